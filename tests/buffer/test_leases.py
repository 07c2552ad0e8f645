"""What a step gets, what it waits for, and what training tells of it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrft.algorithms import build
from rayrft.buffer import client
from rayrft.buffer.client import BufferWriter
from rayrft.buffer.leases import Unit, balance, deal
from rayrft.config.buffer import SamplerConfig
from rayrft.errors import DataError, LeaseEnded
from rayrft.experience import MASKED, to_batch
from rayrft.trainer.batches import fetch_rows
from tests.buffer.in_process import LocalBuffer
from tests.buffer.rows import group, plan, train_rows, trained_ids
from tests.errors import about
from tests.scripted import remote

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


@pytest.mark.parametrize("arrival", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_rows_are_dealt_in_the_order_of_their_tickets_whatever_that_of_their_arrival(
    arrival: tuple[int, ...], buffer: LocalBuffer
) -> None:
    buffer.do("open_stage", plan(3))
    tickets = buffer.do("admit", "explorer", 1, 3)
    for number in arrival:
        buffer.put([(group(number), tickets[number])])
    for _ in range(2):
        [rows] = buffer.lease(0, ranks=1)[1]
        assert [row for row, _, _ in rows] == ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1"], "sums have the same last bits"
        buffer.restart()


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
    assert buffer.do("stats").ledger.held == 8 and not buffer.buffer.state.training.leases[0].acked
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


def test_a_sampler_that_is_exchanged_draws_by_the_scores_of_the_groups_that_were_there_before(opened: Opened) -> None:
    uniform = SamplerConfig(name="uniform", alpha=3.0, max_uses=100)
    buffer, stage = opened(sampler=uniform.model_dump()), plan(1, scheduled=False, name="mix", sampler=uniform)
    buffer.put([(group(number, deviation=float(number == 2)), None) for number in range(4)])
    buffer.do("open_stage", stage)
    assert {name[0] for step in range(20) for name in buffer.trained(step)} > {"2"}
    buffer.do("adjust_stage", replace(stage, sampler=uniform.model_copy(update={"name": "priority"})))
    assert {name[0] for step in range(20, 40) for name in buffer.trained(step)} == {"2"}


# Tickets, what comes of them, and producers that end or die


def test_a_closed_stage_wakes_all_that_a_producer_waits_for(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1))
    [ticket] = buffer.do("admit", "explorer", 1, 10)
    buffer.put([(group(0), ticket)])
    waiting = [buffer.begin("admit", "explorer", 2, 10), buffer.begin("leased", 0)]
    buffer.lease(0)
    assert buffer.do("leased", -1) == 0 and not any(each.done() for each in waiting)
    buffer.do("close_stage")
    assert [buffer.run(each) for each in waiting] == [[], 0]


def test_a_group_with_a_row_of_other_types_fails_alone_among_those_it_is_sent_with(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(3, max_staleness=1))
    tickets, writer = buffer.do("admit", "explorer", 1, 3), BufferWriter(remote(buffer.buffer))
    groups = [group(number) for number in range(3)]
    groups[1][0] = groups[1][0].with_fields(reward="high")

    async def put_all() -> list[Any]:
        puts = (writer.put(rows, ticket=ticket) for rows, ticket in zip(groups, tickets, strict=True))
        return await asyncio.gather(*puts, return_exceptions=True)

    first, refused, last = buffer.run(put_all())
    assert isinstance(refused, DataError) and refused.field == "reward"
    assert first == last == [] and buffer.do("stats").ledger.held == 4


def test_a_group_of_another_schema_or_that_cannot_be_sent_is_an_error_of_its_own(
    buffer: LocalBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full object store, for example: the producer must get an error instead of an answer."""
    payload, errors, writer = client._payload, [OSError("full")], BufferWriter(remote(buffer.buffer))

    def sometimes(message: pa.Buffer) -> Any:
        if errors:
            raise errors.pop()
        return payload(message)

    async def put_two() -> list[Any]:
        async with asyncio.timeout(60):
            first = await asyncio.gather(writer.put(to_batch(group(0))), return_exceptions=True)
            return [*first, await writer.put(to_batch(group(1)))]

    monkeypatch.setattr(client, "_payload", sometimes)
    refused, faults = buffer.run(put_two())
    assert isinstance(refused, OSError) and faults == [] and buffer.do("stats").ledger.held == 2
    with pytest.raises(DataError, check=about("schema")):
        buffer.run(BufferWriter(remote(buffer.buffer)).put(pa.RecordBatch.from_pydict({"group_id": ["x"]})))


def test_groups_of_an_ended_stage_are_dropped_and_not_taken_for_those_of_the_next(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1, max_staleness=1))
    left, late = buffer.do("admit", "explorer", 1, 10)
    buffer.put([(group(0), left)])
    buffer.do("close_stage")
    buffer.do("open_stage", plan(1, version=5))
    [new] = buffer.do("admit", "explorer", 2, 10)
    buffer.put([(group(1), late), (group(2, version=5), new)])
    assert buffer.trained(5) == ["2/0", "2/1"]
    assert buffer.do("stats").ledger.dropped == {"stage_ended": 2, "late": 2}


def test_tickets_of_the_life_before_go_to_the_next(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1))
    first = buffer.do("admit", "one", 1, 1)
    buffer.resume(0, "again")
    assert buffer.do("admit", "two", 1, 1) == first
    assert buffer.do("admit", "one", 2, 1) == ("DataError", "one")


def test_a_lease_in_flight_ends_when_another_master_repeats_earlier_steps(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1))
    buffer.put([(group(0), buffer.do("admit", "explorer", 1, 1)[0])])
    rows = buffer.trained(0, advance=True)
    buffer.do("admit", "explorer", 2, 1)
    waiting = buffer.begin("lease", 1, 2, 1000.0)
    assert buffer.do("advance", 1) is None and not waiting.done()
    buffer.resume(0, "again")
    buffer.do("open_stage", plan(1))
    assert buffer.trained(0, advance=True) == rows
    with pytest.raises(LeaseEnded, check=about("buffer.lease", "resumed")):
        buffer.run(waiting)


# Dealing rows to ranks


@given(sizes=st.lists(st.integers(1, 1000), max_size=40), parts=st.integers(1, 6))
def test_every_item_is_dealt_exactly_once(sizes: list[int], parts: int) -> None:
    dealt = balance(sizes, parts)
    assert len(dealt) == parts
    assert sorted(index for part in dealt for index in part) == list(range(len(sizes)))
    assert all(dealt) or len(sizes) < parts
    assert max(map(len, balance([7] * len(sizes), parts))) == -(-len(sizes) // parts), "equal items are spread evenly"


def test_rows_of_uneven_groups_keep_many_ranks_busy_and_there_is_one_at_least() -> None:
    rng = np.random.default_rng(0)
    lengths = np.repeat(rng.lognormal(5, 1, 64), 8) * rng.uniform(0.5, 1.5, 512)  # 64 groups of 8 rows
    loads = [sum(int(lengths[row]) for row in part) for part in balance(lengths.astype(int).tolist(), 64)]
    assert np.mean(loads) / max(loads) > 0.95
    with pytest.raises(ValueError, match="at least 1"):
        balance([1], 0)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 50)), min_size=1, max_size=40),
    parts=st.integers(1, 6),
    room=st.integers(40, 300),
)
def test_no_part_gets_more_tokens_than_it_has_room_for(sizes: list[tuple[int, int]], parts: int, room: int) -> None:
    costs, tokens = zip(*sizes, strict=True)
    dealt = balance(costs, parts, tokens=tokens, room=room)
    if not dealt:
        assert max(tokens) > room or sum(tokens) > parts * (room - max(tokens)), "there was a part for every item"
        return
    assert sorted(index for part in dealt for index in part) == list(range(len(sizes)))
    assert all(sum(tokens[index] for index in part) <= room for part in dealt)


@pytest.mark.parametrize("group", [1, 8])
def test_ranks_get_equal_costs_where_attention_makes_long_rows_dearer(group: int) -> None:
    # A long tail, as of reasoning: at 1e-4, about that of 0.6B, the longest rows cost four times their tokens.
    lengths = np.random.default_rng(0).lognormal(8, 1.2, 256).clip(100, 32_000).astype(int).tolist()
    units = group_rows([lengths[first : first + group] for first in range(0, 256, group)])

    def spread(attention: float) -> float:
        by_row = {unit.row: unit.cost(1e-4) for unit in units}
        shares = deal([units], 16, attention)
        costs = [sum(by_row[int(row)] for part in share.parts for row in part.rows) for share in shares]
        return max(costs) / float(np.mean(costs)) - 1

    assert spread(1e-4) < 0.02 < 0.1 < spread(0.0), (spread(0.0), spread(1e-4))


def group_rows(rows: list[list[int]]) -> list[Unit]:
    return [
        Unit(None, 100 * number + row, 1, tokens, group=(100 * number, len(group)))  # type: ignore[arg-type]
        for number, group in enumerate(rows)
        for row, tokens in enumerate(group)
    ]


@given(st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=9), min_size=1, max_size=20), st.integers(1, 6))
def test_every_row_is_dealt_once_and_no_share_is_larger_than_it_must(rows: list[list[int]], ranks: int) -> None:
    units = group_rows(rows)
    shares = deal([units], ranks)
    assert sorted(row for share in shares for part in share.parts for row in part.rows) == [u.row for u in units]
    total, largest = sum(unit.tokens for unit in units), max(unit.tokens for unit in units)
    assert max(share.tokens for share in shares) <= total / ranks + max(largest, total / ranks / 4)
    assert all(share.rows[0] for share in shares) or len(units) < ranks


def test_groups_stay_on_one_rank_where_that_leaves_the_shares_even() -> None:
    shares = deal([group_rows([[10] * 8] * 16)], 2)
    assert [share.tokens for share in shares] == [640, 640]
    for share in shares:
        rows = [int(row) for part in share.parts for row in part.rows]
        assert len({row // 100 for row in rows}) == 8


def test_each_mini_batch_is_dealt_evenly_by_itself() -> None:
    units = [Unit(0, row=number * 2, rows=2, tokens=10 + number) for number in range(16)]
    shares = deal([units[number::4] for number in range(4)], 2)
    for share in shares:
        assert share.rows == (4, 4, 4, 4)
    for number in range(4):
        starts = [sum(share.rows[:number]) for share in shares]
        rows = [share.parts[0].rows[start : start + 4].tolist() for share, start in zip(shares, starts, strict=True)]
        assert sorted(rows[0] + rows[1]) == sorted(r for u in units[number::4] for r in (u.row, u.row + 1))


def test_a_group_with_tokens_older_than_its_ticket_is_due_earlier(buffer: LocalBuffer) -> None:
    buffer.do("open_stage", plan(1, max_staleness=2, version=3))
    first, second, _ = buffer.do("admit", "explorer", 1, 3)
    buffer.put([(group(1, version=3), first), (group(2, version=1), second)])
    assert buffer.do("lease", 3, 1, 5).staleness == (2,), "the second group would be too old for a later step"
