"""Transitions of stages, of the feeds that explore jobs join, and of their producers' tickets."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rayrft.buffer import events as e
from rayrft.buffer.groups import GroupStatus
from rayrft.buffer.schedule import StagePlan, Ticket, make_schedule
from rayrft.buffer.state import Feed, Outstanding, ParkedTicket, State, rule
from rayrft.buffer.transitions.leases import drop_stale
from rayrft.errors import StorageError

_NEVER_DUE = 1 << 62


@rule(e.StageOpened)
def stage_opened(state: State, event: e.StageOpened) -> None:
    plan, stage, feed = event.plan, state.stage, state.feeds[""]
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


@rule(e.StageResumed)
def stage_resumed(state: State, event: e.StageResumed) -> None:
    schedule, feed, groups = state.stage.schedule, state.feeds[""], state.groups
    state.stage.plan = event.plan
    used_up = (groups.status == GroupStatus.READY) & (groups.uses >= state.config.max_uses)
    state.retire("", *np.flatnonzero(used_up).tolist())
    fewer = max(0, schedule.max_staleness - event.plan.age_bound)
    state.retire("stale", *schedule.adjust(event.plan, _fresh(state, event.plan)))
    _open(state, event.plan)
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


@rule(e.StageClosed)
def stage_closed(state: State, event: e.StageClosed) -> None:
    state.stage.open = False


@rule(e.FeedJoined)
def feed_joined(state: State, event: e.FeedJoined) -> None:
    state.training.attempts.add(event.attempt)
    state.meta.model = state.meta.model or event.model
    feed = state.feeds.setdefault(event.feed, Feed(event.job))
    feed.in_flight, feed.group_size = event.in_flight, event.group_size
    feed.ended = False  # the tickets that its last attempt held are issued again


@rule(e.TicketsIssued)
def admitted(state: State, event: e.TicketsIssued) -> list[Ticket]:
    """Issue a feed's tickets: those of abandoned producers first, then those of parked groups."""
    feed, plan, schedule = state.feeds[event.feed], state.stage.plan, state.stage.schedule
    tickets, feed.reissued = feed.reissued[: event.count], feed.reissued[event.count :]
    if not event.feed and plan is not None and plan.parks is not None:
        for waiting in state.resumable[: event.count - len(tickets)]:
            del state.stage.parked[waiting.ticket.sequence]
            tickets.append(schedule.resume(waiting.ticket, plan.parks))
    tasks = [] if feed.ended else _draw_tasks(state, event, len(tickets))
    if event.feed:
        first, schedule.next_sequence = schedule.next_sequence, schedule.next_sequence + len(tasks)
        version = state.training.version
        fresh = [Ticket(first + index, version, _NEVER_DUE, feed=event.feed) for index in range(len(tasks))]
    else:
        fresh = schedule.admit(len(tasks))
    tickets += [replace(ticket, task=task) for ticket, task in zip(fresh, tasks, strict=True)]
    for ticket in tickets:
        state.outstanding[ticket.sequence] = Outstanding(ticket, event.producer)
    if len(tickets) < event.count and (event.feed or not tickets):
        feed.ended = True
    if tickets or state.exhausted(event.feed):  # else the producer waits for a parked group
        feed.calls[event.producer] = (event.call, tickets)
    if event.tasks is not None and event.tasks != [ticket.task for ticket in tickets]:
        remedy = "the task set or its sampler changed since the run was started: use the original tasks"
        raise StorageError("the tasks drawn now differ from those in the log", remedy, field="tasks")
    return tickets


def _draw_tasks(state: State, event: e.TicketsIssued, issued: int) -> list[str | None]:
    """Draw tasks for the tickets of a request beyond those ``issued``, fewer if the tasks are exhausted; the recorded
    ones if there is no task set."""
    tasks, count = state.tasks.get(event.feed), event.count - issued
    if tasks is None:
        return [None] * count if event.tasks is None else event.tasks[issued:]
    return [task for _ in range(count) if (task := tasks.draw()) is not None]


@rule(e.TasksAdded)
def tasks_added(state: State, event: e.TasksAdded) -> None:
    state.meta.added_tasks += event.tasks
    if (known := state.tasks.get("")) is not None:
        ids, difficulties = [task.id for task in event.tasks], [task.difficulty for task in event.tasks]
        known.add(ids, event.source, difficulties, [task.priority for task in event.tasks])
        for task in event.tasks:
            known.record(task.id, task.tries, task.passes)


@rule(e.ProducerAbandoned)
def abandoned(state: State, event: e.ProducerAbandoned) -> None:
    stage = state.stage
    for ticket in [held.ticket for held in state.outstanding.values() if held.producer == event.producer]:
        del state.outstanding[ticket.sequence]
        if ticket.sequence in stage.begun:
            stage.parked[ticket.sequence] = ParkedTicket(ticket, -1)
            stage.schedule.release(ticket.sequence)
        elif ticket.feed or ticket.sequence in stage.schedule.running:
            state.feeds[ticket.feed].reissued.append(ticket)
    for feed in state.feeds.values():
        feed.calls.pop(event.producer, None)
    state.meta.gone.add(event.producer)


@rule(e.ProducersEnded)
def producers_ended(state: State, event: e.ProducersEnded) -> None:
    state.feeds[""].ended = True
