"""What the Buffer holds: groups of own rows with their fate, and demonstrations with a cursor.

Rows stay in the object store; the stores keep references and the few numbers that decisions need. Conservation holds at
all times: ``sampled = trained + dropped + held`` over own rows, where held means ready or leased.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayrft.buffer.schedule import Ticket

Ref = Any
"""A reference to a record batch in the object store (``ray.ObjectRef``)."""


@dataclass(frozen=True)
class GroupReport:
    """What the Explorer says of a finished group, kept or not: the source of the step's rollout metrics."""

    rows: int
    reward_sum: float = 0.0
    """Over rows of known reward."""
    scored: int = 0
    tokens: int = 0
    truncated: int = 0
    """Rows cut at max_tokens."""


@dataclass(frozen=True)
class StoredGroup:
    """A group that passed the door: its rows lie in ``ref``."""

    ticket: Ticket
    ref: Ref
    rows: int
    tokens: int
    oldest_version: int


@dataclass
class UsualStore:
    """Groups of own rows and the ledger of every row ever sampled."""

    ready: dict[int, StoredGroup] = field(default_factory=dict)
    leased: dict[int, list[StoredGroup]] = field(default_factory=dict)
    sampled: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_tasks: Counter[str] = field(default_factory=Counter)
    """Tasks that gave no rows at all, such as those with too long a prompt."""

    @property
    def held(self) -> int:
        groups = [*self.ready.values(), *(group for lease in self.leased.values() for group in lease)]
        return sum(group.rows for group in groups)

    def add(self, group: StoredGroup) -> None:
        self.sampled += group.rows
        self.ready[group.ticket.sequence] = group

    def drop(self, rows: int, reason: str) -> None:
        """Rows that were sampled but never stored."""
        self.sampled += rows
        self.dropped[reason] += rows

    def discard(self, sequences: list[int], reason: str) -> None:
        """Stored groups that will not be trained."""
        for sequence in sequences:
            self.dropped[reason] += self.ready.pop(sequence).rows

    def lease(self, step: int, sequences: list[int]) -> list[StoredGroup]:
        self.leased[step] = [self.ready.pop(sequence) for sequence in sequences]
        return self.leased[step]

    def ack(self, step: int) -> None:
        self.trained += sum(group.rows for group in self.leased.pop(step))

    def ledger(self) -> dict[str, Any]:
        """The counters, after asserting that they close."""
        held = self.held
        if self.sampled != self.trained + self.dropped.total() + held:
            raise AssertionError(
                f"rows are lost or doubled: sampled {self.sampled} != trained {self.trained} "
                f"+ dropped {self.dropped.total()} + held {held}"
            )
        return {
            "sampled": self.sampled,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "held": held,
            "dropped_tasks": dict(self.dropped_tasks),
        }


@dataclass
class ExpertStore:
    """Demonstrations under one name, drawn without replacement in an order that is shuffled anew every epoch."""

    ref: Ref
    tokens: np.ndarray
    """Tokens of each row."""
    seed: int
    epoch: int = 0
    cursor: int = 0
    drawn: int = 0

    def draw(self, count: int) -> list[int]:
        """The next ``count`` row indices; an epoch that ends goes over into the next."""
        rows: list[int] = []
        while len(rows) < count:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.tokens))
            part = order[self.cursor : self.cursor + count - len(rows)]
            rows.extend(int(row) for row in part)
            self.cursor += len(part)
            if self.cursor == len(self.tokens):
                self.epoch, self.cursor = self.epoch + 1, 0
        self.drawn += count
        return rows
