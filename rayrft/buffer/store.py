"""The Buffer's store: state in memory, journal and rows on disk, and waits for state changes.

Everything acknowledged is in the journal: killed at any moment and reopened, the store recovers its state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from rayrft.buffer import events as e
from rayrft.buffer.ledger import StoreSizes
from rayrft.buffer.log.journal import GroupCommit, Journal, Position
from rayrft.buffer.log.segments import Extent, segment_name
from rayrft.buffer.log.shard import NotOpen, Ref, RowSpan, Shard
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.samplers import Sampler, samplers
from rayrft.buffer.state import State
from rayrft.buffer.transitions import apply
from rayrft.config.buffer import BufferConfig
from rayrft.data.task_sampler import TaskSet
from rayrft.errors import StorageError
from rayrft.experience import SCHEMA_VERSION
from rayrft.handle import Handle

P = ParamSpec("P")
R = TypeVar("R")

_ATTEMPTS = 5


class Shards:
    """The shards that store rows. ``committed`` returns the extents of a shard that are in the journal.

    A shard executes one call at a time. Ray restarts a dead one; it is reopened at its committed extents, which
    truncates rows whose write was not acknowledged, and the call is repeated.
    """

    def __init__(self, first: Shard, others: list[Handle[Shard]], committed: Callable[[int], list[Extent]]) -> None:
        self._first = first
        self._others = others
        self._committed = committed
        self._thread = ThreadPoolExecutor(1, "shard")
        self._locks = [asyncio.Lock() for _ in range(1 + len(others))]
        self._opened: set[int] = set()
        self.torn_bytes = 0
        """Bytes truncated when shards were opened."""

    def __len__(self) -> int:
        return len(self._locks)

    async def call(
        self, shard: int, method: Callable[Concatenate[Shard, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a method of a shard. Raises StorageError if it dies `_ATTEMPTS` times in a row."""
        from ray.exceptions import RayActorError

        async with self._locks[shard]:
            for _ in range(_ATTEMPTS):
                try:
                    if shard not in self._opened:
                        self.torn_bytes += await self._do(shard, Shard.open, self._committed(shard))
                        self._opened.add(shard)
                    return await self._do(shard, method, *args, **kwargs)
                except (RayActorError, NotOpen) as error:
                    self._opened.discard(shard)
                    died = error
        raise StorageError(
            f"died {_ATTEMPTS} times in a row: {type(died).__name__}",
            field=f"buffer.shard-{shard}",
            remedy="see its log in the Ray dashboard",
        )

    async def all(self, method: Callable[[Shard], R]) -> list[R]:
        """Call a method of every shard."""
        return await asyncio.gather(*(self.call(shard, method) for shard in range(len(self))))

    async def _do(
        self, shard: int, method: Callable[Concatenate[Shard, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        if shard:
            return await self._others[shard - 1].call(method, *args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: method(self._first, *args, **kwargs))


class Store:
    """Opens or creates the log of ``run`` at ``location``, whose journal must reach at least ``least``.

    Raises StorageError if the log is another run's, of another schema version, damaged, or locked by another process.
    """

    def __init__(
        self,
        run: str,
        location: str,
        config: BufferConfig,
        seed: int,
        tasks: TaskSet | None,
        others: list[Handle[Shard]],
        least: Position,
    ) -> None:
        started = time.perf_counter()
        self.config = config
        self.storage = Storage(location)
        self.storage.create()
        self.storage.lock()
        self._seed = seed
        self._journal = Journal(self.storage)
        self.state = State(config.sampler, seed, tasks)
        try:
            recovered = self._journal.open(self._survived(), least)
            if recovered.snapshot is not None:
                self.state.restore(recovered.snapshot)
            for event in recovered.events:
                apply(self.state, event)
            self._check_run(run, location)
        except StorageError:
            self.storage.unlock()
            raise
        self.state.fill_pool(self.new_pool)
        self.shards = Shards(
            Shard(self.storage.folder("shard-0"), config),
            others,
            lambda shard: list(self.state.meta.extents.get(shard, {}).values()),
        )
        self._log = GroupCommit(self._journal, config, self.state.to_snapshot, self._sync_rows)
        self.move_lock = asyncio.Lock()
        """Held while rows are moved or segments deleted, from reading their locations until the event is committed."""
        self._changed = asyncio.Condition()
        self._torn_bytes = recovered.torn_bytes
        self.recovery_s = time.perf_counter() - started

    async def commit(self, *events: e.Event) -> None:
        """Apply events, write them to the journal, and wake the waiters; without events, wait for earlier writes.

        The latter is for repeated calls, whose answer must be durable, too. Raises StorageError.
        """
        self._log.check()
        for event in events:
            apply(self.state, event)
        await self.record(*events)

    async def record(self, *events: e.Event) -> None:
        """Write events that were applied already, and wake the waiters."""
        await self._log.write(*events)
        await self.wake()

    async def flush(self) -> Position:
        """Force all writes to disk, regardless of the fsync policy, so that what they replace may be deleted; return
        the journal position."""
        position = self._journal.position
        await self._log.sync()
        return position

    async def wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, ready: Callable[[], bool], deadline_s: float | None = None) -> None:
        """Wait until ``ready`` is true, checked after every change. Raises TimeoutError at the deadline."""
        async with self._changed, asyncio.timeout(deadline_s):
            await self._changed.wait_for(ready)

    def new_pool(self) -> Sampler:
        """Create an empty pool of the configured sampler."""
        return samplers.get(self.config.sampler.name, "buffer.sampler.name")(self.config.sampler, self._seed)

    def span(self, slot: int) -> RowSpan:
        """Return the location of a group's rows in its shard."""
        groups = self.state.groups
        return RowSpan(int(groups.segment[slot]), int(groups.row[slot]), int(groups.rows[slot]))

    def by_shard(self, slots: list[int]) -> dict[int, list[int]]:
        """Group slots by the shard that stores their rows."""
        found: dict[int, list[int]] = {}
        for slot in slots:
            found.setdefault(int(self.state.groups.shard[slot]), []).append(slot)
        return found

    async def blocks(self, slots: list[int]) -> dict[int, tuple[Ref, int, np.ndarray]]:
        """Return the block of every group's rows, the index of the first row in it, and the tokens of the rows, 0 for
        masked ones."""
        found: dict[int, tuple[Ref, int, np.ndarray]] = {}
        for shard, of_shard in self.by_shard(slots).items():
            refs = await self.shards.call(shard, Shard.refs, [self.span(slot) for slot in of_shard])
            found.update(zip(of_shard, refs, strict=True))
        return found

    async def rows_by_block(self, slots: list[int]) -> list[tuple[Any, np.ndarray]]:
        """Return the blocks of these groups with the sorted indices of their rows."""
        groups = self.state.groups
        rows: dict[Any, list[np.ndarray]] = {}
        for slot, (ref, row, _) in (await self.blocks(slots)).items():
            rows.setdefault(ref, []).append(np.arange(row, row + int(groups.rows[slot])))
        return [(ref, np.sort(np.concatenate(parts))) for ref, parts in rows.items()]

    async def sizes(self) -> StoreSizes:
        """Return memory and disk use, and the duration and truncated bytes of the recovery."""
        memory = await self.shards.all(Shard.memory)
        return StoreSizes(
            groups=len(self.state.groups),
            row_bytes_in_memory=sum(memory),
            metadata_bytes=self.state.groups.nbytes_in_memory,
            log_bytes=self.log_bytes,
            torn_bytes=self._torn_bytes + self.shards.torn_bytes,
            recovery_s=round(self.recovery_s, 3),
        )

    @property
    def log_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(extent.nbytes for shard in self.state.meta.extents.values() for extent in shard.values())

    async def _sync_rows(self) -> None:
        await self.shards.all(Shard.sync)

    def _survived(self) -> Callable[[e.Event], bool]:
        """Return a function that tells whether an event's rows are on disk. A power failure may truncate the newest
        segment if it was not synced, and invalidates the journal from there; full segments are always synced."""
        files = {}
        if self.config.fsync != "always" and self.storage.grows:
            files = {shard: self.storage.folder(f"shard-{shard}").files() for shard in range(self.config.shards)}

        def survived(event: e.Event) -> bool:
            if not isinstance(event, e.Stored | e.Moved) or not files.get(event.shard):
                return True
            newest, size = list(files[event.shard].items())[-1]
            return newest != segment_name(event.extent.segment) or size >= event.extent.nbytes

        return survived

    def _check_run(self, run: str, location: str) -> None:
        meta = self.state.meta
        if not meta.run:
            first = e.Began(run, SCHEMA_VERSION)
            apply(self.state, first)
            self._journal.append([first])
        elif meta.run != run:
            raise StorageError(
                f"the log belongs to run {meta.run!r}",
                field=location,
                remedy="choose another name or buffer.storage",
            )
        elif meta.schema != SCHEMA_VERSION:
            raise StorageError(
                f"the log has schema version {meta.schema}; this rayrft writes {SCHEMA_VERSION}",
                field=location,
                remedy="continue with the version of rayrft that wrote it; its segments are plain Arrow files",
            )
