"""Fields and checks of ray.io/v1 RayCluster and RayJob, as KubeRay 1.5.1 has them: the version that the manifests need.

Source: KubeRay's API reference and its operator's validation. Pods and services are left to ``kubernetes-validate``.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

Count = Annotated[int, Field(ge=0, lt=2**31)]
Strings = dict[str, str]
Manager = Literal["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"]


def _accepts_tokens(version: str) -> str:
    found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) < (2, 52, 0):
        raise ValueError("token authentication needs rayVersion 2.52.0 or later")
    return version


class Fields(BaseModel):
    """Fields of a resource: an unknown one, a missing one and a value of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, alias_generator=to_camel)


class PodSpec(BaseModel):
    """The one part of a pod that KubeRay checks."""

    containers: list[dict[str, Any]] = Field(min_length=1)


class PodTemplate(Fields):
    metadata: dict[str, Any] = {}
    spec: PodSpec


class NodeGroup(Fields):
    """Fields of a head group and of a worker group."""

    ray_start_params: Strings
    template: PodTemplate
    resources: Strings = {}
    labels: Strings = {}

    @model_validator(mode="after")
    def _has_its_resources_once(self) -> NodeGroup:
        if self.resources and self.ray_start_params.keys() & {"num-cpus", "num-gpus", "memory", "resources"}:
            raise ValueError("resources are in rayStartParams or in resources, not in both")
        if "labels" in self.ray_start_params:
            raise ValueError("labels are not in rayStartParams, but in labels")
        return self


class HeadGroup(NodeGroup):
    head_service: dict[str, Any] | None = None
    enable_ingress: bool | None = None
    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"] | None = None


class ScaleStrategy(Fields):
    workers_to_delete: list[str] = []


class WorkerGroup(NodeGroup):
    group_name: str
    replicas: Count = 0
    min_replicas: Count = 0
    max_replicas: Count = 2**31 - 1
    idle_timeout_seconds: Count | None = None
    num_of_hosts: Count = 1
    scale_strategy: ScaleStrategy = ScaleStrategy()
    suspend: bool | None = None


class AuthOptions(Fields):
    mode: Literal["disabled", "token"] = "token"


class AutoscalerOptions(Fields):
    resources: dict[str, Strings] | None = None
    image: str | None = None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    security_context: dict[str, Any] | None = None
    idle_timeout_seconds: Count | None = None
    upscaling_mode: Literal["Default", "Aggressive", "Conservative"] | None = None
    version: Literal["v1", "v2"] | None = None
    env: list[dict[str, Any]] = []
    env_from: list[dict[str, Any]] = []
    volume_mounts: list[dict[str, Any]] = []


class UpgradeStrategy(Fields):
    type: Literal["Recreate", "None"]


class RedisCredential(Fields):
    value: str | None = None
    value_from: dict[str, Any] | None = None


class GcsFaultToleranceOptions(Fields):
    redis_address: str
    redis_username: RedisCredential | None = None
    redis_password: RedisCredential | None = None
    external_storage_namespace: str | None = None


class RayClusterSpec(Fields):
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup] = []
    ray_version: Annotated[str, AfterValidator(_accepts_tokens)] | None = None
    auth_options: AuthOptions | None = None
    enable_in_tree_autoscaling: bool = False
    autoscaler_options: AutoscalerOptions | None = None
    head_service_annotations: Strings = {}
    gcs_fault_tolerance_options: GcsFaultToleranceOptions | None = None
    upgrade_strategy: UpgradeStrategy | None = None
    managed_by: Manager | None = None
    suspend: bool = False

    @model_validator(mode="after")
    def _names_its_version(self) -> RayClusterSpec:
        if self.auth_options is not None and self.auth_options.mode == "token" and self.ray_version is None:
            raise ValueError("token authentication needs rayVersion")
        return self


class SubmitterConfig(Fields):
    backoff_limit: Count | None = None


class RayJobSpec(Fields):
    entrypoint: str
    ray_cluster_spec: RayClusterSpec | None = None
    cluster_selector: Strings = {}
    submission_mode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"] = "K8sJobMode"
    submitter_config: SubmitterConfig | None = None
    submitter_pod_template: PodTemplate | None = None
    active_deadline_seconds: Annotated[Count, Field(gt=0)] | None = None
    backoff_limit: Count = 0
    shutdown_after_job_finishes: bool = False
    ttl_seconds_after_finished: Count = 0
    deletion_strategy: dict[str, Any] | None = None
    entrypoint_num_cpus: float = 0.0
    entrypoint_num_gpus: float = 0.0
    entrypoint_resources: str | None = None
    runtime_env_yaml: str | None = Field(default=None, alias="runtimeEnvYAML")
    job_id: str | None = None
    metadata: Strings = {}
    managed_by: Manager | None = None
    suspend: bool = False

    @model_validator(mode="after")
    def _can_be_run(self) -> RayJobSpec:
        if self.ray_cluster_spec is None and not self.cluster_selector:
            raise ValueError("rayClusterSpec or clusterSelector is needed")
        if self.ttl_seconds_after_finished and not self.shutdown_after_job_finishes:
            raise ValueError("ttlSecondsAfterFinished needs shutdownAfterJobFinishes")
        if self.suspend and not self.shutdown_after_job_finishes:
            raise ValueError("suspend needs shutdownAfterJobFinishes")
        if self.backoff_limit and self.submission_mode == "InteractiveMode":
            raise ValueError("backoffLimit does not go with InteractiveMode")
        return self


class Metadata(Fields):
    """A name becomes a part of the names of services, which are at most 63 characters long."""

    name: str = Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=47)
    namespace: str = "default"
    labels: Strings = {}
    annotations: Strings = {}


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
