"""Engines of the policy, of evaluation and of auxiliary models, in a run and without one."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rayrft.config import RunConfig
from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.explorer import EngineConfig
from rayrft.core.parts.base import Part, has_explorers
from rayrft.core.parts.trainer import TrainerPart, ranks_bundles
from rayrft.core.placement import Bundles, PlacedClass, Placement
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.explorer.engines.pool import EnginePool, Member, Membership
from rayrft.runtime.handle import Handle, TrackedHandle, answer, fence
from rayrft.runtime.waits import Waits
from rayrft.trainer.api import RankApi
from rayrft.trainer.trainer import Trainer, ask_ranks

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
    """The engines of a model, named ``<name>-<index>``, one per bundle of a placement ``group``, and their pool.

    ``waits`` records the calls of the actors in a run, whose Master replaces engines that die. ``replaced``: whether
    another actor does, to which the group is sent.
    """

    def __init__(
        self,
        placement: Placement,
        model: EngineModel,
        group: str,
        name: str,
        pool: str,
        waits: Waits | None = None,
        replaced: bool = False,
    ) -> None:
        self._model, self._placement, self._group, self._name, self._waits = model, placement, group, name, waits
        placed = placement.actor(EnginePool, "engine_pool", name=pool, restarts=-1)
        self.pool = _tracked(placed.create(replaced=replaced or waits is not None), waits)
        self._classes = list(map(self._class, range(placement.count(group))))
        self.engines = [_tracked(each.create(), waits) for each in self._classes]
        self.lost: set[str] = set()
        """Names of engines that have died and are not replaced, or that leave."""
        self.emptied = asyncio.Event()
        """Set when the last engine has died; `Evaluations` clears it."""
        self.lent: dict[int, list[str]] = {}
        """GPUs of trainer ranks that engines use, by the engines' indices."""
        self.loaded: list[Member] = []
        """Evaluation engines with the weights that they were sent last."""

    @classmethod
    def policy(
        cls, placement: Placement, model: EngineModel, waits: Waits | None = None, replaced: bool = False
    ) -> EngineGroup:
        """Create the rollout engines of a policy."""
        return cls(placement, model, "engines", "engine", "engine_pool", waits, replaced)

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
        engine.succeed(self._classes[index].create())
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
        self._classes.append(self._class(len(self.engines)))
        self.engines.append(_tracked(self._classes[-1].create(), self._waits))

    async def shrink(self) -> None:
        """End the last engine; the others answer its requests."""
        engine, _ = self.engines.pop(), self._classes.pop()
        await self.pool.call(EnginePool.leave, engine.untracked, "the run is scaled down")
        await fence(engine)
        self._placement.shrink(self._group, len(self.engines))

    def join(self, engines: Sequence[Handle[RolloutEngine]]) -> Awaitable[Membership]:
        """Let engines take requests with the weights that they were started with."""
        return self.pool.call(EnginePool.join, [Member(engine, 0) for engine in engines])

    def _class(self, index: int) -> PlacedClass[[], RolloutEngine]:
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


def policy_bundles(config: RunConfig, weights: str, beside: Bundles | None = None) -> list[Bundles]:
    """Return the placement group of rollout engines."""
    engine = config.explorer.engine
    if beside and config.lends_gpus:
        engine = engine.model_copy(update={"gpus": 0.0})
    return [_bundles("engines", engine.count, engine, f"vLLM rollout engines, {weights}", beside)]


def auxiliary_bundles(models: Mapping[str, AuxiliaryConfig]) -> list[Bundles]:
    """Return the placement groups of the engines of auxiliary models."""
    return [
        _bundles(f"auxiliary-{name}", each.engine.count, each.engine, f"vLLM engines of {each.model}")
        for name, each in models.items()
    ]


def pool_bundles(count: int) -> Bundles:
    """Return the placement group of the engine pools, one for each model."""
    return Bundles("engine_pool", count, 0.05, 0, 0.25, "which engines take requests")


def _bundles(name: str, count: int, engine: EngineConfig, note: str, beside: Bundles | None = None) -> Bundles:
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


class EngineRole(Part[Any]):
    """The engine groups of a run that have one role."""

    on_death = "replace"
    loads = True

    def create_groups(self) -> dict[str, EngineGroup]:
        """Create the groups by model; the policy is ""."""
        raise NotImplementedError

    @cached_property
    def groups(self) -> dict[str, EngineGroup]:
        """The groups, which are created at the first access."""
        return self.create_groups() if self.exists else {}

    @property
    def group(self) -> EngineGroup | None:
        """The group of the policy, if there is one."""
        return self.groups.get("")

    def create(self) -> list[Handle[Any]]:
        return [engine for group in self.groups.values() for engine in group.engines]

    @property
    def supervised(self) -> list[Handle[Any]]:
        return self.create()  # those of now: see `EngineGroup.grow`

    async def lost(self, actor: Handle[Any]) -> None:
        await self._group_of(actor).lose(actor)

    async def drain(self, nodes: set[str]) -> None:
        for group in self.groups.values():
            await group.drain(nodes)

    async def replace(self, actor: Handle[Any]) -> None:
        group = self._group_of(actor)
        async with self.room():
            await group.replace(actor)
        await self.admit(group, [actor])

    def room(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which there is memory for engines that start."""
        return contextlib.nullcontext()

    async def admit(self, group: EngineGroup, engines: list[Handle[Any]]) -> None:
        """Let engines that have started take requests."""
        await group.join(engines)

    async def admit_again(self, group: EngineGroup) -> None:
        """Let the engines of a group take requests whose pool has forgotten them."""
        if group.alive:
            await self.admit(group, group.alive)

    def _group_of(self, engine: Handle[Any]) -> EngineGroup:
        return next(group for group in self.groups.values() if engine in group.engines)

    async def start(self) -> None:
        """Start the engines. One that a Master finds failed, which takes a run over, is killed, so that it is replaced:
        ranks beside it may have died while it measured their GPU."""
        async with self.room():
            starts = [start for group in self.groups.values() for start in group.start()]
            # A run that starts fails at once, whatever the others still load.
            failures = await asyncio.gather(*starts, return_exceptions=self.run.taken_over)
        for engine, failure in zip(self.create(), failures, strict=True):
            if failure is not None:
                engine.kill()
        for failure in filter(None, failures):
            raise failure


class PolicyEngines(EngineRole):
    """Engines that sample; the weight sync gives them the weights of the trainer."""

    name = "engines"

    @classmethod
    def bundles(cls, config: RunConfig) -> list[Bundles]:
        if not config.rolls_out:
            return []
        weights = f"weights over {config.sync_backend}" if config.trains else "fixed weights"
        # In separate groups Ray may pack two engines on one GPU, or place them on another node than the ranks.
        ranks = ranks_bundles(config, "FSDP2 under Ray Train, each beside an engine")
        return policy_bundles(config, weights, ranks if config.colocated else None)

    def create_groups(self) -> dict[str, EngineGroup]:
        run = self.run
        policy = policy_model(run.config, run.prepared.model, share=run.prepared.engine_share)
        return {"": EngineGroup.policy(run.placement, policy, run.waits)}

    @contextlib.asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """Beside ranks an engine starts once they have loaded, and while they do nothing: it measures the free memory,
        and those that sleep are awake at first."""
        if not self.config.colocated:
            yield
            return
        trainer = self.run[TrainerPart]
        await trainer.up.wait()
        async with self.run.idle_ranks(), trainer.loading:
            if self.config.lends_gpus:
                await self._borrow(trainer.actors[0])
            yield

    async def _borrow(self, trainer: Handle[Trainer]) -> None:
        """Give each engine GPUs of ranks on its node. They stay the same if ranks or engines are replaced."""
        group, count, on = self.groups[""], self.config.explorer.engine.tensor_parallel, self.run.placement.node_of
        there = defaultdict[str | None, list[str]](list)
        for node, gpus in sorted(await ask_ranks(trainer, RankApi.gpus)):
            there[node] += gpus
        for index in range(len(group.engines)):
            gpus = there[await asyncio.to_thread(on, self.name, index)]
            group.lent[index], gpus[:count] = gpus[:count], []

    async def admit(self, group: EngineGroup, engines: list[Handle[Any]]) -> None:
        assert self.run.admit is not None  # engines are replaced in a run that is up
        await self.run.admit(engines)


class EvaluationEngines(EngineRole):
    """Engines that only evaluate. Each evaluation lets the live ones join, with its weights."""

    name = "evaluation"

    @classmethod
    def bundles(cls, config: RunConfig) -> list[Bundles]:
        count, note = config.evaluation_engines, "vLLM engines that only evaluate"
        return [_bundles(cls.name, count, config.explorer.engine, note)] if count else []

    def create_groups(self) -> dict[str, EngineGroup]:
        run = self.run
        model = policy_model(self.config, run.prepared.model, seed=self.config.explorer.engine.count)
        return {"": EngineGroup(run.placement, model, self.name, self.name, "evaluation_pool", run.waits)}

    async def admit(self, group: EngineGroup, engines: list[Handle[Any]]) -> None: ...

    async def admit_again(self, group: EngineGroup) -> None:
        """Let the engines that have weights join with them: an evaluation may wait for engines."""
        alive = [engine.actor for engine in group.alive]
        await group.pool.call(EnginePool.join, [each for each in group.loaded if each.handle.actor in alive])


class AuxiliaryEngines(EngineRole):
    """Engines of auxiliary models, whose weights never change."""

    name = "auxiliary engines"

    @classmethod
    def bundles(cls, config: RunConfig) -> list[Bundles]:
        return auxiliary_bundles(config.auxiliary) if has_explorers(config) else []

    def create_groups(self) -> dict[str, EngineGroup]:
        return EngineGroup.auxiliary(self.run.placement, self.config.auxiliary, self.config.seed, self.run.waits)

    @property
    def pools(self) -> dict[str, Handle[EnginePool]]:
        """The pools by model."""
        return {name: group.pool for name, group in self.groups.items()}

    async def start(self) -> None:
        await super().start()
        await asyncio.gather(*(group.join(group.engines) for group in self.groups.values()))


class EnginePools(Part[EnginePool]):
    """The pools of all engine groups, in one placement group. The groups create them."""

    name = "engine_pool"
    on_death = "restart"

    def create(self) -> list[Handle[EnginePool]]:
        return [group.pool for role in self._roles for group in role.groups.values()]

    async def restarted(self, actor: Handle[EnginePool]) -> None:
        """Let the engines join again, whose pool has forgotten them."""
        for role in self._roles:
            for group in role.groups.values():
                if group.pool is actor:
                    await role.admit_again(group)

    @property
    def _roles(self) -> list[EngineRole]:
        return [self.run[PolicyEngines], self.run[EvaluationEngines], self.run[AuxiliaryEngines]]

    @classmethod
    def bundles(cls, config: RunConfig) -> list[Bundles]:
        if not config.rolls_out:
            return []
        return [pool_bundles(1 + len(AuxiliaryEngines.bundles(config)) + bool(config.evaluation_engines))]
