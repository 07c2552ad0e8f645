"""Transitions of a Buffer that belongs to no run: its feeds and their tickets, and the trainer that empties it."""

from __future__ import annotations

from rayrft.buffer import events as e
from rayrft.buffer.groups import GroupStatus
from rayrft.buffer.schedule import OpenSchedule, Ticket
from rayrft.buffer.state import Feed, Outstanding, State, rule
from rayrft.buffer.transitions.steps import requeued
from rayrft.data.task_sampler import TaskSet
from rayrft.errors import StorageError

_NEVER_DUE = 1 << 62


@rule(e.FeedJoined)
def feed_joined(state: State, event: e.FeedJoined) -> None:
    meta = state.meta
    meta.lives.add(event.life)
    meta.model = meta.model or event.model
    feed = meta.feeds.setdefault(event.feed, Feed(event.job, event.in_flight, event.group_size))
    feed.in_flight, feed.group_size = event.in_flight, event.group_size
    feed.ended = False  # what its last life had under way is issued again


@rule(e.TrainerJoined)
def trainer_joined(state: State, event: e.TrainerJoined) -> None:
    """A run that has joined before goes on. Another one begins at step 0: what its predecessor was training on returns,
    and all that is held counts as version 0, since its age in steps of another trainer means nothing."""
    meta, groups = state.meta, state.groups
    meta.model = meta.model or event.model
    if meta.trainer not in ("", event.run):
        for step in [lease.step for lease in meta.leases.values() if not lease.acked]:
            requeued(state, e.Requeued(step))
        meta.leases, meta.opened, meta.plan, meta.open = {}, {}, None, False
        meta.version = meta.step = meta.checkpointed_step = 0
        meta.replaying, meta.ended, meta.greatest_error = False, False, 0.0
        meta.schedule = OpenSchedule(meta.schedule.next_sequence)
        ready = groups.where(GroupStatus.READY)
        groups.version[ready], groups.last_step[ready] = 0, -1
    meta.trainer, meta.trainer_job = event.run, event.job


def admit_to_feed(state: State, event: e.Admitted) -> list[Ticket]:
    """Issue a feed's tickets: those of abandoned producers first. Fewer than asked for end it."""
    meta, feed = state.meta, state.meta.feeds[event.feed]
    if not event.count:  # its tasks are exhausted
        feed.calls[event.producer] = (event.call, [])
        return []
    tickets, feed.reissued = feed.reissued[: event.count], feed.reissued[event.count :]
    known, missing = state.feed_tasks.get(event.feed), event.count - len(tickets)
    tasks = draw_tasks(known, missing) if known is not None else event.tasks[len(tickets) :]
    first, meta.schedule.next_sequence = meta.schedule.next_sequence, meta.schedule.next_sequence + len(tasks)
    tickets += [
        Ticket(first + index, meta.version, _NEVER_DUE, task, feed=event.feed) for index, task in enumerate(tasks)
    ]
    for ticket in tickets:
        meta.outstanding[ticket.sequence] = Outstanding(ticket, event.producer)
    feed.calls[event.producer] = (event.call, tickets)
    feed.ended = len(tickets) < event.count
    check_tasks(event, tickets)
    return tickets


def count_group(state: State, ticket: Ticket, report: e.GroupReport) -> None:
    """Count a group that is no longer under way, if it is one of a feed."""
    if ticket.feed:
        feed = state.meta.feeds[ticket.feed]
        feed.groups += 1
        feed.report = feed.report + report


def draw_tasks(tasks: TaskSet, count: int) -> list[str | None]:
    """Draw tasks, fewer if they are exhausted."""
    drawn = [tasks.draw() for _ in range(count)]
    return [task for task in drawn if task is not None]


def check_tasks(event: e.Admitted, tickets: list[Ticket]) -> None:
    """Raise StorageError if the tasks drawn now are not those that the log says were drawn."""
    if event.tasks and event.tasks != [ticket.task for ticket in tickets]:
        raise StorageError(
            "the tasks drawn now differ from those in the log",
            "the task set or its sampler changed since the run was started: use the original tasks",
            field="tasks",
        )
