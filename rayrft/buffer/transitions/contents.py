"""Transitions of the rows: producers' results, demonstrations, feedback, and storage locations."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rayrft.buffer import events as e
from rayrft.buffer.expert_cursor import ExpertCursor
from rayrft.buffer.groups import GroupStatus
from rayrft.buffer.schedule import Ticket
from rayrft.buffer.state import ParkedTicket, State, rule

_REJECTED = 10_000
"""Groups that were rejected and are remembered, so that a repeat of one is not counted again."""


@rule(e.Began)
def began(state: State, event: e.Began) -> None:
    state.meta.run, state.meta.schema = event.run, event.schema


@rule(e.GroupsStored)
def stored(state: State, event: e.GroupsStored) -> None:
    state.contents.extents[event.extent.segment] = event.extent
    for group in event.groups:
        if not state.expects(group.key, group.sequence):
            continue
        slot = _add(state, group, event.extent.segment)
        state.set_score(slot, group.stored.score)
        ticket = _report(state, group.sequence, group.dropped, group.report)
        if ticket is not None and ticket.feed:
            ticket, state.groups.sequence[slot] = None, -1  # it belongs to no stage
        if not _finish(state, ticket, slot, group.stored.version):
            state.retire("late", slot)


@rule(e.GroupParked)
def parked(state: State, event: e.GroupParked) -> None:
    stage, group, sequence = state.stage, event.group, event.group.sequence
    state.contents.extents[event.extent.segment] = event.extent
    if sequence is None or not state.expects(group.key, sequence):
        return
    if state.outstanding[sequence].ticket.resumes != event.resumes:
        return  # a late repeat: the group has been resumed since
    slot = _add(state, group, event.extent.segment)
    state.groups.set_status(slot, GroupStatus.PARKED)
    ticket = state.outstanding.pop(sequence).ticket
    stage.schedule.release(sequence)
    if sequence < stage.first_sequence:
        state.retire("unfinished", slot)
    else:
        stage.begun[sequence], stage.parked[sequence] = slot, ParkedTicket(ticket, state.training.version)


def _add(state: State, group: e.StoredGroup, segment: int) -> int:
    """Add a group that has arrived, in place of its parked calls; return its slot."""
    state.discard_calls(group.sequence)
    slot = state.groups.add(group, segment, state.contents.arrivals)
    state.contents.arrivals += 1
    state.contents.ledger.sampled += state.groups.trainable(slot)
    return slot


@rule(e.GroupDropped)
def dropped(state: State, event: e.GroupDropped) -> None:
    if event.sequence is not None and event.sequence not in state.outstanding:
        return
    if event.sequence is None and event.key is not None:
        keys = state.contents.rejected_keys
        known, keys[event.key] = keys.pop(event.key, None), event.digest
        if known == event.digest:
            return
        if len(keys) > _REJECTED:
            del keys[next(iter(keys))]
    state.discard_calls(event.sequence)
    _report(state, event.sequence, event.dropped, event.report)
    if event.sequence is not None:
        state.stage.schedule.release(event.sequence)


@rule(e.TaskFailed)
def task_failed(state: State, event: e.TaskFailed) -> None:
    if (held := state.outstanding.pop(event.sequence, None)) is not None:
        state.discard_calls(event.sequence)
        state.contents.ledger.dropped_tasks[event.reason] += 1
        state.stage.schedule.release(event.sequence)
        state.feeds[held.ticket.feed].groups += 1


def _report(state: State, sequence: int | None, dropped: dict[str, int], report: e.GroupReport) -> Ticket | None:
    """Count a producer's report on a group; return the group's ticket."""
    ledger = state.contents.ledger
    for reason, rows in dropped.items():
        ledger.sampled += rows
        ledger.dropped[reason] += rows
    state.training.reports = state.training.reports + report
    if sequence is None:
        return None
    ticket = state.outstanding.pop(sequence).ticket
    feed, tasks = state.feeds[ticket.feed], state.tasks.get(ticket.feed)
    feed.groups, feed.report = feed.groups + 1, feed.report + report
    if tasks is not None and ticket.task is not None and report.scored and math.isfinite(report.reward_sum):
        tasks.record(ticket.task, report.scored, min(max(report.reward_sum, 0.0), report.scored))
    return ticket


def _finish(state: State, ticket: Ticket | None, slot: int, version: int) -> bool:
    """Make a group ready that arrived; return False if it is too late."""
    stage = state.stage
    if ticket is None:  # while no stage is open, it waits for the next one
        return not stage.open or stage.schedule.offer(slot, version)
    if stage.plan is None or not stage.open:
        return False
    # A token older than the ticket's version makes the group due earlier.
    deadline = min(ticket.deadline, version + stage.plan.max_staleness)
    return stage.schedule.finish(replace(ticket, deadline=deadline), slot)


@rule(e.GroupsEvicted)
def evicted(state: State, event: e.GroupsEvicted) -> None:
    for slot in event.slots:
        state.stage.schedule.remove(slot)
    state.retire(event.reason, *event.slots)


@rule(e.GroupsMoved)
def moved(state: State, event: e.GroupsMoved) -> None:
    state.contents.extents[event.extent.segment] = event.extent
    row = event.row
    for slot in event.slots:
        state.groups.move(slot, event.extent.segment, row)
        row += int(state.groups.rows[slot])
        if event.score is not None:
            state.set_score(slot, event.score)


@rule(e.SegmentsDeleted)
def deleted(state: State, event: e.SegmentsDeleted) -> None:
    contents, groups, gone = state.contents, state.groups, {*event.forgotten}
    for segment in event.segments:
        del contents.extents[segment]
        noted = contents.late_feedback.pop(segment, [])
        if gone and (kept := [each for each in noted if each.experience_id not in gone]):  # its other groups were moved
            contents.late_feedback.setdefault(max(contents.extents), []).extend(kept)
        groups.live.pop(segment, None)
    groups.forget(np.flatnonzero(np.isin(groups.segment, event.segments) & (groups.status != GroupStatus.FREE)))


@rule(e.FeedbackNoted)
def feedback_noted(state: State, event: e.FeedbackNoted) -> None:
    noted = state.contents.late_feedback.setdefault(event.segment, [])
    if event not in noted:  # else it is a repeat
        noted.append(event)
        state.contents.late_feedback_count += 1


@rule(e.DemonstrationsLoaded)
def loaded(state: State, event: e.DemonstrationsLoaded) -> None:
    experts, extent = state.contents.experts, event.extent
    if event.name not in experts or experts[event.name].loaded != extent:  # else it is a repeat: the draws continue
        cursor = ExpertCursor(extent, state.seed, event.unit, labelled=event.labelled, loaded=extent)
        experts[event.name] = cursor


@rule(e.DemonstrationsExtended)
def extended(state: State, event: e.DemonstrationsExtended) -> None:
    experts = state.contents.experts
    if event.name not in experts:
        experts[event.name] = ExpertCursor(event.extent, state.seed, event.unit, labelled=event.labelled)
    experts[event.name].grow(event.extent)


@rule(e.DemonstrationsWithdrawn)
def withdrawn(state: State, event: e.DemonstrationsWithdrawn) -> None:
    state.contents.experts[event.name].exclude(event.rows)
