"""Ray Train on a placement group of the run.

Ray Train by default creates an unnamed placement group. If its controller is killed, as when a run fails, a cleaner
actor removes the group only after the dashboard reports that the controller is dead. Without an answering dashboard,
group and actor leak until the cluster ends, and nothing shows which run they belong to. So the ranks live in a group
that the run creates and removes like all its others, and the cleaner actor is left out, as is the one for datasets.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import psutil
import ray
from ray.train.torch import TorchTrainer
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayrft.runtime import ray_api
from rayrft.weights.channel import node_address, open_store

_SETTINGS = {
    # Poll interval of Ray Train's controller; its default costs 2 s per checkpoint.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # An actor that warns ranks of node preemption, which they do not handle.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Ray Train's controller does so by design.
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
}


class RankTrainer(TorchTrainer):
    """Ray Train's trainer, with workers in the bundles of ``group``. Its caller must be in a placement group itself."""

    def __init__(self, group: Any, loop: Any, **settings: Any) -> None:
        super().__init__(loop, **settings)
        self._group = group

    def _initialize_and_run_controller(self, *, callbacks: list[Any], **settings: Any) -> Any:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        unused = (ray_api.PlacementGroupCleanerCallback, ray_api.DatasetsCallback)  # each starts an actor
        controller = (
            ray.remote(controller_on(self._group))
            .options(
                num_cpus=0,
                # In the starting actor's bundle, so that the controller ends with it.
                scheduling_strategy=PlacementGroupSchedulingStrategy(get_current_placement_group()),
                runtime_env={"env_vars": ray_api.get_env_vars_to_propagate()},
            )
            .remote(callbacks=[hook for hook in callbacks if not isinstance(hook, unused)], **settings)
        )
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())


def controller_on(group: Any) -> type:
    """Return Ray Train's controller class with its workers in ``group`` instead of a new placement group."""

    class _KeptGroup(ray_api.DefaultPlacementGroupHandle):
        def shutdown(self) -> None:
            """Keep the group: the next ranks of the run use it, or its engines do."""

    class Workers(ray_api.WorkerGroup):
        def _create_workers(self, num_workers: int, placement_group: Any, *rest: Any, **settings: Any) -> Any:
            """Place as many ranks in each bundle."""
            several = num_workers // placement_group.bundle_count
            settings["placement_group_bundle_indices"] = [rank // several for rank in range(num_workers)]
            return super()._create_workers(num_workers, placement_group, *rest, **settings)

        def _create_placement_group(self, *_: Any) -> Any:
            return _KeptGroup(group)

        def execute_single(self, rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if fn is ray_api.get_address_and_port:  # before the ranks form their process group
                self.execute(_bind_gloo)
                # Ray Train looks for a free port and binds it later: meanwhile another process may take it.
                fn = _rendezvous
            return super().execute_single(rank, fn, *args, **kwargs)

    class Controller(ray_api.TrainController):
        worker_group_cls = Workers

    Controller.__qualname__ = Controller.__name__  # which the Ray dashboard shows
    return Controller


_stores: list[Any] = []
"""Stores that this rank hosts for process groups; they live as long as the process."""


def _bind_gloo() -> None:
    """Let gloo use the interface of this node's address, unless GLOO_SOCKET_IFNAME is set. By default it takes what the
    host's name resolves to, which is a loopback address on many distributions."""
    address = node_address()
    for name, found in psutil.net_if_addrs().items():
        if any(each.address == address for each in found):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _rendezvous() -> tuple[str, int]:
    """Open the store of the ranks' process group on rank 0; return its address and port."""
    _stores.append(open_store())
    return _stores[-1].host, _stores[-1].port
