"""Turns of weighted sources: shares at every prefix, ends, and states that continue with the same turns."""

from __future__ import annotations

import json
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
def test_a_restored_state_continues_with_the_same_turns(sources: list[tuple[float, int | None]], position: int) -> None:
    weights, limits = [w for w, _ in sources], [limit for _, limit in sources]
    walked, restored = Interleave(weights, limits), Interleave(weights, limits)
    for _ in range(position):
        walked.next()
    restored.next()
    restored.restore(json.loads(json.dumps(walked.state())))
    assert restored.counts == walked.counts
    assert [restored.next() for _ in range(100)] == [walked.next() for _ in range(100)]


def test_when_a_source_ends_the_others_go_on_in_their_proportions() -> None:
    interleave = Interleave([1, 1, 2], [3, None, None])
    turns = [interleave.next() for _ in range(12 + 300)]
    assert Counter(turns[:12]) == {0: 3, 1: 3, 2: 6}
    assert Counter(turns[12:]) == {1: 100, 2: 200}


def test_weights_of_any_magnitude_have_exact_shares() -> None:
    for scale in (1e-12, 1.0, 1e12):
        interleave = Interleave([0.1 * scale, 0.2 * scale])
        for _ in range(30):
            interleave.next()
        assert interleave.counts == [10, 20]
