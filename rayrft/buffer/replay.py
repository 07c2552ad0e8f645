"""The pace of a run that trains on groups more than once: so many new groups for every step, and an age limit.

Groups go into a pool, from which a sampler draws. Nothing is due at a step, so no order of arrival can make a group
late; what is older than ``max_staleness`` leaves the pool before the draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from rayrft.buffer.schedule import Ticket


@dataclass
class ReplaySchedule:
    """Pure bookkeeping: ``groups`` are drawn a step, ``fresh`` new ones are asked for."""

    groups: int
    fresh: int
    max_staleness: int
    over_sampling: float = 1.0
    version: int = 0
    next_sequence: int = 0
    running: dict[int, Ticket] = field(default_factory=dict)
    unpaid: int = 0
    """Groups that arrived and were not asked for by a step yet."""
    kind: Literal["replay"] = "replay"

    def capacity(self, eligible: int) -> int:
        """Groups that may be admitted now, with ``eligible`` groups in the pool."""
        limit = math.ceil(self.over_sampling * (self.max_staleness + 1) * self.fresh)
        return max(0, max(limit - self.unpaid, self.groups - eligible) - len(self.running))

    def admit(self, count: int) -> list[Ticket]:
        """``count`` tickets at the present version; the caller has looked at `capacity`."""
        tickets = []
        for _ in range(count):
            ticket = Ticket(self.next_sequence, self.version, self.version + self.max_staleness)
            self.running[ticket.sequence] = ticket
            self.next_sequence += 1
            tickets.append(ticket)
        return tickets

    def finish(self, ticket: Ticket) -> bool:
        """A group is complete. False where it is too old."""
        if self.running.pop(ticket.sequence, None) is None or ticket.deadline < self.version:
            return False
        self.unpaid += 1
        return True

    def release(self, sequence: int) -> None:
        """A group failed or was filtered: its place is free."""
        self.running.pop(sequence, None)

    def adjust(self, groups: int, fresh: int, max_staleness: int, over_sampling: float) -> None:
        """Go on with other numbers."""
        self.groups, self.fresh, self.max_staleness, self.over_sampling = groups, fresh, max_staleness, over_sampling

    @property
    def starved(self) -> bool:
        """Whether the next step waits for new groups of which not all are under way."""
        return self.unpaid + len(self.running) < self.fresh

    def may_draw(self, eligible: int) -> bool:
        """Whether a step finds its groups, and enough new ones came."""
        return self.unpaid >= self.fresh and eligible >= self.groups

    def drawn(self) -> None:
        """A step has its batch."""
        self.unpaid -= self.fresh

    def give_back(self) -> None:
        """A step returned its batch."""
        self.unpaid += self.fresh

    def advance(self, version: int) -> None:
        """Weights of this version are published."""
        if version < self.version:
            raise ValueError(f"versions only grow: {version} after {self.version}")
        self.version = version
        self.running = {s: ticket for s, ticket in self.running.items() if ticket.deadline >= version}
