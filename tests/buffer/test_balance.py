from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrft.buffer.leases import balance


@given(sizes=st.lists(st.integers(1, 1000), max_size=40), parts=st.integers(1, 6))
def test_every_item_is_dealt_exactly_once(sizes: list[int], parts: int) -> None:
    dealt = balance(sizes, parts)
    assert len(dealt) == parts
    assert sorted(index for part in dealt for index in part) == list(range(len(sizes)))


@given(sizes=st.lists(st.integers(1, 1000), min_size=6, max_size=40), parts=st.integers(1, 6))
def test_no_part_is_empty_where_there_are_enough_items(sizes: list[int], parts: int) -> None:
    assert all(balance(sizes, parts))


def test_equal_items_are_spread_evenly() -> None:
    assert sorted(map(len, balance([7] * 12, 4))) == [3, 3, 3, 3]


def test_a_partition_that_greedy_dealing_misses() -> None:
    # Largest-first dealing gives 8 + 5 + 4 = 17 against 13; the differencing method finds 16 against 14.
    sizes = [8, 7, 6, 5, 4]
    totals = sorted(sum(sizes[i] for i in part) for part in balance(sizes, 2))
    assert totals == [14, 16]


def test_fewer_parts_than_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        balance([1], 0)
