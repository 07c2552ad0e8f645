"""Bundles: the resources of a run's actors, group by group, and whether the nodes of a cluster have room for them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rayrft.errors import PlacementError
from rayrft.runtime import ray_api
from rayrft.runtime.ray_api import ray

GIB = 1 << 30
REPORTING_S = 3.0
"""Time in which Ray reports that resources are free again."""
_SHOWN_NODES = 8
_TOLERANCE = 1e-6
"""Ray counts resources in ten-thousandths; the rounding errors of their float sums are below this."""


@dataclass(frozen=True)
class Bundles:
    """A placement group of ``count`` equal bundles. ``note`` describes its actors."""

    name: str
    count: int
    cpus: float
    gpus: float
    memory_gib: float
    note: str
    beside: Bundles | None = None
    """Another group that shares every bundle, and so the GPUs, with this one, maybe with several actors in each."""
    served: bool = False
    """Whether they are replicas of Ray Serve, which has no placement group: the plan counts the most there may be."""
    spread: bool = False
    """Whether the bundles are spread over the nodes, instead of packed."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Label selector of their nodes."""

    @property
    def actor_resources(self) -> dict[str, float]:
        """Ray's resources for one of its actors."""
        resources = {"CPU": self.cpus, "memory": self.memory_gib * GIB}
        return {**resources, "GPU": self.gpus} if self.gpus else resources

    @property
    def bundle(self) -> dict[str, float]:
        """Ray's resources for one bundle."""
        if self.beside is None:
            return self.actor_resources
        own, other, several = self.actor_resources, self.beside.actor_resources, self.beside.count // self.count
        return {key: round(own.get(key, 0.0) + several * value, 6) for key, value in other.items()}


@dataclass
class ClusterNode:
    """A live node: its host name, amounts of Ray's resources (bytes of memory), its labels and its id; and the free
    fraction of every GPU. What is placed on it is taken from its resources."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    id: str = ""

    def __post_init__(self) -> None:
        self.resources = self._free = defaultdict(float, self.resources)
        whole, rest = divmod(self._free["GPU"] + _TOLERANCE, 1)
        self._gpus = [1.0] * int(whole) + ([rest] if rest > 2 * _TOLERANCE else [])

    def score(self, bundle: dict[str, float]) -> float:
        """Return the share of the resources that would remain, as Ray scores nodes; -1 if the bundle does not fit."""
        left = [(self._free[key] - value, self._free[key]) for key, value in bundle.items() if value]
        return -1.0 if any(rest < -_TOLERANCE for rest, _ in left) else sum(rest / free for rest, free in left)

    def take(self, bundle: dict[str, float]) -> bool:
        """Place a bundle if it fits, a fraction on the fullest GPU that can hold it, as Ray does; return whether."""
        gpus = bundle.get("GPU", 0.0)
        share, count = (gpus, 1 if gpus else 0) if gpus < 1 else (1.0, int(gpus))
        fitting = sorted((room, index) for index, room in enumerate(self._gpus) if room >= share - _TOLERANCE)
        if self.score(bundle) < 0 or len(fitting) < count:
            return False
        for _, index in fitting[:count]:
            self._gpus[index] -= share
        for key, value in bundle.items():
            self._free[key] -= value
        return True


def check_placement(parts: list[Bundles], nodes: Sequence[ClusterNode], which: str = "free") -> None:
    """Raise PlacementError, with the numbers, unless the bundles fit as Ray's scheduler will place them.

    The nodes' resources are those ``free`` or ``in all``. Ray does not report the free fraction per GPU: the best case
    is assumed, so `Placement.reserve` may still fail.
    """
    need, others = total_resources(parts), "stop other runs, or add nodes, for which placement.wait_s waits"
    for resource, keys in (
        ("CPU", "explorer.engine.count, explorer.engine.cpus, trainer.ranks or trainer.cpus"),
        ("GPU", "explorer.engine.count, explorer.engine.gpus, trainer.ranks or trainer.gpus"),
        ("memory", "explorer.engine.memory_gib or trainer.memory_gib"),
    ):
        available = sum(node.resources.get(resource, 0.0) for node in nodes)
        if need[resource] > available + _TOLERANCE:
            scale, unit = (GIB, " GiB") if resource == "memory" else (1, "")
            needed, there = (f"{amount / scale:.4g}{unit}" for amount in (need[resource], available))
            problem = f"the run needs {needed} {resource} and the cluster has {there} {which}: {show_nodes(nodes)}"
            raise PlacementError(problem, f"lower {keys}, {others}", field="placement")
    left = [replace(node) for node in nodes]
    for part in parts:
        placed = _place(part, left)
        if placed < part.count:
            labels = f" with {dict(part.labels)}" if part.labels else ""
            problem = (
                f"{placed} of {part.count} bundles of {part.name!r} fit on a node and GPU{labels} beside the groups "
                f"before them: a bundle needs {show_amounts(part.bundle)}, and there is left {show_nodes(left)}"
            )
            raise PlacementError(problem, f"lower the resources of one bundle, {others}", field="placement")


def check_room(parts: list[Bundles], wait_s: float = 0.0, say: Callable[[str], None] = print) -> None:
    """Raise PlacementError unless the cluster has room; with ``wait_s``, ``say`` it instead: `Placement.reserve` waits.
    Ray reports the resources of an ended run as free only after a delay, so a plan that fits the cluster's total
    resources is retried for that long."""
    ends = time.monotonic() + REPORTING_S
    while True:
        try:
            check_placement(parts, cluster_nodes(ray_api.available_resources_per_node()))
        except PlacementError as error:
            if wait_s:
                return say(f"waiting up to {wait_s:g} s for nodes: {error.problem}")
            if time.monotonic() > ends:
                raise
        else:
            return
        check_placement(parts, cluster_nodes(ray_api.total_resources_per_node()), "in all")
        time.sleep(0.1)  # Ray has no event for it


def cluster_nodes(resources: Mapping[str, Mapping[str, float]]) -> list[ClusterNode]:
    """Return the live nodes with their ``resources``, which are given by node id."""
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    return [
        ClusterNode(nodes[id]["NodeManagerHostname"], amounts, nodes[id]["Labels"], id)
        for id, amounts in resources.items()
        if id in nodes
    ]


def draining_nodes() -> set[str]:
    """Return the ids of the nodes that Ray drains, such as preempted ones."""
    return {*ray_api.state.get_draining_nodes()} if ray.is_initialized() else set()


def fitting_nodes(parts: list[Bundles]) -> set[str]:
    """Return the ids of the nodes on which one of the bundles could be placed if all were free."""
    nodes = cluster_nodes(ray_api.total_resources_per_node())
    one = [replace(part, count=1) for part in parts]
    return {node.id for node in nodes if any(_place(part, [replace(node)]) for part in one)}


def total_resources(parts: list[Bundles]) -> dict[str, float]:
    """Return Ray's resources for all bundles."""
    keys = ("CPU", "GPU", "memory")
    return {key: round(sum(part.bundle.get(key, 0.0) * part.count for part in parts), 6) for key in keys}


def _place(part: Bundles, nodes: list[ClusterNode]) -> int:
    """Place the bundles of a part on the nodes with its labels, those with most room first; return how many fit. As Ray
    does, PACK fills a node before the next, SPREAD takes the nodes in turn."""
    order = [node for node in nodes if all(_has_label(node.labels, *label) for label in part.labels.items())]
    order.sort(key=lambda node: node.score(part.bundle), reverse=True)
    turns = order * part.count if part.spread else [node for node in order for _ in range(part.count)]
    placed = 0
    for node in turns:
        if placed < part.count and node.take(part.bundle):
            placed += 1
    return placed


def _has_label(labels: Mapping[str, str], key: str, wanted: str) -> bool:
    """Return whether labels match a value of Ray's label selectors: ``a``, ``!a``, ``in(a,b)`` or ``!in(a,b)``."""
    value = wanted.removeprefix("!")
    choices = value[3:-1].split(",") if value.startswith("in(") and value.endswith(")") else [value]
    return (labels.get(key) in [choice.strip() for choice in choices]) != wanted.startswith("!")


def show_amounts(resources: Mapping[str, float]) -> str:
    """Format amounts of Ray's resources."""
    cpus, gpus, memory = (resources.get(key, 0.0) for key in ("CPU", "GPU", "memory"))
    return f"{cpus:.4g} CPU, {gpus:.4g} GPU, {memory / GIB:.4g} GiB"


def show_nodes(nodes: Sequence[ClusterNode]) -> str:
    """Return the resources of the nodes, those with the most first."""
    kinds = ("GPU", "CPU", "memory")
    found = sorted(nodes, key=lambda node: [node.resources.get(kind, 0.0) for kind in kinds], reverse=True)
    shown = [f"{node.name} {show_amounts(node.resources)}" for node in found[:_SHOWN_NODES]]
    return "; ".join(shown + [f"{len(found) - _SHOWN_NODES} more nodes"] * (len(found) > _SHOWN_NODES)) or "no node"
