"""Who gets which CPUs, GPUs and memory: planned, shown and checked before anything starts."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

from rayrft.config import RunConfig
from rayrft.errors import PlacementError
from rayrft.rewards import runs_inline

NAMESPACE = "rayrft"
_GIB = 1 << 30
_CLOSE = 1e-6
"""Ray counts resources in ten-thousandths; sums of them as floats are off by less than this."""


@dataclass(frozen=True)
class Part:
    """A placement group: ``count`` equal bundles. ``note`` says who lives there."""

    name: str
    count: int
    cpus: float
    gpus: float
    memory_gib: float
    note: str
    beside: Part | None = None
    """Of another part, one in each bundle too: the two are on the same GPU."""

    @property
    def asks(self) -> dict[str, float]:
        """Ray's resources for one of its actors."""
        resources = {"CPU": self.cpus, "memory": self.memory_gib * _GIB}
        return {**resources, "GPU": self.gpus} if self.gpus else resources

    @property
    def bundle(self) -> dict[str, float]:
        """Ray's resources for one bundle."""
        if self.beside is None:
            return self.asks
        other = self.beside.asks
        return {key: round(value + other[key], 6) for key, value in self.asks.items()}


def plan_placement(config: RunConfig) -> list[Part]:
    """The parts of a run, in the order of the picture."""
    engine, trainer = config.explorer.engine, config.trainer
    ranks = Part("ranks", trainer.ranks, trainer.cpus, trainer.gpus, trainer.memory_gib, "FSDP2 under Ray Train")
    # Groups of their own would not do for engine and rank on one GPU: Ray packs fractions of GPUs as tight as it can,
    # two engines on one GPU, or on another node than the ranks.
    pairs = config.rolls_out and config.sync_backend == "ipc"
    rewards = Part("reward", config.reward.workers, 0.1, 0, 0.25, f"reward workers: {config.reward.name}")
    parts = [
        Part("master", 1, 0.05, 0, 0.25, "paces and supervises"),
        Part("explorer", 1, config.explorer.cpus, 0, 0.5, "tasks, workflows"),
        Part(
            "engines",
            engine.count,
            engine.cpus,
            engine.gpus,
            engine.memory_gib,
            "vLLM rollout engines",
            replace(ranks, note="FSDP2 under Ray Train, each beside an engine") if pairs else None,
        ),
        *([] if runs_inline(config.reward.name) else [rewards]),
        Part("buffer", config.buffer.shards, 0.1, 0, 0.25, "experiences"),
        Part("weight_sync", 1, 0.05, 0, 0.25, f"broadcast over {config.sync_backend}"),
        Part("trainer", 1, 0.05, 0, 0.25, "commands the ranks"),
        *([] if pairs else [ranks]),
    ]
    idle = () if config.rolls_out else ("explorer", "engines", "reward", "weight_sync")
    return [part for part in parts if part.name not in idle]


def show_plan(run: str, parts: list[Part]) -> str:
    """The plan as a table."""
    rows: list[tuple[str, ...]] = [("placement group", "bundles", "CPU", "GPU", "memory", "for")]
    for part in parts:
        for each in (part, part.beside) if part.beside else (part,):
            name = actor_name(run, each.name)
            rows.append(_row(name, str(each.count), each.cpus, each.gpus, each.memory_gib, each.note))
    total = _total(parts)
    rows.append(_row("total", "", total["CPU"], total["GPU"], total["memory"] / _GIB, ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def check_placement(parts: list[Part], resources: list[dict[str, float]], which: str = "free") -> None:
    """Raises PlacementError, with the numbers, unless the bundles find a place as Ray will place them.

    ``resources`` is what each living node of the cluster has, ``free`` or ``in all``. Which fractions of its GPUs are
    free Ray does not tell: the best is assumed, so that `Placement.reserve` may still find no place.
    """
    need = _total(parts)
    for resource, keys in (
        ("CPU", "explorer.engine.count, explorer.engine.cpus, trainer.ranks or trainer.cpus"),
        ("GPU", "explorer.engine.count, explorer.engine.gpus, trainer.ranks or trainer.gpus"),
        ("memory", "explorer.engine.memory_gib or trainer.memory_gib"),
    ):
        there = sum(node.get(resource, 0.0) for node in resources)
        if need[resource] > there + _CLOSE:
            scale, unit = (_GIB, " GiB") if resource == "memory" else (1, "")
            raise PlacementError(
                f"the run needs {need[resource] / scale:.4g}{unit} {resource} and the cluster has "
                f"{there / scale:.4g}{unit} {which}",
                field="placement",
                remedy=f"lower {keys}, stop other runs, or add nodes",
            )
    nodes = [_Node(dict(node)) for node in resources]
    for part in parts:
        placed = _pack(part, nodes)
        if placed < part.count:
            raise PlacementError(
                f"only {placed} of {part.count} bundles of {part.name!r} find a node and a GPU that can hold them "
                "beside the parts before it",
                field=f"placement.{part.name}",
                value=part.bundle,
                remedy="lower what one bundle asks for, stop other runs, or add nodes",
            )


def actor_name(run: str, part: str) -> str:
    """The name under which an actor is found in the namespace, and under which the dashboard shows it."""
    return f"{run}:{part}"


class Placement:
    """The placement groups of a run, made from its plan. Actors are put into them by part and bundle."""

    def __init__(self, run: str, parts: list[Part]) -> None:
        self._run = run
        self._parts = {part.name: part for part in parts}
        self._groups: dict[str, Any] = {}

    @property
    def ranks(self) -> Any:
        """The group that the trainer's ranks live in, one in each bundle."""
        return self._groups.get("ranks") or self._groups["engines"]

    def reserve(self, names: list[str]) -> None:
        """Make the placement groups of these parts; raises PlacementError when one is not placed within 30 s, and when
        another run has one of that name."""
        import ray
        from ray.exceptions import GetTimeoutError, RaySystemError
        from ray.util.placement_group import placement_group

        for name in names:
            part = self._parts[name]
            try:
                self._groups[name] = placement_group(
                    [part.bundle] * part.count, strategy="PACK", name=actor_name(self._run, name)
                )
            except RaySystemError:
                raise PlacementError(
                    "a run of this name is starting, or ending",
                    field="name",
                    value=self._run,
                    remedy="choose another name (name=…), or wait for its end",
                ) from None
        for name in names:
            try:
                ray.get(self._groups[name].ready(), timeout=30)
            except GetTimeoutError:
                raise PlacementError(
                    f"placement group {actor_name(self._run, name)!r} found no place within 30 s",
                    field="placement",
                    value={"asked": self._parts[name].bundle, "free": ray.available_resources()},
                    remedy="something took resources meanwhile: stop it, or start the run again",
                ) from None

    def actor(
        self,
        cls: type,
        part: str,
        *,
        name: str | None = None,
        bundle: int = -1,
        restarts: bool = False,
        retries: int = 0,
    ) -> Any:
        """A remote class placed in a bundle of its part: call ``.remote(…)`` on it.

        The actor is found as ``<run>:<name>``, or not at all where there is no name. Bundle -1 is any of the part's.
        With ``restarts`` Ray starts it again when it dies; ``retries`` -1 makes calls that were under way again, too.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = self._parts[part].asks
        options: dict[str, Any] = {"name": actor_name(self._run, name), "namespace": NAMESPACE} if name else {}
        if any(inspect.iscoroutinefunction(member) for member in vars(cls).values()):
            options["max_concurrency"] = 10_000  # its calls wait on each other; a plain actor takes one at a time
        if restarts:
            options |= {"max_restarts": -1, "max_task_retries": retries}
        return ray.remote(cls).options(
            num_cpus=resources["CPU"],
            num_gpus=resources.get("GPU", 0),
            memory=resources["memory"],
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._groups[part], placement_group_bundle_index=bundle
            ),
            **options,
        )

    def remove(self) -> None:
        """Give everything back; actors in the groups are killed by Ray."""
        from ray.util.placement_group import remove_placement_group

        for group in list(self._groups.values()):  # a run that is stopped may still be reserving
            remove_placement_group(group)
        self._groups.clear()


def remove_groups(run: str) -> None:
    """Remove the placement groups of a run, whoever made them: those of a Master that died stay as long as the process
    lives that started it."""
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    for group in _groups(run):
        # By its id: somebody else may remove it meanwhile, and then it is not found by name.
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group["placement_group_id"]))))


def remove_leftovers(run: str) -> None:
    """Remove the placement groups of a run that has no Master any more. One that somebody is starting just now has the
    Master's group alone, and keeps it."""
    if any(group["name"] != actor_name(run, "master") for group in _groups(run)):
        remove_groups(run)


def _groups(run: str) -> list[dict[str, Any]]:
    from ray.util.placement_group import placement_group_table

    table = placement_group_table().values()
    return [group for group in table if group["name"].startswith(actor_name(run, "")) and group["state"] != "REMOVED"]


def _row(name: str, count: str, cpus: float, gpus: float, memory_gib: float, note: str) -> tuple[str, ...]:
    return name, count, f"{cpus:g}", f"{gpus:g}" if gpus else "-", f"{memory_gib:g} GiB", note


def _total(parts: list[Part]) -> dict[str, float]:
    return {
        key: round(sum(part.bundle.get(key, 0.0) * part.count for part in parts), 6) for key in ("CPU", "GPU", "memory")
    }


@dataclass
class _Node:
    """What is free on a node: sums, and of each of its GPUs."""

    free: dict[str, float]
    gpus: list[float] = field(init=False)

    def __post_init__(self) -> None:
        whole, rest = divmod(self.free.get("GPU", 0.0) + _CLOSE, 1)
        self.gpus = [1.0] * int(whole) + ([rest] if rest > 2 * _CLOSE else [])

    def score(self, bundle: dict[str, float]) -> float:
        """How much of what is asked for would be left, as Ray's scheduler counts it; -1 where it does not fit."""
        left = [(self.free.get(key, 0.0) - value, self.free.get(key, 0.0)) for key, value in bundle.items() if value]
        return -1.0 if any(rest < -_CLOSE for rest, _ in left) else sum(rest / had for rest, had in left)

    def take(self, bundle: dict[str, float]) -> bool:
        """Place a bundle, if there is room: a fraction on the GPU with the least room for it, as Ray does."""
        gpus = bundle.get("GPU", 0.0)
        share, count = (gpus, 1) if gpus < 1 else (1.0, int(gpus))
        fitting = [index for index, room in enumerate(self.gpus) if room >= share - _CLOSE]
        fitting.sort(key=lambda index: self.gpus[index])
        if self.score(bundle) < 0 or (gpus and len(fitting) < count):
            return False
        for index in fitting[:count] if gpus else ():
            self.gpus[index] -= share
        for key, value in bundle.items():
            self.free[key] = self.free.get(key, 0.0) - value
        return True


def _pack(part: Part, nodes: list[_Node]) -> int:
    """How many bundles of the part find a place, where Ray's strategy PACK puts them: as many as fit on the node that
    has the most room, then on the next."""
    placed = 0
    for node in sorted(nodes, key=lambda node: node.score(part.bundle), reverse=True):
        while placed < part.count and node.take(part.bundle):
            placed += 1
    return placed
