"""The Buffer's store: state in memory, journal and rows on disk, and waits for state changes.

Everything acknowledged is in the journal: killed at any moment and reopened, the store recovers its state.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np

from rayrft.buffer.events import Event
from rayrft.buffer.log.journal import EventJournal, Position
from rayrft.buffer.log.row_log import RowLog, RowRef, RowSpan
from rayrft.buffer.log.segments import segment_sizes
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.state import State
from rayrft.buffer.transitions.contents import Began, GroupParked, GroupsMoved, GroupsStored
from rayrft.config.buffer import BufferConfig
from rayrft.data.task_sampler import TaskSet, TaskSetSpec
from rayrft.errors import StorageError
from rayrft.experience import SCHEMA_VERSION
from rayrft.runtime.waits import settle

P = ParamSpec("P")
R = TypeVar("R")

_TASKS = "tasks-"
"""Begins the names of the files with the task sets of feeds, as they were at first."""


class Store:
    """Opens or creates the log of ``run`` in ``folder``, whose journal must reach at least ``least``.

    Raises StorageError if the log is another run's, of another schema version, damaged, or locked by another process.
    """

    def __init__(
        self, run: str, folder: Path, config: BufferConfig, seed: int, tasks: TaskSet | None, least: Position
    ) -> None:
        self.config = config
        self.storage = Storage(folder)
        self.storage.create()
        self.storage.lock()
        self.journal = EventJournal(self.storage)
        self.state = State(config.sampler, seed, tasks)
        for name in self.storage.files():
            if name.startswith(_TASKS):
                spec = TaskSetSpec(**json.loads(self.storage.read(name).to_pybytes()))
                self.state.tasks[name.removeprefix(_TASKS).removesuffix(".json")] = spec()
        try:
            recovered = self.journal.open(self._survived(), least)
            if recovered.snapshot is not None:
                self.state.restore(recovered.snapshot)
            for event in recovered.events:
                event.apply(self.state)
            self._check_run(run)
            self.rows = RowLog(self.storage, config, list(self.state.contents.extents.values()))
        except StorageError:
            self.storage.unlock()
            raise
        self._row_thread = ThreadPoolExecutor(1, "rows")
        self._waiting: list[tuple[tuple[Event, ...], asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._syncer: asyncio.Task[None] | None = None
        self._syncing = asyncio.Lock()
        self._unsynced = self._renewing = False
        self._error: StorageError | None = None
        """Of a write or sync: memory is ahead of the disk, so nothing is written until a restart from the log."""
        self.move_lock = asyncio.Lock()
        """Held while rows are moved or segments deleted, from reading their locations until the event is committed."""
        self._changed = asyncio.Condition()
        self.torn_bytes = recovered.torn_bytes + self.rows.torn_bytes
        """Bytes of unfinished writes that were truncated."""

    async def commit(self, *events: Event) -> None:
        """Apply events, write them to the journal, and wake the waiters; without events, wait for earlier writes.

        The latter is for repeated calls, whose answer must be durable, too. Raises StorageError.
        """
        self._check()
        for event in events:
            event.apply(self.state)
        await self.record(*events)

    async def record(self, *events: Event) -> None:
        """Write applied events and wake the waiters; return when all so far are in the journal. Raises StorageError."""
        self._check()
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((events, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        await done
        async with self._changed:
            self._changed.notify_all()

    async def flush(self) -> Position:
        """Sync all rows and written events to disk, regardless of the fsync policy, so that what they replace may be
        deleted; return the journal position up to which. Raises StorageError."""
        position = self.journal.position  # the rows of events written meanwhile may not be on disk
        try:
            await self._sync_rows()
            async with self._syncing:  # the file must not be closed by a snapshot meanwhile
                await asyncio.to_thread(self.journal.sync, position)
            return position
        except Exception as error:  # any error must also be raised by the next write
            self._error = _storage_error(error)
            raise self._error from None

    async def renew(self) -> None:
        """Replace the journal by a snapshot of the state, so that it holds nothing that is not in the state."""
        self._renewing = True
        await self.record()

    async def wait_for(self, ready: Callable[[], bool], deadline_s: float | None = None) -> None:
        """Wait until ``ready`` is true, checked after every change. Raises TimeoutError at the deadline."""
        async with self._changed, asyncio.timeout(deadline_s):
            await self._changed.wait_for(ready)

    async def add_task_set(self, feed: str, spec: TaskSetSpec) -> None:
        """Keep the task set of a feed, to be drawn from. Raises StorageError if the feed has another one."""
        name, data = f"{_TASKS}{feed}.json", json.dumps(asdict(spec)).encode()
        if feed not in self.state.tasks:
            await asyncio.to_thread(self.storage.write, name, data)
            self.state.tasks.setdefault(feed, spec())
        elif self.storage.read(name).to_pybytes() != data:
            problem = "the job's tasks, or their sampler, are not those that it began with"
            remedy = "resume it with the tasks that it was started with, or start a new job"
            raise StorageError(problem, remedy, field=str(self.storage.folder / name))

    def span(self, slot: int) -> RowSpan:
        """Return the location of a group's rows."""
        groups = self.state.groups
        return RowSpan(int(groups.segment[slot]), int(groups.row[slot]), int(groups.rows[slot]))

    async def in_row_thread(self, method: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method of `rows` in its thread, one call after another, without blocking the event loop.

        Callers resume in the order of their calls, so that events which follow at once are in order: extents only grow.
        """
        call = partial(method, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._row_thread, call)

    async def blocks(self, slots: list[int]) -> list[tuple[RowRef, int, np.ndarray]]:
        """Return each group's block, the index of its first row in it, and the tokens of its rows (0 if masked)."""
        return await self.in_row_thread(self.rows.refs, [self.span(slot) for slot in slots])

    async def rows_by_block(self, slots: list[int]) -> list[tuple[RowRef, np.ndarray]]:
        """Return the blocks of these groups with the sorted indices of their rows."""
        groups = self.state.groups
        rows: dict[RowRef, list[np.ndarray]] = {}
        for slot, (ref, row, _) in zip(slots, await self.blocks(slots), strict=True):
            rows.setdefault(ref, []).append(np.arange(row, row + int(groups.rows[slot])))
        return [(ref, np.sort(np.concatenate(parts))) for ref, parts in rows.items()]

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _write(self) -> None:
        """Write the waiting events, all that came during a write with the next one."""
        while self._waiting:
            batch = self._waiting
            self._waiting = []
            try:
                if self._renewing or self.journal.is_long:
                    self._renewing = False
                    snapshot = self.state.to_snapshot()  # before any await: with the events of this batch and no others
                    await self._sync_rows()  # a snapshot refers to them
                    async with self._syncing:
                        await asyncio.to_thread(self.journal.begin, snapshot)
                elif events := [event for part, _ in batch for event in part]:
                    await asyncio.to_thread(self._append, events)
            except Exception as error:  # any error is raised in the waiting writers
                self._error = _storage_error(error)
                batch = [*batch, *self._waiting]
                self._waiting = []
            for _, done in batch:
                settle(done, self._error)
        self._unsynced = True
        if self.config.fsync == "interval" and (self._syncer is None or self._syncer.done()):
            self._syncer = asyncio.create_task(self._sync_later())

    def _append(self, events: list[Event]) -> None:
        self.journal.append(events)
        if self.config.fsync == "always":
            self.journal.sync(self.journal.position)

    async def _sync_rows(self) -> None:
        await self.in_row_thread(self.rows.sync)

    async def _sync_later(self) -> None:
        while self._unsynced and self._error is None:
            await asyncio.sleep(self.config.fsync_s)
            self._unsynced = False
            with contextlib.suppress(StorageError):  # no caller: raised by the next write
                await self.flush()

    def _survived(self) -> Callable[[Event], bool]:
        """Return a function that tells whether an event's rows are on disk. A power failure may truncate the newest
        segment if it was not synced, and invalidates the journal from there; full segments are always synced."""
        sizes = segment_sizes(self.storage) if self.config.fsync != "always" else {}
        newest = max(sizes, default=-1)

        def survived(event: Event) -> bool:
            if not isinstance(event, GroupsStored | GroupParked | GroupsMoved) or event.extent.segment != newest:
                return True
            return event.extent.nbytes <= sizes[newest]

        return survived

    def _check_run(self, run: str) -> None:
        meta = self.state.meta
        if not meta.run:
            first = Began(run, SCHEMA_VERSION)
            first.apply(self.state)
            self.journal.append([first])
        elif meta.run != run:
            remedy = "choose another name or buffer.storage"
            raise StorageError(f"the log belongs to run {meta.run!r}", remedy, field=str(self.storage.folder))


def _storage_error(error: Exception) -> StorageError:
    if isinstance(error, StorageError):
        return error
    remedy = "this is a bug in rayrft: report it; all acknowledged data is safe"
    return StorageError(f"an event cannot be written: {type(error).__name__}: {error}", remedy, field="journal")
