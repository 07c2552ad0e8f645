"""The process group over which weights are broadcast: the first trainer rank and every engine worker.

It is apart from the default group of either side. Its generation is part of the rendezvous, so members of an older
group never meet those of a newer one.
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
    """A store at a port of its own (`TCPStore.port`), for rank 0 of a group to be.

    It listens from the start: a port that was only found to be free can be another's before a group is there. A store
    that this process makes at the same port with ``multi_tenant`` shares what listens; keep this one until then.
    """
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)


class WeightGroup:
    """One member of the group. Joining blocks until every member has come, or raises after the plan's timeout."""

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
        """Send (rank 0) or receive (others) one buffer, in place; returns when it is there."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        self._group.broadcast([buffer], options).wait()
        if buffer.is_cuda:
            torch.cuda.current_stream().synchronize()
