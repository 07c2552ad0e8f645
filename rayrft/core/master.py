"""The Master actor: the run, from the first actor to the summary."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from importlib import import_module
from typing import Any

from rayrft.config import RunConfig
from rayrft.core.actors import Actors, create_actors, start_actors
from rayrft.core.checkpoints import Progress
from rayrft.core.placement import Placement, plan_placement
from rayrft.core.preflight import Prepared
from rayrft.core.recorder import Recorder
from rayrft.core.summary import NO_ROWS, ledger_in_log, standing, summarise
from rayrft.core.supervision import Silence, Stopped, root_cause, supervise, unless_stopped
from rayrft.core.train_loop import TrainLoop
from rayrft.core.weight_sync import WeightSync
from rayrft.errors import RayrftError, RowsFailed, StorageError
from rayrft.monitor.records import Record
from rayrft.registry import load_plugins
from rayrft.waits import Waits


class Master:
    """The actor. ``run`` is the whole run; everything else may be called while it is under way.

    With ``progress`` the run goes on from there: see `rayrft.core.checkpoints`.
    """

    def __init__(self, config: RunConfig, progress: Progress) -> None:
        load_plugins(config.plugins)
        self._config = config
        self._progress = progress
        self._recorder = Recorder(config, progress.records)
        self._stop = asyncio.Event()
        self._status = "starting"
        self._actors: Actors | None = None
        self._stages: TrainLoop | None = None
        self._waits = Waits("master")
        self._silence: Silence | None = None
        self._summary: dict[str, Any] | None = None

    async def run(self, prepared_refs: list[Any]) -> dict[str, Any]:
        """Run all stages; gives the summary. Raises the root cause when the run fails, after writing the summary.

        ``prepared_refs`` holds one reference to a `Prepared`, inside a list so that it is fetched here.
        """
        prepared: Prepared = await prepared_refs[0]
        placement = Placement(self._config.name, plan_placement(self._config))
        error: RayrftError | None = None
        try:
            parts = [part.name for part in plan_placement(self._config) if part.name != "master"]
            await unless_stopped(self._stop, asyncio.to_thread(placement.reserve, parts))
            self._actors = create_actors(self._config, prepared, placement, self._progress.logged)
            followed = self._actors.followed(self._waits)
            sync = (
                WeightSync(self._config, followed.trainer, followed.engine_pool, prepared.probe, self._waits)
                if followed.engine_pool is not None
                else None
            )
            self._stages = TrainLoop(self._config, followed, self._recorder, self._progress, self._stop, sync)
            self._silence = Silence(
                self._waits, self._actors.signs_of_life(), self._note, self._config.monitor.patience_s
            )
            watches = {**self._actors.watches(), "silence": self._silence.watch()}
            await supervise(self._run(self._actors, self._stages, prepared), watches)
            self._status = "finished"
        except Stopped:
            self._status = "stopped"
        except Exception as failure:  # whatever ended the run becomes its summary and is raised again below
            self._status, error = "failed", root_cause(failure)
            with contextlib.suppress(StorageError):  # a disk that takes no summary may be what ended it
                await self._recorder.note(f"the run failed: {error}", step=self._progress.step)
            if isinstance(error, RowsFailed) and self._stages is not None:
                await self._stages.blame(error)
            await self._refresh_ledger()
        finally:
            if self._actors is not None:
                self._actors.kill_restartable()
            placement.remove()
        self._summary = self._summarise(error)
        try:
            await self._recorder.close(self._summary)
        except StorageError as failure:
            error = error or failure
        if error is not None:
            raise error
        return self._summary

    async def records(self, count: int) -> list[Record]:
        """Records from the ``count``-th on, as soon as there are any; an empty list once the run has ended."""
        return await self._recorder.after(count)

    async def status(self) -> dict[str, Any]:
        """Where the run stands: its state, step, version, the ledger of rows, and what is waited for too long."""
        if self._summary is not None:
            return standing(self._summary, self._config.folder)
        if self._status == "running":
            await self._refresh_ledger()
        stages = self._stages
        return {
            "name": self._config.name,
            "status": self._status,
            "error": None,
            "step": self._progress.step,
            "version": stages.published if stages is not None else 0,
            "folder": str(self._config.folder),
            "waiting": self._silence.overdue if self._silence is not None else [],
            **(stages.ledger if stages is not None and stages.ledger else NO_ROWS),
        }

    async def stop(self) -> None:
        """Ask the run to end after what it is doing; it saves its weights and writes its summary."""
        self._stop.set()

    async def watch(self) -> None:
        """Never returns: a caller that awaits it learns at once when this actor dies."""
        await asyncio.Event().wait()

    async def pids(self) -> dict[str, int]:
        """Process ids of master, buffer, trainer and engines."""
        assert self._actors is not None  # asked for once the run is up
        engines = {f"engine-{i}": await engine.pid.remote() for i, engine in enumerate(self._actors.engines)}
        actors = {name: await getattr(self._actors, name).pid.remote() for name in ("buffer", "trainer")}
        return {"master": os.getpid(), **actors, **engines}

    async def _run(self, actors: Actors, stages: TrainLoop, prepared: Prepared) -> None:
        await unless_stopped(self._stop, self._start(actors, stages, prepared))
        await stages.run()
        await actors.trainer.stop.remote()

    async def _start(self, actors: Actors, stages: TrainLoop, prepared: Prepared) -> None:
        """Bring the run to where its first step can be taken."""
        started = time.time()
        await self._recorder.note("starting engines and trainer", step=self._progress.step)
        for name, reasons in prepared.left_out.items():
            if reasons:
                await self._recorder.note(f"demonstrations {name!r}: left out {dict(reasons)}")
        # With the algorithms of the stages comes torch, which takes seconds to load: while the others start.
        loading = asyncio.to_thread(import_module, "rayrft.algorithms")
        remark, _ = await asyncio.gather(start_actors(actors, self._config, prepared, self._waits), loading)
        if remark:
            await self._recorder.note(f"the trainer's way with this model: {remark}")
        await stages.restore()
        self._status = "running"
        report = await stages.admit(actors.engines_by_name())
        probe = (
            f"; engine log-probs equal the trainer's to {report.probe_gap:.1e}"
            if report and report.probe_gap is not None
            else ""
        )
        seconds = time.time() - started
        await self._recorder.note(f"up after {seconds:.0f} s{probe}", startup_s=seconds)

    async def _note(self, text: str, **data: Any) -> None:
        await self._recorder.note(text, step=self._progress.step, **data)

    async def _refresh_ledger(self) -> None:
        if self._stages is not None:
            await self._stages.refresh_ledger()

    def _summarise(self, error: RayrftError | None) -> dict[str, Any]:
        progress, stages, folder = self._progress, self._stages, self._config.folder
        return summarise(
            self._config.name,
            self._status,
            str(error) if error else None,
            self._recorder.records,
            (stages.ledger if stages is not None else {}) or ledger_in_log(folder),
            self._recorder.seconds,
            stages=progress.stages_done,
            steps=progress.step,
            weight_version=stages.published if stages is not None else 0,
            checkpoint=str(folder / "checkpoints" / "final") if self._status == "finished" else None,
        )
