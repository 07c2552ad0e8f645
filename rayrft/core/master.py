"""The Master actor: runs a run, from its first actor to its summary."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from importlib import import_module
from typing import Any

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.ledger import BufferStats, Ledger, RowStats
from rayrft.buffer.shared import SharedBuffer
from rayrft.config import RunConfig
from rayrft.config.serve import ServeConfig
from rayrft.core.actors import Actors, create_actors, judges, reward_service, start_actors
from rayrft.core.checkpoints import Progress
from rayrft.core.explore_loop import ExploreLoop
from rayrft.core.placement import NAMESPACE, Placement, actor_name, plan_placement
from rayrft.core.preflight import Prepared
from rayrft.core.shared_buffer import join_feed, join_trainer, open_buffer
from rayrft.core.supervision import Silence, Stopped, root_cause, supervise, unless_stopped
from rayrft.core.train_loop import TrainLoop
from rayrft.core.weight_sync import WeightSync
from rayrft.endpoint.keeper import SessionKeeper
from rayrft.endpoint.settings import EndpointActors, EndpointSettings
from rayrft.errors import ActorDied, RayrftError, RowsFailed, StorageError
from rayrft.monitor.recorder import Recorder
from rayrft.monitor.records import Record
from rayrft.monitor.summary import RunStatus, Summary, rows_in_log, status_at_end, summarise
from rayrft.registry import load_plugins
from rayrft.runtime.handle import Handle, Watched
from rayrft.runtime.waits import Waits
from rayrft.trainer.trainer import Trainer

_STATS_DEADLINE_S = 5.0


class Master(Watched):
    """The actor. ``run`` is the whole run; every other method may be called while it is running.

    The run resumes from ``progress``: see `rayrft.core.checkpoints`.
    """

    def __init__(self, config: RunConfig, progress: Progress) -> None:
        load_plugins(config.plugins)
        self._config = config
        self._progress = progress
        kept = progress.records if config.trains else None
        self._recorder = Recorder(config, kept, progress.step)
        self._stop = asyncio.Event()
        self._status = "starting"
        self._actors: Actors | None = None
        self._loop: TrainLoop | ExploreLoop | None = None
        self._waits = Waits("master")
        self._silence: Silence | None = None
        self._summary: Summary | None = None

    async def run(self, prepared_refs: list[Any]) -> Summary:
        """Run all stages; return the summary. Raises the root cause if the run fails, after writing the summary.

        ``prepared_refs`` holds one reference to a `Prepared`, inside a list so that it is fetched here.
        """
        prepared: Prepared = await prepared_refs[0]
        placement = Placement(self._config.name, plan_placement(self._config))
        stats: BufferStats | None = None
        try:
            error = await self._outcome(prepared, placement)
            try:
                await self._close_endpoint()
                await self._close_rewards()
                stats = await self._stats()
            except Exception as failure:  # such as a ledger that does not close: raised below
                self._status, error = "failed", error or root_cause(failure, "buffer")
        finally:
            if self._actors is not None and self._config.buffer.name is None:
                self._actors.buffer.kill()  # Ray would try forever to restart it without its placement group
            placement.remove()
        self._summary = self._summarise(self._status, error, stats)
        try:
            await self._recorder.close(self._summary)
        except StorageError as failure:
            error = error or failure
        if error is not None:
            raise error
        return self._summary

    async def records(self, count: int) -> list[Record]:
        """Wait for records after the first ``count`` and return the next ones; an empty list once the run has ended and
        all were returned."""
        return await self._recorder.after(count)

    async def status(self) -> RunStatus:
        """Return the status of the run, step, version, the ledger of rows, and overdue waits."""
        if self._summary is not None:
            return status_at_end(self._summary, self._config.folder)
        stats = await self._stats() if self._status == "running" else None
        known = self._loop.ledger if self._loop is not None else Ledger()
        return RunStatus(
            self._config.name,
            self._status,
            None,
            self._progress.step,
            self._loop.published if self._loop is not None else 0,
            self._config.folder,
            self._silence.overdue if self._silence is not None else [],
            stats.ledger if stats is not None else known,
        )

    async def stop(self) -> None:
        """Ask the run to end after its current operation, saving its weights.

        If the process that asks is killed soon, as by `ray job stop`, so is this actor: a summary is written at once.
        """
        self._stop.set()
        if self._summary is None:
            name = self._config.name
            killed = ActorDied("the run was killed while it was stopping", field=actor_name(name, "master"))
            rows = RowStats(self._loop.ledger if self._loop is not None else Ledger(), {})
            with contextlib.suppress(StorageError):
                await self._recorder.save(self._summarise("killed", killed, rows))

    async def pids(self) -> dict[str, int]:
        """Return the process ids of master, buffer, trainer, explorers and engines."""
        assert self._actors is not None  # called once the run is up
        actors = self._actors
        others = [actors.buffer, actors.trainer, *actors.explorers, *actors.all_engines]
        pids = {actor.name: await actor.call(Watched.pid) for actor in others if actor is not None}
        return {"master": os.getpid(), **pids}

    async def _outcome(self, prepared: Prepared, placement: Placement) -> RayrftError | None:
        """Create the actors and run all stages; return why the run failed, or None if it finished or was stopped."""
        try:
            parts = [part.name for part in plan_placement(self._config) if part.name != "master" and not part.served]
            await unless_stopped(self._stop, asyncio.to_thread(placement.reserve, parts))
            shared = await asyncio.to_thread(open_buffer, self._config) if self._config.buffer.name else None
            self._actors = create_actors(self._config, prepared, placement, self._progress.logged, shared)
            self._loop = await self._make_loop(self._actors.tracked(self._waits), prepared, shared)
            monitor = self._config.monitor
            self._silence = Silence(
                self._waits, self._actors.signs_of_life(), self._note, monitor.patience_s, monitor.stall_s
            )
            self._silence.starting = True
            watches = {**self._actors.watches(), "silence": self._silence.watch()}
            await supervise(self._run(self._actors, self._loop, prepared), watches)
        except Stopped:
            self._status = "stopped"
            return None
        except Exception as failure:  # whatever ended the run becomes its summary, and is raised by `run`
            self._status, error = "failed", root_cause(failure)
            with contextlib.suppress(StorageError):  # a full disk may be what ended the run
                await self._recorder.note(f"the run failed: {error}", step=self._progress.step)
            if isinstance(error, RowsFailed) and isinstance(self._loop, TrainLoop):
                await self._loop.blame(error)
            return error
        self._status = "finished"
        return None

    async def _make_loop(
        self, actors: Actors, prepared: Prepared, shared: Handle[SharedBuffer] | None
    ) -> TrainLoop | ExploreLoop:
        """Make the loop of the run's mode; join the Buffer that belongs to no run, if that is where its rows go."""
        config, step = self._config, self._progress.step
        if not config.trains:
            assert shared is not None  # the mode needs one
            before = await join_feed(shared, config, prepared)
            return ExploreLoop(config, actors, shared, prepared.run_id, before, self._recorder, self._stop)
        if shared is not None:
            await join_trainer(shared, config, prepared, step)
        sync = None
        if actors.engine_pool is not None and actors.trainer is not None:
            sync = WeightSync(config, actors.trainer, actors.engine_pool, prepared.probe, self._waits)
        return TrainLoop(config, actors, self._recorder, self._progress, self._stop, sync)

    async def _run(self, actors: Actors, loop: TrainLoop | ExploreLoop, prepared: Prepared) -> None:
        await unless_stopped(self._stop, self._start(actors, loop, prepared))
        await loop.run()
        if actors.trainer is not None:
            await actors.trainer.call(Trainer.stop)

    async def _start(self, actors: Actors, loop: TrainLoop | ExploreLoop, prepared: Prepared) -> None:
        """Start the actors, restore the weights, and publish them."""
        started = time.monotonic()
        parts = [name for name, there in (("engines", actors.engines), ("trainer", actors.trainer)) if there]
        await self._recorder.note(f"starting {' and '.join(parts)}", step=self._progress.step)
        for notice in prepared.notices:
            await self._recorder.note(notice)
        for name, reasons in prepared.left_out.items():
            if reasons:
                await self._recorder.note(f"demonstrations {name!r}: left out {dict(reasons)}")
        # The stages' algorithms import torch, which takes seconds: meanwhile the actors start.
        loading = asyncio.to_thread(import_module, "rayrft.algorithms")
        warning, _ = await asyncio.gather(
            start_actors(actors, self._config, prepared, self._waits, self._open_rewards(actors)), loading
        )
        if warning:
            await self._recorder.note(f"trainer: {warning}")
        if isinstance(loop, TrainLoop):
            await loop.restore()
        self._status = "running"
        if self._silence is not None:
            self._silence.starting = False
        report = await loop.admit(actors.engines)
        probe = (
            f"; engine log-probs equal the trainer's to {report.probe_gap:.1e}"
            if report and report.probe_gap is not None
            else ""
        )
        url = await self._open_endpoint(actors, prepared)
        seconds = time.monotonic() - started
        served = f"; endpoint at {url}" if url else ""
        await self._recorder.note(f"up after {seconds:.0f} s{probe}{served}", startup_s=seconds)

    async def _open_rewards(self, actors: Actors) -> None:
        """Deploy the rewards, if the run has them on Ray Serve."""
        service = reward_service(self._config)
        if service is None:
            return
        from rayrft.rewards.service import deploy_rewards
        from rayrft.runtime.serving.applications import Owner, on_head

        config, owner = self._config, Owner(NAMESPACE, actor_name(self._config.name, "master"))
        address = config.endpoint or ServeConfig()
        with self._waits.on("rewards", "deployed"):
            await asyncio.to_thread(
                on_head,
                deploy_rewards,
                service,
                config.scoring,
                config.plugins,
                owner,
                (address.host, address.port),
                config.endpoint is not None,
                judges(config, {name: each.engine_pool for name, each in actors.auxiliary.items()}),
            )

    async def _close_rewards(self) -> None:
        """Delete the rewards on Ray Serve."""
        service = reward_service(self._config)
        if service is not None:
            from rayrft.rewards.service import close_rewards

            await asyncio.to_thread(close_rewards, service)

    async def _open_endpoint(self, actors: Actors, prepared: Prepared) -> str | None:
        """Open the endpoint, if the run has one; return its URL."""
        config, model = self._config, self._config.model
        if config.endpoint is None:
            return None
        from rayrft.endpoint import deployment

        sampling, served = config.explorer.sampling, config.endpoint.model_name or config.name
        names = [actor_name(config.name, part) for part in ("engine_pool", "keeper")]
        return await deployment.open_endpoint(
            actor_name(config.name, "serve"),
            config.name,
            prepared.model,
            EndpointSettings(config.endpoint, served, model.max_length, sampling, prepared.key_digests, model.template),
            EndpointActors(NAMESPACE, names[0], names[1] if actors.keeper is not None else None),
        )

    async def _close_endpoint(self) -> None:
        """Take no more requests, and let the Buffer count what was not trained, if it is able to."""
        from ray.exceptions import RayActorError

        if self._config.endpoint is None:
            return
        from rayrft.runtime.serving.applications import delete_applications

        await asyncio.to_thread(delete_applications, actor_name(self._config.name, "serve"))
        if self._actors is not None and self._actors.keeper is not None:
            with contextlib.suppress(RayActorError, TimeoutError):
                await asyncio.wait_for(self._actors.keeper.call(SessionKeeper.close), _STATS_DEADLINE_S)

    async def _note(self, text: str, **data: Any) -> None:
        await self._recorder.note(text, step=self._progress.step, **data)

    async def _stats(self) -> BufferStats | None:
        """Return the Buffer's statistics; None if there is no Buffer, or it does not answer soon."""
        from ray.exceptions import RayActorError

        if self._actors is not None:
            with contextlib.suppress(RayActorError, TimeoutError):
                return await asyncio.wait_for(self._actors.buffer.call(Buffer.stats), _STATS_DEADLINE_S)
        return None

    def _summarise(self, status: str, error: RayrftError | None, rows: RowStats | None) -> Summary:
        folder, step = self._config.folder, self._progress.step
        weights = folder / "checkpoints" / (f"stopped-{step}" if status == "stopped" else "final")
        saved = status in ("finished", "stopped") and weights.is_dir()
        return summarise(
            self._config.name,
            status,
            str(error) if error else None,
            self._recorder.totals,
            rows or rows_in_log(folder),
            self._recorder.seconds,
            step=step,
            version=self._loop.published if self._loop is not None else 0,
            stages=self._progress.stages_done,
            checkpoint=str(weights) if saved else None,
        )
