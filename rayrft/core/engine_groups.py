"""Engine groups: the engines of a model on a placement group, with their pool, in a run and without one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayrft.config import RunConfig
from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.explorer import EngineConfig
from rayrft.core.bundles import Bundles
from rayrft.core.placement import Placement
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.explorer.engines.pool import EnginePool, Member, Membership
from rayrft.runtime.handle import Handle, TrackedHandle, answer, fence
from rayrft.runtime.waits import Waits

_APPLICATIONS = "agent", "program", "verifiers"
"""Workflows whose applications call an endpoint."""


@dataclass(frozen=True)
class EngineModel:
    """A model, and how engines serve it. Engine ``i`` of a group has the seed ``seed + i``."""

    path: str
    engine: EngineConfig
    max_length: int
    dtype: str
    seed: int
    structured: bool = False
    """Whether answers may have to follow a JSON schema."""


class EngineGroup:
    """The engines of a model, named ``<name>-<index>``, one per bundle of a placement ``group``, and their pool; by
    default those of the policy.

    ``waits`` records the calls of the actors in a run, whose Master replaces engines that die. ``replaced``: whether
    another actor does, to which the group is sent.
    """

    def __init__(
        self,
        placement: Placement,
        model: EngineModel,
        group: str = "engines",
        name: str = "engine",
        pool: str = "engine_pool",
        waits: Waits | None = None,
        replaced: bool = False,
    ) -> None:
        self._model, self._placement, self._group, self._name, self._waits = model, placement, group, name, waits
        create_pool = placement.actor(EnginePool, "engine_pool", name=pool, restarts=-1)
        self.pool = _tracked(create_pool(replaced=replaced or waits is not None), waits)
        self._creators = list(map(self._creator, range(placement.count(group))))
        self.engines = [_tracked(create(), waits) for create in self._creators]
        self.lost: set[str] = set()
        """Names of engines that have died and are not replaced, or that leave."""
        self.emptied = asyncio.Event()
        """Set when the last engine has died; `Evaluations` clears it."""
        self.lent: dict[int, list[str]] = {}
        """GPUs of trainer ranks that engines use, by the engines' indices."""
        self.loaded: list[Member] = []
        """Evaluation engines with the weights that they were sent last."""

    @classmethod
    def auxiliary(
        cls, placement: Placement, models: Mapping[str, AuxiliaryConfig], seed: int, waits: Waits | None = None
    ) -> dict[str, EngineGroup]:
        """Create the engines of auxiliary models, by the models' names."""
        groups = {}
        for name, each in models.items():
            model = EngineModel(each.model, each.engine, each.max_length, each.dtype, seed, structured=True)
            part = f"auxiliary-{name}"
            groups[name] = cls(placement, model, part, part, f"engine_pool-{name}", waits)
        return groups

    @property
    def actors(self) -> list[Handle[Any]]:
        return [self.pool, *self.engines]

    @property
    def alive(self) -> list[Handle[RolloutEngine]]:
        """The engines that have not died and do not leave, or were replaced."""
        return [engine for engine in self.engines if engine.name not in self.lost]

    def start(self, first: int = 0) -> list[Awaitable[None]]:
        """Start the engines from the ``first`` on; return the call of each. They take no requests yet."""
        return list(map(self._start, range(first, len(self.engines))))

    async def replace(self, engine: Handle[RolloutEngine]) -> None:
        """Create and start the successor of an engine that is dead; it takes no requests yet."""
        index = self.engines.index(engine)
        engine.succeed(self._creators[index]())
        await self._start(index)
        self.lost.discard(engine.name)

    async def drain(self, nodes: set[str]) -> None:
        """Send no more requests to the engines on these nodes, if other nodes have some: they finish what they have,
        until they die and are replaced."""
        alive, count = self.alive, range(len(self.engines))
        on = await asyncio.to_thread(lambda: [self._placement.node_of(self._group, index) for index in count])
        leaving = [engine for engine, node in zip(self.engines, on, strict=True) if node in nodes and engine in alive]
        if len(leaving) < len(alive):
            for engine in leaving:
                await self.lose(engine, "its node is drained")

    async def lose(self, engine: Handle[RolloutEngine], reason: str = "it died") -> None:
        """Send no more requests to an engine that has died, or leaves."""
        self.lost.add(engine.name)
        if not self.alive:
            self.emptied.set()
        await self.pool.call(EnginePool.leave, engine.untracked, reason)

    def grow(self) -> None:
        """Create one more engine, which is not started yet; outside of event loops. Raises PlacementError."""
        self._placement.extend(self._group, len(self.engines))
        self._creators.append(self._creator(len(self.engines)))
        self.engines.append(_tracked(self._creators[-1](), self._waits))

    async def shrink(self) -> None:
        """End the last engine; the others answer its requests."""
        engine, _ = self.engines.pop(), self._creators.pop()
        await self.pool.call(EnginePool.leave, engine.untracked, "the run is scaled down")
        await fence(engine)
        self._placement.shrink(self._group, len(self.engines))

    def join(self, engines: Sequence[Handle[RolloutEngine]]) -> Awaitable[Membership]:
        """Let engines take requests with the weights that they were started with."""
        return self.pool.call(EnginePool.join, [Member(engine, 0) for engine in engines])

    def _creator(self, index: int) -> Callable[[], Handle[RolloutEngine]]:
        return self._placement.actor(RolloutEngine, self._group, name=f"{self._name}-{index}", bundle=index)

    def _start(self, index: int) -> Awaitable[None]:
        model = self._model
        return self.engines[index].call(
            RolloutEngine.start,
            model.path,
            model.engine,
            max_length=model.max_length,
            dtype=model.dtype,
            seed=model.seed + index,
            structured=model.structured,
            lent=tuple(self.lent.get(index, ())),
        )


def serve_engines(groups: Collection[EngineGroup], start_s: float) -> None:
    """Start the engines of groups, and let them take requests; block until they do, outside of event loops.

    Raises ActorUnreachable if an engine is not up within ``start_s``, and the root cause if one does not start.
    """
    starting = [group.start() for group in groups]
    for group, starts in zip(groups, starting, strict=True):
        for engine, start in zip(group.engines, starts, strict=True):
            answer(start, engine.name, start_s)
        answer(group.join(group.engines), group.pool.name, start_s)


def auxiliary_bundles(models: Mapping[str, AuxiliaryConfig]) -> list[Bundles]:
    """Return the placement groups of the engines of auxiliary models."""
    return [
        engine_bundles(f"auxiliary-{name}", each.engine.count, each.engine, f"vLLM engines of {each.model}")
        for name, each in models.items()
    ]


def pool_bundles(count: int) -> Bundles:
    """Return the placement group of the engine pools, one for each model."""
    return Bundles("engine_pool", count, 0.05, 0, 0.25, "which engines take requests")


def engine_bundles(name: str, count: int, engine: EngineConfig, note: str, beside: Bundles | None = None) -> Bundles:
    """Return a placement group of engines."""
    return Bundles(name, count, engine.cpus, engine.gpus, engine.memory_gib, note, beside)


def policy_model(config: RunConfig, path: str, *, seed: int = 0, share: float | None = None) -> EngineModel:
    """Return how engines serve the policy in the folder or hub id ``path``; ``seed`` is added to the run's. Each takes
    a ``share`` of its GPU if one is given, else that of the config."""
    # Clients of the endpoint, in a run or in an attempt, may ask for answers that follow a JSON schema.
    named = {config.explorer.workflow, *config.explorer.workflow_options}
    structured = config.endpoint is not None or not named.isdisjoint(_APPLICATIONS)
    engine = config.explorer.engine
    changes: dict[str, Any] = {"sleep": engine.sleep and config.trains}  # only weights wake them
    if share is not None:
        changes["gpu_memory_utilization"] = share
    engine = engine.model_copy(update=changes)
    return EngineModel(path, engine, config.model.max_length, config.model.dtype, config.seed + seed, structured)


def _tracked(actor: Handle[Any], waits: Waits | None) -> Handle[Any]:
    return actor if waits is None else TrackedHandle(actor, waits)
