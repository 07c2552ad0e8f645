"""Both ends of a transport, with a sender and receivers in this process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from rayrft.weights.buckets import Digest, allocate, empty_bucket, fill_bucket, plan_buckets
from rayrft.weights.channel import WeightChannel, open_store
from rayrft.weights.messages import Link, Parcel, TensorMeta

HOST = "127.0.0.1"
CPU = torch.device("cpu")


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{index}": torch.randn(40, 3 + index, generator=generator) for index in range(5)}


def parcel(tensors: dict[str, Tensor]) -> Parcel:
    return Parcel([TensorMeta.of(name, tensor, tensor.dtype) for name, tensor in tensors.items()], 1200)


def buckets(tensors: dict[str, Tensor]) -> Iterator[Tensor]:
    for metas in plan_buckets(parcel(tensors).metas, 1200):
        buffer = empty_bucket(metas, allocate([metas], CPU)[0])
        fill_bucket(buffer, metas, (tensors[meta.name] for meta in metas))
        yield buffer


class Ends:
    """All ends of a link, each in a thread of its own."""

    def __init__(
        self,
        transport: str,
        senders: int,
        receivers: int,
        plugins: tuple[str, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> None:
        store = open_store(30, HOST)
        link = Link(transport, HOST, store.port, 1, senders, receivers, 30, "s", plugins, options or {})
        self._pool = ThreadPoolExecutor(senders + receivers)
        ends = [(True, index) for index in range(senders)] + [(False, index) for index in range(receivers)]

        def connect(end: tuple[bool, int]) -> WeightChannel:
            sends, index = end
            device = torch.device("cuda", index) if transport == "ipc" else CPU
            own = store if end == (True, 0) else None
            return WeightChannel(link, sends=sends, index=index, device=device, store=own)

        channels = list(self._pool.map(connect, ends))
        self.senders, self.receivers = channels[:senders], channels[senders:]

    def transfer(self, number: int, tensors: dict[str, Tensor]) -> tuple[str, list[tuple[str, dict[str, Tensor]]]]:
        """Return the digest sent, and of every receiver the digest and tensors that it got."""
        sent, *got = (future.result(60) for future in self.start(number, tensors))
        return sent, got

    def start(self, number: int, tensors: dict[str, Tensor]) -> list[Future[Any]]:
        """Start a transfer; return the futures of the first sender and of the receivers."""

        def receive(channel: WeightChannel) -> tuple[str, dict[str, Tensor]]:
            digest = Digest()
            got = dict(channel.receive(channel.announced(number), digest))
            return digest.value, got

        sending = [self._pool.submit(end.send, number, parcel(tensors), iter(tensors.values())) for end in self.senders]
        receiving = [self._pool.submit(receive, end) for end in self.receivers]
        return [sending[0], *receiving]

    def close(self) -> None:
        for end in (*self.senders, *self.receivers):
            end.close()
        self._pool.shutdown()
