"""Metadata of the groups in a call of `Buffer.put`, and the receipts it returns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from rayrft.buffer.events import GroupReport
from rayrft.buffer.schedule import Ticket
from rayrft.buffer.validation import Fault


@dataclass(frozen=True)
class Entry:
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
    def sequence(self) -> int | None:
        return None if self.ticket is None else self.ticket.sequence


@dataclass(frozen=True)
class Receipt:
    """Receipt of a group that was put: it is in the log, except the rows in ``faults``.

    A group without a ticket is stored as a whole or, if it has ``faults``, not at all.
    """

    group_id: str
    faults: tuple[Fault, ...] = ()


def group_key(group_id: str) -> int:
    """Hash a group id to the 64-bit key that the Buffer uses."""
    return int.from_bytes(hashlib.blake2b(group_id.encode(), digest_size=8).digest(), "little")
