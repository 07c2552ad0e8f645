"""A Buffer that is full makes producers wait, or drops by rule."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rayrft.buffer import events as e
from rayrft.buffer.client import BufferWriter
from rayrft.buffer.events import Extent
from rayrft.buffer.state import State
from rayrft.buffer.transitions import apply
from rayrft.config.buffer import SamplerConfig
from rayrft.experience import to_batch
from tests.buffer.in_process import LocalBuffer
from tests.buffer.rows import group, plan
from tests.scripted import remote

Opened = Callable[..., LocalBuffer]


def put(buffer: LocalBuffer, deviations: dict[int, float]) -> None:
    for number, deviation in deviations.items():
        buffer.put([(group(number, deviation=deviation), None)])


def test_a_full_buffer_makes_producers_wait_until_there_is_room(opened: Opened) -> None:
    buffer = opened(max_rows=4)
    buffer.put_numbers(0, 1)
    buffer.do("open_stage", plan(1, scheduled=False))

    async def third() -> None:
        writing = asyncio.ensure_future(BufferWriter(remote(buffer.buffer)).put(to_batch(group(2))))
        await buffer.buffer.lease(0, 1, 5)
        await asyncio.wait({writing}, timeout=0.05)
        assert not writing.done()
        await buffer.buffer.ack(0)
        await asyncio.wait_for(writing, 120)

    buffer.run(third())
    assert buffer.do("stats").ledger.sampled == 6


@pytest.mark.parametrize(("rule", "gone"), [("evict_oldest", 0), ("evict_lowest_priority", 2)])
def test_a_full_buffer_evicts_by_rule_and_counts(opened: Opened, rule: str, gone: int) -> None:
    buffer = opened(max_rows=6, when_full=rule)
    put(buffer, {0: 3.0, 1: 2.0, 2: 1.0, 3: 4.0})
    assert buffer.do("stats").ledger.dropped == {rule.replace("evict", "evicted"): 2}
    assert {int(name.split("/")[0]) for name, _ in buffer.held()} == {0, 1, 2, 3} - {gone}


def test_a_group_that_was_used_is_evicted_before_others(opened: Opened) -> None:
    sampler = {"name": "priority", "max_uses": 2, "use_decay": 1e-3}
    buffer = opened(max_rows=6, when_full="evict_lowest_priority", sampler=sampler)
    put(buffer, {0: 1.0, 1: 1e3, 2: 1.0})
    buffer.do("open_stage", plan(1, scheduled=False))
    assert buffer.trained(0) == ["1/0", "1/1"]
    put(buffer, {3: 1.0})
    after = buffer.do("stats").ledger
    assert (after.trained, after.dropped, after.held) == (2, {}, 6)


def test_what_is_remembered_of_rejected_groups_and_late_feedback_does_not_grow_with_the_run() -> None:
    state = State(SamplerConfig(), 0, None)
    for key in [*range(10_050), 10_049]:
        apply(state, e.GroupDropped(None, {"rejected": 1}, e.GroupReport(rows=1), key=key, digest=7))
    remembered, counted = len(state.contents.rejected_keys), state.contents.ledger.sampled
    assert (remembered, counted) == (10_000, 10_050), "a repeat counts once"
    state.contents.extents = {1: Extent(1), 2: Extent(2)}
    apply(state, e.FeedbackNoted(1, "a/0", 1.0, {}, 0))
    apply(state, e.SegmentsDeleted([1]))
    assert state.contents.late_feedback == {} and state.contents.late_feedback_count == 1
