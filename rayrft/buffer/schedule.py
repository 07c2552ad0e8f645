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

That is `WindowedSchedule`. A stage whose groups are used more than once has a `ReplaySchedule`, and one whose producers
need no tickets an `OpenSchedule`; both draw from the sampler's pool.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray


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
    steps: int | None = None
    """Steps of the stage: none begins that no step could take. None: not known."""
    name: str = ""
    """With ``version``, identifies a stage that is opened again."""
    pairs: bool = False
    labelled: bool = False
    """What the demonstrations must be: preference pairs, or single answers that are labelled good or bad."""
    grows: bool = False
    """Whether demonstrations are added while the stage runs: until there are some, a step's groups come without."""
    mini_batches: int = 1
    scheduled: bool = True
    """Whether groups need tickets. Otherwise producers put groups at any time, and steps draw from the pool."""
    max_age: int | None = None
    """Not scheduled: the largest number of versions by which a group may be older than the trainer; none: any."""
    parks: Literal["train", "mask"] | None = None
    """Whether producers may park unfinished groups, and whether the tokens of before are to be trained if they are not
    too old when the group is resumed."""

    @property
    def end(self) -> int | None:
        """The version at which the stage has ended."""
        return None if self.steps is None else self.version + self.steps

    @property
    def most_parked(self) -> int:
        """Number of parked groups from which on these go on before others are begun: as many as may be running."""
        return math.ceil(self.over_sampling * (self.max_staleness + 1) * self.groups)


@dataclass(frozen=True)
class Ticket:
    """Permission to start or resume one group. ``deadline`` is the last step at which it may be consumed.

    ``task`` is the id of the task, or None if the Buffer has no task set. ``resumes`` counts how often the group was
    parked: its attempts go on from what `Buffer.parked` returns. ``feed`` is the `Feed` that it belongs to; a group of
    a feed belongs to no stage, and is due at no step.
    """

    sequence: int
    version: int
    deadline: int
    task: str | None = None
    resumes: int = 0
    feed: str = ""


@dataclass(frozen=True, eq=False)
class Draw:
    """The groups of one batch. ``slots``: ``[n]`` int64, distinct. ``weights``: ``[n]`` float32, at most 1: importance
    weight of every group's loss."""

    slots: NDArray[np.int64]
    weights: NDArray[np.float32]


class Schedule(Protocol):
    """When groups may start and which ready groups a step takes, as pure bookkeeping. Ready groups are known by their
    slots in the group table."""

    pooled: ClassVar[bool]
    """Whether ready groups wait in the sampler's pool, not in the schedule."""
    max_staleness: int
    next_sequence: int
    running: dict[int, Ticket]
    """Groups that were admitted and have not arrived, by the sequence number of their ticket."""

    def capacity(self, eligible: int) -> int:
        """Return the number of groups that may be admitted now, with ``eligible`` groups in the pool."""

    @property
    def needs_admission(self) -> bool:
        """Whether the next step waits for new groups that are not admitted yet, even if the Buffer is full."""

    @property
    def oldest(self) -> int:
        """Oldest version whose groups the next step may take."""

    def admit(self, count: int) -> list[Ticket]:
        """Issue up to ``count`` tickets at the current version; the caller has checked `capacity`."""

    def release(self, sequence: int) -> None:
        """Free the place of a group that failed, was filtered or is parked."""

    def resume(self, ticket: Ticket, parks: Literal["train", "mask"]) -> Ticket:
        """Return the ticket of a parked group with a new deadline, and give it a place; the caller has checked
        `capacity`. Tokens that are too old for the deadline cannot be trained: it is as early as there is room if they
        are to be."""

    def finish(self, ticket: Ticket, slot: int) -> bool:
        """Make an admitted group ready; return False if it is too late."""

    def offer(self, slot: int, version: int) -> bool:
        """Make a group ready that came without a ticket; return False if it is too old or there is no place for it.
        ``version`` is the oldest of its tokens. A group that is ready remains so."""

    def ready_count(self, eligible: int) -> int:
        """Return the number of ready groups, with ``eligible`` groups in the pool."""

    def choose(self, step: int, draw: Callable[[], Draw | None]) -> Draw | None:
        """Return the groups that step ``step`` consumes, or None if it has to wait; ``draw`` draws from the pool."""

    def take(self, slots: list[int]) -> None:
        """Record that a step has leased these groups."""

    def give_back(self, groups: dict[int, Ticket]) -> None:
        """Make leased groups ready again, by slot."""

    def lose(self) -> None:
        """Record that nothing is left of what the present step has leased: it leases again."""

    def remove(self, slot: int) -> None:
        """Remove a ready group."""

    def advance(self, version: int) -> list[int]:
        """Set the published version; return the slots of ready groups that can no longer be in time, now removed.
        Raises ValueError for an older version."""

    def adjust(self, plan: StagePlan, fresh: int) -> list[int]:
        """Continue with the plan's numbers; return the slots of ready groups that are too old for them, now removed."""


def make_schedule(plan: StagePlan, fresh: int, next_sequence: int, *, replays: bool) -> AnySchedule:
    """Make the schedule of a stage. ``fresh``: new groups per step; ``replays``: whether groups are used repeatedly."""
    if not plan.groups or not plan.scheduled:
        return OpenSchedule(next_sequence, plan.max_age, plan.version)
    numbers = plan.max_staleness, plan.over_sampling, plan.version, plan.end, next_sequence
    return ReplaySchedule(plan.groups, fresh, *numbers) if replays else WindowedSchedule(plan.groups, *numbers)


@dataclass
class WindowedSchedule:
    """Schedule of a stage whose groups are used once. Raises ValueError for invalid numbers."""

    groups_per_step: int
    max_staleness: int
    over_sampling: float = 1.0
    version: int = 0
    end: int | None = None
    next_sequence: int = 0
    running: dict[int, Ticket] = field(default_factory=dict)
    ready: dict[int, Ticket] = field(default_factory=dict)
    """By slot."""
    taken: int = 0
    kind: Literal["windowed"] = "windowed"
    pooled: ClassVar[bool] = False
    needs_admission: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.max_staleness < 0 or self.over_sampling < 1:
            raise ValueError("groups_per_step >= 1, max_staleness >= 0 and over_sampling >= 1 are required")

    @property
    def oldest(self) -> int:
        return self.version - self.max_staleness

    def capacity(self, eligible: int = 0) -> int:
        """See `Schedule`. With ``max_staleness`` 0 none is admitted during a step, as it would be late; nor are more
        than the stage's last steps take."""
        return self._places(min(self.max_staleness + 1, _steps_left(self)))

    def _places(self, steps: int) -> int:
        if self.max_staleness == 0 and self.taken:
            return 0
        limit = math.ceil(self.over_sampling * steps * self.groups_per_step)
        return max(0, limit - len(self.running) - len(self.ready) - self.taken)

    def admit(self, count: int) -> list[Ticket]:
        tickets = _tickets(self, min(count, self.capacity()))
        self.running.update({ticket.sequence: ticket for ticket in tickets})
        return tickets

    def release(self, sequence: int) -> None:
        self.running.pop(sequence, None)

    def resume(self, ticket: Ticket, parks: Literal["train", "mask"]) -> Ticket:
        latest = self.version + self.max_staleness
        earliest = latest if parks == "mask" else max(self.version, ticket.deadline)
        for deadline in range(earliest, latest + 1):
            self.running[ticket.sequence] = _resumed(ticket, self.version, deadline)
            if self.over_sampling > 1.0 or self._room_after(self.version - (not self.taken), set()):
                break
        return self.running[ticket.sequence]

    def finish(self, ticket: Ticket, slot: int) -> bool:
        if self.running.pop(ticket.sequence, None) is None or ticket.deadline < self.version:
            return False
        self.ready[slot] = ticket
        return True

    def offer(self, slot: int, version: int) -> bool:
        """See `Schedule`. A group is accepted only if all others still have room by their deadlines. One for which this
        stage has no step goes to the next stage."""
        if slot in self.ready:
            return True
        ticket = Ticket(self.next_sequence, version, version + self.max_staleness)
        if ticket.deadline < self.version or not self._places(self.max_staleness + 1):
            return False
        self.ready[slot] = ticket
        if self.over_sampling == 1.0 and not self._room_after(self.version - (not self.taken), set()):
            del self.ready[slot]
            return False
        self.next_sequence += 1
        return True

    def ready_count(self, eligible: int) -> int:
        return len(self.ready)

    def choose(self, step: int, draw: Callable[[], Draw | None]) -> Draw | None:
        if len(self.ready) < self.groups_per_step:
            return None
        by_deadline = sorted(self.ready, key=lambda slot: (self.ready[slot].deadline, self.ready[slot].sequence))
        chosen = by_deadline[: self.groups_per_step]
        if self.over_sampling == 1.0 and self.running and not self._room_after(step, set(chosen)):
            return None
        return Draw(np.array(chosen, np.int64), np.ones(len(chosen), np.float32))

    def take(self, slots: list[int]) -> None:
        """See `Schedule`. Their places become free once the step's weights are published."""
        for slot in slots:
            del self.ready[slot]
        self.taken = len(slots)

    def give_back(self, groups: dict[int, Ticket]) -> None:
        self.ready.update(groups)
        self.taken = max(0, self.taken - len(groups))

    def lose(self) -> None:
        self.taken = 0

    def remove(self, slot: int) -> None:
        self.ready.pop(slot, None)

    def advance(self, version: int) -> list[int]:
        _check_version(self.version, version)
        self.version = version
        self.taken = 0
        late = [slot for slot, ticket in self.ready.items() if ticket.deadline < version]
        for slot in late:
            del self.ready[slot]
        self.running = _in_time(self.running, version)
        return late

    def adjust(self, plan: StagePlan, fresh: int) -> list[int]:
        fewer, taken = max(0, self.max_staleness - plan.max_staleness), self.taken
        self.groups_per_step, self.max_staleness = plan.groups, plan.max_staleness
        self.over_sampling, self.end = plan.over_sampling, plan.end
        self.running, self.ready = _due_earlier(self.running, fewer), _due_earlier(self.ready, fewer)
        late = self.advance(self.version)
        self.taken = taken
        return late

    def _room_after(self, step: int, taken: set[int]) -> bool:
        """Return whether steps from ``step + 1`` on have room for all other active groups by their deadlines."""
        due = Counter(ticket.deadline for ticket in self.running.values())
        due.update(ticket.deadline for slot, ticket in self.ready.items() if slot not in taken)
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
    end: int | None = None
    next_sequence: int = 0
    running: dict[int, Ticket] = field(default_factory=dict)
    fresh_ready: int = 0
    """New groups that have arrived and are not counted for a step yet."""
    leased: bool = False
    """Whether a step has its batch, and its weights are not published."""
    kind: Literal["replay"] = "replay"
    pooled: ClassVar[bool] = True

    @property
    def needs_admission(self) -> bool:
        return self.fresh_ready + len(self.running) < self.fresh

    @property
    def oldest(self) -> int:
        return self.version - self.max_staleness

    def capacity(self, eligible: int) -> int:
        steps = min(self.max_staleness + 1, _steps_left(self) - self.leased)
        limit = math.ceil(self.over_sampling * steps * self.fresh)
        missing = self.groups - eligible if steps else 0
        return max(0, max(limit - self.fresh_ready, missing) - len(self.running))

    def admit(self, count: int) -> list[Ticket]:
        tickets = _tickets(self, count)
        self.running.update({ticket.sequence: ticket for ticket in tickets})
        return tickets

    def release(self, sequence: int) -> None:
        self.running.pop(sequence, None)

    def resume(self, ticket: Ticket, parks: Literal["train", "mask"]) -> Ticket:
        latest = self.version + self.max_staleness
        deadline = latest if parks == "mask" else max(self.version, ticket.deadline)
        self.running[ticket.sequence] = resumed = _resumed(ticket, self.version, deadline)
        return resumed

    def finish(self, ticket: Ticket, slot: int) -> bool:
        if self.running.pop(ticket.sequence, None) is None or ticket.deadline < self.version:
            return False
        self.fresh_ready += 1
        return True

    def offer(self, slot: int, version: int) -> bool:
        return version >= self.oldest

    def ready_count(self, eligible: int) -> int:
        return eligible

    def choose(self, step: int, draw: Callable[[], Draw | None]) -> Draw | None:
        return draw() if self.fresh_ready >= self.fresh else None

    def take(self, slots: list[int]) -> None:
        self.fresh_ready -= self.fresh
        self.leased = True

    def give_back(self, groups: dict[int, Ticket]) -> None:
        self.lose()

    def lose(self) -> None:
        self.fresh_ready += self.fresh
        self.leased = False

    def remove(self, slot: int) -> None:
        pass

    def advance(self, version: int) -> list[int]:
        _check_version(self.version, version)
        self.version = version
        self.leased = False
        self.running = _in_time(self.running, version)
        return []

    def adjust(self, plan: StagePlan, fresh: int) -> list[int]:
        self.running = _due_earlier(self.running, max(0, self.max_staleness - plan.max_staleness))
        self.groups, self.fresh = plan.groups, fresh
        self.max_staleness, self.over_sampling, self.end = plan.max_staleness, plan.over_sampling, plan.end
        return []


@dataclass
class OpenSchedule:
    """Schedule of a stage without tickets: producers put groups at any time, and groups of any age are drawn, or of one
    up to ``max_age``."""

    next_sequence: int = 0
    """For the next stage."""
    max_age: int | None = None
    version: int = 0
    kind: Literal["open"] = "open"
    running: dict[int, Ticket] = field(default_factory=dict)
    pooled: ClassVar[bool] = True
    max_staleness: ClassVar[int] = 0
    needs_admission: ClassVar[bool] = False

    @property
    def oldest(self) -> int:
        return 0 if self.max_age is None else self.version - self.max_age

    def capacity(self, eligible: int) -> int:
        return 0

    def admit(self, count: int) -> list[Ticket]:
        return []

    def release(self, sequence: int) -> None:
        pass

    def resume(self, ticket: Ticket, parks: Literal["train", "mask"]) -> Ticket:
        return ticket

    def finish(self, ticket: Ticket, slot: int) -> bool:
        return False

    def offer(self, slot: int, version: int) -> bool:
        return version >= self.oldest

    def ready_count(self, eligible: int) -> int:
        return eligible

    def choose(self, step: int, draw: Callable[[], Draw | None]) -> Draw | None:
        return draw()

    def take(self, slots: list[int]) -> None:
        pass

    def give_back(self, groups: dict[int, Ticket]) -> None:
        pass

    def lose(self) -> None:
        pass

    def remove(self, slot: int) -> None:
        pass

    def advance(self, version: int) -> list[int]:
        self.version = version
        return []

    def adjust(self, plan: StagePlan, fresh: int) -> list[int]:
        self.max_age = plan.max_age
        return []


AnySchedule = WindowedSchedule | ReplaySchedule | OpenSchedule


def _steps_left(schedule: WindowedSchedule | ReplaySchedule) -> int:
    """Return the number of steps from the present one on; without an end there are always enough."""
    return schedule.max_staleness + 2 if schedule.end is None else max(0, schedule.end - schedule.version)


def _tickets(schedule: WindowedSchedule | ReplaySchedule, count: int) -> list[Ticket]:
    """Number the next tickets of a schedule."""
    first, version = schedule.next_sequence, schedule.version
    schedule.next_sequence += count
    return [Ticket(first + index, version, version + schedule.max_staleness) for index in range(count)]


def _resumed(ticket: Ticket, version: int, deadline: int) -> Ticket:
    return replace(ticket, version=version, deadline=deadline, resumes=ticket.resumes + 1)


def _in_time(tickets: dict[int, Ticket], version: int) -> dict[int, Ticket]:
    return {key: ticket for key, ticket in tickets.items() if ticket.deadline >= version}


def _due_earlier(tickets: dict[int, Ticket], versions: int) -> dict[int, Ticket]:
    return {key: replace(ticket, deadline=ticket.deadline - versions) for key, ticket in tickets.items()}


def _check_version(old: int, new: int) -> None:
    if new < old:
        raise ValueError(f"versions only grow: {new} after {old}")
