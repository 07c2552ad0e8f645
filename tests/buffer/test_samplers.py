"""Drawing from a pool: shares, corrections, reuse and rest, each against what they are on paper."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rayrft.buffer.samplers import Draw, Fifo, Sampler, samplers
from rayrft.config.buffer import SamplerConfig
from rayrft.errors import ConfigError, DataError
from tests.errors import about

POOLS = ["uniform", "priority"]


def make(name: str, seed: int = 7, **options: float) -> Sampler:
    return samplers.get(name)(SamplerConfig(name=name, **options), seed)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def filled(name: str, scores: list[float], versions: list[int] | None = None, **options: float) -> Sampler:
    sampler = make(name, **options)
    count = len(scores)
    sampler.add(np.arange(count), np.array(scores, dtype=np.float64), np.array(versions or [0] * count))
    return sampler


def drawn(sampler: Sampler, count: int, step: int = 0, number: int = 0) -> Draw:
    draw = sampler.draw(count, step, number)
    assert draw is not None
    assert draw.slots.dtype == np.int64
    assert draw.weights.dtype == np.float32
    assert len(set(draw.slots.tolist())) == len(draw.slots) == len(draw.weights) == count
    return draw


def relative_weights(sampler: Sampler, count: int, step: int = 0) -> np.ndarray:
    """P(slot) / P(slot 0), read from the corrections, which are its inverse where beta is 1."""
    draw = drawn(sampler, count, step)
    corrections = draw.weights[np.argsort(draw.slots)].astype(np.float64)
    return corrections[0] / corrections


# Shares.


@pytest.mark.parametrize(
    ("name", "shares"), [("uniform", [1, 1, 1, 1, 1]), ("priority", [1e-3, 1, math.sqrt(2), 2, 3])]
)
def test_single_draws_follow_the_shares(name: str, shares: list[float]) -> None:
    sampler = filled(name, [0, 1, 2, 4, 9], alpha=0.5)
    counts = np.bincount([int(drawn(sampler, 1, 0, number).slots[0]) for number in range(5000)], minlength=5)
    expected = 5000 * np.array(shares) / sum(shares)
    assert (np.abs(counts - expected) <= 4 * np.sqrt(expected) + 1).all()


def test_a_group_of_score_0_can_still_be_drawn() -> None:
    assert set(drawn(filled("priority", [0.0] * 3 + [5.0] * 3, alpha=1), 6).slots.tolist()) == set(range(6))


def test_age_divides_a_weight_by_e_every_tau_steps_whatever_the_step_of_the_draw() -> None:
    versions = [40, 43, 50, 90]
    sampler = filled("priority", [1.0] * 4, versions, tau=10, beta=1)
    expected = np.exp((np.array(versions) - 40) / 10)
    for step in (90, 91, 500, 4000):
        np.testing.assert_allclose(relative_weights(sampler, 4, step), expected, rtol=1e-6)


def test_moving_the_base_changes_no_draw() -> None:
    rng = np.random.default_rng(0)
    sampler = make("priority", tau=1.0, beta=1)
    sampler.add(np.arange(50), rng.random(50), rng.integers(300, 360, 50))
    draws = [drawn(sampler, 20, step) for step in range(300, 900, 7)]  # the base moves at 355 and 710
    for draw in draws:
        assert (draw.slots == draws[0].slots).all()
        assert (draw.weights == draws[0].weights).all()


def test_corrections_are_those_of_the_paper() -> None:
    scores = np.array([0.5, 1, 2, 3, 5, 8, 13, 21])
    sampler = filled("priority", scores.tolist(), alpha=0.7, beta=0.4)
    draw = drawn(sampler, 5)
    shares = scores**0.7 / np.sum(scores**0.7)
    paper = (len(scores) * shares[draw.slots]) ** -0.4
    np.testing.assert_allclose(draw.weights, paper / paper.max(), rtol=1e-6)
    assert draw.weights.max() == 1


@pytest.mark.parametrize(("step", "beta"), [(0, 0.4), (5, 0.7), (10, 1.0), (99, 1.0)])
def test_beta_rises_linearly_to_1(step: int, beta: float) -> None:
    weights = drawn(filled("priority", [1, 16], alpha=1, beta=0.4, beta_steps=10), 2, step).weights
    assert sorted(weights.tolist()) == pytest.approx([16**-beta, 1.0])


def test_uniform_needs_no_correction() -> None:
    assert (drawn(filled("uniform", [1, 2, 300]), 2).weights == 1).all()


def test_each_use_multiplies_the_weight_by_use_decay() -> None:
    sampler = filled("priority", [1.0] * 3, max_uses=9, use_decay=0.25, beta=1)
    sampler.used(ints(1, 2), ints(1, 3), 0)
    np.testing.assert_allclose(relative_weights(sampler, 3, 1), [1, 0.25, 0.25**3], rtol=1e-6)


def test_a_changed_score_changes_the_share() -> None:
    sampler = filled("priority", [1.0, 1.0], alpha=1, beta=1)
    sampler.update(ints(1), np.array([6.0]))
    np.testing.assert_allclose(relative_weights(sampler, 2), [1, 6], rtol=1e-6)


def test_extreme_settings_still_draw_every_group_with_finite_corrections() -> None:
    sampler = make("priority", alpha=80, tau=0.01, use_decay=1e-9, max_uses=1000)
    slots = np.arange(300)
    sampler.add(slots, np.geomspace(1e-30, 1e30, 300), slots * 5000)
    sampler.used(slots, slots % 900, 0)
    draw = drawn(sampler, 300, 1_500_000)
    assert np.isfinite(draw.weights).all()
    assert ((draw.weights >= 0) & (draw.weights <= 1)).all()


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_score_that_cannot_be_one_is_refused(bad: float) -> None:
    sampler = filled("priority", [1.0, 1.0], alpha=1, beta=1)
    with pytest.raises(DataError, check=about("buffer.sampler.score")):
        sampler.add(ints(2), np.array([bad]), ints(0))
    with pytest.raises(DataError, check=about("buffer.sampler.score")):
        sampler.update(ints(1), np.array([bad]))
    assert sampler.eligible(0) == 2
    assert relative_weights(sampler, 2).tolist() == [1, 1]


# Reuse and rest.


@pytest.mark.parametrize("name", POOLS)
def test_max_uses_puts_a_group_out_and_a_draw_that_is_taken_back_brings_it_in(name: str) -> None:
    sampler = filled(name, [1, 1], max_uses=2)
    sampler.used(ints(0, 1), ints(1, 2), 0)
    assert drawn(sampler, 1, 1).slots.tolist() == [0]
    assert sampler.draw(2, 50, 0) is None
    sampler.used(ints(0, 1), ints(0, 1), 0)
    assert sampler.eligible(50) == 2


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("cooldown", [0, 3])
def test_a_group_rests_for_cooldown_steps_after_the_step_that_used_it(name: str, cooldown: int) -> None:
    sampler = filled(name, [1, 1], max_uses=5, cooldown=cooldown)
    sampler.used(ints(0), ints(1), 10)
    for step in range(10, 11 + cooldown):
        assert drawn(sampler, 1, step, step).slots.tolist() == [1]
        assert sampler.draw(2, step, step) is None
    assert sampler.eligible(11 + cooldown) == 2


@pytest.mark.parametrize("name", POOLS)
def test_a_slot_that_is_used_again_neither_rests_nor_wakes_for_the_group_before(name: str) -> None:
    sampler = filled(name, [1, 1], max_uses=5, cooldown=4)
    sampler.used(ints(0, 1), ints(1, 1), 0)
    sampler.remove(ints(0, 1))
    sampler.add(ints(0), np.array([1.0]), ints(1))
    assert drawn(sampler, 1, 1).slots.tolist() == [0]
    sampler.used(ints(0), ints(1), 3)
    assert [sampler.eligible(step) for step in (3, 5, 7, 8)] == [0, 0, 0, 1]


def test_a_group_in_a_slot_that_is_used_again_has_no_uses() -> None:
    sampler = filled("priority", [1.0, 1.0], max_uses=5, use_decay=0.1, beta=1)
    sampler.used(ints(1), ints(3), 0)
    sampler.remove(ints(1))
    sampler.add(ints(1), np.array([1.0]), ints(0))
    assert relative_weights(sampler, 2, 1).tolist() == [1, 1]


@pytest.mark.parametrize("name", POOLS)
def test_steps_run_forward_only(name: str) -> None:
    sampler = filled(name, [1, 1], max_uses=5, cooldown=4)
    sampler.used(ints(0), ints(1), 0)
    assert [sampler.eligible(step) for step in (4, 5, 4)] == [1, 2, 2]


@pytest.mark.parametrize("name", POOLS)
def test_a_draw_for_which_there_are_too_few_wakes_no_group(name: str) -> None:
    sampler = filled(name, [1, 1], max_uses=5)
    sampler.used(ints(0), ints(1), 0)
    assert sampler.draw(3, 1, 0) is None and sampler.eligible(0) == 1
    sampler.remove(ints(0))
    assert sampler.draw(2, 1, 0) is None
    sampler.add(ints(0), np.array([1.0]), ints(0))
    sampler.used(ints(0), ints(1), 0)
    assert [sampler.eligible(step) for step in (0, 1)] == [1, 2]


@pytest.mark.parametrize("name", ["fifo", *POOLS])
def test_a_slot_without_a_group_may_be_removed_or_scored_to_no_effect(name: str) -> None:
    sampler = filled(name, [1, 1])
    sampler.remove(ints(1, 900))
    sampler.update(ints(1, 5000), np.array([3.0, 3.0]))
    assert drawn(sampler, 1).slots.tolist() == [0]
    assert sampler.eligible(0) == 1


@pytest.mark.parametrize("name", ["fifo", *POOLS])
def test_it_draws_nothing_where_it_cannot_draw_all(name: str) -> None:
    sampler = make(name)
    assert sampler.draw(1, 0, 0) is None
    sampler.add(ints(100_000, 3), np.array([1.0, 1.0]), ints(0, 0))
    assert sampler.draw(3, 0, 0) is None
    assert set(drawn(sampler, 2).slots.tolist()) == {3, 100_000}


def test_fifo_draws_the_oldest_whatever_their_slots() -> None:
    sampler = make("fifo")
    for slot in (5, 0, 9, 2):
        sampler.add(ints(slot), np.array([math.nan]), ints(0))
    assert drawn(sampler, 2).slots.tolist() == [5, 0]
    sampler.used(ints(5, 0), ints(1, 1), 0)
    sampler.remove(ints(9))
    sampler.add(ints(9), np.array([1.0]), ints(1))
    assert drawn(sampler, 2).slots.tolist() == [2, 9]
    sampler.used(ints(0), ints(0), 0)
    assert drawn(sampler, 3).slots.tolist() == [0, 2, 9]


def test_an_unknown_sampler_names_the_nearest_and_an_own_one_is_found_by_its_path() -> None:
    with pytest.raises(ConfigError, check=about("buffer.sampler.name", "prioritized")):
        samplers.get("prioritized", "buffer.sampler.name")
    assert samplers.get("rayrft.buffer.samplers:Fifo") is Fifo


@pytest.mark.parametrize("name", POOLS)
def test_draws_differ_by_number_and_by_seed_only(name: str) -> None:
    rng = np.random.default_rng(0)
    scores = rng.random(1000).tolist()

    def slots(seed: int, number: int) -> list[int]:
        sampler = make(name, seed)
        sampler.add(np.arange(1000), np.array(scores), np.zeros(1000, dtype=np.int64))
        return drawn(sampler, 20, 0, number).slots.tolist()

    assert slots(1, 4) == slots(1, 4)
    assert slots(1, 4) != slots(1, 5)
    assert slots(1, 4) != slots(2, 4)
