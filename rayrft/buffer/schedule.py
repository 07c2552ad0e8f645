"""When a group may start and which groups a step takes: one number, ``max_staleness``.

Invariants, with t the version of the trainer (optimiser steps), S = max_staleness, P = groups per step:

* A group admitted at version v has the deadline v + S: consumed at a step t <= v + S, no token of it is staler than
  S, for its tokens were sampled under v or later.
* At most (S + 1) P groups hold a place: running, ready, or taken by a step whose weights are not published yet. With
  n(d) the active (running or ready) groups whose deadline is at most d, n(d) <= (d - t + 1) P for every d >= t: the
  steps t..d have room for all that are due by then.
* A step takes ready groups by earliest deadline, and only a choice after which the room still suffices (seen from
  t + 1). Otherwise it waits for a straggler that is due.

So every admitted group can be consumed in time whatever the order in which groups finish, and none is thrown away for
its age. The note beside this file, schedule.md, has the proof and an example.

With ``over_sampling`` > 1 more groups than needed are in flight, a step takes the first P that are ready, and what
could no longer be in time is swept: expired, to be dropped and counted.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True)
class StagePlan:
    """What a stage asks of the Buffer: ``groups`` groups a step, and ``expert_rows`` demonstrations, which are
    preference ``pairs`` or not; dealt in ``mini_batches`` parts."""

    groups: int
    group_size: int = 1
    expert_rows: int = 0
    demonstrations: str | None = None
    max_staleness: int = 0
    over_sampling: float = 1.0
    version: int = 0
    name: str = ""
    """By which the Buffer knows that a stage is opened once more."""
    pairs: bool = False
    mini_batches: int = 1
    advantage: str = "grpo"
    """How feedback on a reward changes the advantages of its group (`rayrft.algorithms.advantages`)."""
    coefficients: dict[str, float | int | bool | str | None] = field(default_factory=dict)
    scheduled: bool = True
    """Whether groups come by ticket. Otherwise producers put what they have, and steps take what is there."""


@dataclass(frozen=True)
class Ticket:
    """Permission to start one group. ``deadline`` is the last step at which it may be consumed.

    ``task`` is the number of the task to act on, or None where the Buffer was given no tasks.
    """

    sequence: int
    version: int
    deadline: int
    task: int | None = None


@dataclass
class Schedule:
    """Pure bookkeeping of active groups; no clock, no actor. Raises ValueError where its numbers make no sense."""

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
            raise ValueError("groups_per_step >= 1, max_staleness >= 0 and over_sampling >= 1 are needed")

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now. Without staleness none while a step is trained: they would be late."""
        if self.max_staleness == 0 and self.taken:
            return 0
        limit = math.ceil(self.over_sampling * (self.max_staleness + 1) * self.groups_per_step)
        return max(0, limit - len(self.running) - len(self.ready) - self.taken)

    def admit(self, count: int) -> list[Ticket]:
        """Up to ``count`` tickets at the present version."""
        tickets = []
        for _ in range(min(count, self.capacity)):
            ticket = Ticket(self.next_sequence, self.version, self.version + self.max_staleness)
            self.running[ticket.sequence] = ticket
            self.next_sequence += 1
            tickets.append(ticket)
        return tickets

    def finish(self, ticket: Ticket) -> bool:
        """A group is complete. False where it is not wanted any more (it came after its deadline)."""
        if self.running.pop(ticket.sequence, None) is None or ticket.deadline < self.version:
            return False
        self.ready[ticket.sequence] = ticket
        return True

    def release(self, sequence: int) -> None:
        """A group failed or was filtered: its place is free."""
        self.running.pop(sequence, None)

    def choose(self, step: int) -> list[int] | None:
        """Sequence numbers of the P groups that step ``step`` consumes, or None while it has to wait."""
        if len(self.ready) < self.groups_per_step:
            return None
        by_deadline = sorted(self.ready.values(), key=lambda ticket: (ticket.deadline, ticket.sequence))
        chosen = [ticket.sequence for ticket in by_deadline[: self.groups_per_step]]
        wait = self.over_sampling == 1.0 and self.running and not self._room_after(step, set(chosen))
        return None if wait else chosen

    def take(self, sequences: list[int]) -> None:
        """These groups are leased; their places are free once the step's weights are published."""
        for sequence in sequences:
            del self.ready[sequence]
        self.taken = len(sequences)

    def give_back(self, tickets: list[Ticket]) -> None:
        """Leased groups return."""
        self.ready.update({ticket.sequence: ticket for ticket in tickets})
        self.taken = max(0, self.taken - len(tickets))

    def advance(self, version: int) -> list[int]:
        """Weights of this version are published. Returns ready groups that can no longer be in time, now expired."""
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
        """Go on with other numbers. Returns ready groups that are too old for them, now expired."""
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
        """Whether steps from ``step + 1`` on have room for every other active group by its deadline."""
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
    """Pure bookkeeping: ``groups`` are drawn a step, ``fresh`` new ones are asked for."""

    groups: int
    fresh: int
    max_staleness: int
    over_sampling: float = 1.0
    version: int = 0
    next_sequence: int = 0
    running: dict[int, Ticket] = field(default_factory=dict)
    fresh_ready: int = 0
    """Groups that arrived and were not asked for by a step yet."""
    kind: Literal["replay"] = "replay"

    def capacity(self, eligible: int) -> int:
        """Groups that may be admitted now, with ``eligible`` groups in the pool."""
        limit = math.ceil(self.over_sampling * (self.max_staleness + 1) * self.fresh)
        return max(0, max(limit - self.fresh_ready, self.groups - eligible) - len(self.running))

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
        self.fresh_ready += 1
        return True

    def release(self, sequence: int) -> None:
        """A group failed or was filtered: its place is free."""
        self.running.pop(sequence, None)

    def adjust(self, groups: int, fresh: int, max_staleness: int, over_sampling: float) -> None:
        """Go on with other numbers."""
        self.groups, self.fresh, self.max_staleness, self.over_sampling = groups, fresh, max_staleness, over_sampling

    @property
    def needs_admission(self) -> bool:
        """Whether the next step waits for new groups of which not all are under way."""
        return self.fresh_ready + len(self.running) < self.fresh

    def may_draw(self, eligible: int) -> bool:
        """Whether a step finds its groups, and enough new ones came."""
        return self.fresh_ready >= self.fresh and eligible >= self.groups

    def drawn(self) -> None:
        """A step has its batch."""
        self.fresh_ready -= self.fresh

    def give_back(self) -> None:
        """A step returned its batch."""
        self.fresh_ready += self.fresh

    def advance(self, version: int) -> None:
        """Weights of this version are published."""
        if version < self.version:
            raise ValueError(f"versions only grow: {version} after {self.version}")
        self.version = version
        self.running = {s: ticket for s, ticket in self.running.items() if ticket.deadline >= version}
