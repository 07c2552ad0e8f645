"""Bounds of the Buffer: waiting or eviction when it is full, and trimming of the log."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pyarrow as pa

from rayrft.buffer.events import Event
from rayrft.buffer.export import are_personal
from rayrft.buffer.groups import GroupStatus
from rayrft.buffer.log.row_log import RowSpan
from rayrft.buffer.samplers import log_priorities
from rayrft.buffer.store import Store
from rayrft.buffer.transitions.contents import GroupsEvicted, GroupsMoved, SegmentsDeleted
from rayrft.errors import RayrftError

_EVICT_SHARE = 0.01
"""Share of the bound that is evicted at once, since choosing the lowest priorities scans all groups."""
_SPARSE = 0.5
"""A segment with less than this share of held rows is rewritten."""


class Retention:
    """Keeps held rows within ``max_rows`` and ``max_bytes``, and the log within ``log_bytes``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def room(self, feed: str) -> int:
        """Return the number of groups that the producers of a feed may start."""
        state, config = self._store.state, self._store.config
        stage = state.stage
        waits = config.when_full == "wait"
        full = self._excess(1, 0) > 0
        if not feed:
            # A step that waits for new groups must get them even if the Buffer is full: it then frees room.
            return 0 if waits and full and not stage.schedule.needs_admission else state.capacity
        job, held = state.feeds[feed], state.in_flight(feed)
        free = job.in_flight - held
        if not waits:
            return free
        rows = config.max_rows - state.groups.held_rows - held * job.group_size
        # The last group may exceed the bound by a part of itself.
        room = 0 if full else -(-rows // job.group_size)
        if stage.open and stage.plan is not None and all(lease.acked for lease in state.training.leases.values()):
            # The next step must get its groups even if the held ones have more rows than usual: it frees room.
            room = max(room, stage.plan.groups - state.eligible - held)
        return max(0, min(free, room))

    async def make_room(self, rows: int, nbytes: int, deadline_s: float) -> None:
        """Wait, or evict, until there is room for this many rows and bytes. Raises RayrftError at the deadline."""
        config = self._store.config
        if config.when_full == "wait":
            try:
                await self._store.wait_for(lambda: self._excess(rows, nbytes) <= 0, deadline_s)
            except TimeoutError:
                groups = self._store.state.groups
                held = f"{groups.held_rows} rows and {groups.held_bytes} bytes are held"
                problem = f"waited {deadline_s:g} s for room for {rows} rows: {held}"
                remedy = "train on the held rows, raise max_rows or max_bytes, or let when_full evict"
                raise RayrftError(problem, remedy, field="buffer.max_rows", value=config.max_rows) from None
        elif self._excess(rows, nbytes) > 0:
            await self._evict(rows, nbytes)

    async def release(self, slots: list[int]) -> None:
        """Free the object-store blocks of segments in which no group is held any more."""
        groups = self._store.state.groups
        done = [segment for segment in {*groups.segment[slots].tolist()} if not groups.live[segment]]
        await self._store.in_row_thread(self._store.rows.release, done)

    async def trim(self) -> None:
        """Bring the log within its bound: delete unneeded segments, oldest first; then rewrite sparse ones."""
        if self._store.state.contents.log_bytes <= self._store.config.log_bytes:
            return
        async with self._store.move_lock:
            await self._delete_dead()
            if self._store.state.contents.log_bytes > self._store.config.log_bytes:
                await self._rewrite_sparse()
                await self._delete_dead()

    async def forget(self, ids: Collection[str], before: float) -> tuple[int, int]:
        """Erase rows from the log; see `Buffer.forget`. A segment is rewritten without them, and deleted."""
        store, groups, extents = self._store, self._store.state.groups, self._store.state.contents.extents
        erased = leased = 0
        async with store.move_lock:
            await store.in_row_thread(store.rows.end_segment)
            for segment, size in sorted(extents.items()):
                batch = await store.in_row_thread(store.rows.read, [RowSpan(segment, 0, size.rows)])
                unwanted = np.array(list(are_personal(batch, {*ids}, before)), bool)
                if not unwanted.any():
                    continue
                until = np.concatenate([[0], np.cumsum(unwanted)])
                slots = np.flatnonzero((groups.segment == segment) & (groups.status != GroupStatus.FREE))
                whose = until[groups.row[slots] + groups.rows[slots]] > until[groups.row[slots]]
                for slot in slots[whose]:
                    unwanted[groups.row[slot] : groups.row[slot] + groups.rows[slot]] = True
                kept = slots[~whose].tolist()
                moved = [await self._rewrite(kept)] if kept and segment not in self._leased() else []
                if segment in self._leased():
                    leased += int(unwanted.sum())
                    # A step has leased it meanwhile: the copy is looked through the next time.
                    await store.commit(*(replace(event, slots=[]) for event in moved))
                    continue
                held = [slot for slot in slots[whose].tolist() if groups.status[slot] == GroupStatus.READY]
                names = batch.column("experience_id").filter(pa.array(unwanted)).to_pylist()
                evicted = [GroupsEvicted(held, "forgotten")] if held else []
                await self._delete([segment], names, *evicted, *moved)
                erased += int(unwanted.sum())
        return erased, leased

    def _excess(self, rows: int, nbytes: int) -> float:
        """Return by how much held rows and bytes plus these exceed a bound, as a share of it."""
        config, groups = self._store.config, self._store.state.groups
        return max((groups.held_rows + rows) / config.max_rows, (groups.held_bytes + nbytes) / config.max_bytes) - 1

    async def _evict(self, rows: int, nbytes: int) -> None:
        config, groups = self._store.config, self._store.state.groups
        ready = groups.where(GroupStatus.READY)
        if config.when_full == "evict_lowest_priority":
            columns = groups.score[ready], groups.version[ready], groups.uses[ready]
            ready = ready[np.argsort(log_priorities(self._store.state.config, *columns), kind="stable")]
        rows_over = groups.held_rows + rows - config.max_rows
        bytes_over = groups.held_bytes + nbytes - config.max_bytes
        if rows_over / config.max_rows >= bytes_over / config.max_bytes:
            measure, need = groups.rows[ready], rows_over + int(_EVICT_SHARE * config.max_rows)
        else:
            measure, need = groups.nbytes[ready], bytes_over + int(_EVICT_SHARE * config.max_bytes)
        enough = np.cumsum(measure) >= need
        count = int(np.argmax(enough)) + 1 if enough.any() else len(ready)
        if count:
            gone = ready[:count].tolist()
            await self._store.commit(GroupsEvicted(gone, f"evicted_{config.when_full.removeprefix('evict_')}"))
            await self.release(gone)

    def _leased(self) -> set[int]:
        """Return the segments with groups that a restarted trainer would lease again."""
        state = self._store.state
        slots = [slot for lease in state.training.leases.values() for slot in lease.slots]
        return {*state.groups.segment[slots].tolist()}

    async def _delete_dead(self) -> None:
        state, dead = self._store.state, list[int]()
        needed = self._leased() | {segment for segment, count in state.groups.live.items() if count}
        excess = state.contents.log_bytes - self._store.config.log_bytes
        for segment in sorted(state.contents.extents)[:-1]:
            if excess > 0 and segment not in needed:
                dead.append(segment)
                excess -= state.contents.extents[segment].nbytes
        if dead:
            await self._delete(dead, [])

    async def _rewrite_sparse(self) -> None:
        groups = self._store.state.groups
        extents = self._store.state.contents.extents
        kept = self._leased()
        for segment in sorted(extents)[:-1]:
            held = groups.where(GroupStatus.READY, GroupStatus.PARKED)
            held = held[groups.segment[held] == segment]
            share = groups.rows[held].sum() / extents[segment].rows
            if len(held) and share < _SPARSE and segment not in kept:
                await self._store.commit(await self._rewrite(held.tolist()))

    async def _rewrite(self, slots: list[int]) -> GroupsMoved:
        """Rewrite groups at the end of the log; return the event to commit."""
        spans = [self._store.span(slot) for slot in slots]
        rows = self._store.rows
        done = await self._store.in_row_thread(lambda: rows.append(rows.read(spans).serialize()))
        return GroupsMoved(done.extent, slots, done.row)

    async def _delete(self, segments: list[int], forgotten: list[str], *events: Event) -> None:
        """Commit events and the deletion of segments, then delete their files."""
        await self._store.commit(*events, SegmentsDeleted(segments, forgotten))
        await self._store.flush()
        await self._store.in_row_thread(self._store.rows.delete, segments)
