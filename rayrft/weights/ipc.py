"""CUDA IPC for a trainer rank and an engine's worker on one GPU, where NCCL does not support two ranks.

The rank puts a handle to one bucket after another into the link's store. The worker on its GPU maps the memory, copies
it, and acknowledges. So never more than one bucket is held twice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rayrft.errors import ConfigError
from rayrft.registry import Lazy
from rayrft.weights.messages import Parcel
from rayrft.weights.transport import FIELD, Endpoint, Layout, SignedStore, WeightTransport, register_transport

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = Lazy("torch")


@register_transport("ipc")
class CudaIpc(WeightTransport):
    """Keys of the store begin with the GPU's UUID, so that every worker reads from the rank on its own GPU."""

    colocated = True

    @classmethod
    def check(cls, layout: Layout) -> None:
        gpus = layout.worker_gpus + layout.rank_gpus
        if not layout.worker_gpus:
            problem = "needs explorer.engine.gpus and trainer.gpus above 0"
            raise ConfigError(problem, "use gloo or auto", field=FIELD, value="ipc")
        if layout.ranks != layout.workers or gpus > 1:
            problem = (
                "pairs one trainer rank with one worker of an engine on a GPU: needs explorer.engine.count x "
                f"tensor_parallel ({layout.workers}) = trainer.ranks ({layout.ranks}) and explorer.engine.gpus + "
                "trainer.gpus <= 1"
            )
            raise ConfigError(problem, field=FIELD, value="ipc")
        if layout.workers > 1 and gpus <= 0.5:
            pairs = f"and two of the {layout.workers} pairs would share one"
            problem = f"gives half a GPU or less to a pair of engine and rank, {pairs}"
            remedy = "raise explorer.engine.gpus and trainer.gpus to more than 0.5 together"
            raise ConfigError(problem, remedy, field=FIELD, value="ipc")

    def connect(self, end: Endpoint) -> None:
        self._device, self._index = end.device, end.index
        self._store = SignedStore(end.store, end.secret)
        self._numbers = itertools.count()
        self._gpu = gpu_uuid(end.device)
        own, others, count = ("sender", "receiver", end.receivers) if end.sends else ("receiver", "sender", end.senders)
        self._store.set(f"{own}/{end.index}", self._gpu)
        gpus = [self._store.get(f"{others}/{index}") for index in range(count)]
        self._beside = [index for index, gpu in enumerate(gpus) if gpu == self._gpu]
        """Indices of the ends of the other side on this GPU; an engine that joins alone is beside one rank."""
        self.reads = bool(self._beside)
        if not end.sends and not self._beside:
            raise RuntimeError(f"no trainer rank shares GPU {self._gpu} with this engine; ranks are on {sorted(gpus)}")

    def send(self, parcel: Parcel, buckets: Iterable[Tensor]) -> None:
        for buffer in buckets:
            if not self._beside:  # an exported buffer that nobody maps is never freed
                continue
            key = f"{self._gpu}/{next(self._numbers)}"
            torch.cuda.synchronize(self._device)  # the receiver's stream does not wait for this one
            self._store.set(key, export_buffer(buffer))
            copied = [f"{key}/{index}" for index in self._beside]
            self._store.wait(copied)
            for used in (key, *copied):
                self._store.delete_key(used)

    def receive(self, parcel: Parcel, sizes: Sequence[int]) -> Iterator[Tensor]:
        for _ in sizes:
            key = f"{self._gpu}/{next(self._numbers)}"
            mapped = open_buffer(self._store.get(key), self._device)
            buffer = mapped.clone()
            torch.cuda.synchronize(self._device)
            del mapped
            self._store.set(f"{key}/{self._index}", "")
            yield buffer


def gpu_uuid(device: torch.device) -> str:
    """Return the GPU's UUID, which is the same in all processes; device indices are not."""
    return str(torch.cuda.get_device_properties(device).uuid)


def export_buffer(buffer: Tensor) -> str:
    """Return a handle to a flat CUDA buffer of bytes, as JSON. The buffer must stay alive until it has been read."""
    from torch.multiprocessing import reductions

    _, (_, size, _, offset, _, _, _, *memory) = reductions.reduce_tensor(buffer)  # type: ignore[no-untyped-call]
    return json.dumps([*size, offset, *(each.hex() if isinstance(each, bytes) else each for each in memory)])


def open_buffer(handle: str, device: torch.device) -> Tensor:
    """Map an exported buffer into this process: the same memory, no copy."""
    from torch.multiprocessing import reductions

    size, offset, *memory = json.loads(handle)
    mapped = (bytes.fromhex(each) if isinstance(each, str) else each for each in memory)
    # The device index is that of this process: the exporter's may differ.
    buffer = (torch.Tensor, (size,), (1,), offset, torch.storage.TypedStorage, torch.uint8, device.index or 0)
    return reductions.rebuild_cuda_tensor(*buffer, *mapped)  # type: ignore[no-untyped-call]
