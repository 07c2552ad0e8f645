"""A Buffer that is full makes producers wait, or drops by rule."""

from __future__ import annotations

import asyncio

import pytest
import ray

from rayrft.buffer import events as e
from rayrft.buffer.client import BufferWriter
from rayrft.buffer.events import Extent
from rayrft.buffer.state import State
from rayrft.buffer.transitions import apply
from rayrft.config.buffer import SamplerConfig
from rayrft.experience import to_batch
from tests.buffer.actor import Start, ledger, put
from tests.buffer.rows import group, plan, trained_ids
from tests.scripted import handle


def test_a_full_buffer_makes_producers_wait_until_there_is_room(start: Start) -> None:
    buffer = start(max_rows=4)
    for number in range(2):
        put(buffer, None, group(number))
    ray.get(buffer.open_stage.remote(plan(1, scheduled=False)))

    async def third() -> None:
        writing = asyncio.ensure_future(BufferWriter(handle(buffer)).put(to_batch(group(2))))
        await asyncio.wait({writing}, timeout=0.3)
        assert not writing.done()
        await buffer.lease.remote(0, 1, 5)
        await buffer.ack.remote(0)
        await asyncio.wait_for(writing, 120)

    asyncio.run(third())
    assert ledger(buffer).sampled == 6


@pytest.mark.parametrize(("rule", "gone"), [("evict_oldest", [0, 1]), ("evict_lowest_priority", [20, 21])])
def test_a_full_buffer_evicts_by_rule_and_counts(start: Start, rule: str, gone: list[int]) -> None:
    buffer = start(max_rows=6, when_full=rule)
    for number, deviation in ((0, 3.0), (1, 2.0), (2, 1.0), (3, 4.0)):
        put(buffer, None, group(number, deviation=deviation))
    assert ledger(buffer).dropped == {rule.replace("evict", "evicted"): 2}
    ray.get(buffer.open_stage.remote(plan(3, scheduled=False)))
    rows = trained_ids(ray.get(buffer.lease.remote(0, 1, 5)))
    assert set(rows) == {0, 1, 10, 11, 20, 21, 30, 31} - set(gone)


def test_a_group_that_was_used_is_evicted_before_others(start: Start) -> None:
    sampler = {"name": "priority", "max_uses": 2, "use_decay": 1e-3}
    buffer = start(max_rows=6, when_full="evict_lowest_priority", sampler=sampler)
    for number, deviation in ((0, 1.0), (1, 1e3), (2, 1.0)):
        put(buffer, None, group(number, deviation=deviation))
    ray.get(buffer.open_stage.remote(plan(1, scheduled=False)))
    assert trained_ids(ray.get(buffer.lease.remote(0, 1, 5))) == [10, 11]
    ray.get(buffer.ack.remote(0))
    put(buffer, None, group(3, deviation=1.0))
    after = ledger(buffer)
    assert (after.trained, after.dropped, after.held) == (2, {}, 6)


def test_what_is_remembered_of_rejected_groups_and_late_feedback_does_not_grow_with_the_run() -> None:
    state = State(SamplerConfig(), 0, None)
    for key in range(10_050):
        apply(state, e.GroupDropped(None, {"rejected": 1}, e.GroupReport(rows=1), key=key, digest=7))
    apply(state, e.GroupDropped(None, {"rejected": 1}, e.GroupReport(rows=1), key=10_049, digest=7))
    assert len(state.contents.rejected_keys) == 10_000 and state.contents.ledger.sampled == 10_050, (
        "a repeat counts once"
    )
    state.contents.extents = {1: Extent(1), 2: Extent(2)}
    apply(state, e.FeedbackNoted(1, "a/0", 1.0, {}, 0))
    apply(state, e.SegmentsDeleted([1]))
    assert state.contents.late_feedback == {} and state.contents.late_feedback_count == 1
