"""Evaluation during training: by the rollout engines between two steps, or beside the steps by evaluation engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rayrft.config import RunConfig, StageConfig
from rayrft.core.checkpoints import Progress, Saver
from rayrft.core.parts.engines import EngineGroup
from rayrft.core.weight_sync import WeightSync
from rayrft.errors import ActorDied, WeightSyncError
from rayrft.explorer.engines.pool import EnginePool, Member
from rayrft.explorer.explorer import Explorer
from rayrft.monitor.recorder import Recorder
from rayrft.monitor.records import EvaluationRecord
from rayrft.runtime.handle import Handle, root_cause, until_failed


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

    def __post_init__(self) -> None:
        self._engines = {engine.name: engine for engine in self.engines.engines} if self.engines is not None else {}
        """Evaluation engines that are alive, by name."""
        self._watching: dict[str, asyncio.Future[None]] = {}
        self._running: asyncio.Future[list[EvaluationRecord]] | None = None
        self._step = 0
        """Step that the latest evaluation is of."""
        self._skipped = 0

    async def begin(self, stage: StageConfig) -> asyncio.Future[list[EvaluationRecord]] | None:
        """Evaluate the policy, if evaluation is enabled; with evaluation engines return once they have its weights.
        Return the future records, none if an evaluation engine dies.

        One that is due while the one before has not ended is skipped and counted.
        """
        if not self.config.evaluation.enabled or not self.explorers:
            return None
        if self._running is not None and not self._running.done():
            self._skipped += 1
            text = f"no evaluation: that of step {self._step} has not ended"
            await self.recorder.note(text, stage.name, self.progress.step)
            return None
        self._step = self.progress.step
        if await self._load():
            self.saving.evaluating(self._step)
            self._running = asyncio.ensure_future(self._beside(stage, self._step, self.progress.stage_step))
        else:
            if not stage.groups:
                await self.publish()
            self._running = asyncio.ensure_future(self._evaluate(stage, self._step, self.progress.stage_step, False))
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
        unfinished: list[asyncio.Future[Any]] = [*self._watching.values(), *([self._running] if self._running else [])]
        for future in unfinished:
            future.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)

    async def _load(self) -> bool:
        """Give the current weights to the evaluation engines that are alive; return whether there are any."""
        if self.engines is None or self.weight_sync is None:
            return False
        pool = self.engines.pool
        if not self._watching:
            self._watching = {name: asyncio.ensure_future(until_failed(each)) for name, each in self._engines.items()}
        for name, watching in self._watching.items():
            if watching.done() and self._engines.pop(name, None) is not None:
                await pool.call(EnginePool.leave, name, "it died")
                left = f"{len(self._engines)} are left" if self._engines else "the rollout engines evaluate from now on"
                await self.recorder.note(f"{name} died: {left}", step=self._step)
        if not self._engines:
            return False
        await self.weight_sync.load(list(self._engines.values()), self._step)
        members = (await pool.call(EnginePool.members)).names
        await pool.call(EnginePool.synced, members, self._step)
        new = [Member(engine, self._step) for name, engine in self._engines.items() if name not in members]
        if new:
            await pool.call(EnginePool.join, new)
        return True

    async def _beside(self, stage: StageConfig, step: int, stage_step: int) -> list[EvaluationRecord]:
        """Evaluate during training. The death of an evaluation engine costs this evaluation only."""
        try:
            return await self._evaluate(stage, step, stage_step, True)
        except ActorDied as died:
            if died.field not in self._watching:
                raise
            self._skipped += 1
            self.saving.evaluated(step, None)
            await self.recorder.note(f"the evaluation of step {step} is lost: {root_cause(died)}", stage.name, step)
            return []

    async def _evaluate(self, stage: StageConfig, step: int, stage_step: int, beside: bool) -> list[EvaluationRecord]:
        records = []
        for number, temperature in enumerate(self.config.evaluation.temperatures):
            started = time.perf_counter()
            result = await self.explorers[0].call(Explorer.evaluate, temperature, beside)
            seconds = time.perf_counter() - started
            if set(result.versions) - {step}:
                problem = f"answers were sampled under versions {[*result.versions]} in an evaluation of version {step}"
                remedy = "an engine was sent weights meanwhile, which is a bug: please report it"
                raise WeightSyncError(problem, remedy, field="evaluation")
            if number == 0:
                self.saving.evaluated(step, result.accuracy.value if result.count else None)
            skipped, self._skipped = self._skipped, 0
            record = EvaluationRecord.of(stage.name, step, stage_step, temperature, result, seconds, skipped)
            await self.recorder.add(record)
            records.append(record)
        return records
