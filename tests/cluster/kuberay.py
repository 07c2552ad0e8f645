"""Fields of ray.io/v1 RayCluster and RayJob that the manifests use, with the checks of KubeRay 1.5.1.

Source: KubeRay's API reference and its operator's validation. A field that the manifests do not use yet is added here
with its checks. Pods and services are left to ``kubernetes-validate``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from packaging.version import Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

Count = Annotated[int, Field(ge=0, lt=2**31)]


def _accepts_tokens(version: str) -> str:
    if Version(version) < Version("2.52.0"):
        raise ValueError("token authentication needs rayVersion 2.52.0 or later")
    return version


class Fields(BaseModel):
    """Fields of a resource: an unknown one, a missing one and a value of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=to_camel)


class PodSpec(BaseModel):
    """The one part of a pod that KubeRay checks."""

    containers: list[dict[str, Any]] = Field(min_length=1)


class PodTemplate(Fields):
    spec: PodSpec


class HeadGroup(Fields):
    ray_start_params: dict[str, str]
    template: PodTemplate


class WorkerGroup(HeadGroup):
    group_name: str
    replicas: Count = 0
    min_replicas: Count = 0
    max_replicas: Count = 2**31 - 1


class AuthOptions(Fields):
    mode: Literal["token"]


class AutoscalerOptions(Fields):
    idle_timeout_seconds: Count


class RayClusterSpec(Fields):
    ray_version: Annotated[str, AfterValidator(_accepts_tokens)]
    auth_options: AuthOptions
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup] = []
    enable_in_tree_autoscaling: bool = False
    autoscaler_options: AutoscalerOptions | None = None


class RayJobSpec(Fields):
    entrypoint: str
    ray_cluster_spec: RayClusterSpec
    backoff_limit: Count
    shutdown_after_job_finishes: bool = False
    ttl_seconds_after_finished: Count = 0

    @model_validator(mode="after")
    def _can_be_run(self) -> RayJobSpec:
        if self.ttl_seconds_after_finished and not self.shutdown_after_job_finishes:
            raise ValueError("ttlSecondsAfterFinished needs shutdownAfterJobFinishes")
        return self


class Metadata(Fields):
    """A name becomes a part of the names of services, which are at most 63 characters long."""

    name: str = Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=47)
    namespace: str


class RayCluster(Fields):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: RayClusterSpec


class RayJob(Fields):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: RayJobSpec


KINDS: dict[str, type[RayCluster | RayJob]] = {"RayCluster": RayCluster, "RayJob": RayJob}
