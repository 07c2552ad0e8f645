"""What leaves the disk when the log is full, and what must not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from rayrft.buffer.client import BufferWriter
from rayrft.buffer.events import Extent, FeedbackNoted, GroupReport
from rayrft.buffer.state import State
from rayrft.buffer.transitions.contents import GroupDropped, SegmentsDeleted
from rayrft.config.buffer import SamplerConfig
from rayrft.experience import Experience, to_batch
from tests.buffer.in_process import LocalBuffer
from tests.buffer.rows import group, plan
from tests.scripted import remote

LOG_BYTES = 20_000
Opened = Callable[..., LocalBuffer]


@pytest.fixture
def buffer(opened: Opened) -> LocalBuffer:
    made = opened(log_bytes=LOG_BYTES)
    made.do("open_stage", plan(2, scheduled=False))
    return made


def on_disk(buffer: LocalBuffer) -> int:
    return sum(file.stat().st_size for file in buffer.folder.glob("segment-*"))


def test_the_log_stays_within_its_bound_once_steps_are_covered(buffer: LocalBuffer) -> None:
    for step in range(20):
        buffer.put_numbers(2 * step, 2 * step + 1)
        buffer.trained(step)
        buffer.do("cover", step + 1)
        state = buffer.buffer.state
        assert state.contents.log_bytes == on_disk(buffer) <= LOG_BYTES + 2 * 6000
    assert buffer.do("stats").ledger.trained == 80 and len(state.groups) < 20


def leave_behind(buffer: LocalBuffer, rounds: int) -> None:
    """Of every five groups four are trained on. The fifth, of number 100 r, waits beside them for good."""
    for step in range(rounds):
        heavy = [(group(100 * step + each, deviation=1.0), None) for each in range(1, 5)]
        buffer.put([(group(100 * step, deviation=1e-3), None), *heavy])
        buffer.trained(step)


def picky(opened: Opened, name: str = "buffer") -> LocalBuffer:
    """A Buffer that draws four groups a step, those with large deviations."""
    buffer = opened(name, log_bytes=LOG_BYTES, sampler={"name": "priority", "alpha": 30})
    buffer.do("open_stage", plan(4, scheduled=False))
    return buffer


def test_groups_that_wait_in_sparse_segments_are_written_again_as_they_were(opened: Opened) -> None:
    buffer = picky(opened)
    leave_behind(buffer, 8)
    waiting, before = buffer.held(), on_disk(buffer)
    assert [name for name, _ in waiting] == [f"{100 * i}/{row}" for i in range(8) for row in range(2)]
    buffer.do("cover", 8)
    buffer.do("cover", 8)  # what was the newest segment is not any more
    after = on_disk(buffer)
    assert after < before
    assert buffer.held() == waiting
    buffer.do("cover", 8)
    assert on_disk(buffer) == after, "what is not sparse was written again"
    buffer.restart()
    assert buffer.held() == waiting


@pytest.mark.parametrize("first", ["feedback", "cover"])
def test_feedback_that_comes_while_the_log_is_compacted_is_kept(opened: Opened, first: str) -> None:
    for head_start in range(0, 60, 3):
        buffer = picky(opened, str(head_start))
        leave_behind(buffer, 6)
        calls = [buffer.buffer.feedback("0/1", 7.0), buffer.buffer.cover(6)]

        async def race(one: Coroutine[Any, Any, None], other: Coroutine[Any, Any, None], head_start: int) -> None:
            begun = asyncio.ensure_future(one)
            for _ in range(head_start):
                await asyncio.sleep(0)
            await asyncio.gather(begun, other)

        buffer.run(race(*calls if first == "feedback" else calls[::-1], head_start))
        buffer.restart()
        assert buffer.held()[1] == ("0/1", 7.0), f"with a head start of {head_start}"
        buffer.kill()


def session(number: int, name: str, finished: float, **changes: Any) -> list[Experience]:
    """A group of two sessions of the endpoint, of one response each."""
    return [
        row.with_fields(
            labels={"session_id": f"{name}{at}", "response_ids": f"resp-{name}{at} resp-{name}{at}b"},
            turns=({"role": "user", "content": f"secret of {name}{at}"},),
            finished_at=finished,
            **changes,
        )
        for at, row in enumerate(group(number))
    ]


def secrets(folder: Path) -> set[str]:
    """What is on disk of what people wrote."""
    found = re.findall(
        rb"secret of ([a-z]\d|late)", b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    )
    return {each.decode() for each in found}


def test_what_a_person_wrote_is_erased_by_session_response_or_age_and_the_ledger_closes(
    buffer: LocalBuffer, tmp_path: Path
) -> None:
    buffer.put([(session(each, name, float(each)), None) for each, name in enumerate("abcdef")])
    buffer.put_numbers(7, 8)
    buffer.lease(0)  # a, b
    buffer.do("ack", 0)
    assert buffer.do("forget", ["resp-a0", "c1"]) == (0, 4), "a step without a checkpoint trains on its segment"
    buffer.do("cover", 1)
    buffer.do("feedback", "0/1", None, {"comment": "secret of late"})
    buffer.do("feedback", "1/0", None, {"comment": "not secret"})
    buffer.do("feedback", "5/1", None, {"comment": "kind"})  # written again: the first copy stays until it is erased
    assert buffer.do("forget", ["resp-a0", "c1", "nobody"]) == (4, 0)
    assert secrets(tmp_path) == {f"{name}{at}" for name in "bdef" for at in (0, 1)}, "whole groups, as they were scored"
    ledger = buffer.do("stats").ledger
    assert ledger.dropped == {"forgotten": 2} and (ledger.sampled, ledger.trained, ledger.held) == (16, 4, 10)
    assert [note.experience_id for notes in buffer.buffer.state.contents.late_feedback.values() for note in notes] == [
        "1/0"
    ]
    assert buffer.do("forget", [], 3.5) == (4, 0), "b and d are old; what is of no session stays"
    assert secrets(tmp_path) == {f"{name}{at}" for name in "ef" for at in (0, 1)}
    before = buffer.standing()
    buffer.restart()
    assert buffer.standing() == before
    assert [name for name, _ in buffer.held()] == [f"{each}/{at}" for each in (4, 5, 7, 8) for at in (0, 1)]
    assert buffer.lease(1)[2] == 4
    ledger = buffer.do("ack", 1)
    assert ledger.dropped == {"forgotten": 4} and ledger.trained == 8


# A full Buffer


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
        GroupDropped(None, {"rejected": 1}, GroupReport(rows=1), key=key, digest=7).apply(state)
    remembered, counted = len(state.contents.rejected_keys), state.contents.ledger.sampled
    assert (remembered, counted) == (10_000, 10_050), "a repeat counts once"
    state.contents.extents = {1: Extent(1), 2: Extent(2)}
    FeedbackNoted(1, "a/0", 1.0, {}, 0).apply(state)
    SegmentsDeleted([1]).apply(state)
    assert state.contents.late_feedback == {} and state.contents.late_feedback_count == 1
