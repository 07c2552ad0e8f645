"""Ray Train on a placement group of the run.

Ray Train would make a group of its own, without a name. When its controller is killed, as where a run fails, an actor
of its own is to give the group back: it asks the dashboard whether the controller lives, and where there is none, or it
does not answer, group and actor stay as long as the cluster does. Nor does Ray say which run they belong to. So the
ranks live in a group that the run makes and gives back like all others, and that actor is left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ray
from ray.train._internal.utils import get_address_and_port
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group.placement_group_handle import DefaultPlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayrft.weights.group import open_store

_SETTINGS = {
    # How often Ray Train's controller looks at its workers; its default costs 2 s per checkpoint.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # An actor that warns ranks of a node's end, for which they do nothing.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Ray Train's controller does so by design.
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
}


class RankTrainer(TorchTrainer):
    """Ray Train's trainer, with a worker in each bundle of ``group``. For an actor that is in a group itself."""

    def __init__(self, group: Any, loop: Any, **settings: Any) -> None:
        super().__init__(loop, **settings)
        self._group = group

    def _initialize_and_run_controller(self, *, callbacks: list[Any], **settings: Any) -> Any:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        controller = (
            ray.remote(_controller_on(self._group))
            .options(
                num_cpus=0,
                # It ends with the bundle of the actor that started it.
                scheduling_strategy=PlacementGroupSchedulingStrategy(get_current_placement_group()),
                runtime_env={"env_vars": get_env_vars_to_propagate()},
            )
            .remote(
                callbacks=[each for each in callbacks if not isinstance(each, PlacementGroupCleanerCallback)],
                **settings,
            )
        )
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())


def _controller_on(group: Any) -> type:
    """Ray Train's controller, with workers in that group instead of a new one."""

    class Workers(WorkerGroup):
        def _create_placement_group(self, *_: Any) -> Any:
            return DefaultPlacementGroupHandle(group)

        def execute_single(self, rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # Ray Train asks for a port that is free and uses it later: meanwhile it can be taken.
            return super().execute_single(rank, _meeting_point if fn is get_address_and_port else fn, *args, **kwargs)

    class Controller(TrainController):
        worker_group_cls = Workers

    return Controller


_stores: list[Any] = []
"""What this rank listens at, for its process group; it lives as long as the process."""


def _meeting_point() -> tuple[str, int]:
    """Address and port at which the ranks' process group can meet; for rank 0."""
    host = ray.util.get_node_ip_address()
    _stores.append(open_store(host))
    return host, _stores[-1].port
