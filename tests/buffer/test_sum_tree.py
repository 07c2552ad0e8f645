"""The tree of sums, attacked with zeros, extreme magnitudes, extreme random numbers and every order of updates."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrft.buffer.sum_tree import MAX_WEIGHT, SumTree

WEIGHTS = st.one_of(
    st.just(0.0),
    st.floats(0.1, 10),
    st.floats(0, 1e-290),
    st.floats(0, MAX_WEIGHT),
    st.sampled_from([5e-324, 2.0**-960]),
)
UPDATES = st.lists(st.tuples(st.integers(0, 400), WEIGHTS), min_size=1, max_size=80)


class Constant:
    """Stands for a random generator that gives one number only."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self, count: int) -> np.ndarray:
        return np.full(count, self.number)


def tree_of(weights: dict[int, float]) -> SumTree:
    tree = SumTree()
    tree.set(list(weights), list(weights.values()))
    return tree


@settings(deadline=None)
@given(updates=st.lists(UPDATES, min_size=1, max_size=5))
def test_it_holds_what_an_array_would_hold(updates: list[list[tuple[int, float]]]) -> None:
    tree, model = SumTree(), np.zeros(500)
    for update in updates:
        slots, weights = zip(*update, strict=True)
        tree.set(slots, weights)
        for slot, weight in update:
            model[slot] = weight
        assert (tree.get(np.arange(500)) == model).all()
        assert tree.positive == np.count_nonzero(model)
        assert tree.total == pytest.approx(model.sum())


@settings(deadline=None)
@given(update=UPDATES, seed=st.integers(0, 99), count=st.integers(1, 40))
def test_neither_the_order_of_updates_nor_growth_changes_a_bit_of_a_draw(
    update: list[tuple[int, float]], seed: int, count: int
) -> None:
    final = dict(update)
    at_once = tree_of(final)
    grown = SumTree()
    grown.set([90_000], [3.0])
    for slot, weight in update:
        grown.set([slot], [weight])
    grown.set([90_000], [0.0])
    assert at_once.total == grown.total
    if at_once.positive:
        draws = [tree.draw(count, np.random.default_rng(seed)).tolist() for tree in (at_once, grown)]
        assert draws[0] == draws[1]


@settings(deadline=None)
@given(
    update=UPDATES,
    number=st.one_of(st.sampled_from([0.0, 0.5, 1 - 2.0**-53]), st.floats(0, 1, exclude_max=True)),
    count=st.integers(1, 300),
)
def test_a_weight_of_0_is_never_drawn_whatever_the_rounding(
    update: list[tuple[int, float]], number: float, count: int
) -> None:
    tree = tree_of(dict(update))
    if not tree.positive:
        with pytest.raises(ValueError, match="every weight is 0"):
            tree.draw(count, np.random.default_rng(0))
        return
    drawn = tree.draw(count, Constant(number))  # type: ignore[arg-type]
    assert (tree.get(drawn) > 0).all()
    assert (np.diff(drawn) >= 0).all()


@settings(deadline=None)
@given(weights=st.lists(st.floats(0, 10), min_size=1, max_size=300), seed=st.integers(0, 99))
def test_no_slot_is_drawn_more_than_two_times_off_its_share(weights: list[float], seed: int) -> None:
    shares = np.array([*weights, 1.0])
    tree = tree_of(dict(enumerate(shares)))
    drawn = tree.draw(1000, np.random.default_rng(seed))
    counts = np.bincount(drawn, minlength=len(shares))
    assert (np.abs(counts - 1000 * shares / shares.sum()) < 2 + 1e-6).all()


def test_frequencies_of_single_draws_follow_the_weights() -> None:
    weights = np.array([0, 1, 2, 0, 3, 10, 0.5])
    tree = tree_of(dict(enumerate(weights)))
    rng = np.random.default_rng(0)
    counts = np.bincount([int(tree.draw(1, rng)[0]) for _ in range(20_000)], minlength=7)
    expected = 20_000 * weights / weights.sum()
    assert (np.abs(counts - expected) <= 4 * np.sqrt(expected)).all()


@settings(deadline=None)
@given(update=UPDATES, seed=st.integers(0, 99), data=st.data())
def test_distinct_draws_repeat_nothing_and_leave_no_trace(
    update: list[tuple[int, float]], seed: int, data: st.DataObject
) -> None:
    tree = tree_of(dict(update))
    before, total = tree.get(np.arange(500)), tree.total
    count = data.draw(st.integers(0, tree.positive)) if tree.positive else 1
    if not tree.positive:
        with pytest.raises(ValueError, match="1 different slots asked of 0"):
            tree.draw_distinct(count, np.random.default_rng(seed))
        return
    drawn = tree.draw_distinct(count, np.random.default_rng(seed))
    assert len(set(drawn.tolist())) == count
    assert (before[drawn] > 0).all()
    assert (tree.get(np.arange(500)) == before).all()
    assert tree.total == total


def test_one_slot_that_outweighs_all_others_does_not_keep_them_out_of_a_distinct_draw() -> None:
    tree = tree_of({slot: 10.0 ** (-3 * slot) for slot in range(90)})
    assert sorted(tree.draw_distinct(90, np.random.default_rng(0)).tolist()) == list(range(90))
    with pytest.raises(ValueError, match="91 different slots asked of 90"):
        tree.draw_distinct(91, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("slots", "weights"),
    [
        ([0, -1], [1.0, 1.0]),
        ([0, 1], [1.0, -1e-9]),
        ([0, 1], [1.0, np.nan]),
        ([0, 1], [1.0, np.inf]),
        ([0, 100_000], [1.0, np.nan]),
        ([0, 1], [1.0]),
    ],
)
def test_what_cannot_be_a_weight_is_refused_and_nothing_changes(slots: list[int], weights: list[float]) -> None:
    tree = tree_of({0: 2.0, 5: 3.0})
    with pytest.raises(ValueError, match="slots"):
        tree.set(slots, weights)
    assert tree.get([0, 1, 5]).tolist() == [2.0, 0.0, 3.0]
    assert (tree.total, tree.positive) == (5.0, 2)


def test_slots_that_were_never_set_weigh_nothing() -> None:
    assert tree_of({3: 1.0}).get([-1, 0, 3, 10**9]).tolist() == [0.0, 0.0, 1.0, 0.0]


def test_the_heaviest_weights_do_not_overflow() -> None:
    tree = tree_of(dict.fromkeys(range(5000), MAX_WEIGHT))
    assert np.isfinite(tree.total)
    assert len(set(tree.draw(5000, np.random.default_rng(0)).tolist())) > 2500


def test_compiled_code_is_not_loaded_before_it_is_needed() -> None:
    code = "import rayrft, rayrft.config, rayrft.buffer.samplers, sys; print('numba' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr
