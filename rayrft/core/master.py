"""The Master actor: runs a run, from its first actor to its summary."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.ledger import Ledger, RowStats
from rayrft.config import RunConfig, load_config
from rayrft.core.bundles import draining_nodes
from rayrft.core.checkpoints import Checkpoints, Progress
from rayrft.core.explore_loop import ExploreLoop
from rayrft.core.parts.base import RunParts
from rayrft.core.parts.buffer import BufferPart
from rayrft.core.parts.engines import EvaluationEngines, PolicyEngines
from rayrft.core.parts.explorer import ExplorerPart
from rayrft.core.parts.table import KINDS, plan_placement
from rayrft.core.parts.trainer import TrainerPart
from rayrft.core.placement import Placement, actor_name
from rayrft.core.preflight import PreparedRun
from rayrft.core.restarts import Restarts, Rewound
from rayrft.core.run_folder import write_config
from rayrft.core.shared_buffer import join_feed, join_trainer, open_shared_buffer
from rayrft.core.shared_files import check_shared, locate_files, named_files
from rayrft.core.steering import Steering
from rayrft.core.supervision import StallMonitor, Stopped, supervise, unless_stopped
from rayrft.core.train_loop import TrainLoop
from rayrft.core.weight_sync import WeightSync
from rayrft.errors import ActorDied, ConfigError, NotFinite, RayrftError, RowsFailed, StorageError
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.explorer.explorer import Explorer
from rayrft.files import Room
from rayrft.monitor.recorder import Recorder
from rayrft.monitor.records import Record, RestartRecord
from rayrft.monitor.summary import RunStatus, Summary, rows_in_log, status_at_end, summarise
from rayrft.registry import load_plugins
from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle, Watched, is_restarted, once, root_cause
from rayrft.runtime.stacks import dump, is_stopped, look_at
from rayrft.runtime.trace import Trace
from rayrft.runtime.waits import WaitReport, Waits
from rayrft.trainer.trainer import Trainer
from rayrft.weights.messages import SyncReport

R = TypeVar("R")
_STATS_DEADLINE_S = 5.0


class Master(Watched):
    """The actor. ``run`` is the whole run; every other method may be called while it is running.

    The run resumes from ``progress``: see `rayrft.core.checkpoints`. A Master that Ray has restarted takes over the
    actors of its predecessor, and repeats the steps since the latest checkpoint.
    """

    def __init__(self, config: RunConfig, progress: Progress) -> None:
        load_plugins(config.plugins)
        self._started, self._taken_over = time.monotonic(), is_restarted()
        if self._taken_over:
            config = load_config(config.folder / "config.yaml")  # with the changes since
            progress = Checkpoints(config.folder, config.checkpoint).latest() or progress
        self._progress = progress
        self._steering = Steering(config, progress, self._adopt, self._taken_over)
        self._config = config = self._steering.config
        Room.limit_s = config.monitor.stall_s / 2
        kept = progress.records if config.trains and not self._taken_over else None
        self._recorder = Recorder(config, kept, progress.step, taken_over=self._taken_over)
        self._steering.reached = self._recorder.totals.step if self._taken_over else 0
        self._stop = asyncio.Event()
        if self._taken_over and (config.folder / "summary.json").exists():  # its predecessor was stopping
            self._stop.set()
        self._status = "starting"
        self._parts: RunParts | None = None
        self._restarts: Restarts
        self._loop: TrainLoop | ExploreLoop | None = None
        self._sync: WeightSync | None = None
        self._waits, self._scaling = Waits("master", Trace(config.trace_folder, "master")), asyncio.Lock()
        self._stalls = StallMonitor(
            self._waits,
            {},
            self._note,
            config.monitor.patience_s,
            config.monitor.stall_s,
            config.restarts.silent_s,
            lambda name: self._restarts.kill(name),
            partial(self._look, dump),
            partial(self._look, is_stopped),
            starting=True,
        )
        self._summary: Summary | None = None
        self._drained, self._replaced = set[str](), set[str]()

    @once
    async def run(self, prepared_refs: list[Any]) -> Summary:
        """Run all stages; return the summary. Raises the root cause if the run fails, after writing the summary.

        ``prepared_refs`` holds one reference to a `PreparedRun`, inside a list so that it is fetched here. A later call
        waits for the run of the first.
        """
        prepared: PreparedRun = await prepared_refs[0]
        placement = Placement(self._config.name, plan_placement(self._config), detached=True)
        stats: RowStats | None = None
        try:
            error = await self._outcome(prepared, placement)
            try:
                for part in self._parts or ():
                    await part.close()
                stats = await self._stats()
            except Exception as failure:  # such as a ledger that does not close: raised below
                self._status, error = "failed", error or root_cause(failure, "buffer")
        finally:
            for part in self._parts or ():
                part.kill()
            placement.remove()
            self._steering.end()
        self._summary = self._summarise(self._status, error, stats)
        try:
            await self._recorder.close(self._summary)
        except StorageError as failure:
            error = error or failure
        if error is not None:
            raise error
        return self._summary

    async def records(self, count: int) -> list[Record]:
        """Wait for records after the first ``count`` and return the next ones; an empty list once there are no more."""
        return await self._recorder.after(count)

    async def status(self) -> RunStatus:
        """Return the status of the run, step, version, the ledger of rows, and overdue waits."""
        if self._summary is not None:
            return status_at_end(self._summary, self._config.folder)
        stats = await self._stats() if self._status == "running" else None
        version, ledger = self._known
        since = self._steering.paused_since
        return RunStatus(
            self._config.name,
            self._status if since is None else "paused",
            error=None,
            step=self._progress.step,
            version=version,
            folder=self._config.folder,
            waiting=self._stalls.overdue,
            ledger=stats.ledger if stats else ledger,
            paused_since=None if since is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since)),
        )

    async def steer(self, request: str, *arguments: Any) -> Any:
        """Make a request of `Steering`; return its result once it is served, between two optimiser steps."""
        if not self._config.trains:
            problem = "an explore job takes no optimiser steps, between which it could be steered"
            remedy = "stop it, and resume it with other values: it loses nothing"
            raise ConfigError(problem, remedy, field="mode", value=self._config.mode)
        return await self._steering.ask(request, *arguments)

    async def scale(self, engines: int) -> int:
        """Change the number of rollout engines; return how many there were, once the new ones take requests. Raises
        ConfigError, PlacementError if there is no room, and why an engine does not start: the run keeps what it had."""
        key = "explorer.engine.count"
        config, parts = load_config(self._config, {key: engines}), self._parts
        group = parts[PolicyEngines].group if parts is not None else None
        if parts is None or group is None or self._status != "running" or config.colocated:
            problem = "the run has no rollout engines, is not up yet, or has an engine beside each rank"
            raise ConfigError(problem, "resume it with another number", field=key, value=engines)
        async with self._scaling:
            before = len(group.engines)
            try:
                for _ in range(before, engines):
                    await asyncio.to_thread(group.grow)
                await asyncio.gather(*group.start(before))
                if added := group.engines[before:]:
                    await self._admit(added)
            except Exception as failure:
                while len(group.engines) > before:
                    await group.shrink()
                raise root_cause(failure) from None
            while len(group.engines) > engines:
                await group.shrink()
            for engine in added:
                self._restarts.add(parts[PolicyEngines], engine)
            self._stalls.heartbeats = self._heartbeats(parts)
            self._steering.config = load_config(self._config, {key: engines})
            self._adopt(self._steering.config)
            await asyncio.to_thread(lambda: write_config(load_config(config.folder / "config.yaml", {key: engines})))
            await self._note(f"scaled from {before} to {engines} rollout engines")
            return before

    async def stop(self) -> None:
        """Ask the run to end after its current operation, saving its weights. A summary is written at once, in case all
        is killed before."""
        self._stop.set()
        if self._summary is None:
            field = actor_name(self._config.name, "master")
            killed = ActorDied("the run was killed while it was stopping", field=field)
            with contextlib.suppress(StorageError):
                await self._recorder.save(self._summarise("killed", killed, RowStats(self._known[1], {})))

    async def pids(self) -> dict[str, int]:
        """Return the process ids of the Master and of the actors that it supervises, without those that have died and
        are not yet up again."""
        if self._parts is None:  # it has just been restarted
            return {"master": os.getpid()}
        up = [actor for name, (_, actor) in self._parts.supervised().items() if not self._restarts.is_dead(name)]
        found = await asyncio.gather(*(actor.untracked.call(Watched.pid) for actor in up), return_exceptions=True)
        pids = {actor.name: pid for actor, pid in zip(up, found, strict=True) if isinstance(pid, int)}
        return {"master": os.getpid(), **pids}

    @property
    def _known(self) -> tuple[int, Ledger]:
        """The version of the weights that the engines have, and the ledger of rows, as far as the Master knows."""
        return (self._loop.published, self._loop.ledger) if self._loop is not None else (0, Ledger())

    async def _outcome(self, prepared: PreparedRun, placement: Placement) -> RayrftError | None:
        """Create the actors and run all stages; return why the run failed, or None if it finished or was stopped."""
        try:
            groups = [each.name for each in plan_placement(self._config) if each.name != "master" and not each.served]
            wait_s, loop = self._config.placement.wait_s, asyncio.get_running_loop()

            def say(text: str) -> None:
                asyncio.run_coroutine_threadsafe(self._note(text), loop)

            await unless_stopped(self._stop, asyncio.to_thread(placement.reserve, groups, wait_s, say))
            if wait_s:  # the nodes that were there at the start have been looked at
                files = named_files(self._config, prepared.images)
                await asyncio.to_thread(lambda: check_shared(self._config.folder, files, placement.nodes))
            if not self._taken_over:
                await self._note(await asyncio.to_thread(locate_files, self._config, placement))
            shared = await asyncio.to_thread(open_shared_buffer, self._config) if self._config.buffer.name else None
            waits, logged, taken_over = self._waits, self._progress.logged, self._taken_over
            parts = RunParts(KINDS, self._config, prepared, placement, waits, logged, shared, taken_over)
            parts.actors()
            self._parts = parts
            before = self._recorder.restarts() if taken_over else []
            self._restarts = Restarts(parts, self._config.restarts, self._note_restart, self._blame, self._note, before)
            self._loop = await self._make_loop(parts)
            parts.admit, parts.idle_ranks = self._admit_replaced, self._changing_weights
            self._stalls.heartbeats = self._heartbeats(parts)
            watches = {**self._restarts.watches(), "stalls": self._stalls.watch()}
            await supervise(self._run(parts), watches)
        except Stopped:
            self._status = "stopped"
            return None
        except Exception as failure:  # whatever ended the run becomes its summary, and is raised by `run`
            self._status, error = "failed", root_cause(failure)
            with contextlib.suppress(StorageError):  # a full disk may be what ended the run
                await self._recorder.note(f"the run failed: {error}", step=self._progress.step)
            if isinstance(error, RowsFailed):
                await self._blame(error)
            return error
        self._status = "finished"
        return None

    async def _make_loop(self, parts: RunParts) -> TrainLoop | ExploreLoop:
        """Make the loop of the run's mode; join the named Buffer, if the run has one."""
        config, prepared, progress, recorder = self._config, parts.prepared, self._progress, self._recorder
        explorers, policy, shared = parts[ExplorerPart].actors, parts[PolicyEngines].group, parts.shared
        if not config.trains:
            assert shared is not None  # the mode needs one
            before = await join_feed(shared, config, prepared)
            feed, stage = prepared.run_id, config.explored_stage
            return ExploreLoop(stage, explorers, shared, feed, before, recorder, self._stop, self._restarts)
        if shared is not None:
            await join_trainer(shared, config, prepared, progress.step)
        buffer, [trainer] = parts[BufferPart].actor, parts[TrainerPart].actors
        if self._sync is None and policy is not None:
            self._sync = WeightSync(config, trainer, policy.pool, lambda: policy.alive, prepared.probe, self._waits)
        return TrainLoop(
            config,
            buffer,
            trainer,
            explorers,
            recorder,
            progress,
            self._stop,
            self._restarts,
            self._sync,
            parts[EvaluationEngines].group,
            self._steering,
            attention=prepared.attention,
        )

    async def _run(self, parts: RunParts) -> None:
        assert self._loop is not None  # it was made before
        run: Callable[[], Awaitable[None]] = partial(self._take_over, parts)
        if not self._taken_over:
            await unless_stopped(self._stop, self._start(parts, self._loop))
            run = self._loop.run
        while True:
            try:
                await self._restarts.unless_rewound(run(), self._stop)
                break
            except Rewound:
                run = partial(self._take_over if self._taken_over else self._run_again, parts)
        for trainer in parts[TrainerPart].actors:
            await trainer.call(Trainer.stop)

    async def _take_over(self, parts: RunParts) -> None:
        """Continue the run of a Master that has died, with its actors."""
        self._restarts.running = self._restarts.rewinding = True
        await self._restarts.all_up()
        await parts.start()  # those that it had not started
        for part in parts:
            await part.open()
        policy, loop = parts[PolicyEngines].group, self._loop
        if policy is not None and self._sync is not None:
            await self._sync.take_over(policy.engines)
        if self._status == "starting":
            if isinstance(loop, TrainLoop):  # as far as is known
                loop.trained_by = loop.trainer.actor
            died = ActorDied("its process died", field="master")
            await self._note_restart("master", "master", died, time.monotonic() - self._started)
            self._status, self._stalls.starting = "running", False
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._run_again(parts))
                if policy is not None:  # it may have died while it sent them weights
                    await self._admit(policy.engines)
                self._taken_over = False
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _run_again(self, parts: RunParts) -> None:
        """Run the stages from the latest checkpoint on, with the actors of now."""
        async with self._changing_weights():
            if self._config.trains:
                checkpoints = Checkpoints(self._config.folder, self._config.checkpoint)
                latest = await asyncio.to_thread(checkpoints.latest)
                assert latest is not None  # there is one from before the first step on
                vars(self._progress).update(vars(latest))
                await self._return_to_config(parts)
                await asyncio.to_thread(self._recorder.rewind, latest.step)
                await self._lose_steps(parts)
            self._loop = loop = await self._make_loop(parts)
            if isinstance(loop, TrainLoop):
                await loop.restore()
            if self._sync is not None:
                await self._sync.wake_up()
                self._sync.rewind(self._progress.step)
            await self._restarts.end_rewind()
        await loop.run()

    async def _lose_steps(self, parts: RunParts) -> None:
        """Replace a Trainer that has taken steps if there is no checkpoint to restore: a new one loads the model."""
        for trainer in parts[TrainerPart].actors:
            if not self._progress.step and isinstance(self._loop, TrainLoop) and self._loop.trained_by is trainer.actor:
                trainer.kill()
                await asyncio.Event().wait()  # cancelled: the run rewinds again once the Trainer is replaced

    async def _return_to_config(self, parts: RunParts) -> None:
        """Return to the config of the present step: later changes are made again at their own steps."""
        self._steering.rewind()
        if self._steering.config != self._config or self._taken_over:  # the predecessor may have made later changes
            self._adopt(self._steering.config)
            explorers = parts[ExplorerPart].actors
            await asyncio.gather(*(explorer.call(Explorer.adjust, self._config) for explorer in explorers))

    async def _admit_replaced(self, engines: list[Handle[RolloutEngine]]) -> None:
        if not self._taken_over:  # else `_take_over` admits them, with all others
            await self._admit(engines)

    async def _admit(self, engines: list[Handle[RolloutEngine]]) -> SyncReport | None:
        """Let rollout engines take requests once they hold the trainer's weights, if there is a trainer."""
        policy = self._parts[PolicyEngines].group if self._parts is not None else None
        assert policy is not None  # they are its engines
        while True:
            await self._restarts.restored()
            if self._sync is not None:
                await self._sync.caught_up.wait()
            async with self._changing_weights():
                if self._restarts.rewinding:
                    continue
                if self._sync is None:
                    await policy.join(engines)
                    return None
                if self._sync.caught_up.is_set():
                    return await self._sync.admit(engines, self._progress.step)

    @contextlib.asynccontextmanager
    async def _changing_weights(self) -> AsyncIterator[None]:
        """Let no other task change the trainer's weights, or send them, inside."""
        async with self._sync.weights if self._sync is not None else contextlib.nullcontext():
            if self._restarts.rewinding and self._sync is not None:
                self._sync.disconnect()
            yield

    async def _blame(self, error: RowsFailed | NotFinite) -> None:
        if isinstance(self._loop, TrainLoop):
            await self._loop.blame(error)

    async def _start(self, parts: RunParts, loop: TrainLoop | ExploreLoop) -> None:
        """Start the actors, restore the weights, and publish them."""
        started, prepared = time.monotonic(), parts.prepared
        *others, last = (part.name for part in parts if part.loads and part.actors)
        loading = " and ".join(filter(None, [", ".join(others), last]))
        await self._recorder.note(f"starting {loading}", step=self._progress.step)
        for notice in prepared.notices:
            await self._recorder.note(notice)
        # The stages' algorithms import torch, which takes seconds: meanwhile the actors start.
        warnings, _ = await asyncio.gather(parts.start(), asyncio.to_thread(import_module, "rayrft.algorithms"))
        for warning in warnings:
            await self._recorder.note(warning)
        if isinstance(loop, TrainLoop):
            await loop.restore()
        self._status, self._stalls.starting = "running", False
        policy = parts[PolicyEngines].group
        report = await self._admit(policy.engines) if policy is not None else None
        messages = list(filter(None, [await part.open() for part in parts]))
        if report and report.probe_gap is not None:
            messages.insert(0, f"engine log-probs equal the trainer's to {report.probe_gap:.1e}")
        seconds = time.monotonic() - started
        messages.insert(0, f"up after {seconds:.0f} s")
        await self._recorder.note("; ".join(messages), startup_s=seconds)
        self._restarts.running = True

    def _heartbeats(self, parts: RunParts) -> dict[str, Callable[[], Awaitable[Any]]]:
        more: dict[str, Callable[[], Awaitable[Any]]] = {"nodes": self._prepare_drain} if self._config.trains else {}
        if self._config.endpoint is not None or self._config.reward.placement == "serve":
            more["replicas"] = self._note_replicas
        return parts.heartbeats() | more

    async def _look(self, look: Callable[[int], R], name: str) -> R | None:
        """Call `look_at` with the actor of this name; return its result, or None if the run has no such actor."""
        _, actor = self._parts.supervised().get(name, (None, None)) if self._parts is not None else (None, None)
        return await look_at(actor, look) if actor is not None else None

    async def _prepare_drain(self) -> WaitReport:
        """Write a checkpoint when Ray begins to drain a node of the run, such as one that is preempted, and let its
        engines take no more requests: a heartbeat."""
        new = await asyncio.to_thread(draining_nodes) - self._drained
        self._drained |= new
        if new and self._parts is not None and new & self._parts.placement.nodes:
            await self._note("Ray drains a node of the run: the run writes a checkpoint")
            # Not awaited, as a step may be longer than a heartbeat may take. It fails if the run ends.
            saving = self._steering.ask("checkpoint")
            self._draining = asyncio.gather(saving, self._drain(self._parts, new), return_exceptions=True)
        return WaitReport([], 0.0)

    async def _drain(self, parts: RunParts, nodes: set[str]) -> None:
        async with self._changing_weights():  # an engine that leaves while it is paused would stay paused
            for part in parts:
                await part.drain(nodes)

    async def _note_replicas(self) -> WaitReport:
        """Record the replicas that Ray Serve has replaced since the last call: a heartbeat."""
        from rayrft.runtime.serving.applications import replaced_replicas

        replaced = await asyncio.to_thread(replaced_replicas, actor_name(self._config.name, ""))
        for name in replaced.keys() - self._replaced:
            died = ActorDied("its process died, and Ray Serve has started another one", field=name)
            await self._note_restart("replicas", name, died, replaced[name])
        self._replaced |= replaced.keys()
        return WaitReport([], 0.0)

    def _adopt(self, config: RunConfig) -> None:
        """Continue with a config in which changeable keys differ."""
        self._config = self._recorder.config = config
        Room.limit_s = config.monitor.stall_s / 2
        if self._parts is not None:
            self._parts.config = config
        self._stalls.patience_s, self._stalls.stall_s = config.monitor.patience_s, config.monitor.stall_s

    async def _note(self, text: str, **data: Any) -> None:
        await self._recorder.note(text, step=self._progress.step, **data)

    async def _note_restart(self, part: str, actor: str, cause: RayrftError, seconds: float) -> None:
        stage = self._config.stages[self._progress.stage].name
        text = cause.problem if cause.field == actor else str(cause)
        record = RestartRecord(stage, self._progress.step, time.time(), part, actor, text, seconds)
        await self._recorder.add(record)

    async def _stats(self) -> RowStats | None:
        """Return the Buffer's statistics; None if there is no Buffer, or it does not answer soon."""
        if self._parts is not None:
            with contextlib.suppress(*ray_api.ACTOR_ERRORS, TimeoutError):
                return await asyncio.wait_for(self._parts[BufferPart].actor.call(Buffer.stats), _STATS_DEADLINE_S)
        return None

    def _summarise(self, status: str, error: RayrftError | None, rows: RowStats | None) -> Summary:
        folder, step = self._config.folder, self._progress.step
        weights = folder / "checkpoints" / (f"stopped-{step}" if status == "stopped" else "final")
        saved = status in ("finished", "stopped") and weights.is_dir()
        reason, seconds = str(error) if error else None, time.monotonic() - self._started
        return replace(
            summarise(self._config.name, status, reason, self._recorder.totals, rows or rows_in_log(folder), seconds),
            steps=step,
            weight_version=self._known[0],
            stages=self._progress.stages_done.copy(),
            checkpoint=str(weights) if saved else None,
        )
