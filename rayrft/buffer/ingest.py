"""Ingestion of groups: metadata, room, and validation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from rayrft.buffer.events import Event, GroupReport, StoredGroup
from rayrft.buffer.groups import GroupStatus, group_key
from rayrft.buffer.log.row_log import AppendResult
from rayrft.buffer.retention import Retention
from rayrft.buffer.schedule import Ticket
from rayrft.buffer.store import Store
from rayrft.buffer.transitions.contents import GroupDropped, GroupParked, GroupsStored
from rayrft.buffer.validation import Fault, Limits

_ROOM_DEADLINE_S = 600.0
_OTHER_ROWS = "group stored before with other rows"
_USED_ID = "group_id of another group"
_OF_A_FAULTY_GROUP = "another row of the group invalid"
_NO_STEP = "the group was dropped: it is too old, or the stage has no place for it"


@dataclass(frozen=True)
class GroupEntry:
    """Metadata of a group that is put. ``dropped`` counts rows that were sampled and are not in it, by reason."""

    group_id: str
    ticket: Ticket | None
    report: GroupReport
    dropped: dict[str, int]
    rows: int
    nbytes: int
    digest: int = 0
    """Checksum of the rows of a group without a ticket, which identifies a repeated put."""

    @property
    def key(self) -> int:
        return group_key(self.group_id)

    @property
    def sequence(self) -> int | None:
        return None if self.ticket is None else self.ticket.sequence


class Arrivals:
    """Stores the groups that producers put, after validation against the model's limits."""

    def __init__(self, store: Store, retention: Retention, limits: Limits) -> None:
        self._store = store
        self._retention = retention
        self._limits = limits

    @property
    def limits(self) -> Limits:
        """Limits of the run's model, or of the model of the jobs that meet here."""
        model = self._store.state.meta.model
        return self._limits if model is None else Limits(model.vocabulary, model.max_length)

    async def put(self, entries: list[GroupEntry], payload: list[Any]) -> list[list[Fault]]:
        """Store the groups of a call that are new; see `Buffer.put`."""
        state, groups = self._store.state, self._store.state.groups

        def in_log() -> list[tuple[int, int]]:
            """Return the indices and slots of groups without a ticket that are in the log."""
            slots = [(i, groups.find(entry.key)) for i, entry in enumerate(entries) if entry.ticket is None]
            return [(i, slot) for i, slot in slots if slot is not None]

        def changed() -> list[int]:
            return [i for i, slot in in_log() if groups.digest[slot] != entries[i].digest]

        wanted = [i for i, entry in enumerate(entries) if state.expects(entry.key, entry.sequence)]
        # A ticket of a producer that is abandoned meanwhile is issued again, for the same group.
        held = [i for i, entry in enumerate(entries) if entry.sequence in state.outstanding and i not in wanted]
        events, faults = await self._store_groups(entries, wanted, payload) if wanted else ([], {})
        events += [_refused(entries[i], {_OTHER_ROWS: entries[i].rows}) for i in changed()]
        await self._store.commit(*events)
        faults |= {i: [Fault(entries[i].group_id, _OTHER_ROWS)] for i in changed()}
        # A repeated group has used its ticket; another group with the same id has not.
        if used := [i for i in held if entries[i].sequence in state.outstanding]:
            await self._store.commit(*(_refused(entries[i], {_USED_ID: entries[i].rows}) for i in used))
            faults |= {i: [Fault(entries[i].group_id, _USED_ID)] for i in used}
        for i in [i for i, slot in in_log() if groups.status[slot] == GroupStatus.DROPPED]:
            faults.setdefault(i, [Fault(entries[i].group_id, _NO_STEP)])
        return [faults.get(i, []) for i in range(len(entries))]

    async def park(self, entry: GroupEntry, payload: list[Any]) -> None:
        """Store the calls of an unfinished group; see `Buffer.park`."""
        events: list[Event] = []
        assert entry.ticket is not None  # only groups with tickets are parked
        if self._store.state.expects(entry.key, entry.sequence):
            message = await read_message(payload)
            done = await self._store.in_row_thread(self._store.rows.append, message)  # the finished group is validated
            events = [GroupParked(done.extent, _stored_group(entry, done, 0), entry.ticket.resumes)]
        await self._store.commit(*events)

    async def _store_groups(
        self, entries: list[GroupEntry], wanted: list[int], payload: list[Any]
    ) -> tuple[list[Event], dict[int, list[Fault]]]:
        """Write the rows of the wanted groups; return their events for the journal, and their faults."""
        # Room for a group with a ticket was reserved at its admission.
        store = self._store
        if store.config.when_full != "wait" or any(entries[i].ticket is None for i in wanted):
            rows, nbytes = sum(entries[i].rows for i in wanted), sum(entries[i].nbytes for i in wanted)
            await self._retention.make_room(rows, nbytes, _ROOM_DEADLINE_S)
        message = await read_message(payload)
        # Groups with tickets may lose invalid rows; other producers fix a group and put it again, so it must be whole.
        whole = [i for i in wanted if entries[i].ticket is None]
        limits = replace(self.limits, version=store.state.newest_version)
        done = await store.in_row_thread(store.rows.take, message, wanted, whole, len(entries), limits)
        stored = [_stored_group(entries[i], done, place) for place, i in enumerate(done.groups)]
        events: list[Event] = [GroupsStored(done.extent, stored)] if stored else []
        for i in sorted(set(wanted) - set(done.groups)):
            found = Counter(fault.reason for fault in done.faults[i])
            if i in whole and found.total() < entries[i].rows:
                found[_OF_A_FAULTY_GROUP] = entries[i].rows - found.total()
            events.append(_refused(entries[i], found))
        return events, {i: found for i, found in done.faults.items() if i in wanted}


async def read_message(payload: list[Any]) -> pa.Buffer:
    """Return a packed message that was sent inside the call, or by reference."""
    return payload[0] if isinstance(payload[0], pa.Buffer) else await payload[0]


def _refused(entry: GroupEntry, reasons: dict[str, int]) -> GroupDropped:
    """Return the event for a rejected group, with its rows by reason."""
    dropped = {**entry.dropped, **{f"rejected: {reason}": rows for reason, rows in reasons.items()}}
    # The producer puts a rejected group without a ticket again, fixed: its report is counted then.
    report = entry.report if entry.ticket is not None else GroupReport()
    return GroupDropped(entry.sequence, dropped, report, entry.key, entry.digest)


def _stored_group(entry: GroupEntry, done: AppendResult, place: int) -> StoredGroup:
    """Return the journal's entry for the ``place``-th appended group."""
    found = Counter(f"rejected: {fault.reason}" for fault in done.faults.get(done.groups[place], []))
    dropped = {**entry.dropped, **found}
    return StoredGroup(entry.key, entry.digest, done.stored[place], entry.sequence, dropped, entry.report)
