"""The process group of weight broadcasts: the first trainer rank and every engine worker.

It is separate from the default group of either side. Its generation is part of the rendezvous, so that members of an
older group never join a newer one.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from rayrft.weights.messages import GroupPlan


def open_store(host: str) -> TCPStore:
    """Open a rendezvous store for rank 0 of a future group, at a free port (`TCPStore.port`).

    It listens at once: a port that is only found to be free may be taken before the group forms. A later store of this
    process at the same port with ``multi_tenant`` shares the listener; keep this one until then.
    """
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)


class WeightGroup:
    """One member of the group. Joining blocks until all members have joined, or raises after the plan's timeout."""

    def __init__(self, plan: GroupPlan, rank: int, device: torch.device) -> None:
        timeout = timedelta(seconds=plan.timeout_s)
        tcp = TCPStore(
            plan.host, plan.port, plan.world_size, is_master=rank == 0, timeout=timeout, multi_tenant=rank == 0
        )
        store = PrefixStore(f"rayrft/{plan.generation}", tcp)
        self._store = tcp  # the master's store must outlive the group
        self._group: Any
        if plan.backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, rank, plan.world_size, timeout)
        else:
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, plan.world_size, options)

    def broadcast(self, buffer: Tensor) -> None:
        """Send (rank 0) or receive (others) one buffer in place; returns when it has arrived."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._group.broadcast([buffer], options).wait()
        if buffer.is_cuda:
            torch.cuda.current_stream().synchronize()
