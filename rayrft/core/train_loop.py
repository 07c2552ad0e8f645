"""The training loop of a run: its stages, and their steps."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.leases import Lease
from rayrft.buffer.ledger import Ledger
from rayrft.config import RunConfig, StageConfig, load_config
from rayrft.config.stage import EvaluationConfig
from rayrft.core.checkpoints import Progress, Saver
from rayrft.core.engine_groups import EngineGroup
from rayrft.core.evaluations import Evaluations
from rayrft.core.parts.buffer import plan_stage
from rayrft.core.restarts import Restarts
from rayrft.core.steering import Steering
from rayrft.core.supervision import Stopped, unless_stopped
from rayrft.core.weight_sync import WeightSync
from rayrft.data.demonstrations import held_out_name
from rayrft.errors import ConfigError, LeaseEnded, NotFinite, RayrftError, RowsFailed, Stalled, StorageError
from rayrft.explorer.explorer import Explorer
from rayrft.monitor.recorder import Recorder
from rayrft.monitor.records import EvaluationRecord, PairsRecord, StepRecord, record_key
from rayrft.monitor.verdict import Bottleneck, check_gap, check_on_policy_step
from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle
from rayrft.runtime.waits import cancel
from rayrft.trainer.api import RankApi
from rayrft.trainer.batch_pipeline import ProcessedLease
from rayrft.trainer.result import StepResult, group_value_errors
from rayrft.trainer.trainer import Trainer, ask_ranks
from rayrft.weights.messages import SyncReport

R = TypeVar("R")

_ATTEMPTS = 5
"""Times that the batch of a step is leased again when blocks of it were lost, as when the Buffer died."""
_BLAME_DEADLINE_S = 5.0


@dataclass
class TrainLoop:
    """Runs the stages that ``progress`` has not completed, on actors that are up."""

    config: RunConfig
    buffer: Handle[Buffer]
    trainer: Handle[Trainer]
    explorers: list[Handle[Explorer]]
    recorder: Recorder
    progress: Progress
    stop: asyncio.Event
    restarts: Restarts
    weight_sync: WeightSync | None = None
    """None where nothing is rolled out."""
    evaluation: EngineGroup | None = None
    """The evaluation engines."""
    steering: Steering | None = None
    ledger: Ledger = field(default_factory=Ledger)
    """Ledger of rows after the latest step."""
    published: int = field(default=0, init=False)
    """Version of the weights that the engines have."""
    attention: float = 0.0
    """See `StagePlan`."""
    exploring: asyncio.Future[list[None]] = field(init=False)
    """The calls of the Explorers that fill the Buffer in the current stage."""

    def __post_init__(self) -> None:
        self.published = self.progress.step
        self._attempt = uuid.uuid4().hex
        """Distinguishes this attempt of the run from those before it was resumed."""
        self._saving = Saver(self.config, self.buffer, self.trainer, self.progress)
        self._evaluations = Evaluations(self, self._saving)
        self._bottleneck, self._gap_noted = Bottleneck(), False
        """Of the current stage."""
        self.trained_by: Any = None
        """Ray's handle of the Trainer that has taken the latest step of this loop."""
        self._mixed_until = -1
        """Until this step rows of an earlier temperature may be trained."""

    async def run(self) -> None:
        """Run all remaining stages. Raises Stopped if the user asked for it, after saving."""
        progress = self.progress
        self.ledger, torn_bytes = await self.buffer.call(Buffer.resume, progress.step, self._attempt)
        if torn_bytes:
            message = f"a crash left {torn_bytes} bytes of unfinished writes in the Buffer's log: truncated"
            await self.recorder.note(message, step=progress.step)
        if repeated := max((step for kind, _, step in self.recorder.repeated if kind == StepRecord.kind), default=0):
            await self.recorder.note(f"repeats steps {progress.step + 1} to {repeated}", step=progress.step)
        try:
            for number in range(len(self.config.stages)):
                stage = self.config.stages[number]  # users may have changed it
                if number > progress.stage or (number == progress.stage and progress.needs(stage.steps)):
                    progress.begin(number)
                    await self._stage(stage)
        except Stopped:
            await self._checkpoint()
            await self._saving.export(f"stopped-{progress.step}")
            await self._saving.done()
            raise
        finally:
            await self._evaluations.cancel()
            await self._saving.settle()
        await self._saving.export("final")
        await self._saving.done()

    async def publish(self) -> SyncReport | None:
        """Publish the trainer's weights to the engines; their version is the number of optimiser steps taken."""
        self.published = self.progress.step
        return await self.weight_sync.publish(self.published) if self.weight_sync is not None else None

    async def restore(self) -> None:
        """Restore the weights of the latest checkpoint; all other state is restored when the stage is open."""
        if self.progress.step:
            await self._saving.restore(whole=False)

    async def blame(self, error: RowsFailed | NotFinite) -> None:
        """Tell the Buffer on which rows, or that on its batch, the current step failed, for the next attempt at it."""
        # If the Buffer cannot be reached, the next attempt has the same batch.
        with contextlib.suppress(*ray_api.ACTOR_ERRORS, TimeoutError, StorageError):
            step = self.progress.step
            if isinstance(error, NotFinite):
                call = self.buffer.call(Buffer.discard_batch, step)
            else:
                call = self.buffer.call(Buffer.blame, step, self._attempt, error.value)
            await asyncio.wait_for(call, _BLAME_DEADLINE_S)

    async def note(self, text: str, **data: Any) -> None:
        """Note something about the current stage."""
        await self.recorder.note(text, self.config.stages[self.progress.stage].name, self.progress.step, **data)

    async def checkpoint(self) -> int:
        """Write a checkpoint between two steps; return its step."""
        await self._checkpoint()
        await self._saving.done()
        return self.progress.step

    async def _checkpoint(self) -> None:
        """Start writing a checkpoint, with a note of it that stays when its folder is deleted."""
        await self.note("writes a checkpoint", checkpoint=self.progress.step)
        await self._saving.checkpoint(self.recorder.count(self.progress.step))

    async def evaluate(self, changes: dict[str, Any]) -> asyncio.Future[list[EvaluationRecord]]:
        """Evaluate between two steps, with these changes of the config; with evaluation engines the future is done
        later. Raises ConfigError if that is not possible."""
        other = load_config(self.config, changes).evaluation if changes else None
        if (found := await self._evaluate(self.config.stages[self.progress.stage], other=other)) is None:
            problem = "the run does not evaluate, its reward model is not trained yet, or an evaluation is running"
            raise ConfigError(problem, "set evaluation.enabled, or try again later", field="evaluation")
        return found

    async def adjust(self, config: RunConfig) -> None:
        """Continue with a config in which changeable keys differ: in this actor, ranks, Explorers and Buffer."""
        if config.explorer.sampling != self.config.explorer.sampling:
            self._mixed_until = self.progress.step + max(config.max_staleness, self.config.max_staleness)
        self.config = config
        stage, temperature = config.stages[self.progress.stage], config.explorer.sampling.temperature
        self._saving.checkpoints.config = config.checkpoint
        await ask_ranks(self.trainer, RankApi.adjust, stage.algorithm.build(), stage, temperature)
        await asyncio.gather(*(explorer.call(Explorer.adjust, config) for explorer in self.explorers))
        await self.buffer.call(Buffer.adjust_stage, plan_stage(self.config, stage, self.progress, self.attention))

    async def _stage(self, stage: StageConfig) -> None:
        progress, self._bottleneck, self._gap_noted = self.progress, Bottleneck(), False
        await self.open(stage)
        explorers = self.explorers if stage.groups else []
        explore = partial(self.restarts.explore, self.buffer, lambda: self.config.stages[progress.stage])
        self.exploring = asyncio.gather(*map(explore, explorers))
        try:
            if self.steering is not None and self.steering.paused_since is not None:  # it was before a rewind
                await self.steering.border(self)
            while progress.stage_step < stage.steps:
                try:
                    await self._step(stage)
                except LeaseEnded as ended:
                    if ended.value != "end_of_data":
                        raise
                    await self.note(f"stage ends after {progress.stage_step} steps: {ended}")
                    break
                stage = self.config.stages[progress.stage]
                if progress.stage_step < stage.steps:
                    await self.between_steps(stage)
        finally:
            try:
                await self.buffer.call(Buffer.close_stage, stage.name)
                await self.end_exploring()
            finally:
                await cancel(self.exploring)
        if not stage.groups:
            await self.publish()
        await self._saving.export(stage.name)
        await self._rank_pairs(stage)
        if stage.trains_reward_model:  # rewards read it
            await self._saving.exported(stage.name)
        await unless_stopped(self.stop, self._evaluations.end())
        await self._evaluate(stage, ended=True)
        await unless_stopped(self.stop, self._evaluations.end())
        progress.end(stage.name, stage.steps)
        await self._judge(stage)
        await self.checkpoint()

    async def open(self, stage: StageConfig) -> None:
        """Open or resume the stage in Trainer, engines and Buffer."""
        progress, algorithm = self.progress, stage.algorithm.build()
        resumed = progress.stage_step > 0
        start_from = stage.start_from
        if self.config.trainer.lora is not None and progress.stage:
            # The policy with its adapter merged: it is also the reference under a new adapter.
            before = [each.name for each in self.config.stages[: progress.stage] if not each.trains_reward_model]
            start_from = start_from or next(reversed(before), None)
        weights = await self._saving.exported(start_from) if start_from and not resumed else None
        await ask_ranks(self.trainer, RankApi.open_stage, algorithm, stage, weights)
        if resumed:
            await self._saving.restore(whole=True)
            message = f"resumes after {progress.stage_step} steps"
        else:
            batch = [f"{stage.groups} groups of {stage.group_size}"] * bool(stage.groups)
            batch += [f"{stage.expert_rows} expert rows"] * bool(stage.expert_rows)
            message = f"{stage.algorithm.name}, {stage.steps} steps of {' + '.join(batch)}"
        if weights is not None:
            await self.publish()
        await self.recorder.note(f"stage {stage.name!r}: {message}", stage.name, progress.step)
        if not resumed and (progress.step == 0 or stage.start_from):
            await self._evaluate(stage)
        await self.buffer.call(Buffer.open_stage, plan_stage(self.config, stage, self.progress, self.attention))

    async def _step(self, stage: StageConfig) -> None:
        """Take one optimiser step: lease, train, acknowledge, publish, admit."""
        progress, started = self.progress, time.perf_counter()
        step, before = progress.step, self.ledger
        self._saving.check()
        self._evaluations.check()
        async with contextlib.AsyncExitStack() as changing:
            processed, results, waited_s = await self.train(step, changing)
            lease = processed.lease
            self.ledger = await self.buffer.call(Buffer.ack, step, group_value_errors(results))
            trained_s = time.perf_counter() - started - waited_s
            progress.step += 1
            progress.stage_step += 1
            timing = self.restarts.timings(self.explorers)
            report, timings = await asyncio.gather(self._publish_step(stage), timing)
        step_s = time.perf_counter() - started
        worked = {f"batch_{name}": stats for name, stats in processed.operators.items()}
        timings = replace(timings, operators=timings.operators | worked)
        record = StepRecord.of(
            stage.name,
            progress.step,
            lease,
            results,
            report,
            timings,
            self.ledger.lost_since(before),
            step_s=step_s,
            wait_s=waited_s,
            train_s=trained_s,
            explores=self.config.mode != "train",
        )
        progress.accuracy, progress.reward = None, record.reward
        self._bottleneck.add(record)
        await self.recorder.add(record)
        repeated = record_key(record) in self.recorder.repeated
        if self.steering is not None:  # before new groups are admitted, so that changes apply to all of them
            if not repeated:
                await self.steering.guard(self, record)
            await self.steering.border(self)
        await self.buffer.call(Buffer.advance, self.published)
        if not repeated and not record.metrics.skipped_updates:
            await self.doubt(stage, lease, results[0])

    async def doubt(self, stage: StageConfig, lease: Lease, result: StepResult) -> None:
        """Note what looks wrong about a first step, and a stage's first gap. Raises WeightSyncError (`check_gap`)."""
        taken, mean = self.progress.stage_step, self.config.probe_bounds.mean
        # Answers that keep the KV cache of old weights validly differ from the trainer's.
        ends = self.weight_sync is not None and self.config.weight_sync.kv_cache == "recompute"
        mixes = self.progress.step <= self._mixed_until
        gap = None if mixes or ((found := check_gap(lease, result, mean, ends=ends)) and self._gap_noted) else found
        first = check_on_policy_step(lease, result, mean) if taken == 1 else None
        for warning in filter(None, (gap, first)):
            await self.recorder.note(f"step {taken} of {stage.name!r}: {warning}", stage.name, self.progress.step)
        self._gap_noted = self._gap_noted or gap is not None

    async def train(
        self, step: int, changing: contextlib.AsyncExitStack
    ) -> tuple[ProcessedLease, list[StepResult], float]:
        """Lease the batch of the step and train on it; return the lease, the results by rank, and the seconds spent
        waiting for the batch. Until ``changing`` is closed, the weights are sent to no engine but by `publish`. A
        Buffer that died loses its blocks, and restores them when it is up again."""
        ranks, waited_s = self.config.trainer.ranks, 0.0
        # Applications may be idle for as long as they like.
        stall_s = math.inf if self.config.mode == "serve" else self.config.monitor.stall_s
        for _ in range(_ATTEMPTS):
            asked = time.perf_counter()
            leasing = asyncio.ensure_future(self.buffer.call(Buffer.lease, step, ranks, stall_s))
            lease = await self.unless_ended(leasing)
            waited_s += time.perf_counter() - asked
            if (processed := await self._process(lease)) is None:
                continue
            if self.weight_sync is not None:
                await changing.enter_async_context(self.weight_sync.weights)
                await changing.enter_async_context(self.weight_sync.asleep())
            self.trained_by = self.trainer.actor
            results = await ask_ranks(self.trainer, RankApi.train, processed.lease)
            if trained := list(filter(None, results)):
                return processed, trained, waited_s
            await changing.aclose()
        remedy = "see why objects are lost (nodes that die, an object store that is too small), then: rayrft resume"
        raise RayrftError(f"blocks of the batch were lost {_ATTEMPTS} times", remedy, field="buffer.lease", value=step)

    async def _process(self, lease: Lease) -> ProcessedLease | None:
        """Send a batch through the operators on batches, if there are any; None if blocks of it are lost."""
        if not self.config.pipelines.batch:
            return ProcessedLease(lease)
        processed = await self.trainer.call(Trainer.process, lease)
        if processed is not None and processed.problem is not None:
            message = f"operators failed on the batch, or on rows of it: {processed.problem}"
            await self.recorder.note(message, step=lease.step)
        return processed

    async def between_steps(self, stage: StageConfig) -> None:
        taken = self.progress.stage_step
        if stage.evaluate_every and taken % stage.evaluate_every == 0:
            await self._rank_pairs(stage)
            if not stage.trains_reward_model:
                await self._evaluate(stage)
            await self._judge(stage)
        if self._saving.due():
            await self._checkpoint()

    async def _evaluate(
        self, stage: StageConfig, *, ended: bool = False, other: EvaluationConfig | None = None
    ) -> asyncio.Future[list[EvaluationRecord]] | None:
        """Evaluate, unless a reward model that scores is still to be trained, by this stage if it has not ``ended``;
        raise Stopped if the run is stopped meanwhile. ``other``: see `Evaluations.begin`."""
        if self.progress.stage + ended <= self.config.scored_after:
            return None
        return await unless_stopped(self.stop, self._evaluations.begin(stage, other))

    async def _rank_pairs(self, stage: StageConfig) -> None:
        """Rank the preference pairs that are held out from the stage, if there are any."""
        if not self.config.holds_out(stage):
            return
        started, store = time.perf_counter(), f"expert/{held_out_name(stage.demonstrations or '')}"
        blocks = await self.buffer.call(Buffer.partition, store)
        found = (await ask_ranks(self.trainer, RankApi.rank_pairs, blocks))[0]
        step, taken, seconds = self.progress.step, self.progress.stage_step, time.perf_counter() - started
        await self.recorder.add(PairsRecord.of(stage.name, step, taken, found, seconds))

    async def _judge(self, stage: StageConfig) -> None:
        """Note what bounds the stage."""
        if message := self._bottleneck.verdict(self.config.max_staleness, explores=self.config.mode == "both"):
            await self.recorder.note(message, stage.name, self.progress.step)

    async def unless_ended(self, work: asyncio.Future[R]) -> R:
        """Return the result of ``work``, or cancel it. Raises Stopped if the run is stopped first, or the error of an
        Explorer."""
        stop, exploring = asyncio.ensure_future(self.stop.wait()), self.exploring
        try:
            while not self.stop.is_set():
                if exploring.done():
                    exploring.result()
                if work.done():
                    return work.result()
                running: set[asyncio.Future[Any]] = {stop, work} if exploring.done() else {stop, work, exploring}
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            raise Stopped
        finally:
            stop.cancel()
            work.cancel()

    async def _publish_step(self, stage: StageConfig) -> SyncReport | None:
        """Publish after a step, unless the stage samples no groups."""
        return await self.publish() if stage.groups else None

    async def end_exploring(self) -> None:
        """Wait until the Explorer has abandoned its groups, as it does once the stage is closed."""
        stall_s = self.config.monitor.stall_s
        try:
            await asyncio.wait_for(self.exploring, stall_s)
        except TimeoutError:
            problem = f"groups were not abandoned within {stall_s:g} s of the end of the stage"
            raise Stalled(problem, "see its log in the Ray dashboard", field="explorer") from None
