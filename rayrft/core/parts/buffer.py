"""The Buffer, which Ray restarts when it dies."""

from __future__ import annotations

import asyncio
from typing import Any

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.schedule import StagePlan
from rayrft.config import RunConfig, StageConfig
from rayrft.core.bundles import Bundles
from rayrft.core.checkpoints import Progress
from rayrft.core.parts.base import Part
from rayrft.experience import pack, to_batch
from rayrft.runtime.handle import Handle, Watched
from rayrft.runtime.ray_api import ray

BUFFER = Bundles("buffer", 1, 0.1, 0, 0.25, "experiences")


def plan_stage(config: RunConfig, stage: StageConfig, progress: Progress, attention: float) -> StagePlan:
    """Plan the present stage for the Buffer; for ``attention`` see `StagePlan`."""
    algorithm, partly = stage.algorithm.build(), config.explorer.partial
    return StagePlan(
        stage.groups,
        stage.group_size,
        stage.expert_rows,
        stage.demonstrations if stage.expert_rows else None,
        config.max_staleness,
        config.explorer.over_sampling,
        progress.stage_began,
        stage.steps,
        scheduled=config.mode in ("both", "serve"),
        max_age=config.buffer.max_age,
        name=stage.name,
        pairs="pairs" in algorithm.needs,
        labelled="labels" in algorithm.needs,
        grows=config.grows(stage),
        mini_batches=stage.update.mini_batches,
        parks=partly.old_tokens if partly else None,
        hold_steps=config.feedback.hold_steps,
        sampler=config.buffer.sampler,
        attention=attention,
    )


class BufferPart(Part[Buffer]):
    """The run's Buffer, or the one that its config names, which belongs to no run."""

    name = BUFFER.name
    on_death = "restart"

    @classmethod
    def bundles(cls, config: RunConfig) -> list[Bundles]:
        return [] if config.buffer.name is not None or config.mode == "bench" else [BUFFER]

    def create(self) -> list[Handle[Buffer]]:
        config, prepared = self.config, self.run.prepared
        buffer: Handle[Buffer] | None = self.run.shared
        if buffer is None:
            create = self.run.placement.actor(Buffer, self.name, name=self.name, restarts=-1)
            buffer = create(
                prepared.run_id,
                config.buffer_folder,
                config.buffer,
                config.seed,
                prepared.task_set,
                prepared.limits,
                self.run.logged,
                config.monitor.stall_s / 2,
                config.plugins,
            )
        # Without an Explorer, groups come when they come.
        serving = config.mode == "serve" and config.records_sessions
        return [self.track(buffer, endless=[Buffer.lease] if serving else [])]

    @property
    def exists(self) -> bool:
        return True

    @property
    def actor(self) -> Handle[Buffer]:
        return self.actors[0]

    async def start(self) -> None:
        given = self.run.prepared.demonstrations if self.config.trains else {}
        refs = {name: [ray.put(pack(to_batch(rows)))] for name, rows in given.items()}
        await asyncio.gather(*(self.actor.call(Buffer.load, name, ref) for name, ref in refs.items()))

    @property
    def heartbeat(self) -> Any:
        # The waits of a named Buffer are those of its train job, which may be another job than this one.
        return Watched.waiting if self.config.trains else Watched.pid

    def kill(self) -> None:
        if self.run.shared is None:
            self.actor.kill()  # Ray would try forever to restart it without its placement group
