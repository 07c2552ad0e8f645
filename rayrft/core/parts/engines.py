"""The engines of a run: of the policy, of evaluation and of auxiliary models."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from typing import Any

from rayrft.config import RunConfig
from rayrft.core.bundles import Bundles
from rayrft.core.engine_groups import EngineGroup, auxiliary_bundles, engine_bundles, policy_model, pool_bundles
from rayrft.core.parts.base import Part, has_explorers
from rayrft.core.parts.trainer import TrainerPart, ranks_bundles
from rayrft.explorer.engines.pool import EnginePool
from rayrft.runtime.handle import Handle
from rayrft.trainer.api import RankApi
from rayrft.trainer.trainer import Trainer, ask_ranks


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

    @property
    def actors(self) -> list[Handle[Any]]:  # those of now: see `EngineGroup.grow`
        return [engine for group in self.groups.values() for engine in group.engines]

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
        for engine, failure in zip(self.actors, failures, strict=True):
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
        engine, note = config.explorer.engine, f"vLLM rollout engines, {weights}"
        if not config.colocated:
            return [engine_bundles(cls.name, engine.count, engine, note)]
        # In separate groups Ray may pack two engines on one GPU, or place them on another node than the ranks.
        ranks = ranks_bundles(config, "FSDP2 under Ray Train, each beside an engine")
        if config.lends_gpus:
            engine = engine.model_copy(update={"gpus": 0.0})
        return [engine_bundles(cls.name, engine.count, engine, note, ranks)]

    def create_groups(self) -> dict[str, EngineGroup]:
        run = self.run
        policy = policy_model(run.config, run.prepared.model, share=run.prepared.engine_share)
        return {"": EngineGroup(run.placement, policy, waits=run.waits)}

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
        return [engine_bundles(cls.name, count, config.explorer.engine, note)] if count else []

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
