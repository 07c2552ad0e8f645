"""Group commit: events that come while others are being written go to the journal together, with one fsync."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pyarrow as pa

from rayrft.buffer.log.events import Event
from rayrft.buffer.log.journal import Journal
from rayrft.config.buffer import BufferConfig
from rayrft.errors import StorageError

_SNAPSHOT_BYTES = 8 << 20
_SNAPSHOT_RATIO = 2
"""A journal of this size, and of so many times the last snapshot's, is replaced by a snapshot."""


class GroupCommit:
    """Writes events in the order in which they were given; ``write`` returns when its event is in the journal.

    ``snapshot`` gives the state with every event given so far; ``sync_rows`` brings row data to the disk, which must be
    there before the journal speaks of it. After a failed write nothing is written any more: what is in memory is ahead
    of the disk, and a restart goes back to what was acknowledged.
    """

    def __init__(
        self,
        journal: Journal,
        config: BufferConfig,
        snapshot: Callable[[], pa.Buffer],
        sync_rows: Callable[[], Awaitable[None]],
    ) -> None:
        self._journal = journal
        self._config = config
        self._snapshot = snapshot
        self._sync_rows = sync_rows
        self._waiting: list[tuple[tuple[Event, ...], asyncio.Future[None]]] = []
        self._flusher: asyncio.Task[None] | None = None
        self._syncer: asyncio.Task[None] | None = None
        self._syncing = asyncio.Lock()
        self._unsynced = False
        self._snapshot_bytes = 0
        self._error: StorageError | None = None

    def check(self) -> None:
        """Raises what an earlier write failed of."""
        if self._error is not None:
            raise self._error

    async def write(self, *events: Event) -> None:
        """Returns when these events, and all that were given before, are in the journal. Raises StorageError."""
        self.check()
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((events, done))
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())
        await done

    async def sync(self) -> None:
        """Returns when all rows, and all events that were written, are on the disk. Raises StorageError."""
        try:
            await self._sync_rows()
            async with self._syncing:  # of this file, and not of one that a snapshot has just closed
                await asyncio.to_thread(self._journal.sync)
        except Exception as error:  # whatever it is, the next one who writes must hear of it, too
            self._error = _storage_error(error)
            raise self._error from None

    async def _flush(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                if self._journal.size > max(_SNAPSHOT_BYTES, _SNAPSHOT_RATIO * self._snapshot_bytes):
                    await self._begin()
                elif events := [event for part, _ in batch for event in part]:
                    await asyncio.to_thread(self._append, events)
            except Exception as error:  # whatever it is, those who wait must hear of it
                self._error = _storage_error(error)
                batch, self._waiting = [*batch, *self._waiting], []
            for _, done in batch:
                if done.done():
                    continue
                if self._error is None:
                    done.set_result(None)
                else:
                    done.set_exception(self._error)
        self._unsynced = True
        if self._config.fsync == "interval" and (self._syncer is None or self._syncer.done()):
            self._syncer = asyncio.create_task(self._sync_later())

    def _append(self, events: list[Event]) -> None:
        self._journal.append(events)
        if self._config.fsync == "always":
            self._journal.sync()

    async def _begin(self) -> None:
        # Taken at once, so that it holds the events of this batch and none that comes after.
        snapshot = self._snapshot()
        await self._sync_rows()
        async with self._syncing:
            await asyncio.to_thread(self._journal.begin, snapshot)
        self._snapshot_bytes = len(snapshot)

    async def _sync_later(self) -> None:
        while self._unsynced and self._error is None:
            await asyncio.sleep(self._config.fsync_s)
            self._unsynced = False
            with contextlib.suppress(StorageError):  # there is no caller: the next one hears of it
                await self.sync()


def _storage_error(error: Exception) -> StorageError:
    if isinstance(error, StorageError):
        return error
    return StorageError(
        f"an event cannot be written: {type(error).__name__}: {error}",
        field="journal",
        remedy="this is a fault of rayrft: report it; nothing that was acknowledged is lost",
    )
