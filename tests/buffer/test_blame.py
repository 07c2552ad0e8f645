"""Rows on which a step fails: tried once more by themselves, then left out and counted, whatever is killed between."""

from __future__ import annotations

from typing import Any

import pytest

from rayrft.buffer.events import Extent
from rayrft.buffer.ledger import Ledger
from rayrft.buffer.state import ExpertCursor
from tests.buffer.in_process import LocalBuffer
from tests.buffer.rows import expert_rows, group, packed, pairs, plan


def begin(buffer: LocalBuffer, groups: int, count: int, **more: Any) -> None:
    """A stage that takes so many groups a step, and groups 1 .. ``count``."""
    buffer.do("open_stage", plan(groups, scheduled=False, name="stage", **more))
    buffer.put_numbers(*range(1, count + 1))


def rows(buffer: LocalBuffer, step: int = 0) -> list[str]:
    return sorted(row for share in buffer.lease(step)[1] for row, _, _ in share)


def alone(buffer: LocalBuffer, step: int = 0) -> int:
    """How many rows of the step's batch are to stand alone."""
    return sum(int(part.alone.sum()) for share in buffer.do("lease", step, 2, 0).shares for part in share.parts)


def resumed(buffer: LocalBuffer, blamed: list[str], attempt: str, step: int = 0) -> None:
    """The run fails on these rows, and begins again."""
    for _ in range(2):  # a call may be made again
        buffer.do("blame", step, attempt, blamed)
    buffer.restart()
    buffer.do("resume", step, f"after the {attempt}")
    buffer.do("open_stage", plan(2, scheduled=False, name="stage"))


def test_a_row_that_fails_twice_is_left_out_with_its_group_and_counted(buffer: LocalBuffer) -> None:
    begin(buffer, 2, 3)
    whole = rows(buffer)
    assert whole == ["1/0", "1/1", "2/0", "2/1"] and alone(buffer) == 0
    resumed(buffer, ["1/1", "2/0"], "first")
    assert rows(buffer) == whole and alone(buffer) == 4, "the same batch, and whoever may be to blame by itself"
    resumed(buffer, ["2/0"], "second")
    assert rows(buffer) == ["1/0", "1/1"] and alone(buffer) == 2
    buffer.do("ack", 0)
    stats = buffer.do("stats")
    assert stats.ledger == Ledger(sampled=6, trained=2, dropped={"failed_twice": 2}, held=2)


def test_one_who_fails_once_and_then_not_is_trained(buffer: LocalBuffer) -> None:
    begin(buffer, 2, 2)
    rows(buffer)
    resumed(buffer, ["1/1"], "first")
    resumed(buffer, ["2/1"], "second")
    assert rows(buffer) == ["1/0", "1/1", "2/0", "2/1"]
    buffer.do("ack", 0)
    buffer.do("blame", 0, "third", ["1/1"])
    assert buffer.do("stats").ledger.trained == 4, "a step that is trained is beyond blame"


def test_a_step_of_which_nothing_is_left_gets_other_groups(buffer: LocalBuffer) -> None:
    begin(buffer, 1, 2)
    assert rows(buffer) == ["1/0", "1/1"]
    buffer.do("blame", 0, "first", ["1/0"])
    buffer.do("blame", 0, "second", ["1/0"])
    buffer.restart()
    assert rows(buffer) == ["2/0", "2/1"]


def test_a_last_step_of_which_nothing_is_left_may_have_others_sampled(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1, name="stage", steps=1, max_staleness=1))
    [ticket] = buffer.do("admit", "explorer", 1, 1)
    buffer.put([(group(1), ticket)])
    assert rows(buffer) == ["1/0", "1/1"] and not buffer.may_admit(), "it has its batch"
    buffer.do("blame", 0, "first", ["1/0"])
    buffer.do("blame", 0, "second", ["1/0"])
    buffer.restart()
    assert buffer.may_admit()


def test_mini_batches_are_as_few_as_what_is_left(buffer: LocalBuffer) -> None:
    begin(buffer, 2, 2, mini_batches=2)
    rows(buffer)
    for attempt in ("first", "second"):
        buffer.do("blame", 0, attempt, ["1/0"])
    assert [len(share.rows) for share in buffer.do("lease", 0, 1, 0).shares] == [1]


@pytest.mark.parametrize("unit", [1, 2], ids=["conversations", "pairs"])
def test_a_demonstration_that_fails_twice_is_drawn_no_more(buffer: LocalBuffer, unit: int) -> None:
    gold = pairs(3) if unit == 2 else expert_rows(6)
    buffer.do("load", "gold", packed(gold))
    buffer.do("open_stage", plan(0, expert_rows=4, demonstrations="gold", pairs=unit == 2))
    first = rows(buffer)
    gone = [row.experience_id for row in gold if row.experience_id in first][:unit]
    for attempt in ("first", "second"):
        buffer.do("blame", 0, attempt, gone[-1:])
        buffer.restart()
    assert rows(buffer) == sorted(set(first) - set(gone))
    drawn = [name for step in range(1, 7) for name in rows(buffer, step)]
    assert len(drawn) == 24 and not set(drawn) & set(gone)
    buffer.restart()
    assert [name for step in range(1, 7) for name in rows(buffer, step)] == drawn


def test_every_epoch_has_each_of_the_other_demonstrations_once() -> None:
    cursor, drawn = ExpertCursor(Extent(0, rows=6), seed=0), list[int]()
    cursor.advance(4)
    cursor.exclude(cursor.peek(2)[:1])  # still to come in this epoch
    while len(drawn) < 31:
        drawn += cursor.peek(3)
        cursor.advance(3)
    assert [len(set(drawn[at : at + 5])) for at in range(1, 31, 5)] == [5] * 6 and cursor.excluded[0] not in drawn
