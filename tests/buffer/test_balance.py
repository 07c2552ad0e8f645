from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrft.buffer.leases import Unit, balance, deal


@given(sizes=st.lists(st.integers(1, 1000), max_size=40), parts=st.integers(1, 6))
def test_every_item_is_dealt_exactly_once(sizes: list[int], parts: int) -> None:
    dealt = balance(sizes, parts)
    assert len(dealt) == parts
    assert sorted(index for part in dealt for index in part) == list(range(len(sizes)))
    assert all(dealt) or len(sizes) < parts
    assert max(map(len, balance([7] * len(sizes), parts))) == -(-len(sizes) // parts), "equal items are spread evenly"


def test_rows_of_uneven_groups_keep_many_ranks_busy() -> None:
    rng = np.random.default_rng(0)
    lengths = np.repeat(rng.lognormal(5, 1, 64), 8) * rng.uniform(0.5, 1.5, 512)  # 64 groups of 8 rows
    loads = [sum(int(lengths[row]) for row in part) for part in balance(lengths.astype(int).tolist(), 64)]
    assert np.mean(loads) / max(loads) > 0.95


def group_rows(rows: list[list[int]]) -> list[Unit]:
    return [
        Unit(None, 100 * number + row, 1, tokens, group=(100 * number, len(group)))  # type: ignore[arg-type]
        for number, group in enumerate(rows)
        for row, tokens in enumerate(group)
    ]


@given(
    st.lists(st.lists(st.integers(1, 100), min_size=1, max_size=9), min_size=1, max_size=20),
    st.integers(1, 6),
)
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


def test_fewer_parts_than_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        balance([1], 0)
