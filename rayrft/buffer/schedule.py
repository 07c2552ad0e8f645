"""Schedule of groups, by one number ``max_staleness``: when a group may start and which groups a step takes.

Invariants, with t the version of the trainer (optimiser steps), S = max_staleness, P = groups per step:

* A group admitted at version v has the deadline v + S: consumed at a step t <= v + S, no token of it is staler than
  S, for its tokens were sampled under v or later.
* At most (S + 1) P groups have a place: running, ready, or taken by a step whose weights are not published yet. With
  n(d) the active (running or ready) groups whose deadline is at most d, n(d) <= (d - t + 1) P for every d >= t: the
  steps t..d have room for all that are due by then.
* A step takes ready groups by earliest deadline, and only a choice after which the room still suffices (seen from
  t + 1). Otherwise it waits for a straggler that is due.

So every admitted group can be consumed in time in whatever order groups finish, and none is dropped for its age. See
schedule.md beside this file for the proof and an example.

With ``over_sampling`` > 1 more groups than needed are in flight, a step takes the first P that are ready, and groups
that can no longer be in time expire, to be dropped and counted.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True)
class StagePlan:
    """A stage's demands on the Buffer: ``groups`` groups and ``expert_rows`` demonstrations (or preference ``pairs``)
    per step, split into ``mini_batches``."""

    groups: int
    group_size: int = 1
    expert_rows: int = 0
    demonstrations: str | None = None
    max_staleness: int = 0
    over_sampling: float = 1.0
    version: int = 0
    name: str = ""
    """With ``version``, identifies a stage that is opened again."""
    pairs: bool = False
    mini_batches: int = 1
    scheduled: bool = True
    """Whether groups need tickets. Otherwise producers put groups at any time, and steps draw from the pool."""


@dataclass(frozen=True)
class Ticket:
    """Permission to start one group. ``deadline`` is the last step at which it may be consumed.

    ``task`` is the index of the task, or None if the Buffer has no task set.
    """

    sequence: int
    version: int
    deadline: int
    task: int | None = None


@dataclass
class Schedule:
    """Schedule of a stage whose groups are used once, as pure bookkeeping. Raises ValueError for invalid numbers."""

    groups_per_step: int
    max_staleness: int
    over_sampling: float = 1.0
    version: int = 0
    next_sequence: int = 0
    running: dict[int, Ticket] = field(default_factory=dict)
    ready: dict[int, Ticket] = field(default_factory=dict)
    taken: int = 0
    kind: Literal["fifo"] = "fifo"

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.max_staleness < 0 or self.over_sampling < 1:
            raise ValueError("groups_per_step >= 1, max_staleness >= 0 and over_sampling >= 1 are required")

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now; with ``max_staleness`` 0 none during a step, as they would be late."""
        if self.max_staleness == 0 and self.taken:
            return 0
        limit = math.ceil(self.over_sampling * (self.max_staleness + 1) * self.groups_per_step)
        return max(0, limit - len(self.running) - len(self.ready) - self.taken)

    def admit(self, count: int) -> list[Ticket]:
        """Issue up to ``count`` tickets at the current version."""
        tickets = []
        for _ in range(min(count, self.capacity)):
            ticket = Ticket(self.next_sequence, self.version, self.version + self.max_staleness)
            self.running[ticket.sequence] = ticket
            self.next_sequence += 1
            tickets.append(ticket)
        return tickets

    def finish(self, ticket: Ticket) -> bool:
        """Mark a group as ready; return False if it is too late."""
        if self.running.pop(ticket.sequence, None) is None or ticket.deadline < self.version:
            return False
        self.ready[ticket.sequence] = ticket
        return True

    def release(self, sequence: int) -> None:
        """A group failed or was filtered: its place is free."""
        self.running.pop(sequence, None)

    def choose(self, step: int) -> list[int] | None:
        """Return the sequence numbers of the P groups that step ``step`` consumes; None if it has to wait."""
        if len(self.ready) < self.groups_per_step:
            return None
        by_deadline = sorted(self.ready.values(), key=lambda ticket: (ticket.deadline, ticket.sequence))
        chosen = [ticket.sequence for ticket in by_deadline[: self.groups_per_step]]
        wait = self.over_sampling == 1.0 and self.running and not self._room_after(step, set(chosen))
        return None if wait else chosen

    def take(self, sequences: list[int]) -> None:
        """Mark groups as leased; their places become free once the step's weights are published."""
        for sequence in sequences:
            del self.ready[sequence]
        self.taken = len(sequences)

    def give_back(self, tickets: list[Ticket]) -> None:
        """Make leased groups ready again."""
        self.ready.update({ticket.sequence: ticket for ticket in tickets})
        self.taken = max(0, self.taken - len(tickets))

    def advance(self, version: int) -> list[int]:
        """Set the published version; return the ready groups that can no longer be in time, now expired."""
        if version < self.version:
            raise ValueError(f"versions only grow: {version} after {self.version}")
        self.version = version
        self.taken = 0
        late = [sequence for sequence, ticket in self.ready.items() if ticket.deadline < version]
        for sequence in late:
            del self.ready[sequence]
        self.running = {s: ticket for s, ticket in self.running.items() if ticket.deadline >= version}
        return late

    def adjust(self, groups_per_step: int, max_staleness: int, over_sampling: float) -> list[int]:
        """Continue with other numbers; return the ready groups that are too old for them, now expired."""
        fewer, taken = max(0, self.max_staleness - max_staleness), self.taken
        self.groups_per_step, self.max_staleness, self.over_sampling = groups_per_step, max_staleness, over_sampling
        self.running, self.ready = (
            {sequence: replace(ticket, deadline=ticket.deadline - fewer) for sequence, ticket in tickets.items()}
            for tickets in (self.running, self.ready)
        )
        late = self.advance(self.version)
        self.taken = taken
        return late

    def _room_after(self, step: int, taken: set[int]) -> bool:
        """Return whether steps from ``step + 1`` on have room for all other active groups by their deadlines."""
        active = [*self.running.values(), *self.ready.values()]
        due = Counter(ticket.deadline for ticket in active if ticket.sequence not in taken)
        waiting = 0
        for deadline in sorted(due):
            waiting += due[deadline]
            if waiting > (deadline - step) * self.groups_per_step:
                return False
        return True


@dataclass
class ReplaySchedule:
    """Schedule of a replaying stage: a step draws ``groups`` from the pool, and waits for ``fresh`` new ones."""

    groups: int
    fresh: int
    max_staleness: int
    over_sampling: float = 1.0
    version: int = 0
    next_sequence: int = 0
    running: dict[int, Ticket] = field(default_factory=dict)
    fresh_ready: int = 0
    """New groups that have arrived and are not counted for a step yet."""
    kind: Literal["replay"] = "replay"

    def capacity(self, eligible: int) -> int:
        """Return the number of groups that may be admitted now, with ``eligible`` groups in the pool."""
        limit = math.ceil(self.over_sampling * (self.max_staleness + 1) * self.fresh)
        return max(0, max(limit - self.fresh_ready, self.groups - eligible) - len(self.running))

    def admit(self, count: int) -> list[Ticket]:
        """Issue ``count`` tickets at the current version; the caller has checked `capacity`."""
        tickets = []
        for _ in range(count):
            ticket = Ticket(self.next_sequence, self.version, self.version + self.max_staleness)
            self.running[ticket.sequence] = ticket
            self.next_sequence += 1
            tickets.append(ticket)
        return tickets

    def finish(self, ticket: Ticket) -> bool:
        """Count a group as ready; return False if it is too late."""
        if self.running.pop(ticket.sequence, None) is None or ticket.deadline < self.version:
            return False
        self.fresh_ready += 1
        return True

    def release(self, sequence: int) -> None:
        """A group failed or was filtered: its place is free."""
        self.running.pop(sequence, None)

    def adjust(self, groups: int, fresh: int, max_staleness: int, over_sampling: float) -> None:
        """Continue with other numbers."""
        self.groups, self.fresh, self.max_staleness, self.over_sampling = groups, fresh, max_staleness, over_sampling

    @property
    def needs_admission(self) -> bool:
        """Whether the next step waits for new groups that are not admitted yet."""
        return self.fresh_ready + len(self.running) < self.fresh

    def may_draw(self, eligible: int) -> bool:
        """Return whether a step has enough eligible groups, and enough new ones."""
        return self.fresh_ready >= self.fresh and eligible >= self.groups

    def drawn(self) -> None:
        """Record that a step has drawn its batch."""
        self.fresh_ready -= self.fresh

    def give_back(self) -> None:
        """Record that a step has returned its batch."""
        self.fresh_ready += self.fresh

    def advance(self, version: int) -> None:
        """Set the published version, and expire running groups that can no longer be in time."""
        if version < self.version:
            raise ValueError(f"versions only grow: {version} after {self.version}")
        self.version = version
        self.running = {s: ticket for s, ticket in self.running.items() if ticket.deadline >= version}
