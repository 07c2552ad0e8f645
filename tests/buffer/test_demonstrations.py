"""Demonstrations: what belongs together stays together, and sets grow while steps take them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from rayrft.buffer.leases import Lease
from rayrft.buffer.reader import Archive
from rayrft.config.buffer import SamplerConfig
from rayrft.errors import DataError, LeaseEnded
from rayrft.experience import Experience, to_batch
from tests.buffer.in_process import LocalBuffer
from tests.buffer.rows import expert_rows, packed, pairs, plan
from tests.errors import about


def gold(first: int, count: int) -> list[Experience]:
    """Demonstrations of the numbers ``first`` …, each a group of its own."""
    rows = expert_rows(first + count)[first:]
    return [
        replace(row, experience_id=f"gold/{first + at}", group_id=f"gold/{first + at}") for at, row in enumerate(rows)
    ]


def pair(number: int, first: int) -> list[Experience]:
    return [replace(row, pair_id=f"p{number}", chosen=at == 0) for at, row in enumerate(gold(first, 2))]


def extend(buffer: LocalBuffer, rows: list[Experience], name: str = "gold") -> int:
    return buffer.run(buffer.buffer.extend(name, packed(rows)))


def load(buffer: LocalBuffer, rows: list[Experience]) -> int:
    return buffer.run(buffer.buffer.load("gold", packed(rows)))


def open_stage(buffer: LocalBuffer, groups: int = 0, count: int = 2, **more: Any) -> None:
    more = {"expert_rows": count, "demonstrations": "gold", "scheduled": False, "name": "stage"} | more
    buffer.run(buffer.buffer.open_stage(plan(groups, **more)))


def names(first: int, count: int) -> list[str]:
    return [f"gold/{number}" for number in range(first, first + count)]


def test_rows_that_are_added_before_an_epoch_begins_are_in_it_and_later_ones_after_its_end(buffer: LocalBuffer) -> None:
    assert extend(buffer, gold(0, 2)) == 2
    extend(buffer, gold(2, 1))
    open_stage(buffer)
    before = buffer.lease(0)
    assert extend(buffer, gold(3, 2)) == 2
    for _ in range(2):
        assert buffer.lease(0) == before, "the set has grown, and then the Buffer has died"
        buffer.restart()
        buffer.do("resume", 0, "second life")
        open_stage(buffer)
    rows = [row for step in range(4) for row in buffer.trained(step)]
    assert Counter(rows) == Counter(names(0, 3)) + Counter(names(0, 5)), "three rows, and then all five"


@pytest.mark.parametrize("unit", [1, 2])
def test_what_is_withdrawn_is_drawn_no_more_and_its_lease_stays_whatever_dies(buffer: LocalBuffer, unit: int) -> None:
    extend(buffer, gold(0, 6) if unit == 1 else [side for number in range(3) for side in pair(number, 2 * number)])
    open_stage(buffer, count=2, pairs=unit == 2)
    leased = buffer.trained(0)
    gone = leased if unit == 2 else leased[:1]
    for _ in range(2):  # a repeated call changes nothing
        assert buffer.do("withdraw", "gold", [gone[-1], "unknown"]) == unit
        buffer.restart()
    assert buffer.do("withdraw", "silver", gone) == 0
    archived = pa.Table.from_batches(Archive(buffer.folder, SamplerConfig()).rows("expert/gold"))
    assert archived.filter(pc.field("group_status") == "excluded").column("experience_id").to_pylist() == gone
    [(_, left)] = buffer.do("partition", "expert/gold")
    assert len(left) == 6 - unit
    buffer.do("resume", 0, "second life")
    open_stage(buffer, count=2, pairs=unit == 2)
    assert buffer.trained(0) == leased
    later = [row for step in range(1, 11) for row in buffer.trained(step)]
    assert len(later) == 20 and not {*later} & {*gone}
    assert len({*later} - {*leased}) == 4, "all others are"


def test_a_stage_ends_whose_demonstrations_are_all_withdrawn(buffer: LocalBuffer) -> None:
    extend(buffer, gold(0, 2))
    open_stage(buffer)
    assert buffer.trained(0) == names(0, 2)
    buffer.do("withdraw", "gold", names(0, 2))
    with pytest.raises(LeaseEnded, match="'gold' is withdrawn", check=about("buffer.lease", "end_of_data")):
        buffer.run(buffer.buffer.lease(1, 1, 5.0))


def test_a_repeated_call_adds_nothing_whatever_dies_between(buffer: LocalBuffer) -> None:
    assert [extend(buffer, gold(0, 3)) for _ in range(2)] == [3, 0]
    buffer.restart()
    assert extend(buffer, gold(1, 4)) == 2, "numbers 3 and 4"
    assert buffer.do("stats").expert["gold"].rows == 5


def test_what_a_killed_append_left_in_the_file_is_cut_by_the_next_one(buffer: LocalBuffer) -> None:
    extend(buffer, gold(0, 3))
    [file] = buffer.folder.glob("expert-gold-*.arrow")
    with file.open("ab") as appended:
        appended.write(to_batch(gold(3, 1)).serialize().to_pybytes()[:-7])
    buffer.restart()
    assert extend(buffer, gold(4, 2)) == 2
    open_stage(buffer, count=5)
    assert buffer.trained(0) == ["gold/0", "gold/1", "gold/2", "gold/4", "gold/5"]


def test_a_resumed_run_loads_its_file_again_and_keeps_what_was_added(buffer: LocalBuffer) -> None:
    load(buffer, gold(0, 3))
    extend(buffer, gold(3, 2))
    open_stage(buffer, count=2)
    first = buffer.trained(0)
    buffer.restart()
    assert load(buffer, gold(0, 3)) == 3
    open_stage(buffer, count=2)
    second = buffer.trained(1) + buffer.trained(2)
    third = [row for row in names(0, 3) if row not in first]
    assert set(third) <= set(second), "the epoch goes on where it was"
    assert buffer.do("stats").expert["gold"].rows == 5


def test_other_rows_replace_a_set_that_has_grown(buffer: LocalBuffer) -> None:
    load(buffer, gold(0, 3))
    extend(buffer, gold(3, 2))
    load(buffer, gold(10, 2))
    open_stage(buffer, count=2)
    assert buffer.trained(0) == names(10, 2)


def test_rows_of_another_kind_are_refused_and_none_is_stored(buffer: LocalBuffer) -> None:
    extend(buffer, gold(0, 2))
    with pytest.raises(DataError, match="preference pairs"):
        extend(buffer, pair(0, 2))
    assert extend(buffer, pair(0, 2), "pairs") == 2
    assert {name: drawn.rows for name, drawn in buffer.do("stats").expert.items()} == {"gold": 2, "pairs": 2}


def test_a_pair_of_which_one_side_is_known_is_skipped_whole(buffer: LocalBuffer) -> None:
    assert extend(buffer, pair(0, 0)) == 2
    assert extend(buffer, pair(1, 1) + pair(2, 3)) == 2, "number 1 is a side of the first pair"


def test_a_stage_begins_without_demonstrations_that_will_come_and_takes_them_when_they_have(
    buffer: LocalBuffer,
) -> None:
    open_stage(buffer, groups=1, count=2, grows=True)
    buffer.put_numbers(1, 2)
    assert buffer.trained(0) == ["1/0", "1/1"]
    extend(buffer, gold(0, 3))
    assert buffer.trained(1)[:2] == ["2/0", "2/1"] and buffer.do("stats").expert["gold"].drawn == 2


@pytest.mark.parametrize("groups, grows", [(1, False), (0, True)], ids=["none will come", "nothing else to train on"])
def test_a_stage_does_not_begin_without_demonstrations_where(buffer: LocalBuffer, groups: int, grows: bool) -> None:
    with pytest.raises(DataError, match="no such demonstrations", check=about("demonstrations", "gold")):
        open_stage(buffer, groups=groups, grows=grows)


# What belongs together stays together


def lease(buffer: LocalBuffer, step: int, ranks: int = 2) -> Lease:
    found = buffer.do("lease", step, ranks, 0)
    assert isinstance(found, Lease), found
    return found


def test_pairs_are_drawn_and_dealt_whole_and_each_once_an_epoch_whatever_dies(buffer: LocalBuffer) -> None:
    assert load(buffer, pairs(6)) == 12
    open_stage(buffer, count=8, pairs=True, mini_batches=2)
    drawn = []
    for step in range(3):
        before = buffer.lease(step)
        buffer.restart()
        assert buffer.lease(step) == before
        for share in lease(buffer, step).shares:
            rows = [int(row) for part in share.parts for row in part.rows]
            assert [row // 2 for row in rows[::2]] == [row // 2 for row in rows[1::2]] and rows[0] % 2 == 0
            assert share.rows == (2, 2)
            drawn += rows
        buffer.do("ack", step)
    assert sorted(drawn) == sorted([*range(12), *range(12)])


def test_broken_pairs_and_rows_of_which_only_some_are_labelled_are_refused(buffer: LocalBuffer) -> None:
    one, other, third, fourth = pairs(2)
    plain = [replace(row, pair_id=None, chosen=None) for row in (third, fourth)]
    for rows in ([one, third, other, fourth], [one, other, third], [one, other, *plain]):
        with pytest.raises(DataError, match="only some rows form preference pairs"):
            load(buffer, rows)
    with pytest.raises(DataError, match="only some rows have a label"):
        load(buffer, [replace(plain[0], chosen=False), plain[1]])


def test_own_groups_and_demonstrations_are_spread_over_mini_batches(buffer: LocalBuffer) -> None:
    load(buffer, expert_rows(8))
    open_stage(buffer, 4, 4, group_size=2, mini_batches=2)
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
    for kind, rows in ((PLAIN, expert_rows(4)), (PAIRS, pairs(2)), (LABELLED, labelled)):
        load(buffer, rows)
        if kind is wanted:
            open_stage(buffer, count=4, **wanted)
            assert sum(sum(share.rows) for share in lease(buffer, 0).shares) == 4
            other = pairs(2) if wanted is not PAIRS else labelled
            with pytest.raises(DataError, match=f"needs .*{said}"):
                load(buffer, other)
            return
        with pytest.raises(DataError, match=f"needs .*{said}"):
            open_stage(buffer, count=4, **wanted)


def test_a_lease_has_its_demonstrations_also_after_others_took_their_place(buffer: LocalBuffer) -> None:
    load(buffer, expert_rows(5))
    open_stage(buffer, count=3)
    before = buffer.lease(0)
    load(buffer, expert_rows(2))
    buffer.restart()
    assert buffer.lease(0) == before
    assert len(list(buffer.folder.glob("expert-*"))) == 2
    buffer.do("ack", 0)
    buffer.do("cover", 1)
    load(buffer, expert_rows(3))
    assert len(list(buffer.folder.glob("expert-*"))) == 1
