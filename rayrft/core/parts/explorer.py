"""The Explorers, which share the tasks; the first one evaluates."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import Any

from rayrft.config import RunConfig
from rayrft.core.parts.base import Part, has_explorers
from rayrft.core.parts.buffer import BufferPart
from rayrft.core.parts.engines import AuxiliaryEngines, EvaluationEngines, PolicyEngines
from rayrft.core.parts.operators import remote_operators
from rayrft.core.parts.rewards import RewardsPart, remote_scoring
from rayrft.core.placement import Bundles
from rayrft.explorer.explorer import Explorer
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
        prepared, placement, pools = run.prepared, run.placement, run[AuxiliaryEngines].pools
        policy, evaluation = run[PolicyEngines].group, run[EvaluationEngines].group
        assert policy is not None  # there is one where groups are sampled
        return placement.actor(Explorer, self.name, name=f"explorer-{index}", bundle=index).create(
            config,
            prepared.tokenizer,
            policy.pool,
            run[BufferPart].actor,
            *self._tasks,
            remote_scoring(config, placement, pools),
            prepared.run_id if config.mode == "explore" else "",
            pools,
            evaluation.pool if evaluation is not None else None,
            remote_operators(config, prepared.model, placement, pools),
        )

    async def start(self) -> None:
        if self.actors:
            await self.run[RewardsPart].deploy()
            await asyncio.gather(*(explorer.call(Explorer.start) for explorer in self.actors))
