"""The Master actor: the run, from the first actor to the summary."""

from __future__ import annotations

import asyncio
import os
import time
from importlib import import_module
from typing import Any

from rayrft.config import RunConfig
from rayrft.core import cast as casting
from rayrft.core.placement import Placement, plan_placement
from rayrft.core.prepare import Prepared
from rayrft.core.progress import Progress
from rayrft.core.recorder import Recorder
from rayrft.core.stages import Stages, Stopped
from rayrft.core.supervision import root_cause, supervise
from rayrft.errors import RayrftError
from rayrft.monitor.records import Record
from rayrft.registry import load_plugins


class Master:
    """The actor. ``run`` is the whole run; everything else may be called while it is under way.

    With ``progress`` the run goes on from there: see `rayrft.core.progress`.
    """

    def __init__(self, config: RunConfig, progress: Progress) -> None:
        load_plugins(config.plugins)
        self._config = config
        self._progress = progress
        self._recorder = Recorder(config, progress.records)
        self._stop = asyncio.Event()
        self._status = "starting"
        self._cast: casting.Cast | None = None
        self._stages: Stages | None = None

    async def run(self, prepared_refs: list[Any]) -> dict[str, Any]:
        """Run all stages; gives the summary. Raises the root cause when the run fails, after writing the summary.

        ``prepared_refs`` holds one reference to a `Prepared`, inside a list so that it is fetched here.
        """
        prepared: Prepared = await prepared_refs[0]
        placement = Placement(self._config.name, plan_placement(self._config))
        error: RayrftError | None = None
        try:
            parts = [part.name for part in plan_placement(self._config) if part.name != "master"]
            await asyncio.to_thread(placement.reserve, parts)
            self._cast = casting.hire(self._config, prepared, placement)
            self._stages = Stages(self._config, self._cast, self._recorder, self._progress, self._stop)
            await supervise(self._run(self._cast, self._stages, prepared), self._cast.watches())
            self._status = "finished"
        except Stopped:
            self._status = "stopped"
        except Exception as failure:  # whatever ended the run becomes its summary and is raised again below
            self._status, error = "failed", root_cause(failure)
            await self._recorder.note(f"the run failed: {error}", step=self._progress.step)
            await self._take_stock()
        finally:
            if self._cast is not None:
                self._cast.dismiss()
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
            "step": self._progress.step,
            "version": self._published,
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
        assert self._cast is not None  # asked for once the run is up
        engines = {f"engine-{i}": await engine.pid.remote() for i, engine in enumerate(self._cast.engines)}
        actors = {name: await getattr(self._cast, name).pid.remote() for name in ("buffer", "trainer")}
        return {"master": os.getpid(), **actors, **engines}

    async def _run(self, cast: casting.Cast, stages: Stages, prepared: Prepared) -> None:
        started = time.time()
        await self._recorder.note("starting engines and trainer", step=self._progress.step)
        for name, reasons in prepared.left_out.items():
            if reasons:
                await self._recorder.note(f"demonstrations {name!r}: left out {dict(reasons)}")
        # With the algorithms of the stages comes torch, which takes seconds to load: while the others start.
        loading = asyncio.to_thread(import_module, "rayrft.algorithms")
        remark, _ = await asyncio.gather(casting.start(cast, self._config, prepared), loading)
        if remark:
            await self._recorder.note(f"the trainer's way with this model: {remark}")
        await stages.restore()
        self._status = "running"
        report = await stages.publish()
        probe = (
            f"; engine log-probs equal the trainer's to {report.probe_gap:.1e}"
            if report and report.probe_gap is not None
            else ""
        )
        seconds = time.time() - started
        await self._recorder.note(f"up after {seconds:.0f} s{probe}", startup_s=seconds)
        await stages.run()
        await cast.trainer.stop.remote()

    async def _take_stock(self) -> None:
        if self._stages is not None:
            await self._stages.take_stock()

    @property
    def _ledger(self) -> dict[str, Any]:
        nothing = {"sampled": 0, "trained": 0, "dropped": {}, "held": 0}
        return self._stages.ledger or nothing if self._stages is not None else nothing

    @property
    def _published(self) -> int:
        return self._stages.published if self._stages is not None else 0

    def _summary(self, error: RayrftError | None) -> dict[str, Any]:
        ledger, progress = self._ledger, self._progress
        return {
            "name": self._config.name,
            "status": self._status,
            "error": str(error) if error else None,
            "stages": progress.stages_done,
            "accuracy": self._recorder.accuracy(),
            "counters": {key: ledger.get(key) for key in ("sampled", "trained", "dropped", "held")},
            "dropped_tasks": ledger.get("dropped_tasks"),
            "expert": ledger.get("expert"),
            "seconds": self._recorder.seconds(),
            "steps": progress.step,
            "weight_version": self._published,
            "checkpoint": str(self._config.folder / "checkpoints" / "final") if self._status == "finished" else None,
        }
