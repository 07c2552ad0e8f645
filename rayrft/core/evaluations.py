"""Evaluation during training: by the rollout engines between two steps, or beside the steps by evaluation engines."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from rayrft.config import StageConfig
from rayrft.config.stage import EvaluationConfig
from rayrft.core.checkpoints import Saver
from rayrft.core.engine_groups import EngineGroup
from rayrft.errors import ActorDied, WeightSyncError
from rayrft.explorer.engines.pool import EnginePool, Member
from rayrft.explorer.explorer import Explorer
from rayrft.monitor.records import EvaluationRecord
from rayrft.runtime import ray_api
from rayrft.runtime.handle import root_cause
from rayrft.runtime.waits import cancel, unless

if TYPE_CHECKING:
    from rayrft.core.train_loop import TrainLoop


class Evaluations:
    """Evaluations of the current policy by the first Explorer of a ``loop``, on the held-out tasks, at each temperature
    of the config: by the evaluation engines, if the run has any, else by the rollout engines."""

    def __init__(self, loop: TrainLoop, saving: Saver) -> None:
        self._loop, self._saving = loop, saving
        self._running: asyncio.Future[list[EvaluationRecord]] | None = None
        self._stage: StageConfig
        self._step = 0
        self._other: EvaluationConfig | None = None
        """Stage and step that the latest evaluation is of, and the other config than the run's."""
        self._skipped = 0

    async def begin(
        self, stage: StageConfig, other: EvaluationConfig | None = None
    ) -> asyncio.Future[list[EvaluationRecord]] | None:
        """Evaluate the policy, if evaluation is enabled; with evaluation engines return once they have its weights.
        Return the future records, none if an evaluation engine dies. The accuracy by an ``other`` config than the run's
        does not judge the step's checkpoint.

        One that is due while the one before has not ended is skipped and counted.
        """
        loop, progress = self._loop, self._loop.progress
        if not loop.config.evaluation.enabled or not loop.explorers:
            return None
        if (EvaluationRecord.kind, stage.name, progress.step) in loop.recorder.repeated:
            return None
        if self._running is not None and not self._running.done():
            self._skipped += 1
            text = f"no evaluation: that of step {self._step} has not ended"
            await loop.recorder.note(text, stage.name, progress.step)
            return None
        self._stage, self._step, self._other = stage, progress.step, other
        try:
            engines = await self._load()
        except ray_api.ACTOR_ERRORS as died:
            await self._lose(died)
            return None
        if engines is None:
            if not stage.groups:
                await loop.publish()
            self._running = asyncio.ensure_future(self._evaluate(progress.stage_step, beside=False))
            await self._running
        else:
            if other is None:
                self._saving.checkpoints.evaluating.add(progress.step)
            self._running = asyncio.ensure_future(self._beside(engines, progress.stage_step))
        return self._running

    def check(self) -> None:
        """Raise the error that ended an evaluation, if one did."""
        if self._running is not None and self._running.done():
            self._running.result()

    async def end(self) -> None:
        """Wait for the evaluation that has not ended. Raises its error."""
        if self._running is not None:
            await self._running

    async def cancel(self) -> None:
        """Cancel the running evaluation."""
        if self._running is not None:
            await cancel(self._running)

    async def _load(self) -> EngineGroup | None:
        """Give the current weights to the evaluation engines that are alive; return them, or None if there are none."""
        engines, sync = self._loop.evaluation, self._loop.weight_sync
        if engines is None or sync is None or not engines.alive:
            return None
        # Handles of now: an engine that is replaced meanwhile has no weights.
        alive = [engine.untracked for engine in engines.alive]
        engines.emptied.clear()
        await sync.load(alive, self._step)
        engines.loaded = [Member(engine, self._step) for engine in alive]
        await engines.pool.call(EnginePool.join, engines.loaded)
        return engines

    async def _beside(self, engines: EngineGroup, stage_step: int) -> list[EvaluationRecord]:
        """Evaluate during training. Without evaluation engines that are alive, the evaluation is lost."""
        died = partial(ActorDied, "all evaluation engines died", field="evaluation")
        try:
            return await unless(engines.emptied.wait(), died, self._evaluate(stage_step, beside=True))
        except ActorDied as error:
            await self._lose(error)
            return []

    async def _lose(self, error: BaseException) -> None:
        self._skipped += 1
        if self._other is None:
            self._saving.evaluated(self._step, None)
        text = f"the evaluation of step {self._step} is lost: {root_cause(error)}"
        await self._loop.recorder.note(text, self._stage.name, self._step)

    async def _evaluate(self, stage_step: int, *, beside: bool) -> list[EvaluationRecord]:
        stage, step, loop, records = self._stage.name, self._step, self._loop, list[EvaluationRecord]()
        config = self._other or loop.config.evaluation
        for number, temperature in enumerate(config.temperatures):
            started = time.perf_counter()
            explorer = loop.explorers[0]
            evaluating = partial(explorer.call, Explorer.evaluate, temperature, config.samples, beside)
            result = await loop.restarts.survive(explorer, evaluating)
            seconds = time.perf_counter() - started
            if set(result.versions) - {step}:
                problem = f"answers were sampled under versions {[*result.versions]} in an evaluation of version {step}"
                remedy = "an engine was sent weights meanwhile, which is a bug: please report it"
                raise WeightSyncError(problem, remedy, field="evaluation")
            if number == 0 and self._other is None:
                self._saving.evaluated(step, result.accuracy.value if result.count else None)
            skipped, self._skipped = self._skipped, 0
            record = EvaluationRecord.of(stage, step, stage_step, temperature, result, seconds, skipped)
            await loop.recorder.add(record)
            records.append(record)
            if result.unknown:
                reasons = ", ".join(f"{count} {reason}" for reason, count in [*result.unknown.items()][:3])
                text = f"held-out attempts without a reward: {reasons}"
                await loop.recorder.note(f"{text}; {result.error}" if result.error else text, stage, step)
        return records
