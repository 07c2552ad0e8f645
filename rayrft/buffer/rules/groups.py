"""Where rows lie, and rows that are not a producer's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rayrft.buffer.book import ExpertCursor
from rayrft.buffer.groups import Fate
from rayrft.buffer.log import events as e
from rayrft.buffer.rules.rule import rule
from rayrft.buffer.schedule import Schedule

if TYPE_CHECKING:
    from rayrft.buffer.state import State


@rule(e.Evicted)
def evicted(state: State, event: e.Evicted) -> None:
    state.pool.leave(event.slots)
    for slot in event.slots:
        if isinstance(state.book.schedule, Schedule):
            sequence = int(state.groups.sequence[slot])
            state.book.schedule.ready.pop(sequence, None)
            state.by_sequence.pop(sequence, None)
        state.retire(slot, event.reason)


@rule(e.Moved)
def moved(state: State, event: e.Moved) -> None:
    state.book.extents.setdefault(event.shard, {})[event.extent.segment] = event.extent
    row = event.row
    for slot in event.slots:
        state.groups.move(slot, event.shard, event.extent.segment, row)
        row += int(state.groups.rows[slot])
        if event.score is not None:
            state.set_score(slot, event.score)
            state.pool.update(slot, float(state.groups.score[slot]))


@rule(e.Deleted)
def deleted(state: State, event: e.Deleted) -> None:
    groups = state.groups
    for segment in event.segments:
        del state.book.extents[event.shard][segment]
        groups.live.pop((event.shard, segment), None)
    there = (groups.shard == event.shard) & np.isin(groups.segment, event.segments) & (groups.fate != Fate.FREE)
    groups.forget(np.flatnonzero(there))


@rule(e.FeedbackNoted)
def feedback_noted(state: State, event: e.FeedbackNoted) -> None:
    if event not in state.book.late_feedback:  # else it is the same, given again
        state.book.late_feedback.append(event)


@rule(e.Loaded)
def loaded(state: State, event: e.Loaded) -> None:
    known = state.book.experts.get(event.name)
    if known is None or known.extent != event.extent:  # else it is the same, loaded again: the draws go on
        state.book.experts[event.name] = ExpertCursor(event.extent, state.seed, event.unit)
