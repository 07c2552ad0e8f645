"""Measures of a model: pass@k and majority@k by hand and by enumeration, intervals, and what does not count."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrft.explorer.evaluation import Attempt, majority_at, measure, over_tasks, pass_at, wilson_interval


@pytest.mark.parametrize(
    ("n", "right", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # of the 6 pairs 3 have it
        (4, 2, 2, 5 / 6),
        (5, 3, 3, 1.0),  # only 2 are wrong
        (5, 0, 5, 0.0),
        (1000, 1, 1000, 1.0),
        (10_000, 1, 100, 0.01),  # the binomials would overflow a float
    ],
)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n: int, right: int, k: int, expected: float) -> None:
    assert pass_at(n, right, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("votes", "k", "expected"),
    [
        ("aab", 1, 2 / 3),
        ("aab", 2, (1 + 2 * 1 / 2) / 3),  # aa wins, the two subsets ab are ties
        ("aab", 3, 1.0),
        ("abb", 3, 0.0),
        ("a-", 2, 1.0),  # who gives no answer does not vote
        ("--", 2, 0.0),
        ("abc", 3, 1 / 3),
        ("aabbc", 4, (1 * 1 / 2 + 2 * 1 + 2 * 0) / 5),  # without c a tie; without a b a wins; without an a b wins
    ],
)
def test_majority_at_k_by_hand(votes: str, k: int, expected: float) -> None:
    assert majority_at([(None if v == "-" else v, v == "a") for v in votes], k) == pytest.approx(expected, abs=1e-12)


VOTES = st.lists(st.tuples(st.sampled_from([None, "a", "b", "c", "d"]), st.booleans()), min_size=1, max_size=8)


@given(VOTES, st.integers(1, 8))
def test_majority_at_k_is_the_mean_over_all_subsets(votes: list[tuple[str | None, bool]], k: int) -> None:
    if k > len(votes):
        with pytest.raises(ValueError, match="number of attempts"):
            majority_at(votes, k)
        return
    shares = {answer: fmean(right for other, right in votes if other == answer) for answer, _ in votes}

    def outcome(subset: tuple[int, ...]) -> float:
        counts = Counter(votes[index][0] for index in subset if votes[index][0] is not None)
        winners = [answer for answer, count in counts.items() if count == max(counts.values())]
        return fmean(shares[answer] for answer in winners) if winners else 0.0

    subsets = itertools.combinations(range(len(votes)), k)
    assert majority_at(votes, k) == pytest.approx(fmean(map(outcome, subsets)), abs=1e-9)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 9))
def test_pass_at_k_is_the_mean_over_all_subsets(n: int, right: int, k: int) -> None:
    right, k = min(right, n), min(k, n)
    subsets = list(itertools.combinations([index < right for index in range(n)], k))
    assert pass_at(n, right, k) == pytest.approx(fmean(map(any, subsets)), abs=1e-9)


def test_many_answers_of_many_kinds_take_no_enumeration() -> None:
    votes: list[tuple[str | None, bool]] = [(str(number), number == 0) for number in range(64)] + [("0", True)] * 8
    # "0" wins but for subsets without it, and for those with one of it, where each of 32 answers has one vote.
    without, once = math.comb(63, 32), 9 * math.comb(63, 31)
    expected = 1 - (without + once * 31 / 32) / math.comb(72, 32)
    assert majority_at(votes, 32) == pytest.approx(expected, abs=1e-12)


def attempts(task: str, *rewards: float | None, **rest: object) -> list[Attempt]:
    return [Attempt(task, repeat, reward, str(reward), **rest) for repeat, reward in enumerate(rewards)]  # type: ignore[arg-type]


def test_unknown_rewards_are_counted_and_are_not_wrong() -> None:
    timeout = [Attempt("b", 2, None, problem="timeout"), Attempt("c", 0, None), Attempt("c", 1, None)]
    found = measure([*attempts("a", 1.0, 0.0, 0.5), *attempts("b", 1.0, 1.0), *timeout], [1, 2, 3])
    assert (found.tasks, found.samples, found.right, found.count) == (3, 3, 3, 5)
    assert found.unknown == {"timeout": 1, "no reason given": 2}
    assert found.accuracy.value == pytest.approx((1 / 3 + 1) / 2) and found.accuracy.tasks == 2
    assert found.mean_reward == pytest.approx(3.5 / 5)
    assert found.passed[2].value == pytest.approx((2 / 3 + 1) / 2)
    assert (found.passed[3].value, found.passed[3].tasks) == (1.0, 1), "of task b only two rewards are known"
    assert found.majority[1].value == found.accuracy.value == found.passed[1].value


@pytest.mark.parametrize("reward", [0.7 + 0.2 + 0.1, 1 - 2**-24, 1.0, 1.5])
def test_full_marks_up_to_rounding_are_right(reward: float) -> None:
    found = measure([*attempts("a", reward, reward), *attempts("b", 0.99999, 0.99999)], [2])
    assert (found.right, found.accuracy.value, found.passed[2].value, found.majority[2].value) == (2, 0.5, 0.5, 0.5)


def test_nothing_known_is_no_number() -> None:
    found = measure([Attempt("a", 0, None)], [1])
    assert math.isnan(found.accuracy.value) and math.isnan(found.mean_reward) and found.accuracy.tasks == 0
    assert (found.accuracy.low, found.accuracy.high) == (0.0, 1.0)


def test_lengths_and_cuts_are_of_attempts_that_gave_an_answer() -> None:
    cut = Attempt("a", 1, 0.0, tokens=20, cut=True, versions=(4,))
    found = measure([Attempt("a", 0, 1.0, tokens=10, versions=(3, 4)), cut, Attempt("a", 2, None, problem="timeout")])
    assert (found.mean_tokens, found.cut_share, found.versions) == (15.0, 0.5, (3, 4))


def test_the_interval_is_over_tasks_and_not_over_attempts() -> None:
    """Tasks that are always right or always wrong tell as little with 100 attempts as with one."""
    few, many = ([a for t in range(20) for a in attempts(str(t), *[float(t % 2)] * n)] for n in (1, 100))
    low, high = wilson_interval(10, 20)
    for found in (measure(few).accuracy, measure(many).accuracy):
        assert (found.value, found.low, found.high, found.tasks) == (0.5, low, high, 20)


def test_the_bootstrap_covers_as_the_normal_interval_does_and_follows_its_seed() -> None:
    values = [0.25, 0.75] * 200  # a deviation of 0.25, so a standard error of 0.0125
    found = over_tasks(values, seed=1)
    assert found == over_tasks(values, seed=1) != over_tasks(values, seed=2)
    assert found.value == 0.5 and found.high - found.low == pytest.approx(2 * 1.96 * 0.0125, rel=0.1)


@pytest.mark.parametrize("values", [[0.5], [0.25] * 8, [0.1 * 3, 0.3, 0.3]])
def test_equal_shares_have_the_interval_of_as_many_right_tasks(values: list[float]) -> None:
    found = over_tasks(values)
    assert (found.low, found.high) == pytest.approx(wilson_interval(sum(values), len(values)))
    assert found.low < values[0] < found.high
