"""Evaluation during training: by the rollout engines between two steps, or beside the steps by evaluation engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rayrft.config import RunConfig, StageConfig
from rayrft.config.stage import EvaluationConfig
from rayrft.core.checkpoints import Progress, Saver
from rayrft.core.parts.engines import EngineGroup
from rayrft.core.restarts import Restarts
from rayrft.core.weight_sync import WeightSync
from rayrft.errors import ActorDied, WeightSyncError
from rayrft.explorer.engines.pool import EnginePool, Member
from rayrft.explorer.explorer import Explorer
from rayrft.monitor.recorder import Recorder
from rayrft.monitor.records import EvaluationRecord
from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle, root_cause
from rayrft.runtime.waits import cancel, unless


@dataclass
class Evaluations:
    """Evaluates the current policy on the held-out tasks, at every temperature of the config."""

    config: RunConfig
    explorers: list[Handle[Explorer]]
    """The first one evaluates."""
    engines: EngineGroup | None
    """Evaluation engines; else the rollout engines evaluate."""
    recorder: Recorder
    progress: Progress
    saving: Saver
    weight_sync: WeightSync | None
    publish: Callable[[], Awaitable[Any]]
    """Gives the rollout engines the current weights."""
    restarts: Restarts

    def __post_init__(self) -> None:
        self._running: asyncio.Future[list[EvaluationRecord]] | None = None
        self._step = 0
        """Step that the latest evaluation is of."""
        self._skipped = 0

    async def begin(
        self, stage: StageConfig, other: EvaluationConfig | None = None
    ) -> asyncio.Future[list[EvaluationRecord]] | None:
        """Evaluate the policy, if evaluation is enabled; with evaluation engines return once they have its weights.
        Return the future records, none if an evaluation engine dies. The accuracy by an ``other`` config than the run's
        does not judge the step's checkpoint.

        One that is due while the one before has not ended is skipped and counted.
        """
        if not self.config.evaluation.enabled or not self.explorers:
            return None
        if (EvaluationRecord.kind, stage.name, self.progress.step) in self.recorder.repeated:
            return None
        if self._running is not None and not self._running.done():
            self._skipped += 1
            text = f"no evaluation: that of step {self._step} has not ended"
            await self.recorder.note(text, stage.name, self.progress.step)
            return None
        self._step = self.progress.step
        try:
            loaded = await self._load()
        except ray_api.ACTOR_ERRORS as died:
            await self._lose(stage, self._step, died, other)
            return None
        if loaded:
            if other is None:
                self.saving.checkpoints.evaluating.add(self._step)
            self._running = asyncio.ensure_future(self._beside(stage, self._step, self.progress.stage_step, other))
        else:
            if not stage.groups:
                await self.publish()
            evaluating = self._evaluate(stage, self._step, self.progress.stage_step, False, other)
            self._running = asyncio.ensure_future(evaluating)
            await self._running
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

    async def _load(self) -> bool:
        """Give the current weights to the evaluation engines that are alive; return whether there are any."""
        if self.engines is None or self.weight_sync is None or not self.engines.alive:
            return False
        # Handles of now: an engine that is replaced meanwhile has no weights.
        alive = [engine.untracked for engine in self.engines.alive]
        self.engines.emptied.clear()
        await self.weight_sync.load(alive, self._step)
        self.engines.loaded = [Member(engine, self._step) for engine in alive]
        await self.engines.pool.call(EnginePool.join, self.engines.loaded)
        return True

    async def _beside(
        self, stage: StageConfig, step: int, stage_step: int, other: EvaluationConfig | None
    ) -> list[EvaluationRecord]:
        """Evaluate during training. Without evaluation engines that are alive, the evaluation is lost."""
        assert self.engines is not None  # they evaluate

        def died() -> ActorDied:
            return ActorDied("all evaluation engines died", field="evaluation")

        try:
            evaluating = self._evaluate(stage, step, stage_step, True, other)
            return await unless(self.engines.emptied.wait(), died, evaluating)
        except ActorDied as error:
            await self._lose(stage, step, error, other)
            return []

    async def _lose(self, stage: StageConfig, step: int, error: BaseException, other: EvaluationConfig | None) -> None:
        self._skipped += 1
        if other is None:
            self.saving.evaluated(step, None)
        await self.recorder.note(f"the evaluation of step {step} is lost: {root_cause(error)}", stage.name, step)

    async def _evaluate(
        self, stage: StageConfig, step: int, stage_step: int, beside: bool, other: EvaluationConfig | None
    ) -> list[EvaluationRecord]:
        records, config = [], other or self.config.evaluation
        for number, temperature in enumerate(config.temperatures):
            started = time.perf_counter()
            explorer = self.explorers[0]
            evaluating = partial(explorer.call, Explorer.evaluate, temperature, config.samples, beside)
            result = await self.restarts.survive(explorer, evaluating)
            seconds = time.perf_counter() - started
            if set(result.versions) - {step}:
                problem = f"answers were sampled under versions {[*result.versions]} in an evaluation of version {step}"
                remedy = "an engine was sent weights meanwhile, which is a bug: please report it"
                raise WeightSyncError(problem, remedy, field="evaluation")
            if number == 0 and other is None:
                self.saving.evaluated(step, result.accuracy.value if result.count else None)
            skipped, self._skipped = self._skipped, 0
            record = EvaluationRecord.of(stage.name, step, stage_step, temperature, result, seconds, skipped)
            await self.recorder.add(record)
            records.append(record)
            if result.unknown:
                reasons = ", ".join(f"{count} {reason}" for reason, count in [*result.unknown.items()][:3])
                text = f"held-out attempts without a reward: {reasons}"
                await self.recorder.note(f"{text}; {result.error}" if result.error else text, stage.name, step)
        return records
