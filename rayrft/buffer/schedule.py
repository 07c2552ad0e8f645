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
its age. Proof: the condition holds when nothing is active. Admission at t adds a group due at t + S, the latest
deadline there is, so only n(t + S) grows, and the bound on places keeps it: (S + 1) P before the take of step t, and
S P active ones after it, when the P taken still hold theirs. A lease is made only where the condition holds after it.
A group that fails or is filtered leaves the active set, which can only lower n. Progress: if every active group due
is ready, the earliest deadlines are taken first, and each n(d) falls by P or to 0.

With ``over_sampling`` > 1 more groups than needed are in flight, a step takes the first P that are ready, and what
could no longer be in time is swept: expired, to be dropped and counted.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Ticket:
    """Permission to start one group. ``deadline`` is the last step at which it may be consumed."""

    sequence: int
    version: int
    deadline: int


class Schedule:
    """Pure bookkeeping of active groups; no clock, no actor."""

    def __init__(
        self,
        groups_per_step: int,
        max_staleness: int,
        *,
        over_sampling: float = 1.0,
        version: int = 0,
        first_sequence: int = 0,
    ) -> None:
        if groups_per_step < 1 or max_staleness < 0 or over_sampling < 1:
            raise ValueError("groups_per_step >= 1, max_staleness >= 0 and over_sampling >= 1 are needed")
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self.over_sampling = over_sampling
        self.version = version
        self.next_sequence = first_sequence
        self._running: dict[int, Ticket] = {}
        self._ready: dict[int, Ticket] = {}
        self._taken = 0

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now."""
        limit = math.ceil(self.over_sampling * (self.max_staleness + 1) * self.groups_per_step)
        return max(0, limit - len(self._running) - len(self._ready) - self._taken)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def ready(self) -> int:
        return len(self._ready)

    def admit(self, count: int) -> list[Ticket]:
        """Up to ``count`` tickets at the present version."""
        tickets = []
        for _ in range(min(count, self.capacity)):
            ticket = Ticket(self.next_sequence, self.version, self.version + self.max_staleness)
            self._running[ticket.sequence] = ticket
            self.next_sequence += 1
            tickets.append(ticket)
        return tickets

    def finish(self, ticket: Ticket) -> bool:
        """A group is complete. False where it is not wanted any more (it came after its deadline)."""
        if self._running.pop(ticket.sequence, None) is None:
            return False
        self._ready[ticket.sequence] = ticket
        return True

    def release(self, ticket: Ticket) -> None:
        """A group failed or was filtered: its place is free."""
        self._running.pop(ticket.sequence, None)

    def take(self, step: int) -> list[int] | None:
        """Sequence numbers of the P groups that step ``step`` consumes, or None while it has to wait."""
        if len(self._ready) < self.groups_per_step:
            return None
        by_deadline = sorted(self._ready.values(), key=lambda ticket: (ticket.deadline, ticket.sequence))
        chosen = [ticket.sequence for ticket in by_deadline[: self.groups_per_step]]
        if self.over_sampling == 1.0 and not self._room_after(step, set(chosen)):
            return None
        for sequence in chosen:
            del self._ready[sequence]
        self._taken = self.groups_per_step
        return chosen

    def advance(self, version: int) -> list[int]:
        """Weights of this version are published. Returns ready groups that can no longer be in time, now expired."""
        if version < self.version:
            raise ValueError(f"versions only grow: {version} after {self.version}")
        self.version = version
        self._taken = 0
        late = [sequence for sequence, ticket in self._ready.items() if ticket.deadline < version]
        for sequence in late:
            del self._ready[sequence]
        self._running = {s: ticket for s, ticket in self._running.items() if ticket.deadline >= version}
        return late

    def _room_after(self, step: int, taken: set[int]) -> bool:
        """Whether steps from ``step + 1`` on have room for every other active group by its deadline."""
        active = [*self._running.values(), *self._ready.values()]
        due = Counter(ticket.deadline for ticket in active if ticket.sequence not in taken)
        waiting = 0
        for deadline in sorted(due):
            waiting += due[deadline]
            if waiting > (deadline - step) * self.groups_per_step:
                return False
        return True
