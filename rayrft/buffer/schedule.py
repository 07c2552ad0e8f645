"""Schedule of groups, by one number ``max_staleness``: when a group may start and which groups a step takes.

In a `WindowedSchedule`, a group admitted at version v has the deadline v + ``max_staleness``. A step takes ready groups
by earliest deadline, and only if the steps after it have room for all other active groups (running or ready) by their
deadlines. Otherwise it waits for a straggler that is due. So every admitted group can be consumed in time in whatever
order groups finish, and none is dropped for its age: schedule.md beside this file has the proof and an example. If
``over_sampling`` > 1, more groups than needed are in flight, a step takes the first ready ones, and groups that
can no longer be in time are dropped and counted.

A stage whose groups are used more than once, or whose producers need no tickets, has a `PoolSchedule`, which draws from
all ready groups by the sampler.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rayrft.config.buffer import SamplerConfig

ANY_AGE = 1 << 62
"""More versions than there ever are: the bound of a stage that takes groups of any age, and a deadline for none."""


@dataclass(frozen=True)
class StagePlan:
    """A stage's demands on the Buffer: groups and demonstrations (or preference pairs) per step, in mini-batches."""

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
    grows: bool = False
    """Whether demonstrations are added while the stage runs: until there are some, a step has groups alone."""
    mini_batches: int = 1
    scheduled: bool = True
    """Whether groups need tickets. Otherwise producers put groups at any time, and steps draw from the pool."""
    max_age: int | None = None
    """Not scheduled: the largest number of versions by which a group may be older than the trainer; none: any."""
    parks: Literal["train", "mask"] | None = None
    """Whether producers may park groups, whose tokens so far are then masked, or trained unless they are too old."""
    hold_steps: int = 0
    """Steps, at most ``max_staleness``, for which ready groups wait before training, so that people can judge them."""
    sampler: SamplerConfig | None = None
    """How groups are drawn; by default as the Buffer was created to do."""
    attention: float = 0.0
    """Ranks get shares of equal cost: a row of s tokens costs ``s + attention s^2`` (`data.models.attention_cost`)."""

    @property
    def kind(self) -> tuple[int, bool]:
        """What the demonstrations must be: a `DemonstrationKind`."""
        return 2 if self.pairs else 1, self.labelled

    @property
    def issues_tickets(self) -> bool:
        """Whether groups of the stage need tickets."""
        return self.scheduled and self.groups > 0

    @property
    def age_bound(self) -> int:
        """Largest number of versions by which a group may be older than the trainer."""
        if self.issues_tickets:
            return self.max_staleness
        return ANY_AGE if self.max_age is None else self.max_age

    @property
    def end(self) -> int | None:
        """The version at which the stage has ended."""
        return None if self.steps is None else self.version + self.steps

    @property
    def most_parked(self) -> int:
        """With this many parked groups, continue them before starting new ones."""
        return math.ceil(self.over_sampling * (self.max_staleness + 1) * self.groups)


@dataclass(frozen=True)
class Ticket:
    """Permission to start or resume one group. ``deadline`` is the last step at which it may be consumed.

    ``task`` is the id of the task, or None if the Buffer has no task set. ``resumes`` counts how often the group was
    parked: its attempts continue from the calls that `Buffer.parked` returns. ``feed`` is the id of an explore job's
    `Feed`, whose groups belong to no stage and have no deadline.
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


@dataclass
class Schedule:
    """When groups may start and which ready groups a step takes, as pure bookkeeping. Ready groups are known by their
    slots in the group table."""

    groups_per_step: int = 0
    """0 if producers need no tickets."""
    max_staleness: int = ANY_AGE
    over_sampling: float = 1.0
    version: int = 0
    end: int | None = None
    next_sequence: int = 0
    running: dict[int, Ticket] = field(default_factory=dict)
    """Groups that were admitted and have not arrived, by the sequence number of their ticket."""
    pooled: ClassVar[bool]
    """Whether a step draws from all ready groups."""

    @property
    def oldest(self) -> int:
        """Oldest version whose groups the next step may take."""
        return self.version - self.max_staleness

    @property
    def needs_admission(self) -> bool:
        """Whether the next step waits for new groups that are not admitted yet, even if the Buffer is full."""
        return False

    def admit(self, count: int) -> list[Ticket]:
        """Issue ``count`` tickets at the current version; the caller has checked `capacity`."""
        first, deadline = self.next_sequence, self.version + self.max_staleness
        self.next_sequence += count
        tickets = [Ticket(first + index, self.version, deadline) for index in range(count)]
        self.running.update({ticket.sequence: ticket for ticket in tickets})
        return tickets

    def release(self, sequence: int) -> None:
        """Free the place of a group that failed, was filtered or is parked."""
        self.running.pop(sequence, None)

    def resume(self, ticket: Ticket, parks: Literal["train", "mask"]) -> Ticket:
        """Return the ticket of a parked group with a new deadline, and give it a place; the caller has checked
        `capacity`. The deadline is the earliest feasible one if old tokens are trained, else the latest."""
        latest = self.version + self.max_staleness
        earliest = latest if parks == "mask" else min(latest, max(self.version, ticket.deadline))
        for deadline in range(earliest, latest + 1):
            resumed = replace(ticket, version=self.version, deadline=deadline, resumes=ticket.resumes + 1)
            self.running[ticket.sequence] = resumed
            if self._has_room():
                break
        return resumed

    def finish(self, ticket: Ticket, slot: int) -> bool:
        """Make an admitted group ready; return False if it is too late."""
        return self.running.pop(ticket.sequence, None) is not None and ticket.deadline >= self.version

    def offer(self, slot: int, version: int) -> bool:
        """Make a group ready that came without a ticket; return False if it is too old or there is no place for it.
        ``version`` is the oldest of its tokens. A group that is ready remains so."""
        return version >= self.oldest

    def ready_count(self, eligible: int) -> int:
        """Return the number of ready groups, with ``eligible`` groups in the pool."""
        return eligible

    def remove(self, slot: int) -> None:
        """Remove a ready group."""

    def advance(self, version: int) -> list[int]:
        """Set the published version; return the slots of ready groups that can no longer be in time, now removed.
        Raises ValueError for an older version."""
        if version < self.version:
            raise ValueError(f"versions only grow: {version} after {self.version}")
        self.version = version
        self.running = _in_time(self.running, version)
        return []

    def adjust(self, plan: StagePlan, fresh: int) -> list[int]:
        """Continue with the plan's numbers; return the slots of ready groups that are too old for them, now removed."""
        self.running = _in_time(_due_earlier(self.running, self.max_staleness - plan.age_bound), self.version)
        self.groups_per_step = plan.groups if plan.issues_tickets else 0
        self.max_staleness, self.over_sampling, self.end = plan.age_bound, plan.over_sampling, plan.end
        return []

    def _steps_left(self) -> int:
        """Return the number of steps from the present one on; without an end there are always enough."""
        return self.max_staleness + 2 if self.end is None else max(0, self.end - self.version)

    def _has_room(self) -> bool:
        """Return whether all active groups can be taken by their deadlines."""
        return True


def make_schedule(plan: StagePlan, fresh: int, next_sequence: int, *, replays: bool) -> AnySchedule:
    """Make the schedule of a stage. ``fresh``: new groups per step; ``replays``: whether groups are used repeatedly."""
    groups = plan.groups if plan.issues_tickets else 0
    numbers = groups, plan.age_bound, plan.over_sampling, plan.version, plan.end, next_sequence
    return WindowedSchedule(*numbers) if groups and not replays else PoolSchedule(*numbers, fresh=fresh)


@dataclass
class WindowedSchedule(Schedule):
    """Schedule of a stage whose groups are used once."""

    ready: dict[int, Ticket] = field(default_factory=dict)
    """By slot."""
    taken: int = 0
    kind: Literal["windowed"] = "windowed"
    pooled: ClassVar[bool] = False

    def capacity(self, eligible: int = 0) -> int:
        """Return the number of groups that may be admitted now: none during a step if ``max_staleness`` is 0, because
        it would be late, and not more than the stage's last steps take."""
        return self._places(min(self.max_staleness + 1, self._steps_left()))

    def _places(self, steps: int) -> int:
        if self.max_staleness == 0 and self.taken:
            return 0
        limit = math.ceil(self.over_sampling * steps * self.groups_per_step)
        return max(0, limit - len(self.running) - len(self.ready) - self.taken)

    def admit(self, count: int) -> list[Ticket]:
        return super().admit(min(count, self.capacity()))

    def finish(self, ticket: Ticket, slot: int) -> bool:
        if not super().finish(ticket, slot):
            return False
        self.ready[slot] = ticket
        return True

    def offer(self, slot: int, version: int) -> bool:
        """See `Schedule`. A group is accepted only if all others still have room by their deadlines. One for which this
        stage has no step goes to the next stage."""
        if slot in self.ready:
            return True
        if version < self.oldest or not self._places(self.max_staleness + 1):
            return False
        self.ready[slot] = Ticket(self.next_sequence, version, version + self.max_staleness)
        if self._has_room():
            self.next_sequence += 1
        else:
            del self.ready[slot]
        return slot in self.ready

    def ready_count(self, eligible: int) -> int:
        return len(self.ready)

    def choose(self, step: int, draw: Callable[[], Draw | None]) -> Draw | None:
        """Return the groups that step ``step`` consumes, or None if it has to wait."""
        if len(self.ready) < self.groups_per_step:
            return None
        by_deadline = sorted(self.ready, key=lambda slot: (self.ready[slot].deadline, self.ready[slot].sequence))
        chosen = by_deadline[: self.groups_per_step]
        if self.over_sampling == 1.0 and self.running and not self._room_after(step, set(chosen)):
            return None
        return Draw(np.array(chosen, np.int64), np.ones(len(chosen), np.float32))

    def take(self, slots: list[int]) -> None:
        """Record that a step has leased these groups. Their places become free once its weights are published."""
        for slot in slots:
            del self.ready[slot]
        self.taken = len(slots)

    def give_back(self, groups: dict[int, tuple[int, int]]) -> None:
        """Make leased groups ready again, from their sequence numbers and versions by slot."""
        for slot, (sequence, version) in groups.items():
            self.ready[slot] = Ticket(sequence, version, version + self.max_staleness)
        self.taken = max(0, self.taken - len(groups))

    def discard_lease(self) -> None:
        """Record that the step's batch became empty; it will be leased again."""
        self.taken = 0

    def remove(self, slot: int) -> None:
        self.ready.pop(slot, None)

    def advance(self, version: int) -> list[int]:
        super().advance(version)
        self.taken = 0
        return self._expire()

    def adjust(self, plan: StagePlan, fresh: int) -> list[int]:
        self.ready = _due_earlier(self.ready, self.max_staleness - plan.age_bound)
        super().adjust(plan, fresh)
        return self._expire()

    def _expire(self) -> list[int]:
        """Remove the ready groups that can no longer be in time; return their slots."""
        late = [slot for slot, ticket in self.ready.items() if ticket.deadline < self.version]
        for slot in late:
            del self.ready[slot]
        return late

    def _has_room(self) -> bool:
        return self.over_sampling > 1.0 or self._room_after(self.version - (not self.taken), set())

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
class PoolSchedule(Schedule):
    """Schedule of a stage whose steps draw from all ready groups, after ``fresh`` new ones (0 without tickets)."""

    fresh: int = 0
    fresh_ready: int = 0
    """New groups that have arrived and are not counted for a step yet."""
    leased: bool = False
    """Whether a step has its batch, and its weights are not published."""
    kind: Literal["pool"] = "pool"
    pooled: ClassVar[bool] = True

    @property
    def needs_admission(self) -> bool:
        return self.fresh_ready + len(self.running) < self.fresh

    def capacity(self, eligible: int) -> int:
        """Return the number of groups that may be admitted now, with ``eligible`` groups in the pool."""
        steps = min(self.max_staleness + 1, self._steps_left() - self.leased)
        limit = math.ceil(self.over_sampling * steps * self.fresh)
        missing = self.groups_per_step - eligible if steps else 0
        return max(0, max(limit - self.fresh_ready, missing) - len(self.running))

    def finish(self, ticket: Ticket, slot: int) -> bool:
        in_time = super().finish(ticket, slot)
        self.fresh_ready += in_time
        return in_time

    def choose(self, step: int, draw: Callable[[], Draw | None]) -> Draw | None:
        """Return the groups that ``draw`` draws from the pool, or None if the step has to wait."""
        return draw() if self.fresh_ready >= self.fresh else None

    def take(self, slots: list[int]) -> None:
        self.fresh_ready -= self.fresh
        self.leased = True

    def give_back(self, groups: dict[int, tuple[int, int]]) -> None:
        self.discard_lease()

    def discard_lease(self) -> None:
        self.fresh_ready += self.fresh
        self.leased = False

    def advance(self, version: int) -> list[int]:
        self.leased = False
        return super().advance(version)

    def adjust(self, plan: StagePlan, fresh: int) -> list[int]:
        self.fresh = fresh
        return super().adjust(plan, fresh)


AnySchedule = WindowedSchedule | PoolSchedule


def _in_time(tickets: dict[int, Ticket], version: int) -> dict[int, Ticket]:
    return {key: ticket for key, ticket in tickets.items() if ticket.deadline >= version}


def _due_earlier(tickets: dict[int, Ticket], versions: int) -> dict[int, Ticket]:
    if versions <= 0:
        return tickets
    return {key: replace(ticket, deadline=ticket.deadline - versions) for key, ticket in tickets.items()}
