"""Turns of weighted sources: shares at every prefix, ends, and jumps that lead where turns lead."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rayrft.data.task_sampler import Interleave

WEIGHTS = st.lists(st.floats(0.01, 100) | st.integers(1, 20).map(float), min_size=1, max_size=6)
ENDING = st.tuples(st.sampled_from([0.1, 0.25, 1.0, 2.0, 3.0, 7.5]), st.none() | st.integers(1, 30))


@given(WEIGHTS, st.integers(1, 400))
def test_every_prefix_is_within_one_of_the_shares(weights: list[float], turns: int) -> None:
    interleave = Interleave(weights)
    for turn in range(1, turns + 1):
        interleave.next()
        for count, weight in zip(interleave.counts, weights, strict=True):
            assert abs(count - turn * weight / sum(weights)) < 1 + 1e-9


@given(st.lists(ENDING, min_size=1, max_size=6), st.integers(0, 300))
def test_seeking_leads_where_turns_lead(sources: list[tuple[float, int | None]], position: int) -> None:
    weights, limits = [w for w, _ in sources], [limit for _, limit in sources]
    walked, jumped = Interleave(weights, limits), Interleave(weights, limits)
    for _ in range(position):
        walked.next()
    jumped.next()
    jumped.seek(position)
    assert jumped.counts == walked.counts
    assert [jumped.next() for _ in range(100)] == [walked.next() for _ in range(100)]


def test_a_far_position_is_reached_by_whole_rounds() -> None:
    interleave = Interleave([0.3, 0.7], [None, 8 * 10**14])
    interleave.seek(10**15 + 7)
    assert interleave.counts == [3 * 10**14 + 2, 7 * 10**14 + 5]
    interleave.seek(10**16)
    assert interleave.counts == [10**16 - 8 * 10**14, 8 * 10**14]


def test_when_a_source_ends_the_others_go_on_in_their_proportions() -> None:
    interleave = Interleave([1, 1, 2], [3, None, None])
    turns = [interleave.next() for _ in range(12 + 300)]
    assert Counter(turns[:12]) == {0: 3, 1: 3, 2: 6}
    assert Counter(turns[12:]) == {1: 100, 2: 200}


def test_weights_of_any_magnitude_have_exact_shares() -> None:
    for scale in (1e-12, 1.0, 1e12):
        interleave = Interleave([0.1 * scale, 0.2 * scale])
        interleave.seek(30)
        assert interleave.counts == [10, 20]
