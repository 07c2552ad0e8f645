"""Broadcast from the first trainer rank to all engine workers: gloo between CPUs, nccl between whole GPUs.

The process group is separate from the default group of either side. While a bucket travels, the sender fills the next
one and the receivers load the one before: either side holds two, and a sender in host memory one more, which waits to
travel.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rayrft.errors import ConfigError
from rayrft.registry import Lazy
from rayrft.weights.messages import Parcel
from rayrft.weights.transport import FIELD, Endpoint, Layout, WeightTransport, register_transport

if TYPE_CHECKING:
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch import Tensor
else:
    np, torch, dist = Lazy("numpy"), Lazy("torch"), Lazy("torch.distributed")


class Broadcast(WeightTransport):
    """The first sender has rank 0 in the group, the receivers follow; the other senders are not in it."""

    _group: Any = None

    def connect(self, end: Endpoint) -> None:
        self._device = end.device
        self.in_flight = 2 if end.device.type == "cpu" else 1
        self.reads = not end.sends or end.index == 0
        if self.reads:
            rank = 0 if end.sends else 1 + end.index
            self._group = self._form(end, rank, 1 + end.receivers, timedelta(seconds=end.timeout_s))

    def send(self, parcel: Parcel, buckets: Iterable[Tensor]) -> None:
        travelling: deque[Any] = deque()
        for buffer in buckets:
            if self.reads:
                if len(travelling) == self.in_flight:
                    self._wait(travelling.popleft())
                travelling.append(self._broadcast(buffer))
        for each in travelling:
            self._wait(each)

    def receive(self, parcel: Parcel, sizes: Sequence[int]) -> Iterator[Tensor]:
        memory = _Memory(max(sizes, default=0), self._device)
        arriving: deque[tuple[Tensor, Any]] = deque()
        for size in sizes:
            arriving.append((buffer := memory.take(size), self._broadcast(buffer)))
            if len(arriving) == 2:
                yield self._arrived(*arriving.popleft())
        while arriving:
            yield self._arrived(*arriving.popleft())

    def close(self) -> None:
        self._group = None

    def _form(self, end: Endpoint, rank: int, size: int, timeout: timedelta) -> Any:
        """Return the process group; blocks until all members have joined, or raises after the timeout."""
        raise NotImplementedError

    def _broadcast(self, buffer: Tensor) -> Any:
        """Begin to send (rank 0) or receive (others) a buffer in place; return what `_wait` waits for."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        return self._group.broadcast([buffer], options)

    def _arrived(self, buffer: Tensor, travelling: Any) -> Tensor:
        self._wait(travelling)
        return buffer

    def _wait(self, travelling: Any) -> None:
        travelling.wait()
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()


class _Memory:
    """Buffers of at most ``size`` bytes. In host memory, one to which no tensor refers any more is taken again, where a
    new one would cost a page fault for each 4 KiB; of GPUs torch keeps the memory."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        self._free: list[np.ndarray] = []

    def take(self, size: int) -> Tensor:
        if self._device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        memory = self._free.pop() if self._free else np.empty(self._size, np.uint8)
        buffer = memory[:size]
        weakref.finalize(buffer, self._free.append, memory).atexit = False
        return torch.from_numpy(buffer)


@register_transport("gloo")
class Gloo(Broadcast):
    @classmethod
    def check(cls, layout: Layout) -> None:
        if layout.worker_gpus:
            raise ConfigError("is for CPU engines", "use nccl, ipc or auto", field=FIELD, value="gloo")

    def _form(self, end: Endpoint, rank: int, size: int, timeout: timedelta) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        # By default gloo takes what the host's name resolves to, which is a loopback address on many distributions.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=end.address)]
        return dist.ProcessGroupGloo(end.store, rank, size, options)


@register_transport("nccl")
class Nccl(Broadcast):
    @classmethod
    def check(cls, layout: Layout) -> None:
        if not layout.worker_gpus:
            problem = "needs explorer.engine.gpus and trainer.gpus above 0"
            raise ConfigError(problem, "use gloo or auto", field=FIELD, value="nccl")
        if layout.worker_gpus < 1 or layout.rank_gpus < 1:
            problem = "does not support two ranks on one GPU"
            raise ConfigError(problem, "give whole GPUs to each side, or use ipc", field=FIELD, value="nccl")

    def _form(self, end: Endpoint, rank: int, size: int, timeout: timedelta) -> Any:
        torch.cuda.set_device(end.device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(end.store, rank, size, options)
