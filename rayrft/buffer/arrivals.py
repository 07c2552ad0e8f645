"""Groups that arrive: room for them, their rows into a shard's segment, and their entries into the journal."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from rayrft.buffer.log import events as e
from rayrft.buffer.log.shard import Appended
from rayrft.buffer.retention import Retention
from rayrft.buffer.store import Store
from rayrft.buffer.writer import Entry, group_key, shard_of

_ROOM_DEADLINE_S = 600.0


class Arrivals:
    """Takes what producers put."""

    def __init__(self, store: Store, retention: Retention) -> None:
        self._store = store
        self._retention = retention

    async def put(self, entries: list[Entry], payload: list[Any]) -> None:
        """See `Buffer.put`."""
        keys = [group_key(entry.group_id) for entry in entries]
        wanted = [i for i, entry in enumerate(entries) if self._store.state.expects(keys[i], entry.sequence)]
        if not wanted:
            return await self._store.commit()
        # A group with a ticket was given its room when it was admitted.
        if self._store.config.when_full != "wait" or any(entries[i].ticket is None for i in wanted):
            rows, nbytes = sum(entries[i].rows for i in wanted), sum(entries[i].nbytes for i in wanted)
            await self._retention.make_room(rows, nbytes, _ROOM_DEADLINE_S)
        shard = shard_of(entries[0].group_id, len(self._store.shards))
        message = payload[0] if shard or isinstance(payload[0], pa.Buffer) else await payload[0]
        sync = self._store.config.fsync == "always"
        done: Appended = await self._store.shards.call(shard, "append", message, wanted, len(entries), sync=sync)
        stored = [_stored_group(entries[i], keys[i], done, place) for place, i in enumerate(done.groups)]
        events: list[e.Event] = [e.Stored(shard, done.extent, stored)] if stored else []
        for i in sorted(set(wanted) - set(done.groups)):
            dropped = {**entries[i].dropped, **done.faults.get(i, {})}
            events.append(e.Dropped(entries[i].sequence, dropped, entries[i].report, keys[i]))
        await self._store.commit(*events)


def _stored_group(entry: Entry, key: int, done: Appended, place: int) -> e.StoredGroup:
    """The ``place``-th group that was appended, as the journal keeps it."""
    numbers = done.numbers
    return e.StoredGroup(
        key=key,
        row=done.row + int(numbers.starts[place]),
        rows=int(numbers.rows[place]),
        tokens=int(numbers.tokens[place]),
        nbytes=int(done.nbytes[place]),
        version=int(numbers.versions[place]),
        score=float(done.scores[place]),
        sequence=entry.sequence,
        dropped={**entry.dropped, **done.faults.get(done.groups[place], {})},
        report=entry.report,
    )
