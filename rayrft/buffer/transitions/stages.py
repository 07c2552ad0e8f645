"""Transitions of stages, tickets, producers' reports on groups, and storage locations."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rayrft.buffer import events as e
from rayrft.buffer.groups import GroupStatus
from rayrft.buffer.schedule import StagePlan, Ticket, make_schedule
from rayrft.buffer.state import ExpertCursor, Outstanding, State, Waiting, rule
from rayrft.buffer.transitions.feeds import admit_to_feed, check_tasks, count_group, draw_tasks
from rayrft.buffer.transitions.steps import drop_stale

_REJECTED = 10_000
"""Groups that were rejected and are remembered, so that a repeat of one is not counted again."""


@rule(e.Evicted)
def evicted(state: State, event: e.Evicted) -> None:
    for slot in event.slots:
        state.meta.schedule.remove(slot)
        state.retire(slot, event.reason)


@rule(e.Moved)
def moved(state: State, event: e.Moved) -> None:
    state.meta.extents[event.extent.segment] = event.extent
    row = event.row
    for slot in event.slots:
        state.groups.move(slot, event.extent.segment, row)
        row += int(state.groups.rows[slot])
        if event.score is not None:
            state.set_score(slot, event.score)


@rule(e.Deleted)
def deleted(state: State, event: e.Deleted) -> None:
    groups, gone = state.groups, {*event.forgotten}
    for segment in event.segments:
        del state.meta.extents[segment]
        noted = state.meta.late_feedback.pop(segment, [])
        if gone and (kept := [each for each in noted if each.experience_id not in gone]):  # its other groups were moved
            state.meta.late_feedback.setdefault(max(state.meta.extents), []).extend(kept)
        groups.live.pop(segment, None)
    groups.forget(np.flatnonzero(np.isin(groups.segment, event.segments) & (groups.status != GroupStatus.FREE)))


@rule(e.FeedbackNoted)
def feedback_noted(state: State, event: e.FeedbackNoted) -> None:
    noted = state.meta.late_feedback.setdefault(event.segment, [])
    if event not in noted:  # else it is a repeat
        noted.append(event)
        state.meta.late_feedback_count += 1


@rule(e.Loaded)
def loaded(state: State, event: e.Loaded) -> None:
    known, extent = state.meta.experts.get(event.name), event.extent
    if known is None or known.loaded != extent:  # else it is a repeat: the draws continue
        state.meta.experts[event.name] = ExpertCursor(
            extent, state.seed, event.unit, labelled=event.labelled, loaded=extent
        )


@rule(e.Extended)
def extended(state: State, event: e.Extended) -> None:
    experts = state.meta.experts
    if event.name not in experts:
        experts[event.name] = ExpertCursor(event.extent, state.seed, event.unit, labelled=event.labelled)
    experts[event.name].grow(event.extent)


@rule(e.Withdrawn)
def withdrawn(state: State, event: e.Withdrawn) -> None:
    state.meta.experts[event.name].exclude(event.rows)


@rule(e.Began)
def began(state: State, event: e.Began) -> None:
    state.meta.run, state.meta.schema = event.run, event.schema


@rule(e.StageOpened)
def stage_opened(state: State, event: e.StageOpened) -> None:
    plan, meta = event.plan, state.meta
    for slot in state.groups.where(GroupStatus.READY).tolist():
        if state.groups.sequence[slot] >= 0:
            state.retire(slot, "stage_ended")
    for slot in meta.begun.values():
        state.retire(slot, "unfinished")
    meta.begun, meta.parked = {}, {}
    meta.plan, meta.version, meta.open = plan, plan.version, True
    meta.opened[plan.name] = plan.version
    meta.ended = meta.ended and not plan.scheduled  # producers without tickets may have finished before
    meta.reissued_tickets = []
    # A late request of the previous stage must not be taken for one of this stage.
    meta.calls = {producer: (call, []) for producer, (call, _) in meta.calls.items()}
    # The numbers of tickets continue: a late group of the previous stage must not be taken for one of this stage.
    sequence, replays = meta.schedule.next_sequence, state.config.name != "fifo"
    meta.first_sequence = sequence
    meta.schedule = make_schedule(plan, _fresh(state, plan), sequence, replays=replays)
    _offer_ready(state)


@rule(e.StageResumed)
def stage_resumed(state: State, event: e.StageResumed) -> None:
    plan, meta = event.plan, state.meta
    meta.plan, meta.open = plan, True
    meta.opened[plan.name] = plan.version
    meta.ended = meta.ended and not plan.scheduled
    fewer = max(0, meta.schedule.max_staleness - plan.max_staleness)
    for slot in meta.schedule.adjust(plan, _fresh(state, plan)):
        state.retire(slot, "stale")
    _offer_ready(state)
    tickets = [replace(ticket, deadline=ticket.deadline - fewer) for ticket in meta.reissued_tickets]
    meta.reissued_tickets = [ticket for ticket in tickets if ticket.deadline >= meta.version]
    # Free the places of tickets whose groups arrived after the stage was closed.
    held = meta.outstanding.keys() | {ticket.sequence for ticket in meta.reissued_tickets}
    for sequence in set(meta.schedule.running) - held:
        meta.schedule.release(sequence)


def _offer_ready(state: State) -> None:
    """Offer the stage the groups that came without a ticket before it opened; drop what is too old for it."""
    drop_stale(state)
    if not state.meta.schedule.pooled:
        for slot in state.groups.where(GroupStatus.READY).tolist():
            if not state.meta.schedule.offer(slot, int(state.groups.version[slot])):
                state.retire(slot, "late")


def _fresh(state: State, plan: StagePlan) -> int:
    """Return the new groups per step of a replaying stage."""
    return math.ceil(plan.groups / state.config.replay_ratio)


@rule(e.StageClosed)
def stage_closed(state: State, event: e.StageClosed) -> None:
    state.meta.open = False


@rule(e.Admitted)
def admitted(state: State, event: e.Admitted) -> list[Ticket]:
    meta = state.meta
    schedule = meta.schedule
    if event.feed:
        return admit_to_feed(state, event)
    if not event.count:  # the stage is closed, or the tasks are exhausted
        meta.calls[event.producer] = (event.call, [])
        return []
    tickets, meta.reissued_tickets = meta.reissued_tickets[: event.count], meta.reissued_tickets[event.count :]
    if meta.plan is not None and meta.plan.parks is not None:
        for waiting in state.resumable[: event.count - len(tickets)]:
            del meta.parked[waiting.ticket.sequence]
            tickets.append(schedule.resume(waiting.ticket, meta.plan.parks))
    fresh = [] if meta.ended else schedule.admit(event.count - len(tickets))
    tasks = _tasks(state, event.tasks[len(tickets) :], len(fresh))
    tickets += [replace(ticket, task=task) for ticket, task in zip(fresh, tasks, strict=False)]
    for ticket in fresh[len(tasks) :]:
        schedule.release(ticket.sequence)
    for ticket in tickets:
        meta.outstanding[ticket.sequence] = Outstanding(ticket, event.producer)
    if not tickets:
        meta.ended = True
    if tickets or state.exhausted:  # else the producer waits for a parked group
        meta.calls[event.producer] = (event.call, tickets)
    check_tasks(event, tickets)
    return tickets


@rule(e.TasksAdded)
def tasks_added(state: State, event: e.TasksAdded) -> None:
    state.meta.added_tasks += event.tasks
    if state.tasks is not None:
        ids, difficulties = [task.id for task in event.tasks], [task.difficulty for task in event.tasks]
        state.tasks.add(ids, event.source, difficulties, [task.priority for task in event.tasks])
        for task in event.tasks:
            state.tasks.record(task.id, task.tries, task.passes)


@rule(e.Abandoned)
def abandoned(state: State, event: e.Abandoned) -> None:
    held = [entry.ticket for entry in state.meta.outstanding.values() if entry.producer == event.producer]
    schedule = state.meta.schedule
    for ticket in held:
        del state.meta.outstanding[ticket.sequence]
        if ticket.feed:
            state.meta.feeds[ticket.feed].reissued.append(ticket)
        elif ticket.sequence in state.meta.begun:
            state.meta.parked[ticket.sequence] = Waiting(ticket, -1)
            schedule.release(ticket.sequence)
        elif ticket.sequence in schedule.running:
            state.meta.reissued_tickets.append(ticket)
    for calls in (state.meta.calls, *(feed.calls for feed in state.meta.feeds.values())):
        calls.pop(event.producer, None)
    state.meta.gone.add(event.producer)


@rule(e.ProducersEnded)
def producers_ended(state: State, event: e.ProducersEnded) -> None:
    state.meta.ended = True


@rule(e.Stored)
def stored(state: State, event: e.Stored) -> None:
    meta = state.meta
    meta.extents[event.extent.segment] = event.extent
    for group in event.groups:
        if not state.expects(group.key, group.sequence):
            continue
        state.discard_calls(group.sequence)
        slot = state.groups.add(group, event.extent.segment, meta.arrivals)
        state.set_score(slot, group.score)
        meta.arrivals += 1
        meta.ledger.sampled += group.rows - group.masked
        ticket = _report(state, group.sequence, group.dropped, group.report)
        if ticket is not None and ticket.feed:
            ticket, state.groups.sequence[slot] = None, -1  # it belongs to no stage
        if not _finish(state, ticket, slot, group.version):
            state.retire(slot, "late")


@rule(e.Parked)
def parked(state: State, event: e.Parked) -> None:
    meta, group = state.meta, event.group
    meta.extents[event.extent.segment] = event.extent
    sequence = group.sequence
    if sequence is None or not state.expects(group.key, sequence):
        return
    if meta.outstanding[sequence].ticket.resumes != event.resumes:
        return  # a late repeat: the group has been resumed since
    state.discard_calls(sequence)
    slot = state.groups.add(group, event.extent.segment, meta.arrivals)
    state.groups.set_status(slot, GroupStatus.PARKED)
    meta.arrivals += 1
    meta.ledger.sampled += state.groups.trainable(slot)
    ticket = meta.outstanding.pop(sequence).ticket
    meta.schedule.release(sequence)
    if sequence < meta.first_sequence:
        state.retire(slot, "unfinished")
    else:
        meta.begun[sequence], meta.parked[sequence] = slot, Waiting(ticket, meta.version)


@rule(e.Dropped)
def dropped(state: State, event: e.Dropped) -> None:
    if event.sequence is not None and event.sequence not in state.meta.outstanding:
        return
    if event.sequence is None and event.key is not None:
        keys = state.meta.rejected_keys
        if keys.pop(event.key, None) == event.digest:
            keys[event.key] = event.digest
            return
        keys[event.key] = event.digest
        if len(keys) > _REJECTED:
            del keys[next(iter(keys))]
    state.discard_calls(event.sequence)
    _report(state, event.sequence, event.dropped, event.report)
    if event.sequence is not None:
        state.meta.schedule.release(event.sequence)


@rule(e.TaskFailed)
def task_failed(state: State, event: e.TaskFailed) -> None:
    if (held := state.meta.outstanding.pop(event.sequence, None)) is not None:
        state.discard_calls(event.sequence)
        state.meta.ledger.dropped_tasks[event.reason] += 1
        state.meta.schedule.release(event.sequence)
        count_group(state, held.ticket, e.GroupReport())


def _tasks(state: State, recorded: list[str | None], count: int) -> list[str | None]:
    """Draw tasks for ``count`` tickets, fewer if they are exhausted; the ``recorded`` ones if there is no task set."""
    if state.tasks is None:
        return recorded or [None] * count
    return draw_tasks(state.tasks, count)


def _report(state: State, sequence: int | None, dropped: dict[str, int], report: e.GroupReport) -> Ticket | None:
    """Count a producer's report on a group; return the group's ticket."""
    meta = state.meta
    for reason, rows in dropped.items():
        meta.ledger.sampled += rows
        meta.ledger.drop(rows, reason)
    meta.reports = meta.reports + report
    if sequence is None:
        return None
    ticket = meta.outstanding.pop(sequence).ticket
    count_group(state, ticket, report)
    tasks = state.feed_tasks.get(ticket.feed) if ticket.feed else state.tasks
    if tasks is not None and ticket.task is not None and report.scored and math.isfinite(report.reward_sum):
        tasks.record(ticket.task, report.scored, min(max(report.reward_sum, 0.0), report.scored))
    return ticket


def _finish(state: State, ticket: Ticket | None, slot: int, version: int) -> bool:
    """Make a group ready that arrived; return False if it is too late."""
    meta = state.meta
    if ticket is None:  # while no stage is open, it waits for the next one
        return not meta.open or meta.schedule.offer(slot, version)
    if meta.plan is None or not meta.open:
        return False
    # A token older than the ticket's version makes the group due earlier.
    deadline = min(ticket.deadline, version + meta.plan.max_staleness)
    return meta.schedule.finish(replace(ticket, deadline=deadline), slot)
