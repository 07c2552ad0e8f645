"""Placement of a run's actors on CPUs, GPUs and memory: planned, shown and checked before anything starts."""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, ParamSpec, TypeVar

from rayrft.errors import PlacementError
from rayrft.monitor.report import format_table
from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle, end, named_actor
from rayrft.runtime.ray_api import ray

P = ParamSpec("P")
T = TypeVar("T")

NAMESPACE = "rayrft"
JANITOR = "janitor"
"""Name of the actor that clears a run: see `rayrft.core.janitor`."""
_NAME = "name"
"""Name of the placement group that reserves the name of a run for the process that starts it."""
_GIB = 1 << 30
_REPORTING_S = 3.0
_READY_S = 30.0
"""Time for Ray to place groups for which there is room."""
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
        resources = {"CPU": self.cpus, "memory": self.memory_gib * _GIB}
        return {**resources, "GPU": self.gpus} if self.gpus else resources

    @property
    def bundle(self) -> dict[str, float]:
        """Ray's resources for one bundle."""
        if self.beside is None:
            return self.actor_resources
        own, other, several = self.actor_resources, self.beside.actor_resources, self.beside.count // self.count
        return {key: round(own.get(key, 0.0) + several * value, 6) for key, value in other.items()}


@dataclass(frozen=True)
class ClusterNode:
    """A live node: its host name, amounts of Ray's resources (bytes of memory), its labels and its id."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    id: str = ""


def show_plan(run: str, parts: list[Bundles]) -> str:
    """Format the plan as a table."""
    rows: list[tuple[str, ...]] = [("placement group", "bundles", "CPU", "GPU", "memory", "for")]
    for part in parts:
        for row in (part, part.beside) if part.beside else (part,):
            name = actor_name(run, row.name)
            where = [f"{key}={value}" for key, value in row.labels.items()] + ["spread over nodes"] * row.spread
            note = ", ".join([row.note, *where])
            rows.append(_row(name, str(row.count), row.cpus, row.gpus, row.memory_gib, note))
    total = _total(parts)
    rows.append(_row("total", "", total["CPU"], total["GPU"], total["memory"] / _GIB, ""))
    return format_table(rows)


def check_placement(parts: list[Bundles], nodes: Sequence[ClusterNode], which: str = "free") -> None:
    """Raise PlacementError, with the numbers, unless the bundles fit as Ray's scheduler will place them.

    The nodes' resources are those ``free`` or ``in all``. Ray does not report the free fraction per GPU: the best case
    is assumed, so `Placement.reserve` may still fail.
    """
    need, others = _total(parts), "stop other runs, or add nodes, for which placement.wait_s waits"
    for resource, keys in (
        ("CPU", "explorer.engine.count, explorer.engine.cpus, trainer.ranks or trainer.cpus"),
        ("GPU", "explorer.engine.count, explorer.engine.gpus, trainer.ranks or trainer.gpus"),
        ("memory", "explorer.engine.memory_gib or trainer.memory_gib"),
    ):
        available = sum(node.resources.get(resource, 0.0) for node in nodes)
        if need[resource] > available + _TOLERANCE:
            scale, unit = (_GIB, " GiB") if resource == "memory" else (1, "")
            needed, there = (f"{amount / scale:.4g}{unit}" for amount in (need[resource], available))
            problem = f"the run needs {needed} {resource} and the cluster has {there} {which}: {_show_nodes(nodes)}"
            raise PlacementError(problem, f"lower {keys}, {others}", field="placement")
    left = [_Node(node) for node in nodes]
    for part in parts:
        placed = _place(part, left)
        if placed < part.count:
            labels = f" with {dict(part.labels)}" if part.labels else ""
            problem = (
                f"{placed} of {part.count} bundles of {part.name!r} fit on a node and GPU{labels} beside the groups "
                f"before them: a bundle needs {_amounts(part.bundle)}, and there is left {_show_nodes(left)}"
            )
            raise PlacementError(problem, f"lower the resources of one bundle, {others}", field="placement")


def check_room(parts: list[Bundles], wait_s: float = 0.0, say: Callable[[str], None] = print) -> None:
    """Raise PlacementError unless the cluster has room; with ``wait_s``, ``say`` it instead: `Placement.reserve` waits.
    Ray reports the resources of an ended run as free only after a delay, so a plan that fits the cluster's total
    resources is retried for that long."""
    ends = time.monotonic() + _REPORTING_S
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
    return {node.id for node in nodes if any(_place(part, [_Node(node)]) for part in one)}


def actor_name(run: str, part: str) -> str:
    """Return the name of an actor in Ray's namespace and dashboard."""
    return f"{run}:{part}"


def named_actors(prefix: str) -> list[str]:
    """Return the names of runs' actors on this cluster that start with ``prefix``."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [a["name"] for a in actors if a["namespace"] == NAMESPACE and a["name"].startswith(prefix)]


def find_actor(name: str) -> Handle[Any] | None:
    """Return the handle of a run's living actor of that name; None if there is none."""
    return named_actor(name, NAMESPACE)


def running_runs() -> list[str]:
    """Return the names of the runs on this cluster."""
    suffix = actor_name("", "master")
    return sorted(name.removesuffix(suffix) for name in named_actors("") if name.endswith(suffix))


def starting_runs() -> list[str]:
    """Return the names of the runs that have reserved their name and whose Master does not exist yet."""
    suffix = actor_name("", _NAME)
    reserved = {group["name"].removesuffix(suffix) for group in _groups() if group["name"].endswith(suffix)}
    return sorted(reserved - {*running_runs()})


@dataclass(frozen=True)
class PlacedClass(Generic[P, T]):
    """An actor class whose actors run in a part's bundle; it may be sent to other processes."""

    name: str
    remote_class: Any

    def create(self, *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
        """Create an actor and return at once. References among the arguments are resolved."""
        return Handle(self.name, self.remote_class.remote(*args, **kwargs))


class Placement:
    """The placement groups of a run, created from its plan. Actors are placed by part and bundle."""

    def __init__(self, run: str, parts: list[Bundles], *, detached: bool = False) -> None:
        """``detached``: groups and named actors are created unless they exist, and outlive who created them."""
        self._run = run
        self._lifetime = "detached" if detached else None
        self._parts = {part.name: part for part in parts}
        self._groups: dict[str, Any] = {}

    @property
    def ranks(self) -> Any:
        """The group of the trainer's ranks, one per bundle."""
        return self._groups.get("ranks") or self._groups["engines"]

    def count(self, name: str) -> int:
        """Return the number of bundles of a group."""
        return self._parts[name].count

    def reserve(self, names: list[str], wait_s: float = 0.0, say: Callable[[str], None] | None = None) -> None:
        """Create the placement groups of these names together; detached ones may exist. ``say`` receives what is waited
        for. Raises PlacementError if one is not placed within ``wait_s`` (at least 30 s), or if another run has one of
        that name."""
        for name in names:
            part, full_name = self._parts[name], actor_name(self._run, name)
            settings: dict[str, Any] = {"strategy": "SPREAD" if part.spread else "PACK", "lifetime": self._lifetime}
            if part.labels:
                settings["bundle_label_selector"] = [dict(part.labels)] * part.count
            try:
                self._groups[name] = ray.util.placement_group([part.bundle] * part.count, name=full_name, **settings)
            except ray.exceptions.RaySystemError:
                if self._lifetime is not None:  # another job has made it
                    self._groups[name] = ray.util.get_placement_group(full_name)
                    continue
                remedy = "choose another name (name=…), or wait until it has ended"
                problem = "a run of this name is starting or ending"
                raise PlacementError(problem, remedy, field="name", value=self._run) from None
        ready, seconds = {self._groups[name].ready(): self._parts[name] for name in names}, max(wait_s, _READY_S)
        for timeout in (_REPORTING_S, seconds - _REPORTING_S):
            _, waiting = ray.wait(list(ready), num_returns=len(ready), timeout=timeout)
            if not waiting:
                for name in names:  # a run that was scaled
                    for bundle in range(self._groups[name].bundle_count, self.count(name)):
                        self.extend(name, bundle)
                return
            late = [ready[each] for each in waiting]
            groups = ", ".join(f"{each.name} ({each.count} x {_amounts(each.bundle)})" for each in late)
            nodes = _show_nodes(cluster_nodes(ray_api.available_resources_per_node()))
            if say is not None and timeout == _REPORTING_S:
                say(f"waiting up to {seconds:g} s for room for {groups}; free: {nodes}")
        problem = f"no room for {groups} within {seconds:g} s; free: {nodes}"
        remedy = "stop the jobs that have taken resources meanwhile, add nodes, or raise placement.wait_s"
        raise PlacementError(problem, remedy, field="placement")

    def extend(self, name: str, bundle: int) -> None:
        """Add a bundle to a group: one of a placement group of its own. Raises PlacementError if there is no room."""
        more = f"{name}-{bundle}"
        self._parts[more] = replace(self._parts[name], name=more, count=1)
        try:
            self.reserve([more])
        except PlacementError:
            self.shrink(name, bundle)
            raise

    def shrink(self, name: str, bundle: int) -> None:
        """Remove a bundle that was added; Ray kills the actor in it."""
        if (group := self._groups.pop(f"{name}-{bundle}", None)) is not None:
            ray.util.remove_placement_group(group)

    def actor(
        self, cls: Callable[P, T], part: str, *, name: str | None = None, bundle: int = -1, restarts: int = 0
    ) -> PlacedClass[P, T]:
        """Return an actor class placed in a bundle of its part; bundle -1 is any.

        The actor is named ``<run>:<name>``, or anonymous without ``name``. Ray restarts it up to ``restarts`` times
        when it dies (-1: no limit), and retries the calls in flight.
        """
        resources, added = self._parts[part].actor_resources, self._groups.get(f"{part}-{bundle}")
        options: dict[str, Any] = {"name": actor_name(self._run, name), "namespace": NAMESPACE} if name else {}
        if name and self._lifetime is not None:
            options |= {"lifetime": self._lifetime, "get_if_exists": True}
        if any(inspect.iscoroutinefunction(member) for member in vars(cls).values()):
            options["max_concurrency"] = 10_000  # calls of an async actor may wait for each other
        if restarts:
            options |= {"max_restarts": restarts, "max_task_retries": -1}
        options |= {"num_cpus": resources["CPU"], "num_gpus": resources.get("GPU", 0), "memory": resources["memory"]}
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        where = strategy(added or self._groups[part], placement_group_bundle_index=0 if added else bundle)
        return PlacedClass(name or part, ray.remote(cls).options(scheduling_strategy=where, **options))

    @property
    def nodes(self) -> set[str]:
        """The ids of the nodes of the reserved groups."""
        return {node for name in self._groups for node in self.nodes_of(name)}

    def node_of(self, name: str, bundle: int) -> str | None:
        """Return the id of the node of a bundle, which may have been added; None if it is not placed."""
        added = self._groups.get(f"{name}-{bundle}")
        table = ray.util.placement_group_table(added or self._groups[name])
        nodes: dict[int, str] = table.get("bundles_to_node_id", {})
        return nodes.get(0 if added else bundle)

    def nodes_of(self, name: str) -> set[str]:
        """Return the ids of the nodes of a group; none if it is not reserved."""
        table = ray.util.placement_group_table(self._groups[name]) if name in self._groups else {}
        return {*table.get("bundles_to_node_id", {}).values()}

    def remove(self) -> None:
        """Remove the placement groups; Ray kills the actors in them."""
        for group in list(self._groups.values()):  # a run that is stopped may still be reserving
            ray.util.remove_placement_group(group)
        self._groups.clear()


def clear_run(run: str, *, spare: str = "") -> None:
    """Kill all named actors of a run but the one to ``spare``, and remove its placement groups; return when their names
    and resources are free."""
    listed = [find_actor(name) for name in named_actors(actor_name(run, "")) if name != spare]
    end([actor for actor in listed if actor is not None])
    remove_groups(run)


def remove_groups(run: str) -> None:
    """Remove all placement groups of a run: a dead Master's stay while the process that started it is alive."""
    from ray.util.placement_group import PlacementGroup

    for group in _groups(actor_name(run, "")):
        # By id: looking it up by name would fail if another process removes it meanwhile.
        ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group["placement_group_id"])))


def reserve_name(run: str) -> None:
    """Reserve the name of a run for this process, until the run is cleared or the process ends; clear what a run of
    this name without a Master has left. Raises PlacementError if another process has reserved it."""
    own = _reserve_name(run)
    left = any(group["name"] != own for group in _groups(actor_name(run, "")))
    if left or find_actor(actor_name(run, JANITOR)) is not None:
        clear_run(run)
        _reserve_name(run)


def _reserve_name(run: str) -> str:
    """Create the group that reserves a name, of a byte of memory; return the group's name."""
    name = actor_name(run, _NAME)
    try:
        ray.util.placement_group([{"memory": 1}], name=name)
    except ray.exceptions.RaySystemError:
        remedy = "choose another name (name=…), or wait until it has ended"
        raise PlacementError("a run of this name is starting", remedy, field="name", value=run) from None
    return name


def _groups(prefix: str = "") -> list[dict[str, Any]]:
    """Return the placement groups on this cluster whose names start with ``prefix``."""
    table = ray.util.placement_group_table().values()
    return [group for group in table if group["name"].startswith(prefix) and group["state"] != "REMOVED"]


def _row(name: str, count: str, cpus: float, gpus: float, memory_gib: float, note: str) -> tuple[str, ...]:
    return name, count, f"{cpus:g}", f"{gpus:g}" if gpus else "-", f"{memory_gib:g} GiB", note


def _total(parts: list[Bundles]) -> dict[str, float]:
    keys = ("CPU", "GPU", "memory")
    return {key: round(sum(part.bundle.get(key, 0.0) * part.count for part in parts), 6) for key in keys}


class _Node:
    """Free resources of a node, and the free fraction of every GPU."""

    def __init__(self, node: ClusterNode) -> None:
        self.name = node.name
        self.labels = node.labels
        self.resources = defaultdict(float, node.resources)
        whole, rest = divmod(self.resources["GPU"] + _TOLERANCE, 1)
        self.gpus = [1.0] * int(whole) + ([rest] if rest > 2 * _TOLERANCE else [])

    def score(self, bundle: dict[str, float]) -> float:
        """Return the share of the resources that would remain, as Ray scores nodes; -1 if the bundle does not fit."""
        left = [(self.resources[key] - value, self.resources[key]) for key, value in bundle.items() if value]
        return -1.0 if any(rest < -_TOLERANCE for rest, _ in left) else sum(rest / free for rest, free in left)

    def take(self, bundle: dict[str, float]) -> bool:
        """Place a bundle if it fits, a fraction on the fullest GPU that can hold it, as Ray does; return whether."""
        gpus = bundle.get("GPU", 0.0)
        share, count = (gpus, 1 if gpus else 0) if gpus < 1 else (1.0, int(gpus))
        fitting = sorted((room, index) for index, room in enumerate(self.gpus) if room >= share - _TOLERANCE)
        if self.score(bundle) < 0 or len(fitting) < count:
            return False
        for _, index in fitting[:count]:
            self.gpus[index] -= share
        for key, value in bundle.items():
            self.resources[key] -= value
        return True


def _place(part: Bundles, nodes: list[_Node]) -> int:
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


def _amounts(resources: Mapping[str, float]) -> str:
    cpus, gpus, memory = (resources.get(key, 0.0) for key in ("CPU", "GPU", "memory"))
    return f"{cpus:.4g} CPU, {gpus:.4g} GPU, {memory / _GIB:.4g} GiB"


def _show_nodes(nodes: Sequence[ClusterNode | _Node]) -> str:
    """Return the resources of the nodes, those with the most first."""
    kinds = ("GPU", "CPU", "memory")
    found = sorted(nodes, key=lambda node: [node.resources.get(kind, 0.0) for kind in kinds], reverse=True)
    shown = [f"{node.name} {_amounts(node.resources)}" for node in found[:_SHOWN_NODES]]
    return "; ".join(shown + [f"{len(found) - _SHOWN_NODES} more nodes"] * (len(found) > _SHOWN_NODES)) or "no node"
