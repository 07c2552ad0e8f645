"""Who gets which CPUs, GPUs and memory: planned, shown and checked before anything starts."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from rayrft.config import RunConfig
from rayrft.errors import PlacementError

NAMESPACE = "rayrft"
_GIB = 1 << 30


@dataclass(frozen=True)
class Part:
    """A placement group: ``count`` equal bundles. ``note`` says who lives there."""

    name: str
    count: int
    cpus: float
    gpus: float
    memory_gib: float
    note: str

    @property
    def bundle(self) -> dict[str, float]:
        """Ray's resources for one bundle."""
        resources = {"CPU": self.cpus, "memory": self.memory_gib * _GIB}
        return {**resources, "GPU": self.gpus} if self.gpus else resources


def plan_placement(config: RunConfig) -> list[Part]:
    """The parts of a run, in the order of the picture. Ray Train makes the group of the trainer's ranks itself."""
    engine, trainer = config.explorer.engine, config.trainer
    parts = [
        Part("master", 1, 0.05, 0, 0.25, "paces and supervises"),
        Part("explorer", 1, config.explorer.cpus, 0, 0.5, "tasks, workflows"),
        Part("engines", engine.count, engine.cpus, engine.gpus, engine.memory_gib, "vLLM rollout engines"),
        Part("reward", config.reward.workers, 0.1, 0, 0.25, f"reward workers: {config.reward.name}"),
        Part("buffer", config.buffer.shards, 0.1, 0, 0.25, "experiences"),
        Part("weight_sync", 1, 0.05, 0, 0.25, f"broadcast over {config.sync_backend}"),
        Part("trainer", 1, 0.05, 0, 0.25, "commands the ranks"),
        Part(
            "ranks",
            trainer.ranks,
            trainer.cpus,
            trainer.gpus,
            trainer.memory_gib,
            "FSDP2, placed by Ray Train",
        ),
    ]
    idle = () if config.rolls_out else ("explorer", "engines", "reward", "weight_sync")
    return [part for part in parts if part.name not in idle]


def show_plan(run: str, parts: list[Part]) -> str:
    """The plan as a table."""
    rows: list[tuple[str, ...]] = [("placement group", "bundles", "CPU", "GPU", "memory", "for")]
    for part in parts:
        rows.append(_row(f"{run}:{part.name}", str(part.count), part.cpus, part.gpus, part.memory_gib, part.note))
    total = _total(parts)
    rows.append(_row("total", "", total["CPU"], total["GPU"], total["memory"] / _GIB, ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def check_placement(parts: list[Part], available: dict[str, float], nodes: list[dict[str, float]]) -> None:
    """Raises PlacementError, with the numbers, unless the cluster has what the plan asks for.

    ``available`` is what is free on the cluster, ``nodes`` what each living node has in all.
    """
    need = _total(parts)
    for resource, keys in (
        ("CPU", "explorer.engine.count, explorer.engine.cpus, trainer.ranks or trainer.cpus"),
        ("GPU", "explorer.engine.count, explorer.engine.gpus, trainer.ranks or trainer.gpus"),
        ("memory", "explorer.engine.memory_gib or trainer.memory_gib"),
    ):
        free = available.get(resource, 0.0)
        if need[resource] > free + 1e-6:
            scale, unit = (_GIB, " GiB") if resource == "memory" else (1, "")
            raise PlacementError(
                f"the run needs {need[resource] / scale:.4g}{unit} {resource} and the cluster has "
                f"{free / scale:.4g}{unit} free",
                field="placement",
                remedy=f"lower {keys}, stop other runs, or add nodes",
            )
    for part in parts:
        if not any(all(node.get(k, 0.0) >= v for k, v in part.bundle.items()) for node in nodes):
            raise PlacementError(
                f"no single node can hold one bundle of {part.name!r}",
                field="placement",
                value=part.bundle,
                remedy="lower what one bundle asks for, or add a larger node",
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

        resources = self._parts[part].bundle
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


def remove_groups(prefix: str) -> None:
    """Remove the placement groups whose names begin so, whoever made them: those of a Master that died stay as long as
    the process lives that started it."""
    from ray import PlacementGroupID
    from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

    for entry in placement_group_table().values():
        if entry["name"].startswith(prefix) and entry["state"] != "REMOVED":
            # By its id: somebody else may remove it meanwhile, and then it is not found by name.
            group = PlacementGroupID(bytes.fromhex(entry["placement_group_id"]))
            remove_placement_group(PlacementGroup(group))


def _row(name: str, count: str, cpus: float, gpus: float, memory_gib: float, note: str) -> tuple[str, ...]:
    return name, count, f"{cpus:g}", f"{gpus:g}" if gpus else "-", f"{memory_gib:g} GiB", note


def _total(parts: list[Part]) -> dict[str, float]:
    return {
        "CPU": round(sum(part.cpus * part.count for part in parts), 6),
        "GPU": round(sum(part.gpus * part.count for part in parts), 6),
        "memory": sum(part.memory_gib * part.count for part in parts) * _GIB,
    }
