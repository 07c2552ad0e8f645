"""What a step gets, what it waits for, and what training tells of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from rayrft.algorithms import build
from rayrft.errors import LeaseEnded
from rayrft.experience import MASKED
from rayrft.trainer.batches import fetch_rows
from tests.buffer.in_process import LocalBuffer
from tests.buffer.rows import group, plan, train_rows, trained_ids

Opened = Callable[..., LocalBuffer]


def test_the_rows_of_a_group_are_dealt_over_ranks_with_the_advantages_of_the_whole_group(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1))
    [ticket] = buffer.do("admit", "explorer", 1, 10)
    rows = [row.with_fields(status=MASKED if at == 3 else "finished") for at, row in enumerate(group(0, 5))]
    buffer.put([(rows, ticket)], {"truncated": 1})
    lease = buffer.do("lease", 0, 4, 5)
    assert [len(fetch_rows(share, build("dr_grpo"))) for share in lease.shares] == [1] * 4
    found = {row.experience: row.advantages.tolist() for row in train_rows(lease, "dr_grpo")}
    # The rewards are 0 to 4. The masked row with 3 counts in their mean, 2, and is not trained.
    assert found == {f"0/{number}": [0.0, *[number - 2.0] * 3] for number in (0, 1, 2, 4)}
    counted = buffer.do("stats").ledger
    assert (lease.usual_rows, counted.sampled, counted.held, counted.dropped) == (4, 5, 4, {"truncated": 1})
    assert buffer.do("ack", 0).trained == 4


def test_staleness_is_counted_from_the_oldest_token(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1, max_staleness=2, version=7))
    buffer.put([(group(0, version=6), buffer.do("admit", "explorer", 1, 1)[0])])
    assert buffer.do("lease", 7, 1, 5).staleness == (1,)


def test_a_step_that_waits_says_what_for_and_its_deadline_is_on_groups_that_become_ready(
    buffer: LocalBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, limits, reschedule = [0.0], list[float](), asyncio.Timeout.reschedule

    def noted(self: asyncio.Timeout, when: float | None) -> None:
        if when is not None and when > buffer.loop.time() + 50:  # the lease's, of 60 s
            limits.append(when)
        reschedule(self, when)

    monkeypatch.setattr("rayrft.runtime.waits.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(asyncio.Timeout, "reschedule", noted)
    buffer.do("open_stage", plan(3))
    tickets = buffer.do("admit", "explorer", 1, 3)
    leasing = buffer.begin("lease", 0, 1, 60)
    assert buffer.do("waiting").waits
    now[0] = 10.0
    buffer.do("fail", tickets[0], "workflow_error")
    [waits] = buffer.do("waiting").waits
    assert waits.quiet_s == 10 and "workflow_error" in waits.what and len(limits) == 1, "a failure is no progress"
    for number in (1, 2):
        buffer.put([(group(number), tickets[number])])
        [waits] = buffer.do("waiting").waits
        assert waits.quiet_s == 0 and len(limits) == 1 + number and limits[-1] > limits[-2]
    [another] = buffer.do("admit", "explorer", 2, 3)
    buffer.put([(group(3), another)])
    assert trained_ids(buffer.run(leasing)) == [10, 11, 20, 21, 30, 31]
    with pytest.raises(LeaseEnded, match=r"step 1 needs 3 groups, and .*: 0 ready, 0 running.*workflow_error"):
        buffer.run(buffer.buffer.lease(1, 1, 0))


@pytest.mark.parametrize("ends", ["its steps", "its producers"])
def test_groups_are_held_for_people_as_long_as_more_can_come(ends: str, buffer: LocalBuffer) -> None:
    steps = 5 if ends == "its steps" else None
    buffer.do("open_stage", plan(1, max_staleness=2, hold_steps=2, steps=steps))
    waits, stale, calls = ("LeaseEnded", "deadline"), list[int](), itertools.count()
    for step in range(5):
        ended = ends == "its producers" and step == 3
        tickets = [] if ended or not buffer.may_admit() else buffer.do("admit", "explorer", next(calls), 10)
        if ended:
            buffer.do("finish")
        for ticket in tickets:
            assert buffer.lease(step) == waits, "another group is running"
            buffer.put([(group(ticket.sequence, version=ticket.version), ticket)])
        leased = buffer.lease(step)
        assert leased[2] == 2, leased
        stale += leased[4]
        buffer.trained(step, advance=True)
    assert stale == [0, 1, 2, 2, 2], "each waits for two steps, and none is older than the bound"


def test_groups_are_drawn_by_how_far_the_critic_missed_them_and_again_after_a_restart(opened: Opened) -> None:
    buffer = opened(sampler={"name": "priority", "score": "td_error", "alpha": 3.0, "max_uses": 100})
    buffer.put_numbers(*range(4))
    buffer.do("open_stage", plan(4, scheduled=False))
    assert buffer.lease(0)[2] == 8, "what is not trained yet is drawn, too"
    missed = {str(number): 0.0 for number in range(4)} | {"2": 0.7, "of a group that is not here": 1.0}
    assert buffer.do("ack", 0, missed | {"1": float("nan")})[0] == "DataError"
    assert buffer.do("stats").ledger.held == 8 and not buffer.buffer._state.training.leases[0].acked
    buffer.do("ack", 0, missed)
    buffer.do("open_stage", plan(1, scheduled=False, name="one"))
    for step, error in ((1, 0.7), (2, 0.7), (3, 5.0)):
        assert [name for name, *_ in buffer.lease(step, 1)[1][0]] == ["2/0", "2/1"]
        buffer.do("ack", step, {"2": error})
        buffer.restart()
    buffer.put_numbers(7)
    buffer.do("feedback", "7/0", None, {"quality": "good"})
    drawn = {name for step in range(4, 20) for name in buffer.trained(step)}
    assert drawn == {"2/0", "2/1", "7/0", "7/1"}, "what is new counts as much as the greatest error; others stay"
