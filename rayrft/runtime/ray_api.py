"""Ray, imported at its first use; and the private names of Ray that rayrft uses, which any release may change."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from rayrft.registry import Lazy

ray: Any = Lazy("ray")

_CALLBACKS = "ray.train.v2._internal.callbacks"
_WORKERS = "ray.train.v2._internal.execution"
PRIVATE = {
    # Resources of each node: the public functions return sums over the cluster.
    "available_resources_per_node": "ray._private.state",
    "total_resources_per_node": "ray._private.state",
    # The nodes that are drained: `ray.nodes` does not say so. And the GCS' own records, with when a process ended.
    "state": "ray._private.state",
    "ActorTableData": "ray.core.generated.gcs_pb2",
    "WorkerTableData": "ray.core.generated.gcs_pb2",
    # The address of an actor's node, also after its death.
    "actors": "ray._private.state",
    # Clusters on this machine, and the latest `ray start`.
    "find_gcs_addresses": "ray._private.services",
    "read_ray_address": "ray._private.utils",
    # Whether a cluster answers, and requires a token: `ray.init` tries for two minutes, and then fails in many ways.
    "CheckAliveRequest": "ray.core.generated.gcs_service_pb2",
    "GetAllNodeInfoRequest": "ray.core.generated.gcs_service_pb2",
    "NodeInfoGcsServiceStub": "ray.core.generated.gcs_service_pb2_grpc",
    "load_certs_from_env": "ray._common.tls_utils",
    # The authentication mode of this process, which Ray reads once.
    "Config": "ray._raylet",
    "_enable_token_auth": "ray._private.authentication.authentication_token_setup",
    # The head node, where Ray Serve listens.
    "HEAD_NODE_RESOURCE_NAME": "ray._common.constants",
    # Ray Train in a placement group of the run: see `rayrft.trainer.ray_train`.
    "PlacementGroupCleanerCallback": f"{_CALLBACKS}.placement_group_callback",
    "DatasetsCallback": f"{_CALLBACKS}.datasets",
    "TrainController": f"{_WORKERS}.controller",
    "WorkerGroup": f"{_WORKERS}.worker_group.worker_group",
    "DefaultPlacementGroupHandle": f"{_WORKERS}.worker_group.placement_group_handle",
    "get_env_vars_to_propagate": "ray.train.v2._internal.constants",
    "get_address_and_port": "ray.train._internal.utils",
}
"""Modules of the private names, which are attributes of this module."""

_ERRORS = {
    # Of a call to an actor that is dead. Ray ends actors whose node is short of memory: that is not a RayActorError.
    "ACTOR_DEATHS": ("ActorDiedError", "OutOfMemoryError"),
    # Of a call to an actor that is dead or cannot be reached.
    "ACTOR_ERRORS": ("RayActorError", "OutOfMemoryError"),
    # Likewise, or of one that was cancelled because this process ends the actor.
    "ENDED_CALLS": ("RayActorError", "OutOfMemoryError", "TaskCancelledError"),
}
"""Tuples of Ray's errors, which are attributes of this module."""


def hide_gpus() -> None:
    """Hide all GPUs from this process, and the processes that it starts, in an actor that has none: Ray leaves it those
    of other actors. CUDA reads the variable at its first call."""
    in_actor = "ray" in sys.modules and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
    if in_actor and not ray.get_gpu_ids():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def __getattr__(name: str) -> Any:
    if name in _ERRORS:
        return tuple(getattr(ray.exceptions, each) for each in _ERRORS[name])
    if name not in PRIVATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(PRIVATE[name]), name)
