"""Placement of a run's actors: their names, and their placement groups, which are reserved before anything starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from rayrft.core.bundles import GIB, REPORTING_S, Bundles, cluster_nodes, show_amounts, show_nodes, total_resources
from rayrft.errors import PlacementError
from rayrft.monitor.report import format_table
from rayrft.runtime import ray_api
from rayrft.runtime.handle import NAMESPACE, Handle, end, find_actor
from rayrft.runtime.ray_api import ray

P = ParamSpec("P")
T = TypeVar("T")

JANITOR = "janitor"
"""Name of the actor that clears a run: see `rayrft.core.janitor`."""
_NAME = "name"
"""Name of the placement group that reserves the name of a run for the process that starts it."""
_READY_S = 30.0
"""Time for Ray to place groups for which there is room."""


def show_plan(run: str, parts: list[Bundles]) -> str:
    """Format the plan as a table."""
    rows: list[tuple[str, ...]] = [("placement group", "bundles", "CPU", "GPU", "memory", "for")]
    for part in parts:
        for row in (part, part.beside) if part.beside else (part,):
            name = actor_name(run, row.name)
            where = [f"{key}={value}" for key, value in row.labels.items()] + ["spread over nodes"] * row.spread
            note = ", ".join([row.note, *where])
            rows.append(_row(name, str(row.count), row.cpus, row.gpus, row.memory_gib, note))
    total = total_resources(parts)
    rows.append(_row("total", "", total["CPU"], total["GPU"], total["memory"] / GIB, ""))
    return format_table(rows)


def actor_name(run: str, part: str) -> str:
    """Return the name of an actor in Ray's namespace and dashboard."""
    return f"{run}:{part}"


def named_actors(prefix: str) -> list[str]:
    """Return the names of runs' actors on this cluster that start with ``prefix``."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [a["name"] for a in actors if a["namespace"] == NAMESPACE and a["name"].startswith(prefix)]


def running_runs() -> list[str]:
    """Return the names of the runs on this cluster."""
    suffix = actor_name("", "master")
    return sorted(name.removesuffix(suffix) for name in named_actors("") if name.endswith(suffix))


def starting_runs() -> list[str]:
    """Return the names of the runs that have reserved their name and whose Master does not exist yet."""
    suffix = actor_name("", _NAME)
    reserved = {group["name"].removesuffix(suffix) for group in _groups() if group["name"].endswith(suffix)}
    return sorted(reserved - {*running_runs()})


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
        for timeout in (REPORTING_S, seconds - REPORTING_S):
            _, waiting = ray.wait(list(ready), num_returns=len(ready), timeout=timeout)
            if not waiting:
                for name in names:  # a run that was scaled
                    for bundle in range(self._groups[name].bundle_count, self.count(name)):
                        self.extend(name, bundle)
                return
            late = [ready[each] for each in waiting]
            groups = ", ".join(f"{each.name} ({each.count} x {show_amounts(each.bundle)})" for each in late)
            nodes = show_nodes(cluster_nodes(ray_api.available_resources_per_node()))
            if say is not None and timeout == REPORTING_S:
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
    ) -> Callable[P, Handle[T]]:
        """Return a function that creates an actor in a bundle of its part, and returns at once; bundle -1 is any.
        References among its arguments are resolved.

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
        placed = ray.remote(cls).options(scheduling_strategy=where, **options)

        def create(*args: P.args, **kwargs: P.kwargs) -> Handle[T]:
            return Handle(name or part, placed.remote(*args, **kwargs))

        return create

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
