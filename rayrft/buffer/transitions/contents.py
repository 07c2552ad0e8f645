"""Transitions of the rows: producers' results, demonstrations, feedback, and storage locations."""

from __future__ import annotations

import math
from dataclasses import field, replace

import numpy as np

from rayrft.buffer.events import Event, Extent, GroupReport, StoredGroup
from rayrft.buffer.expert_cursor import ExpertCursor
from rayrft.buffer.groups import GroupStatus
from rayrft.buffer.schedule import Ticket
from rayrft.buffer.state import ParkedTicket, State

_REJECTED = 10_000
"""Groups that were rejected and are remembered, so that a repeat of one is not counted again."""


class Began(Event):
    run: str
    schema: str

    def apply(self, state: State) -> None:
        state.meta.run, state.meta.schema = self.run, self.schema


class GroupsStored(Event):
    """Groups were stored in the segment that now has this extent."""

    extent: Extent
    groups: list[StoredGroup]

    def apply(self, state: State) -> None:
        state.contents.extents[self.extent.segment] = self.extent
        for group in self.groups:
            if not state.expects(group.key, group.sequence):
                continue
            slot = _add(state, group, self.extent.segment)
            state.set_score(slot, group.stored.score)
            ticket = _report(state, group.sequence, group.dropped, group.report)
            if ticket is not None and ticket.feed:
                ticket, state.groups.sequence[slot] = None, -1  # it belongs to no stage
            if not _finish(state, ticket, slot, group.stored.version):
                state.retire("late", slot)


class GroupParked(Event):
    """Calls of a group's unfinished attempts were stored in the segment of this extent. Its ticket is issued again."""

    extent: Extent
    group: StoredGroup
    resumes: int
    """Of the ticket."""

    def apply(self, state: State) -> None:
        stage, group, sequence = state.stage, self.group, self.group.sequence
        state.contents.extents[self.extent.segment] = self.extent
        if sequence is None or not state.expects(group.key, sequence):
            return
        if state.outstanding[sequence].ticket.resumes != self.resumes:
            return  # a late repeat: the group has been resumed since
        slot = _add(state, group, self.extent.segment)
        state.groups.set_status(slot, GroupStatus.PARKED)
        ticket = state.outstanding.pop(sequence).ticket
        stage.schedule.release(sequence)
        if sequence < stage.first_sequence:
            state.retire("unfinished", slot)
        else:
            stage.begun[sequence], stage.parked[sequence] = slot, ParkedTicket(ticket, state.training.version)


def _add(state: State, group: StoredGroup, segment: int) -> int:
    """Add a group that has arrived, in place of its parked calls; return its slot."""
    state.discard_calls(group.sequence)
    slot = state.groups.add(group, segment, state.contents.arrivals)
    state.contents.arrivals += 1
    state.contents.ledger.sampled += state.groups.trainable(slot)
    return slot


class GroupDropped(Event):
    """A group was dropped without storing any row."""

    sequence: int | None
    dropped: dict[str, int]
    report: GroupReport
    key: int | None = None
    digest: int = 0
    """Checksum of a rejected group without a ticket."""

    def apply(self, state: State) -> None:
        if self.sequence is not None and self.sequence not in state.outstanding:
            return
        if self.sequence is None and self.key is not None:
            keys = state.contents.rejected_keys
            known, keys[self.key] = keys.pop(self.key, None), self.digest
            if known == self.digest:
                return
            if len(keys) > _REJECTED:
                del keys[next(iter(keys))]
        state.discard_calls(self.sequence)
        _report(state, self.sequence, self.dropped, self.report)
        if self.sequence is not None:
            state.stage.schedule.release(self.sequence)


class TaskFailed(Event):
    """A task gave no rows."""

    sequence: int
    reason: str

    def apply(self, state: State) -> None:
        if (held := state.outstanding.pop(self.sequence, None)) is not None:
            state.discard_calls(self.sequence)
            state.contents.ledger.dropped_tasks[self.reason] += 1
            state.stage.schedule.release(self.sequence)
            state.feeds[held.ticket.feed].groups += 1


def _report(state: State, sequence: int | None, dropped: dict[str, int], report: GroupReport) -> Ticket | None:
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


class GroupsEvicted(Event):
    slots: list[int]
    reason: str

    def apply(self, state: State) -> None:
        for slot in self.slots:
            state.stage.schedule.remove(slot)
        state.retire(self.reason, *self.slots)


class GroupsMoved(Event):
    """Groups were rewritten contiguously from row ``row`` of the extent's segment."""

    extent: Extent
    slots: list[int]
    row: int
    score: float | None = None
    """New score if feedback changed the rows."""

    def apply(self, state: State) -> None:
        state.contents.extents[self.extent.segment] = self.extent
        row = self.row
        for slot in self.slots:
            state.groups.move(slot, self.extent.segment, row)
            row += int(state.groups.rows[slot])
            if self.score is not None:
                state.set_score(slot, self.score)


class SegmentsDeleted(Event):
    segments: list[int]
    forgotten: list[str] = field(default_factory=list)
    """Experience ids whose late feedback is deleted, too."""

    def apply(self, state: State) -> None:
        contents, groups, gone = state.contents, state.groups, {*self.forgotten}
        for segment in self.segments:
            del contents.extents[segment]
            noted = contents.late_feedback.pop(segment, [])
            # Its other groups were moved.
            if gone and (kept := [each for each in noted if each.experience_id not in gone]):
                contents.late_feedback.setdefault(max(contents.extents), []).extend(kept)
            groups.live.pop(segment, None)
        groups.forget(np.flatnonzero(np.isin(groups.segment, self.segments) & (groups.status != GroupStatus.FREE)))


class DemonstrationsLoaded(Event):
    """Demonstrations are stored in the file ``expert-<name>-<segment>.arrow`` of this extent."""

    name: str
    extent: Extent
    unit: int = 1
    """Rows per unit: 2 for preference pairs."""
    labelled: bool = False
    """Whether they are single answers that are labelled good or bad."""

    def apply(self, state: State) -> None:
        experts, extent = state.contents.experts, self.extent
        if self.name not in experts or experts[self.name].loaded != extent:  # else it is a repeat: the draws continue
            cursor = ExpertCursor(extent, state.seed, self.unit, labelled=self.labelled, loaded=extent)
            experts[self.name] = cursor


class DemonstrationsExtended(DemonstrationsLoaded):
    """Demonstrations were added to those of a name, whose file has this extent now."""

    def apply(self, state: State) -> None:
        experts = state.contents.experts
        if self.name not in experts:
            experts[self.name] = ExpertCursor(self.extent, state.seed, self.unit, labelled=self.labelled)
        experts[self.name].grow(self.extent)


class DemonstrationsWithdrawn(Event):
    """Demonstrations of a name are not drawn any more, by their row numbers; leases that have them keep them."""

    name: str
    rows: list[int]

    def apply(self, state: State) -> None:
        state.contents.experts[self.name].exclude(self.rows)
