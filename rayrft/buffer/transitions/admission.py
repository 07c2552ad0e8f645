"""Transitions of stages, of the feeds that explore jobs join, and of their producers' tickets."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rayrft.buffer.events import Event, ModelTerms
from rayrft.buffer.groups import GroupStatus
from rayrft.buffer.schedule import ANY_AGE, StagePlan, Ticket, make_schedule
from rayrft.buffer.state import Feed, Outstanding, ParkedTicket, State
from rayrft.buffer.transitions.leases import drop_stale
from rayrft.errors import StorageError
from rayrft.experience import Task


class StageOpened(Event):
    plan: StagePlan

    def apply(self, state: State) -> None:
        plan, stage, feed = self.plan, state.stage, state.feeds[""]
        stage.plan = plan
        ready = state.groups.where(GroupStatus.READY)
        state.retire("stage_ended", *ready[state.groups.sequence[ready] >= 0].tolist())
        state.retire("unfinished", *stage.begun.values())
        stage.begun, stage.parked, feed.reissued = {}, {}, []
        # A late request of the previous stage must not be taken for one of this stage.
        feed.calls = {producer: (call, []) for producer, (call, _) in feed.calls.items()}
        state.training.version = plan.version
        # The numbers of tickets continue: a late group of the previous stage must not be taken for one of this stage.
        stage.first_sequence = sequence = stage.schedule.next_sequence
        stage.schedule = make_schedule(plan, _fresh(state, plan), sequence, replays=state.config.name != "fifo")
        _open(state, plan)


class StageResumed(StageOpened):
    """The stage is open again in its old state; the plan's numbers may have changed."""

    def apply(self, state: State) -> None:
        schedule, feed, groups = state.stage.schedule, state.feeds[""], state.groups
        state.stage.plan = self.plan
        used_up = (groups.status == GroupStatus.READY) & (groups.uses >= state.config.max_uses)
        state.retire("", *np.flatnonzero(used_up).tolist())
        fewer = max(0, schedule.max_staleness - self.plan.age_bound)
        state.retire("stale", *schedule.adjust(self.plan, _fresh(state, self.plan)))
        _open(state, self.plan)
        tickets = [replace(ticket, deadline=ticket.deadline - fewer) for ticket in feed.reissued]
        feed.reissued = [ticket for ticket in tickets if ticket.deadline >= state.training.version]
        # Free the places of tickets whose groups arrived after the stage was closed.
        held = state.outstanding.keys() | {ticket.sequence for ticket in feed.reissued}
        for sequence in set(schedule.running) - held:
            schedule.release(sequence)


def _open(state: State, plan: StagePlan) -> None:
    """Open a plan's stage; offer it the groups that came without a ticket before it opened, or drop too old ones."""
    stage, feed = state.stage, state.feeds[""]
    stage.open = True
    stage.opened[plan.name] = plan.version
    feed.ended = feed.ended and not plan.scheduled  # producers without tickets may have finished before
    drop_stale(state)
    if not stage.schedule.pooled:
        for slot in state.groups.where(GroupStatus.READY).tolist():
            if not stage.schedule.offer(slot, int(state.groups.version[slot])):
                state.retire("late", slot)


def _fresh(state: State, plan: StagePlan) -> int:
    """Return the new groups per step of a stage that draws from a pool."""
    return math.ceil(plan.groups / state.config.replay_ratio) if plan.issues_tickets else 0


class StageClosed(Event):
    """The stage admits no more groups."""

    def apply(self, state: State) -> None:
        state.stage.open = False


class FeedJoined(Event):
    """An attempt of explore job ``job`` starts or resumes its feed: see `Feed`."""

    feed: str
    attempt: str
    job: str
    model: ModelTerms
    in_flight: int
    group_size: int

    def apply(self, state: State) -> None:
        state.training.attempts.add(self.attempt)
        state.meta.model = state.meta.model or self.model
        feed = state.feeds.setdefault(self.feed, Feed(self.job))
        feed.in_flight, feed.group_size = self.in_flight, self.group_size
        feed.ended = False  # the tickets that its last attempt held are issued again


class TicketsIssued(Event):
    """A request for tickets was answered, with none if ``count`` is 0.

    ``tasks`` are those of the tickets, None before they are drawn: recovery draws them again and compares."""

    producer: str
    call: int
    count: int
    tasks: list[str | None] | None
    feed: str = ""
    """The feed that the producer belongs to."""

    def apply(self, state: State) -> list[Ticket]:
        """Issue a feed's tickets: those of abandoned producers first, then those of parked groups."""
        feed, plan, schedule = state.feeds[self.feed], state.stage.plan, state.stage.schedule
        tickets, feed.reissued = feed.reissued[: self.count], feed.reissued[self.count :]
        if not self.feed and plan is not None and plan.parks is not None:
            for waiting in state.resumable[: self.count - len(tickets)]:
                del state.stage.parked[waiting.ticket.sequence]
                tickets.append(schedule.resume(waiting.ticket, plan.parks))
        tasks = [] if feed.ended else _draw_tasks(state, self, len(tickets))
        if self.feed:
            first, schedule.next_sequence = schedule.next_sequence, schedule.next_sequence + len(tasks)
            version = state.training.version
            fresh = [Ticket(first + index, version, ANY_AGE, feed=self.feed) for index in range(len(tasks))]
        else:
            fresh = schedule.admit(len(tasks))
        tickets += [replace(ticket, task=task) for ticket, task in zip(fresh, tasks, strict=True)]
        for ticket in tickets:
            state.outstanding[ticket.sequence] = Outstanding(ticket, self.producer)
        if len(tickets) < self.count and (self.feed or not tickets):
            feed.ended = True
        if tickets or state.exhausted(self.feed):  # else the producer waits for a parked group
            feed.calls[self.producer] = (self.call, tickets)
        if self.tasks is not None and self.tasks != [ticket.task for ticket in tickets]:
            remedy = "the task set or its sampler changed since the run was started: use the original tasks"
            raise StorageError("the tasks drawn now differ from those in the log", remedy, field="tasks")
        return tickets


def _draw_tasks(state: State, event: TicketsIssued, issued: int) -> list[str | None]:
    """Draw tasks for the tickets of a request beyond those ``issued``, fewer if the tasks are exhausted; the recorded
    ones if there is no task set."""
    tasks, count = state.tasks.get(event.feed), event.count - issued
    if tasks is None:
        return [None] * count if event.tasks is None else event.tasks[issued:]
    return [task for _ in range(count) if (task := tasks.draw()) is not None]


class TasksAdded(Event):
    """The task set has grown: these tasks belong to its source ``source``, by index."""

    tasks: list[Task]
    source: int

    def apply(self, state: State) -> None:
        state.meta.added_tasks += self.tasks
        if (known := state.tasks.get("")) is not None:
            ids, difficulties = [task.id for task in self.tasks], [task.difficulty for task in self.tasks]
            known.add(ids, self.source, difficulties, [task.priority for task in self.tasks])
            for task in self.tasks:
                known.record(task.id, task.tries, task.passes)


class ProducerAbandoned(Event):
    """The producer is abandoned: its tickets are issued to the next request."""

    producer: str

    def apply(self, state: State) -> None:
        stage = state.stage
        for ticket in [held.ticket for held in state.outstanding.values() if held.producer == self.producer]:
            del state.outstanding[ticket.sequence]
            if ticket.sequence in stage.begun:
                stage.parked[ticket.sequence] = ParkedTicket(ticket, -1)
                stage.schedule.release(ticket.sequence)
            elif ticket.feed or ticket.sequence in stage.schedule.running:
                state.feeds[ticket.feed].reissued.append(ticket)
        for feed in state.feeds.values():
            feed.calls.pop(self.producer, None)
        state.meta.gone.add(self.producer)


class ProducersEnded(Event):
    """No more groups will arrive."""

    def apply(self, state: State) -> None:
        state.feeds[""].ended = True
