"""How well the model does, and what bounds the run: said between steps."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from contextlib import AbstractAsyncContextManager
from typing import Any

from rayrft.buffer.leases import Lease
from rayrft.buffer.schedule import StagePlan
from rayrft.config import RunConfig, StageConfig
from rayrft.core.actors import Actors
from rayrft.core.checkpoints import Progress, Saver
from rayrft.core.recorder import Recorder
from rayrft.core.step_record import StepSeconds, check_on_policy_step, evaluation_record, lost_since, step_record
from rayrft.core.supervision import Stopped, unless_stopped
from rayrft.core.weight_sync import SyncReport, WeightSync
from rayrft.errors import LeaseEnded, RayrftError, RowsFailed, StorageError
from rayrft.explorer.evaluation import Evaluation
from rayrft.monitor.records import StepRecord
from rayrft.monitor.verdict import verdict
from rayrft.trainer.commands import Load, OpenStage, Train
from rayrft.trainer.result import StepResult, mean_value_errors


class Evaluator:
    """Evaluates and judges the run as ``progress`` stands."""

    def __init__(self, config: RunConfig, actors: Actors, recorder: Recorder, progress: Progress) -> None:
        self._config = config
        self._actors = actors
        self._recorder = recorder
        self._progress = progress

    async def evaluate(self, stage: StageConfig) -> None:
        """Let the engines answer the held-out tasks at every temperature of the config, if it asks for that."""
        if not self._config.evaluation.enabled or self._actors.explorer is None:
            return
        progress = self._progress
        for number, temperature in enumerate(self._config.evaluation.temperatures):
            started = time.perf_counter()
            result: Evaluation = await self._actors.explorer.evaluate.remote(temperature)
            seconds = time.perf_counter() - started
            if number == 0 and result.count:
                progress.accuracy = result.accuracy
            record = evaluation_record(stage.name, progress.step, progress.stage_step, result, seconds)
            await self._recorder.add(record)

    async def judge(self, stage: StageConfig, first: int) -> None:
        """Say what bounds the stage, from its records so far: those from the ``first`` on."""
        steps = [record for record in self._recorder.records[first:] if isinstance(record, StepRecord)]
        if message := verdict(steps, self._config.max_staleness):
            await self._recorder.note(message, stage.name, self._progress.step)


_LOADS = 5
"""Times that the batch of a step is asked for again when blocks of it were lost, as with a Buffer that died."""


class TrainLoop:
    """Runs stages on a actors that is up, from wherever ``progress`` says the run stands."""

    def __init__(
        self,
        config: RunConfig,
        actors: Actors,
        recorder: Recorder,
        progress: Progress,
        stop: asyncio.Event,
        weight_sync: WeightSync | None = None,
    ) -> None:
        """``weight_sync`` is None where nothing is rolled out."""
        self._config = config
        self._actors = actors
        self._weight_sync = weight_sync
        self._recorder = recorder
        self._stop = stop
        self._life = uuid.uuid4().hex
        """By which the Buffer tells this life of the run from those before it was resumed."""
        self._saving = Saver(config, actors, progress)
        self._evaluator = Evaluator(config, actors, recorder, progress)
        self.progress = progress
        self.ledger: dict[str, Any] = {}
        """Of rows, as the Buffer last gave it."""
        self.published = 0
        """The version of the weights that the engines hold."""

    async def run(self) -> None:
        """All stages that are left. Raises Stopped when the user asked for it, after saving."""
        progress = self.progress
        if torn := await self._actors.buffer.resume.remote(progress.step, self._life):
            message = f"a crash left {torn} bytes of unfinished writes in the Buffer's log, which were cut off"
            await self._recorder.note(message, step=progress.step)
        await self.refresh_ledger()
        try:
            for number, stage in enumerate(self._config.stages):
                if number > progress.stage or (number == progress.stage and progress.needs(stage.steps)):
                    progress.begin(number)
                    await self._stage(stage)
        except Stopped:
            await self._saving.checkpoint(len(self._recorder.records))
            await self._saving.export(f"stopped-{progress.step}")
            await self._saving.done()
            await self.refresh_ledger()
            raise
        await self._saving.export("final")
        await self.refresh_ledger()

    async def publish(self) -> SyncReport | None:
        """Bring the present weights to the engines as a new version: the number of optimiser steps taken."""
        self.published = self.progress.step
        return await self._weight_sync.publish(self.published) if self._weight_sync is not None else None

    async def admit(self, engines: dict[str, Any]) -> SyncReport | None:
        """Let engines, by name, take requests once they hold the present weights."""
        self.published = self.progress.step
        return await self._weight_sync.admit(engines, self.published) if self._weight_sync is not None else None

    async def restore(self) -> None:
        """Put the weights of the latest checkpoint in place; the rest of it follows when the stage is open."""
        if self.progress.step:
            await self._saving.restore(whole=False)

    async def blame(self, error: RowsFailed) -> None:
        """Tell the Buffer which rows the present step failed on, for when it is tried again."""
        from ray.exceptions import RayActorError

        # Where that cannot be, the run ends as it would have: the step is tried again as it was.
        with contextlib.suppress(RayActorError, TimeoutError, StorageError):
            await asyncio.wait_for(self._actors.buffer.blame.remote(self.progress.step, self._life, error.value), 5)

    async def refresh_ledger(self) -> None:
        """Ask the Buffer for its ledger. Where it is gone, or was never there, the last answer stands."""
        from ray.exceptions import RayActorError

        with contextlib.suppress(RayActorError, TimeoutError):
            self.ledger = await asyncio.wait_for(self._actors.buffer.stats.remote(), 5)

    async def _stage(self, stage: StageConfig) -> None:
        progress, first = self.progress, len(self._recorder.records)
        await self._open(stage)
        exploring = asyncio.ensure_future(self._explore(stage))
        try:
            while progress.stage_step < stage.steps:
                try:
                    await self._step(stage, exploring)
                except LeaseEnded as ended:
                    if ended.value != "end_of_data":
                        raise
                    taken = progress.stage_step
                    await self._recorder.note(f"stage ends after {taken} steps: {ended}", stage.name, progress.step)
                    break
                if progress.stage_step < stage.steps:
                    await self._between(stage, first)
        finally:
            await self._actors.buffer.close_stage.remote(stage.name)
            await exploring
        if not stage.groups:
            await self.publish()
        await self._saving.export(stage.name)
        await self._evaluate(stage)
        progress.end(stage.name, stage.steps)
        await self._evaluator.judge(stage, first)
        await self._saving.checkpoint(len(self._recorder.records))
        await self._saving.done()

    async def _open(self, stage: StageConfig) -> None:
        """Bring Trainer, engines and Buffer to where the stage stands."""
        progress, algorithm = self.progress, stage.algorithm.build()
        resumed = progress.stage_step > 0
        begins_from = stage.start_from
        if self._config.trainer.lora is not None and progress.stage:
            # Its weights have the adapter in them: under a new one they are the reference, too.
            begins_from = begins_from or self._config.stages[progress.stage - 1].name
        weights = self._saving.exported(begins_from) if begins_from and not resumed else None
        await self._command(OpenStage(algorithm, stage, weights))
        if resumed:
            await self._saving.restore(whole=True)
            message = f"goes on after {progress.stage_step} steps"
        else:
            message = self._describe(stage)
        if weights is not None:
            await self.publish()
        await self._recorder.note(f"stage {stage.name!r}: {message}", stage.name, progress.step)
        if not resumed and (progress.step == 0 or stage.start_from):
            await self._evaluate(stage)
        plan = StagePlan(
            stage.groups,
            stage.group_size,
            stage.expert_rows,
            stage.demonstrations if stage.expert_rows else None,
            self._config.max_staleness,
            self._config.explorer.over_sampling,
            progress.stage_began,
            scheduled=self._config.mode == "both",
            name=stage.name,
            pairs=algorithm.needs_pairs,
            mini_batches=stage.update.mini_batches,
        )
        await self._actors.buffer.open_stage.remote(plan)

    async def _step(self, stage: StageConfig, exploring: asyncio.Future[None]) -> None:
        """Lease, train, publish, admit: one optimiser step."""
        progress, started = self.progress, time.perf_counter()
        step, before = progress.step, self.ledger
        self._saving.check()
        lease = await self._unless_ended(asyncio.ensure_future(self._lease(step)), exploring)
        waited = time.perf_counter() - started
        async with self._engines_asleep():
            results: list[StepResult] = await self._command(Train())
        result = results[0]
        await self._actors.buffer.ack.remote(step, mean_value_errors(results))
        await self.refresh_ledger()
        trained = time.perf_counter() - started - waited
        progress.step += 1
        progress.stage_step += 1
        report = await self.publish() if stage.groups else None
        await self._actors.buffer.advance.remote(self.published)
        rollout_s, reward_s = await self._timings()
        seconds = StepSeconds(time.perf_counter() - started, waited, rollout_s, reward_s, trained)
        lost = lost_since(before, self.ledger)
        record = step_record(stage.name, progress.step, lease, result, report, seconds, lost)
        progress.accuracy, progress.reward = None, record.reward
        await self._recorder.add(record)
        if progress.stage_step == 1:
            doubt = check_on_policy_step(lease, result, self._config.probe_bounds.mean)
            if doubt is not None:
                await self._recorder.note(f"first step of {stage.name!r}: {doubt}", stage.name, progress.step)

    async def _between(self, stage: StageConfig, first: int) -> None:
        """Evaluate and save, where that is due between two steps."""
        taken = self.progress.stage_step
        if stage.evaluate_every and taken % stage.evaluate_every == 0:
            if not stage.groups:
                await self.publish()
            await self._evaluate(stage)
            await self._evaluator.judge(stage, first)
        if self._saving.due():
            await self._saving.checkpoint(len(self._recorder.records))

    async def _evaluate(self, stage: StageConfig) -> None:
        """An evaluation is left alone when the run is stopped: the run that goes on makes it again, where it was the
        stage's last."""
        await unless_stopped(self._stop, self._evaluator.evaluate(stage))

    async def _lease(self, step: int) -> Lease:
        """The batch of the step, loaded on every rank. A Buffer that died takes the blocks with it, and has them again
        when it is back."""
        for _ in range(_LOADS):
            ranks, stall_s = self._config.trainer.ranks, self._config.monitor.stall_s
            lease: Lease = await self._actors.buffer.lease.remote(step, ranks, stall_s)
            if all(await self._command(Load(lease))):
                return lease
        raise RayrftError(
            f"blocks of the batch were lost {_LOADS} times",
            field="buffer.lease",
            value=step,
            remedy="see why objects are lost (nodes that die, an object store that is too small), then: rayrft resume",
        )

    def _engines_asleep(self) -> AbstractAsyncContextManager[None]:
        """Where trainer and engines share a GPU and the config asks for it, its memory is the trainer's in here."""
        if self._weight_sync is None or not self._config.explorer.engine.sleep:
            return contextlib.nullcontext()
        return self._weight_sync.asleep()

    async def _unless_ended(self, work: asyncio.Future[Any], exploring: asyncio.Future[None]) -> Any:
        """The result of ``work``, unless the run is stopped or the Explorer fails first, or did so meanwhile."""
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            while True:
                if self._stop.is_set():
                    raise Stopped
                if exploring.done():
                    exploring.result()
                if work.done():
                    return work.result()
                going_on = {stop, work} if exploring.done() else {stop, work, exploring}
                await asyncio.wait(going_on, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()

    async def _explore(self, stage: StageConfig) -> None:
        if stage.groups and self._actors.explorer is not None:
            await self._actors.explorer.explore.remote(stage)

    async def _command(self, command: Any) -> Any:
        return await self._actors.trainer.command.remote(command)

    async def _timings(self) -> tuple[float, float]:
        if self._actors.explorer is None:
            return 0.0, 0.0
        return await self._actors.explorer.timings.remote()

    def _describe(self, stage: StageConfig) -> str:
        rows = f"{stage.groups} groups of {stage.group_size}" if stage.groups else ""
        expert = f"{stage.expert_rows} expert rows" if stage.expert_rows else ""
        batch = " + ".join(part for part in (rows, expert) if part)
        return f"{stage.algorithm.name}, {stage.steps} steps of {batch}"
