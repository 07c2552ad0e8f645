"""Drawing from a pool: shares, corrections, reuse and rest, each against what they are on paper."""

from __future__ import annotations

import math
import uuid
from collections import Counter
from itertools import permutations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.groups import GroupTable
from rayrft.buffer.samplers import Candidates, draw, draw_oldest, eligible, samplers
from rayrft.buffer.schedule import Draw
from rayrft.buffer.scores import check_scores, score_groups, scores
from rayrft.buffer.shared import SharedBuffer
from rayrft.config.buffer import SamplerConfig
from rayrft.errors import ConfigError, DataError
from rayrft.experience import Experience, to_batch
from tests.buffer.in_process import small
from tests.buffer.rows import group, stored_group
from tests.errors import about

POOLS = ["uniform", "priority"]


class Pool:
    """Ready groups of a table, and a sampler that draws from them."""

    def __init__(self, name: str, scores: list[float], versions: list[int] | None = None, **options: float) -> None:
        self.groups, self.config = GroupTable(), SamplerConfig(name=name, **options)
        for number, score in enumerate(scores):
            version = 0 if versions is None else versions[number]
            self.groups.add(stored_group(number, score=score, version=version), 0, number)

    def use(self, slot: int, uses: int, step: int) -> None:
        self.groups.uses[slot], self.groups.last_step[slot] = uses, step

    def eligible(self, step: int) -> int:
        return int(eligible(self.groups, self.config, step).sum())

    def try_draw(self, count: int, step: int = 0, number: int = 0, seed: int = 7) -> Draw | None:
        rng = np.random.default_rng([seed, number])
        return draw(samplers.get(self.config.name), self.groups, self.config, count, step, rng)

    def draw(self, count: int, step: int = 0, number: int = 0, seed: int = 7) -> Draw:
        drawn = self.try_draw(count, step, number, seed)
        assert drawn is not None
        assert drawn.slots.dtype == np.int64
        assert drawn.weights.dtype == np.float32
        assert len(set(drawn.slots.tolist())) == len(drawn.slots) == len(drawn.weights) == count
        return drawn

    def relative_weights(self, count: int, step: int = 0) -> np.ndarray:
        """P(slot) / P(slot 0), read from the corrections, which are its inverse where beta is 1."""
        drawn = self.draw(count, step)
        corrections = drawn.weights[np.argsort(drawn.slots)].astype(np.float64)
        return corrections[0] / corrections


# Shares.


@pytest.mark.parametrize(
    ("name", "shares"), [("uniform", [1, 1, 1, 1, 1]), ("priority", [1e-3, 1, math.sqrt(2), 2, 3])]
)
def test_single_draws_follow_the_shares(name: str, shares: list[float]) -> None:
    pool = Pool(name, [0, 1, 2, 4, 9], alpha=0.5)
    counts = np.bincount([int(pool.draw(1, 0, number).slots[0]) for number in range(5000)], minlength=5)
    expected = 5000 * np.array(shares) / sum(shares)
    assert (np.abs(counts - expected) <= 4 * np.sqrt(expected) + 1).all()


@pytest.mark.parametrize(("name", "shares"), [("uniform", [1, 1, 1, 1]), ("priority", [1, 2, 4, 9])])
def test_a_draw_of_several_is_one_after_another_without_replacement(name: str, shares: list[float]) -> None:
    pool = Pool(name, [1, 2, 4, 9], alpha=1)
    found = Counter(frozenset(pool.draw(2, 0, number).slots.tolist()) for number in range(5000))
    total, expected = sum(shares), Counter[frozenset[int]]()
    for first, second in permutations(range(4), 2):
        share = shares[first] / total * shares[second] / (total - shares[first])
        expected[frozenset((first, second))] += 5000 * share  # type: ignore[assignment]
    assert all(abs(found[pair] - count) <= 4 * math.sqrt(count) for pair, count in expected.items())


def test_age_and_each_use_decay_a_weight_and_the_step_changes_no_draw() -> None:
    versions = [40, 43, 50, 90]
    pool = Pool("priority", [1.0] * 4, versions, tau=10, beta=1)
    expected = np.exp((np.array(versions) - 40) / 10)
    for step in (90, 91, 500, 4000):
        np.testing.assert_allclose(pool.relative_weights(4, step), expected, rtol=1e-6)
        assert (pool.draw(2, step).slots == pool.draw(2, 90).slots).all()
    pool = Pool("priority", [1.0] * 3, max_uses=9, use_decay=0.25, beta=1)
    pool.use(1, 1, 0)
    pool.use(2, 3, 0)
    np.testing.assert_allclose(pool.relative_weights(3, 1), [1, 0.25, 0.25**3], rtol=1e-6)


def test_corrections_are_those_of_the_paper_and_uniform_needs_none() -> None:
    scores = np.array([0.5, 1, 2, 3, 5, 8, 13, 21])
    drawn = Pool("priority", scores.tolist(), alpha=0.7, beta=0.4).draw(5)
    shares = scores**0.7 / np.sum(scores**0.7)
    paper = (len(scores) * shares[drawn.slots]) ** -0.4
    np.testing.assert_allclose(drawn.weights, paper / paper.max(), rtol=1e-6)
    assert drawn.weights.max() == 1
    assert (Pool("uniform", [1, 2, 300]).draw(2).weights == 1).all()


@pytest.mark.parametrize(("step", "beta"), [(0, 0.4), (5, 0.7), (10, 1.0), (99, 1.0)])
def test_beta_rises_linearly_to_1(step: int, beta: float) -> None:
    weights = Pool("priority", [1, 16], alpha=1, beta=0.4, beta_steps=10).draw(2, step).weights
    assert sorted(weights.tolist()) == pytest.approx([16**-beta, 1.0])


def test_extreme_settings_and_a_score_of_0_still_draw_every_group_with_finite_corrections() -> None:
    scores = np.geomspace(1e-30, 1e30, 300).tolist()
    versions = [number * 5000 for number in range(300)]
    pool = Pool("priority", scores, versions, alpha=80, tau=0.01, use_decay=1e-9, max_uses=1000)
    for slot in range(300):
        pool.use(slot, slot % 900, 0)
    drawn = pool.draw(300, 1_500_000)
    assert np.isfinite(drawn.weights).all()
    assert ((drawn.weights >= 0) & (drawn.weights <= 1)).all()
    assert set(Pool("priority", [0.0] * 3 + [5.0] * 3, alpha=1).draw(6).slots.tolist()) == set(range(6))


# Reuse and rest.


@pytest.mark.parametrize("name", POOLS)
def test_max_uses_puts_a_group_out_and_a_draw_that_is_taken_back_brings_it_in(name: str) -> None:
    pool = Pool(name, [1, 1], max_uses=2)
    pool.use(0, 1, 0)
    pool.use(1, 2, 0)
    assert pool.draw(1, 1).slots.tolist() == [0]
    assert pool.try_draw(2, 50) is None
    pool.use(0, 0, 0)
    pool.use(1, 1, 0)
    assert [pool.eligible(step) for step in (0, 50)] == [1, 2], "the first one was never used"


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("cooldown", [0, 3])
def test_a_group_rests_for_cooldown_steps_after_the_step_that_used_it(name: str, cooldown: int) -> None:
    pool = Pool(name, [1, 1], max_uses=5, cooldown=cooldown)
    pool.use(0, 1, 10)
    for step in range(10, 11 + cooldown):
        assert pool.draw(1, step, step).slots.tolist() == [1]
        assert pool.try_draw(2, step, step) is None
    assert pool.eligible(11 + cooldown) == 2


@pytest.mark.parametrize("name", ["fifo", *POOLS])
def test_it_draws_nothing_where_it_cannot_draw_all(name: str) -> None:
    assert Pool(name, []).try_draw(1) is None
    pool = Pool(name, [1.0, 1.0])
    assert pool.try_draw(3) is None
    assert set(pool.draw(2).slots.tolist()) == {0, 1}


def test_fifo_draws_the_oldest_whatever_their_slots() -> None:
    pool = Pool("fifo", [math.nan] * 4)
    pool.groups.order[:4] = [5, 0, 9, 2]
    assert pool.draw(3).slots.tolist() == [1, 3, 0]


def test_an_unknown_sampler_names_the_nearest_and_an_own_one_is_found_by_its_path() -> None:
    with pytest.raises(ConfigError, check=about("buffer.sampler.name", "prioritized")):
        samplers.get("prioritized", "buffer.sampler.name")
    assert samplers.get("rayrft.buffer.samplers:draw_oldest") is draw_oldest


@pytest.mark.parametrize("shared", [False, True])
def test_a_buffer_knows_the_samplers_of_plugins(tmp_path: Path, shared: bool) -> None:
    name, plugin = f"of_a_plugin_{uuid.uuid4().hex}", tmp_path / "plugin.py"
    lines = ("from rayrft.buffer.samplers import draw_oldest, samplers", f"samplers.register('{name}')(draw_oldest)")
    plugin.write_text("\n".join(lines))
    config = small(sampler={"name": name})
    with pytest.raises(ConfigError, check=about("buffer.sampler.name", name)):
        Buffer("run", tmp_path / "without", config, 0)
    if shared:
        SharedBuffer("b", tmp_path / "with", config, 0, plugins=[plugin])
    else:
        Buffer("run", tmp_path / "with", config, 0, plugins=[plugin])


def twice_the_first(groups: Candidates, count: int, *_: object) -> Draw:
    return Draw(np.repeat(groups.slots[:1], count), np.ones(count, np.float32))


def one_too_few(groups: Candidates, count: int, *_: object) -> Draw:
    return Draw(groups.slots[: count - 1], np.ones(count, np.float32))


def none_of_them(groups: Candidates, count: int, *_: object) -> Draw:
    return Draw(groups.slots[-1] + 1 + np.arange(count), np.ones(count, np.float32))


@pytest.mark.parametrize("sampler", [twice_the_first, one_too_few, none_of_them], ids=lambda sampler: sampler.__name__)
def test_a_sampler_that_draws_other_than_asked_is_refused(sampler: object) -> None:
    pool = Pool(f"tests.buffer.test_samplers:{sampler.__name__}", [1, 1, 1])  # type: ignore[attr-defined]
    with pytest.raises(DataError, check=about("buffer.sampler.name", pool.config.name)):
        pool.try_draw(2)


@pytest.mark.parametrize("name", POOLS)
def test_draws_differ_by_number_and_by_seed_only(name: str) -> None:
    scores = np.random.default_rng(0).random(1000).tolist()

    def slots(seed: int, number: int) -> list[int]:
        return Pool(name, scores).draw(20, 0, number, seed).slots.tolist()

    assert slots(1, 4) == slots(1, 4)
    assert slots(1, 4) != slots(1, 5)
    assert slots(1, 4) != slots(2, 4)


# What groups are worth


def row(reward: float | None = None, priority: float | None = None) -> Experience:
    return group(1, 1)[0].with_fields(reward=reward, priority=priority)


def score(name: str, *groups: list[Experience]) -> list[float]:
    starts = np.cumsum([0, *(len(group) for group in groups[:-1])])
    values = score_groups(name, to_batch([each for group in groups for each in group]), starts)
    assert values.dtype == np.float64
    return values.tolist()


def rewarded(*rewards: float | None) -> list[Experience]:
    return [row(reward=reward) for reward in rewards]


def test_a_priority_is_the_mean_of_what_operators_gave_and_a_td_error_1_without_a_critic() -> None:
    groups = [row(priority=0.25), row(priority=None), row(priority=0.75)], rewarded(1, 0), [row(priority=3.0)]
    assert score("priority", *groups) == [0.5, 0.0, 3.0]
    assert score("td_error", rewarded(0, 5), rewarded(None)) == [1.0, 1.0]


@settings(deadline=None, max_examples=50)
@given(
    groups=st.lists(
        st.lists(st.one_of(st.none(), st.floats(-2, 2, width=32)), min_size=1, max_size=4), min_size=1, max_size=5
    ),
    cut=st.integers(0, 3),
)
def test_vectorised_scores_equal_loops_also_on_a_slice(groups: list, cut: int) -> None:
    rows, expected = [], {"reward_deviation": [], "failure": []}
    for each in groups:
        rewards = [reward for reward in each if reward is not None]
        rows += rewarded(*each)
        expected["reward_deviation"].append(np.std(rewards) if rewards else 0.0)
        expected["failure"].append(np.clip(1 - np.mean(rewards), 0, 1) if rewards else 0.0)
    batch = to_batch([row(reward=5.0)] * cut + rows).slice(cut)
    starts = np.cumsum([0, *(len(each) for each in groups[:-1])])
    for name, values in expected.items():
        np.testing.assert_allclose(scores.get(name)(batch, starts), values, atol=1e-6)


def by_row(batch: pa.RecordBatch, starts: np.ndarray) -> np.ndarray:
    return np.ones(batch.num_rows)


def infinite(batch: pa.RecordBatch, starts: np.ndarray) -> np.ndarray:
    return np.full(len(starts), np.inf)


def whole(batch: pa.RecordBatch, starts: np.ndarray) -> np.ndarray:
    return np.diff(starts, append=batch.num_rows)


def test_an_own_score_is_found_by_its_path_and_an_unknown_one_names_the_nearest() -> None:
    assert score(f"{__name__}:whole", rewarded(1, 2), rewarded(1)) == [2.0, 1.0]
    with pytest.raises(ConfigError, check=about("buffer.sampler.score", "reward_deviations")):
        scores.get("reward_deviations", "buffer.sampler.score")


@pytest.mark.parametrize(("name", "found"), [("infinite", "inf"), ("by_row", r"\(3,\)")])
def test_what_is_wrong_with_an_own_function_is_said_with_its_name(name: str, found: str) -> None:
    with pytest.raises(DataError, match=f"buffer.sampler.score: .*{__name__}:{name}.*found {found}"):
        score(f"{__name__}:{name}", rewarded(1, 2), rewarded(1))


@pytest.mark.parametrize("bad", [-1e-9, np.nan, np.inf, -np.inf])
def test_one_bad_score_among_good_ones_is_refused(bad: float) -> None:
    check_scores(np.zeros(0), "nobody")
    check_scores(np.array([0.0, 1e308]), "somebody")
    with pytest.raises(DataError, match="somebody", check=about("buffer.sampler.score")):
        check_scores(np.array([1.0, bad, 2.0]), "somebody")
