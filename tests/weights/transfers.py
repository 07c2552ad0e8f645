"""Transfers of weights between the ranks of a test or a bench, and the bytes that they move."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rayrft.trainer.model import gather
from rayrft.weights.broadcast import Gloo
from rayrft.weights.buckets import Digest
from rayrft.weights.channel import WeightChannel, open_store
from rayrft.weights.messages import Link, Parcel

HOST = "127.0.0.1"


class Gathered(TorchDispatchMode):
    """Counts the bytes that are gathered from all ranks of a replica together."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_gather_into_tensor" in str(func):
            self.nbytes += args[0].nbytes * args[1]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the bytes that this process gathers, digests and broadcasts (sends or receives) inside."""
    counts, update, broadcast = Counter[str](), Digest.update, Gloo._broadcast

    def digests(self: Digest, buffer: Tensor) -> None:
        counts["digested"] += buffer.nbytes
        update(self, buffer)

    def broadcasts(self: Gloo, buffer: Tensor) -> Any:
        counts["broadcast"] += buffer.nbytes
        return broadcast(self, buffer)

    replaced = mock.patch.object(Digest, "update", digests), mock.patch.object(Gloo, "_broadcast", broadcasts)
    with Gathered() as gathered, replaced[0], replaced[1]:
        yield counts
    counts["gathered"] = gathered.nbytes


def open_channel() -> WeightChannel:
    """Link all ranks but the last one, which send, with that one over gloo. A collective."""
    rank, senders = dist.get_rank(), dist.get_world_size() - 1
    store = open_store(60, HOST) if rank == 0 else None
    port: list[Any] = [store.port if store is not None else None]
    dist.broadcast_object_list(port)
    link = Link("gloo", HOST, port[0], 1, senders, receivers=1, timeout_s=600, secret="s")
    return WeightChannel(link, sends=rank < senders, index=rank % senders, device=torch.device("cpu"), store=store)


def carry(channel: WeightChannel, number: int, parcel: Parcel, weights: dict[str, Tensor]) -> tuple[int, str]:
    """Send the weights from all ranks but the last one, or load what comes into them; return the bytes loaded, and the
    digest of what this rank has sent or received, if it knows one."""
    if dist.get_rank() < dist.get_world_size() - 1:
        tensors = (gather(weights[meta.name], getattr(torch, meta.dtype)) for meta in parcel.metas)
        return 0, channel.send(number, parcel, tensors)
    loaded, digest = 0, Digest()
    for name, tensor in channel.receive(channel.announced(number), digest):
        weights[name].copy_(tensor)
        loaded += tensor.nbytes
    return loaded, digest.value


def assert_arrived(digest: str) -> None:
    """Compare what the first rank has sent and the last one has received. A collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, digest)
    assert found[0] == found[-1]


def transfer(channel: WeightChannel, number: int, parcel: Parcel, weights: dict[str, Tensor]) -> int:
    """`carry`, and `assert_arrived`; return the bytes loaded."""
    loaded, digest = carry(channel, number, parcel, weights)
    assert_arrived(digest)
    return loaded
