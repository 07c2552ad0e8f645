"""The Explorers, which share the tasks (the first one evaluates), and the actors of their operators on experiences."""

from __future__ import annotations

import asyncio
from functools import cached_property, partial
from typing import Any

from rayrft.config import RunConfig
from rayrft.core.bundles import Bundles
from rayrft.core.parts.base import Part, has_explorers
from rayrft.core.parts.buffer import BufferPart
from rayrft.core.parts.engines import AuxiliaryEngines, EvaluationEngines, PolicyEngines
from rayrft.core.parts.rewards import RewardsPart, remote_scoring
from rayrft.explorer.engines.auxiliary import auxiliary_models
from rayrft.explorer.explorer import Explorer
from rayrft.pipelines.experiences import experience_chain
from rayrft.pipelines.run.groups import ActorOperators, OperatorActor
from rayrft.rewards import where
from rayrft.runtime.handle import Handle
from rayrft.runtime.ray_api import ray


class ExplorerPart(Part[Explorer]):
    """The Explorers of a run that samples groups by itself."""

    name = "explorer"
    on_death = "replace"

    @classmethod
    def bundles(cls, config: RunConfig) -> list[Bundles]:
        if not has_explorers(config):
            return []
        models = config.reward.models.values() if config.reward.placement == "beside" else ()
        beside = sum(model.workers * (where(part.name) == "process") for model in models for part in model.scored_by)
        note = "tasks, workflows" + (f", {beside} processes that score" if beside else "")
        return [Bundles(cls.name, config.explorer.count, config.explorer.cpus, 0, 0.5, note)]

    def create(self) -> list[Handle[Explorer]]:
        made = map(self._make, range(self.config.explorer.count))
        return [self.track(explorer, endless=[Explorer.explore]) for explorer in made]

    async def replace(self, actor: Handle[Explorer]) -> None:
        actor.succeed(self._make(self.actors.index(actor)))
        await actor.call(Explorer.start)

    @cached_property
    def _tasks(self) -> tuple[Any, Any]:
        """References to the tasks and the held-out tasks."""
        return ray.put(self.run.prepared.tasks), ray.put(self.run.prepared.held_out)

    def _make(self, index: int) -> Handle[Explorer]:
        config, run = self.config, self.run
        prepared, pools, operators = run.prepared, run[AuxiliaryEngines].pools, run[OperatorsPart].actors
        policy, evaluation = run[PolicyEngines].group, run[EvaluationEngines].group
        assert policy is not None  # there is one where groups are sampled
        name = f"explorer-{index}"
        return run.placement.actor(Explorer, self.name, name=name, bundle=index)(
            config,
            prepared.tokenizer,
            policy.pool,
            run[BufferPart].actor,
            *self._tasks,
            remote_scoring(config, run[RewardsPart].actors[index :: config.explorer.count]),
            prepared.run_id if config.mode == "explore" else "",
            pools,
            evaluation.pool if evaluation is not None else None,
            partial(ActorOperators, operators[index :: config.explorer.count]) if operators else None,
            name,
        )

    async def start(self) -> None:
        if self.actors:
            await self.run[RewardsPart].deploy()
            await asyncio.gather(*(explorer.call(Explorer.start) for explorer in self.actors))


class OperatorsPart(Part[OperatorActor]):
    """The actors of operators on experiences, unless the Explorers run the operators."""

    name = "operators"
    on_death = "restart"

    @classmethod
    def bundles(cls, config: RunConfig) -> list[Bundles]:
        actors, experiences = config.pipelines.actors, config.pipelines.experiences
        if not experiences or actors is None or not has_explorers(config) or config.mode == "bench":
            return []
        count, note = config.explorer.count * actors.count, ", ".join(each.name for each in experiences)
        return [Bundles(cls.name, count, actors.cpus, actors.gpus, actors.memory_gib, note)]

    def create(self) -> list[Handle[OperatorActor]]:
        config, placement, pools = self.config, self.run.placement, self.run[AuxiliaryEngines].pools
        name, chain = self.name, experience_chain(config, self.run.prepared.model)
        count = placement.count(name)
        models = partial(auxiliary_models, config.auxiliary, pools, share=1 / count) if pools else None
        placed = [placement.actor(OperatorActor, name, name=f"{name}-{i}", bundle=i, restarts=-1) for i in range(count)]
        settings = chain, config.pipelines, models, config.auxiliary, config.scoring
        return [self.track(create(*settings)) for create in placed]

    async def restarted(self, actor: Handle[OperatorActor]) -> None:
        await actor.call(OperatorActor.open)
