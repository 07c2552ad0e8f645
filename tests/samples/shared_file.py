"""A weight transport of one's own: memory-mapped files in a folder that trainer and engines share.

plugins: [tests/samples/shared_file.py]
weight_sync: {backend: shared_file}
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from rayrft.weights import Endpoint, Parcel, WeightTransport, register_transport


@register_transport("shared_file")
class SharedFile(WeightTransport):
    def connect(self, end: Endpoint) -> None:
        self._end, self._numbers = end, itertools.count()

    def send(self, parcel: Parcel, buckets: Iterable[Tensor]) -> None:
        for buffer in buckets:
            if self._end.index:  # the first sender has everything
                continue
            number = next(self._numbers)
            file, path = tempfile.mkstemp(dir=os.environ.get("SHARED_FOLDER"))
            os.close(file)
            torch.from_file(path, shared=True, size=buffer.numel(), dtype=torch.uint8).copy_(buffer)
            self._end.store.set(f"path/{number}", path)
            self._end.store.wait([f"copied/{number}/{index}" for index in range(self._end.receivers)])
            os.unlink(path)

    def receive(self, parcel: Parcel, sizes: Sequence[int]) -> Iterator[Tensor]:
        for size in sizes:
            number = next(self._numbers)
            path = self._end.store.get(f"path/{number}").decode()
            buffer = torch.from_file(path, shared=True, size=size, dtype=torch.uint8).to(self._end.device, copy=True)
            self._end.store.set(f"copied/{number}/{self._end.index}", "")
            yield buffer
