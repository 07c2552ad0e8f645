"""In-memory metadata of the Buffer's groups: numpy columns, one entry per group."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator
from enum import IntEnum
from typing import Annotated, get_type_hints

import numpy as np
import pyarrow as pa

from rayrft.buffer.events import StoredGroup
from rayrft.errors import DataError


class GroupStatus(IntEnum):
    """Status of a slot's group; see `HELD`."""

    FREE = 0
    """The slot is empty."""
    READY = 1
    LEASED = 2
    TRAINED = 3
    DROPPED = 4
    PARKED = 5
    """Unfinished: the rows are the model's calls until it was parked."""


HELD = (GroupStatus.READY, GroupStatus.LEASED, GroupStatus.PARKED)


def group_key(group_id: str) -> int:
    """Hash a group id to the 64-bit key that the Buffer uses."""
    return int.from_bytes(hashlib.blake2b(group_id.encode(), digest_size=8).digest(), "little")


def unknown_row(experience_id: str) -> DataError:
    """Return the error for an id of which there is no row."""
    remedy = "ids are in the column experience_id; rows leave the log when it reaches buffer.log_bytes"
    return DataError("no row of this id is in the log", remedy, field="experience_id", value=experience_id)


class GroupTable:
    """Columns by slot. A group keeps its slot while its rows are on disk; then the slot is reused."""

    status: Annotated[np.ndarray, np.int8]
    key: Annotated[np.ndarray, np.uint64]
    digest: Annotated[np.ndarray, np.uint32]  # of a group put without a ticket
    sequence: Annotated[np.ndarray, np.int64]  # of its ticket, or -1
    order: Annotated[np.ndarray, np.int64]  # of its arrival
    segment: Annotated[np.ndarray, np.int32]
    row: Annotated[np.ndarray, np.int64]
    rows: Annotated[np.ndarray, np.int32]
    masked: Annotated[np.ndarray, np.int32]  # rows that are never trained
    tokens: Annotated[np.ndarray, np.int32]
    nbytes: Annotated[np.ndarray, np.int64]
    version: Annotated[np.ndarray, np.int64]
    score: Annotated[np.ndarray, np.float64]
    uses: Annotated[np.ndarray, np.int16]
    pending: Annotated[np.ndarray, np.int16]  # leases that are not acknowledged
    last_step: Annotated[np.ndarray, np.int64]  # of its last lease, or -1
    reason: Annotated[np.ndarray, np.int16]  # of its drop: the place of it among the ledger's reasons, or -1

    def __init__(self) -> None:
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.zeros(0, dtype))
        self._free: list[int] = []
        self._slots: dict[int, int] = {}
        self.held_rows = 0
        self.held_bytes = 0
        self.live: Counter[int] = Counter()
        """Held groups by segment."""

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, key: int) -> int | None:
        """Return the slot of a group whose rows are on disk, or None."""
        return self._slots.get(key)

    def of_row(self, experience_id: str) -> Iterator[int]:
        """Iterate over the slots of groups whose ids are prefixes of a row's id, the longest first."""
        parts = experience_id.split("/")
        keys = (group_key("/".join(parts[:length])) for length in range(len(parts), 0, -1))
        return (slot for key in keys if (slot := self.find(key)) is not None)

    def add(self, group: StoredGroup, segment: int, order: int) -> int:
        """Add a group; return its slot, the lowest free one, so that replaying the journal gives the same slots."""
        if not self._free:
            self._grow()
        slot = heapq.heappop(self._free)
        self._slots[group.key] = slot
        self.key[slot], self.digest[slot] = group.key, group.digest
        self.sequence[slot] = -1 if group.sequence is None else group.sequence
        self.order[slot] = order
        self.segment[slot] = segment
        for name, number in vars(group.stored).items():
            getattr(self, name)[slot] = number
        self.uses[slot], self.pending[slot], self.last_step[slot], self.reason[slot] = 0, 0, -1, -1
        self.set_status(slot, GroupStatus.READY)
        return slot

    def set_status(self, slot: int, status: GroupStatus) -> None:
        """Change the status of a group, and update the sums over held groups."""
        was, now = int(self.status[slot] in HELD), int(status in HELD)
        self.status[slot] = status
        self.held_rows += (now - was) * self.trainable(slot)
        self.held_bytes += (now - was) * int(self.nbytes[slot])
        self.live[int(self.segment[slot])] += now - was

    def trainable(self, slots: int | list[int] | np.ndarray) -> int:
        """Return the number of rows of these groups without the masked ones, as the ledger counts."""
        return int((self.rows[slots] - self.masked[slots]).sum())

    def move(self, slot: int, segment: int, row: int) -> None:
        """Update the location of a group's rows."""
        held = int(self.status[slot] in HELD)
        self.live[int(self.segment[slot])] -= held
        self.segment[slot], self.row[slot] = segment, row
        self.live[segment] += held

    def forget(self, slots: np.ndarray) -> None:
        """Remove groups whose rows were deleted from disk, or are not needed any more."""
        for slot in slots.tolist():
            del self._slots[int(self.key[slot])]
            self.status[slot] = GroupStatus.FREE
            heapq.heappush(self._free, slot)

    def where(self, *statuses: GroupStatus) -> np.ndarray:
        """Return the slots with any of these statuses, in order of arrival."""
        slots = np.flatnonzero(np.isin(self.status, statuses))
        return slots[np.argsort(self.order[slots], kind="stable")]

    def to_table(self) -> pa.Table:
        """Return the columns for a snapshot."""
        return pa.table({name: getattr(self, name) for name in _COLUMNS})

    @classmethod
    def from_table(cls, table: pa.Table) -> GroupTable:
        """Build the table from a snapshot."""
        self = cls()
        for name in _COLUMNS:
            setattr(self, name, table.column(name).to_numpy().copy())
        taken = np.flatnonzero(self.status != GroupStatus.FREE)
        self._free = np.flatnonzero(self.status == GroupStatus.FREE).tolist()  # sorted: a heap
        self._slots = dict(zip(self.key[taken].tolist(), taken.tolist(), strict=True))
        held = np.isin(self.status, HELD)
        self.held_rows, self.held_bytes = self.trainable(held), int(self.nbytes[held].sum())
        self.live = Counter(self.segment[held].tolist())
        return self

    def _grow(self) -> None:
        size = len(self.status)
        more = max(1024, size // 2)
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(more, dtype)]))
        self._free = list(range(size, size + more))


_COLUMNS: dict[str, type] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(GroupTable, include_extras=True).items()
}
