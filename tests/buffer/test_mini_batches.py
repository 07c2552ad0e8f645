"""What belongs together stays together: groups, demonstrations and preference pairs, by mini-batch and by rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rayrft.buffer.leases import Lease, Unit, deal
from rayrft.errors import DataError
from rayrft.experience import Experience
from tests.buffer.in_process import LocalBuffer
from tests.buffer.rows import expert_rows, packed, pairs, plan


def load(buffer: LocalBuffer, rows: list[Experience]) -> Any:
    return buffer.do("load", "given", packed(rows))


def lease(buffer: LocalBuffer, step: int, ranks: int = 2) -> Lease:
    found = buffer.do("lease", step, ranks, 0)
    assert isinstance(found, Lease), found
    return found


def test_each_mini_batch_is_dealt_evenly_by_itself() -> None:
    units = [Unit(0, row=number * 2, rows=2, tokens=10 + number) for number in range(16)]
    shares = deal([units[number::4] for number in range(4)], 2)
    for share in shares:
        assert share.rows == (4, 4, 4, 4)
    for number in range(4):
        starts = [sum(share.rows[:number]) for share in shares]
        rows = [share.parts[0].rows[start : start + 4].tolist() for share, start in zip(shares, starts, strict=True)]
        assert sorted(rows[0] + rows[1]) == sorted(r for u in units[number::4] for r in (u.row, u.row + 1))


def test_pairs_are_drawn_and_dealt_whole_and_each_once_an_epoch(buffer: LocalBuffer) -> None:
    assert load(buffer, pairs(6)) == 12
    buffer.do("open_stage", plan(0, expert_rows=4, demonstrations="given", pairs=True))
    drawn = []
    for step in range(3):
        for share in lease(buffer, step).shares:
            rows = [int(row) for part in share.parts for row in part.rows]
            assert [row // 2 for row in rows[::2]] == [row // 2 for row in rows[1::2]] and rows[0] % 2 == 0
            drawn += rows
        buffer.do("ack", step)
    assert sorted(drawn) == list(range(12))


def test_a_lease_of_pairs_is_the_same_after_a_kill(buffer: LocalBuffer) -> None:
    load(buffer, pairs(6))
    buffer.do("open_stage", plan(0, expert_rows=8, demonstrations="given", pairs=True, mini_batches=2))
    before = buffer.lease(0)
    assert lease(buffer, 0).shares[0].rows == (2, 2)
    buffer.restart()
    assert buffer.lease(0) == before and lease(buffer, 0).shares[0].rows == (2, 2)


@pytest.mark.parametrize("spoil", ["order", "half", "mixed"])
def test_broken_pairs_are_refused(buffer: LocalBuffer, spoil: str) -> None:
    rows = pairs(2)
    if spoil == "order":
        rows = [rows[0], rows[2], rows[1], rows[3]]
    elif spoil == "half":
        rows = rows[:3]
    else:
        rows = [*rows[:2], *(replace(row, pair_id=None, chosen=None) for row in rows[2:])]
    assert load(buffer, rows)[0] == "DataError"


def test_own_groups_and_demonstrations_are_spread_over_mini_batches(buffer: LocalBuffer) -> None:
    load(buffer, expert_rows(8))
    buffer.do(
        "open_stage", plan(4, group_size=2, expert_rows=4, demonstrations="given", mini_batches=2, scheduled=False)
    )
    buffer.put_numbers(*range(4))
    leased = lease(buffer, 0)
    assert [sum(share.rows[number] for share in leased.shares) for number in range(2)] == [6, 6]
    assert (leased.usual_rows, leased.expert_rows, buffer.do("stats").ledger.sampled) == (8, 4, 8)


PLAIN, PAIRS, LABELLED = {}, {"pairs": True}, {"labelled": True}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [(PLAIN, "to imitate"), (PAIRS, "preference pairs"), (LABELLED, "labelled good or bad")],
    ids=["plain", "pairs", "labelled"],
)
def test_a_stage_takes_no_demonstrations_of_another_kind_than_it_needs(
    buffer: LocalBuffer, wanted: dict[str, bool], said: str
) -> None:
    labelled = [replace(row, chosen=number % 3 == 0) for number, row in enumerate(expert_rows(4))]
    opening = plan(0, expert_rows=4, demonstrations="given", **wanted)
    for kind, rows in ((PLAIN, expert_rows(4)), (PAIRS, pairs(2)), (LABELLED, labelled)):
        load(buffer, rows)
        if kind is wanted:
            buffer.run(buffer.buffer.open_stage(opening))
            assert sum(sum(share.rows) for share in lease(buffer, 0).shares) == 4
            other = pairs(2) if wanted is not PAIRS else labelled
            with pytest.raises(DataError, match=f"needs .*{said}"):
                buffer.run(buffer.buffer.load("given", packed(other)))
            return
        with pytest.raises(DataError, match=f"needs .*{said}"):
            buffer.run(buffer.buffer.open_stage(opening))


def test_rows_of_which_only_some_are_labelled_are_refused(buffer: LocalBuffer) -> None:
    first, *others = expert_rows(4)
    with pytest.raises(DataError, match="only some rows have a label"):
        buffer.run(buffer.buffer.load("given", packed([replace(first, chosen=False), *others])))
