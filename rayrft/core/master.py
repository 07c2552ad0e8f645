"""The Master actor: the run, from the first actor to the summary.

Its main path is `_run` -> `_stage` -> `_step`: lease a batch, train on it, publish the weights, admit new groups.
Explorer and Trainer overlap by themselves where ``max_staleness`` lets groups be admitted before their step.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rayrft.buffer.lease import Lease
from rayrft.buffer.schedule import StagePlan
from rayrft.config import RunConfig, StageConfig
from rayrft.core import cast as casting
from rayrft.core.bookkeeping import StepSeconds, evaluation_record, step_record
from rayrft.core.placement import Placement, plan_placement
from rayrft.core.prepare import Prepared
from rayrft.core.recorder import Recorder
from rayrft.core.supervision import root_cause, supervise
from rayrft.core.weight_sync import SyncReport
from rayrft.errors import LeaseEnded, RayrftError
from rayrft.explorer.evaluation import Evaluation
from rayrft.monitor.records import Record, StepRecord
from rayrft.monitor.verdict import verdict
from rayrft.registry import load_plugins
from rayrft.trainer.commands import Load, OpenStage, Save, Train
from rayrft.trainer.result import StepResult

_LEASE_DEADLINE_S = 300.0


class _Stopped(Exception):
    """The user asked the run to stop."""


class Master:
    """The actor. ``run`` is the whole run; everything else may be called while it is under way."""

    def __init__(self, config: RunConfig) -> None:
        load_plugins(config.plugins)
        self._config = config
        self._recorder = Recorder(config)
        self._stop = asyncio.Event()
        self._step_number = 0
        self._version = 0
        self._status = "starting"
        self._stages_done: list[dict[str, Any]] = []
        self._checkpoints: dict[str, Path] = {}
        self._ledger: dict[str, Any] = {"sampled": 0, "trained": 0, "dropped": {}, "held": 0}
        self._hired: casting.Cast | None = None

    async def run(self, prepared_refs: list[Any]) -> dict[str, Any]:
        """Run all stages; gives the summary. Raises the root cause when the run fails, after writing the summary.

        ``prepared_refs`` holds one reference to a `Prepared`, inside a list so that it is fetched here.
        """
        prepared: Prepared = await prepared_refs[0]
        placement = Placement(self._config.name, plan_placement(self._config))
        error: RayrftError | None = None
        try:
            parts = [part.name for part in plan_placement(self._config) if part.name not in ("master", "ranks")]
            await asyncio.to_thread(placement.reserve, parts)
            self._hired = casting.hire(self._config, prepared, placement)
            await supervise(self._run(prepared), self._cast.watches())
            self._status = "finished"
        except _Stopped:
            self._status = "stopped"
        except Exception as failure:  # whatever ended the run becomes its summary and is raised again below
            self._status, error = "failed", root_cause(failure)
            await self._recorder.note(f"the run failed: {error}", step=self._step_number)
            await self._take_stock()
        finally:
            if self._hired is not None:
                self._hired.dismiss()
            placement.remove()
        summary = self._summary(error)
        await self._recorder.close(summary)
        if error is not None:
            raise error
        return summary

    async def records(self, count: int) -> list[Record]:
        """Records from the ``count``-th on, as soon as there are any; an empty list once the run has ended."""
        return await self._recorder.after(count)

    async def status(self) -> dict[str, Any]:
        """Where the run stands: its state, step, version and the ledger of rows."""
        if self._status == "running":
            await self._take_stock()
        return {
            "name": self._config.name,
            "status": self._status,
            "step": self._step_number,
            "version": self._version,
            "folder": str(self._config.folder),
            **self._ledger,
        }

    async def stop(self) -> None:
        """Ask the run to end after what it is doing; it saves its weights and writes its summary."""
        self._stop.set()

    async def watch(self) -> None:
        """Never returns: a caller that awaits it learns at once when this actor dies."""
        await asyncio.Event().wait()

    async def pids(self) -> dict[str, int]:
        """Process ids of master, buffer, trainer and engines."""
        engines = {f"engine-{i}": await engine.pid.remote() for i, engine in enumerate(self._cast.engines)}
        actors = {name: await getattr(self._cast, name).pid.remote() for name in ("buffer", "trainer")}
        return {"master": os.getpid(), **actors, **engines}

    @property
    def _cast(self) -> casting.Cast:
        assert self._hired is not None  # nothing below runs before the actors are hired
        return self._hired

    async def _run(self, prepared: Prepared) -> None:
        started = time.time()
        await self._recorder.note("starting engines and trainer")
        for name, reasons in prepared.left_out.items():
            if reasons:
                await self._recorder.note(f"demonstrations {name!r}: left out {dict(reasons)}")
        if remark := await casting.start(self._cast, self._config, prepared):
            await self._recorder.note(f"the trainer's way with this model: {remark}")
        self._status = "running"
        report = await self._publish()
        probe = (
            f"; engine log-probs equal the trainer's to {report.probe_gap:.1e}"
            if report and report.probe_gap is not None
            else ""
        )
        await self._recorder.note(f"up after {time.time() - started:.0f} s{probe}", startup_s=time.time() - started)
        try:
            for stage in self._config.stages:
                await self._stage(stage)
        except _Stopped:
            await self._save(f"stopped-{self._step_number}")
            await self._take_stock()
            raise
        await self._save("final")
        await self._take_stock()
        await self._cast.trainer.stop.remote()

    async def _stage(self, stage: StageConfig) -> None:
        first = len(self._recorder.records)
        weights = self._checkpoints[stage.start_from] if stage.start_from else None
        algorithm = stage.algorithm.build()
        await self._command(OpenStage(algorithm, stage, weights))
        if weights is not None:
            await self._publish()
        await self._recorder.note(self._describe(stage), stage.name, self._step_number)
        if self._step_number == 0 or weights is not None:
            await self._evaluate(stage, 0)
        await self._cast.buffer.open_stage.remote(
            StagePlan(
                stage.groups,
                stage.group_size,
                stage.expert_rows,
                stage.demonstrations if stage.expert_rows else None,
                self._config.max_staleness,
                self._config.explorer.over_sampling,
                self._version,
                pairs=algorithm.needs_pairs,
                mini_batches=stage.update.mini_batches,
            )
        )
        exploring = asyncio.ensure_future(self._explore(stage))
        try:
            for done in range(1, stage.steps + 1):
                try:
                    await self._step(stage, exploring)
                except LeaseEnded as ended:
                    if ended.value != "end_of_data":
                        raise
                    await self._recorder.note(
                        f"stage ends after {done - 1} steps: {ended}", stage.name, self._step_number
                    )
                    break
                if stage.evaluate_every and done % stage.evaluate_every == 0 and done < stage.steps:
                    await self._publish_unless_rolled_out(stage)
                    await self._evaluate(stage, done)
                    await self._judge(stage, first)
        finally:
            await self._cast.buffer.close_stage.remote()
            await exploring
        await self._publish_unless_rolled_out(stage)
        await self._save(stage.name)
        await self._evaluate(stage, stage.steps)
        steps = await self._judge(stage, first)
        self._stages_done.append({"name": stage.name, "steps": len(steps), "final_step": self._step_number})

    async def _step(self, stage: StageConfig, exploring: asyncio.Future[None]) -> None:
        """Lease, train, publish, admit: one optimiser step."""
        step, started = self._step_number, time.perf_counter()
        lease = await self._unless_ended(asyncio.ensure_future(self._lease(step)), exploring)
        waited = time.perf_counter() - started
        async with self._engines_asleep():
            result: StepResult = (await self._command(Train()))[0]
        await self._cast.buffer.ack.remote(step)
        await self._take_stock()
        trained = time.perf_counter() - started - waited
        self._step_number += 1
        report = await self._publish() if stage.groups else None
        await self._cast.buffer.advance.remote(self._version)
        rollout_s, reward_s = await self._timings()
        seconds = StepSeconds(time.perf_counter() - started, waited, rollout_s, reward_s, trained)
        await self._recorder.add(step_record(stage.name, self._step_number, lease, result, report, seconds))

    async def _lease(self, step: int) -> Lease:
        """The batch of the step, loaded on every rank. A Buffer that died takes the blocks with it, and has them again
        when it is back."""
        while True:
            lease: Lease = await self._cast.buffer.lease.remote(step, self._config.trainer.ranks, _LEASE_DEADLINE_S)
            if all(await self._command(Load(lease))):
                return lease

    @contextlib.asynccontextmanager
    async def _engines_asleep(self) -> AsyncIterator[None]:
        """Where trainer and engines share a GPU and the config asks for it, its memory is the trainer's in here."""
        sync = self._cast.weight_sync if self._config.explorer.engine.sleep else None
        if sync is not None:
            await sync.sleep.remote()
        yield
        if sync is not None:
            await sync.wake_up.remote()

    async def _unless_ended(self, work: asyncio.Future[Any], exploring: asyncio.Future[None]) -> Any:
        """The result of ``work``, unless the run is stopped or the Explorer fails first."""
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait(
                {work, stop, exploring} if not exploring.done() else {work, stop},
                return_when="FIRST_COMPLETED",
            )
            if self._stop.is_set():
                raise _Stopped
            if exploring.done():
                exploring.result()
            return await work
        finally:
            stop.cancel()

    async def _explore(self, stage: StageConfig) -> None:
        if stage.groups and self._cast.explorer is not None:
            await self._cast.explorer.explore.remote(stage)

    async def _publish(self) -> SyncReport | None:
        """Bring the present weights to the engines as a new version: the number of optimiser steps taken."""
        self._version = self._step_number
        if self._cast.weight_sync is None:
            return None
        return await self._cast.weight_sync.publish.remote(self._version)

    async def _publish_unless_rolled_out(self, stage: StageConfig) -> None:
        if not stage.groups:
            await self._publish()

    async def _evaluate(self, stage: StageConfig, stage_step: int) -> None:
        if not self._config.evaluation.enabled or self._cast.explorer is None:
            return
        for temperature in self._config.evaluation.temperatures:
            started = time.perf_counter()
            result: Evaluation = await self._cast.explorer.evaluate.remote(temperature)
            seconds = time.perf_counter() - started
            await self._recorder.add(evaluation_record(stage.name, self._step_number, stage_step, result, seconds))

    async def _judge(self, stage: StageConfig, first: int) -> list[StepRecord]:
        """Say what bounds the stage, from its records so far (those from the ``first`` on); gives its steps."""
        steps = [record for record in self._recorder.records[first:] if isinstance(record, StepRecord)]
        if said := verdict(steps, self._config.max_staleness):
            await self._recorder.note(said, stage.name, self._step_number)
        return steps

    async def _save(self, name: str) -> None:
        folder = self._config.folder / "checkpoints" / name
        await self._command(Save(folder))
        self._checkpoints[name] = folder
        await self._cast.buffer.cover.remote(self._step_number)

    async def _take_stock(self) -> None:
        """Ask the Buffer for its ledger. Where it is gone, or was never there, the last answer stands."""
        from ray.exceptions import RayActorError

        if self._hired is not None:
            with contextlib.suppress(RayActorError, TimeoutError):
                self._ledger = await asyncio.wait_for(self._cast.buffer.stats.remote(), 5)

    async def _command(self, command: Any) -> Any:
        return await self._cast.trainer.command.remote(command)

    async def _timings(self) -> tuple[float, float]:
        if self._cast.explorer is None:
            return 0.0, 0.0
        return await self._cast.explorer.timings.remote()

    def _describe(self, stage: StageConfig) -> str:
        rows = f"{stage.groups} groups of {stage.group_size}" if stage.groups else ""
        expert = f"{stage.expert_rows} expert rows" if stage.expert_rows else ""
        batch = " + ".join(part for part in (rows, expert) if part)
        return f"stage {stage.name!r}: {stage.algorithm.name}, {stage.steps} steps of {batch}"

    def _summary(self, error: RayrftError | None) -> dict[str, Any]:
        ledger = self._ledger
        return {
            "name": self._config.name,
            "status": self._status,
            "error": str(error) if error else None,
            "stages": self._stages_done,
            "accuracy": self._recorder.accuracy(),
            "counters": {key: ledger.get(key) for key in ("sampled", "trained", "dropped", "held")},
            "dropped_tasks": ledger.get("dropped_tasks"),
            "expert": ledger.get("expert"),
            "seconds": self._recorder.seconds(),
            "steps": self._step_number,
            "weight_version": self._version,
            "checkpoint": str(self._checkpoints["final"]) if "final" in self._checkpoints else None,
        }
