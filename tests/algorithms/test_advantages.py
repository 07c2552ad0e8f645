"""Group advantages against values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayrft.algorithms import GroupFacts, build, group_advantages
from rayrft.algorithms.advantages import returns_to_go
from rayrft.algorithms.normalisation import Moments, normalise, sum_moments
from tests.algorithms.flat import make_batch, on_mask

ONE_RIGHT = [1.0, 0.0, 0.0, 0.0]
LONE = GroupFacts(0.5, torch.tensor([0]), torch.tensor([0]), torch.tensor([0]), {"right": torch.tensor([1.0])})
FORM, ROOT3 = [0.0, 2.0, 0.0, 2.0], math.sqrt(3) / 2
PARTS = GroupFacts(components={name: torch.tensor(v).double() for name, v in (("right", [1, 0, 0, 0]), ("form", FORM))})
WEIGHED = {"epsilon": 1e-12, "reward_components": {"form": 2.0, "right": -1.0}}
TAU, BASELINE = 1 / math.log(2), math.log2(5 / 4)


@pytest.mark.parametrize(
    ("name", "coefficients", "rewards", "expected"),
    [
        # Of ONE_RIGHT: mean 0.25; unbiased variance (0.5625 + 3 * 0.0625) / 3 = 0.25, deviation 0.5.
        ("grpo", {"epsilon": 1e-12}, ONE_RIGHT, [1.5, -0.5, -0.5, -0.5]),
        ("grpo", {"epsilon": 0.25}, ONE_RIGHT, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("grpo", {"epsilon": 1e-12, "std_threshold": 0.49}, ONE_RIGHT, [1.5, -0.5, -0.5, -0.5]),
        # A deviation at or below the threshold is noise: there is no advantage, or it is not divided.
        ("grpo", {"std_threshold": 0.5}, ONE_RIGHT, [0.0] * 4),
        ("grpo", {"std_threshold": 0.5, "below_threshold": "centre"}, ONE_RIGHT, [0.75, -0.25, -0.25, -0.25]),
        ("grpo", {"std_threshold": 9.0}, [1.0], [0.0]),
        # "right" as above; "form" has mean 1 and deviation sqrt(4/3). The reward itself has no part in it.
        ("gdpo", {"epsilon": 1e-12}, FORM, [1.5 - ROOT3, -0.5 + ROOT3, -0.5 - ROOT3, -0.5 + ROOT3]),
        ("gdpo", WEIGHED, ONE_RIGHT, [-1.5 - 2 * ROOT3, 0.5 + 2 * ROOT3, 0.5 - 2 * ROOT3, 0.5 + 2 * ROOT3]),
        ("dr_grpo", {}, ONE_RIGHT, [0.75, -0.25, -0.25, -0.25]),
        ("reinforce_pp", {}, ONE_RIGHT, ONE_RIGHT),
        ("reinforce_pp_baseline", {}, ONE_RIGHT, [0.75, -0.25, -0.25, -0.25]),
        # The others of the first have mean 0; those of the second (1 + 0 + 0) / 3.
        ("rloo", {}, ONE_RIGHT, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("remax", {}, ONE_RIGHT, [0.5, -0.5, -0.5, -0.5]),
        # exp(r / tau) = 2^r: 2, 1, 1, 1 of mean 5/4; tau log(5/4) = log2(5/4). At high tau the mean, at low the best.
        ("opmd", {"baseline_tau": TAU}, ONE_RIGHT, [1 - BASELINE, -BASELINE, -BASELINE, -BASELINE]),
        ("opmd", {"baseline_tau": 1e6}, ONE_RIGHT, [0.75, -0.25, -0.25, -0.25]),
        ("opmd", {"baseline_tau": 1e-3}, ONE_RIGHT, [0.0, -1.0, -1.0, -1.0]),
        # Baseline 0.25 - 0.1.
        ("asymre", {}, ONE_RIGHT, [0.85, -0.15, -0.15, -0.15]),
        ("asymre", {}, [1.0, 1.0], [0.1, 0.1]),
        # One is right: of the three others one is kept, and the mean of the two is 0.5.
        ("red_drop", {}, ONE_RIGHT, [0.5, -0.5, 0.0, 0.0]),
        # Mean 0.375; 0.25 and 0 are worse, as many as are not.
        ("red_drop", {}, [0.25, 0.0, 0.375, 0.875], [-0.125, -0.375, 0.0, 0.5]),
        # Mean 0.5; the last of the three that are worse goes, and the mean of the rest is 0.75.
        ("red_drop", {}, [0.0, 0.25, 1.0, -1.0, 1.75], [-0.75, -0.5, 0.25, 0.0, 1.0]),
        ("accept", {}, ONE_RIGHT, ONE_RIGHT),
        ("accept", {"accept_above": -0.5}, ONE_RIGHT, [1.0] * 4),
        ("accept", {"accept_above": 0.3}, torch.tensor([0.3, 0.31]).tolist(), [0.0, 1.0]),  # 0.3 in single precision
    ],
)
def test_by_hand(name: str, coefficients: Any, rewards: list[float], expected: list[float]) -> None:
    facts = replace(PARTS, greedy_reward=0.5)
    found = group_advantages.get(name).bind(coefficients)(torch.tensor(rewards, dtype=torch.float64), facts)
    assert found.tolist() == pytest.approx(expected, abs=2e-3 if coefficients.get("baseline_tau") == 1e-3 else 1e-6)


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("remax", "reward of the greedy answer"),
        ("gdpo", "components of the"),
        ("gigpo", "trajectory, turn and state of every step"),
        ("process", "turn of every step"),
    ],
)
def test_what_a_group_lacks_is_named(name: str, lacks: str) -> None:
    with pytest.raises(ValueError, match=f"needs the {lacks}"):
        group_advantages.get(name).function(torch.zeros(4), GroupFacts(trajectory=torch.arange(4)))


LOOK_AT_THE_REWARD_ALONE = {"reinforce_pp", "remax", "accept"}


@pytest.mark.parametrize("name", group_advantages)
def test_a_group_of_one_carries_no_preference(name: str) -> None:
    advantage = group_advantages.get(name).bind({})(torch.tensor([1.0]), LONE)
    assert advantage.shape == (1,)
    assert (advantage.item() == 0.0) == (name not in LOOK_AT_THE_REWARD_ALONE)
    assert ("compares" in group_advantages.get(name).traits) == (name not in LOOK_AT_THE_REWARD_ALONE)


@pytest.mark.parametrize("name", sorted(set(group_advantages) - LOOK_AT_THE_REWARD_ALONE - {"asymre"}))
@pytest.mark.parametrize("rewards", [[0.5] * 3, [0.1] * 7])
def test_equal_rewards_carry_no_preference(name: str, rewards: list[float]) -> None:
    count = torch.arange(len(rewards))
    components = {"a": torch.tensor(rewards), "b": torch.ones(len(rewards))}
    group = GroupFacts(None, count, torch.zeros_like(count), torch.zeros_like(count), components)
    assert group_advantages.get(name).bind({})(torch.tensor(rewards), group).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("name", sorted(set(group_advantages) - {"red_drop"}))  # it leaves out the last
def test_the_order_of_a_group_changes_nothing(name: str) -> None:
    rewards, order = torch.randn(6, dtype=torch.float64), torch.randperm(6)
    trajectory, turn, state = torch.tensor([0, 0, 1, 1, 2, 2]), torch.arange(6) % 2, torch.tensor([0, 1, 0, 1, 1, 2])
    advantage = group_advantages.get(name).bind({})
    other = torch.randn(6, dtype=torch.float64)
    plain = advantage(rewards, GroupFacts(0.3, trajectory, turn, state, {"a": other, "b": rewards}))
    parts = {"a": other[order], "b": rewards[order]}
    shuffled = advantage(rewards[order], GroupFacts(0.3, trajectory[order], turn[order], state[order], parts))
    torch.testing.assert_close(shuffled, plain[order])


@pytest.mark.parametrize("name", group_advantages)
def test_rewards_of_another_shape_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"must have shape \[n\], got \(2, 2\)"):
        group_advantages.get(name).bind({})(torch.zeros(2, 2), LONE)


LAST = [False, False, True]


@pytest.mark.parametrize(
    ("by", "values", "fields", "moments"),
    [
        # Tokens 1, 1, 1 and 5: mean 2, biased variance (1 + 1 + 1 + 9) / 4 = 3; weighed 1/3: mean 3, variance 4.
        ("tokens", [[1.0] * 3, [5.0]], {}, (2.0, 3**0.5)),
        ("tokens", [[1.0] * 3, [5.0]], {"weight": [1 / 3, 1.0]}, (3.0, 2.0)),
        ("tokens", [[1.0] * 3, [-3.0], [50.0] * 2], {"expert": LAST}, (0.0, 3**0.5)),
        # Answers count once each, those without tokens not at all: mean 3, deviation 2; weighed 3 to 1: 2 and sqrt(3).
        ("answers", [[1.0] * 3, [5.0], [70.0], []], {"expert": [False, False, True, False]}, (3.0, 2.0)),
        ("answers", [[1.0] * 3, [5.0], []], {"weight": [3.0, 1.0, 9.0]}, (2.0, 3**0.5)),
        # Rewards 1 and 5: deviation 2, whatever the lengths; nothing is shifted.
        ("rewards", [[1.0] * 3, [3.0], [7.0]], {"expert": LAST, "reward": [1.0, 5.0, 9.0]}, (0.0, 2.0)),
    ],
)
def test_normalisation_over_own_rows_by_hand(by: Any, values: Any, fields: Any, moments: tuple[float, float]) -> None:
    fields = {name: torch.tensor(each) if name != "expert" else each for name, each in fields.items()}
    batch = make_batch([[0.0] * len(row) for row in values], values, **fields)
    found = Moments.of(sum_moments([batch], by=by), by)
    assert (found.mean, found.deviation) == pytest.approx(moments)
    mean, deviation = moments
    expected = [(value - mean) / deviation for value in on_mask(batch.advantages, batch.usual())]
    assert on_mask(normalise(batch, found).advantages, batch.usual()) == pytest.approx(expected)


def test_moments_are_summed_over_micro_batches_and_need_rewards_where_they_are_theirs() -> None:
    whole, *halves = (make_batch([[0.0]] * len(rows), rows) for rows in ([[1.0], [5.0]], [[1.0]], [[5.0]]))
    assert Moments.of(sum(sum_moments([half]) for half in halves)) == Moments.of(sum_moments([whole]))
    assert Moments.of(sum_moments([])) == Moments(0.0, 0.0)
    with pytest.raises(ValueError, match="needs the rewards"):
        sum_moments([whole], by="rewards")


def test_nothing_is_divided_by_a_deviation_of_rounding_errors() -> None:
    batch = make_batch([[0.0], [0.0]], [[0.1], [0.1]], reward=torch.tensor([0.3, 0.3]))
    for by, expected in (("rewards", 0.1), ("answers", 0.0), ("tokens", 0.0)):
        moments = Moments.of(sum_moments([batch], by=by), by)  # type: ignore[arg-type]
        assert on_mask(normalise(batch, moments).advantages, batch) == pytest.approx([expected] * 2, abs=1e-9)


def test_rewards_are_clipped_and_scaled_before_they_are_compared() -> None:
    rewards = torch.tensor([-3.0, 0.5, 7.0])
    shaping = {"reward_low": -1.0, "reward_high": 2.0, "reward_scale": 10.0}
    for given, expected in (
        (shaping, [-10.0, 5.0, 20.0]),
        ({"reward_low": -1.0}, [-1.0, 0.5, 7.0]),
        ({"reward_high": 2.0}, [-3.0, 0.5, 2.0]),
        ({"reward_scale": 0.5}, [-1.5, 0.25, 3.5]),
        ({}, [-3.0, 0.5, 7.0]),
    ):
        assert build("reinforce_pp", given).group_advantages(rewards, GroupFacts()).tolist() == expected
    beside_greedy = build("remax", shaping).group_advantages(rewards, GroupFacts(greedy_reward=9.0))
    assert beside_greedy.tolist() == [-30.0, -15.0, 0.0]
    batch = make_batch([[0.0], [0.0]], reward=torch.tensor([-3.0, 1.0]), turn_rewards=[[4.0], [0.0]])
    seen = build("grpo", shaping).token_advantages(batch)
    assert seen.reward is not None and seen.reward.tolist() == [-10.0, 10.0]
    assert seen.turn_rewards is not None and on_mask(seen.turn_rewards, batch) == [20.0, 0.0]


def test_turns_without_a_reward_stay_without_one_whatever_its_bounds() -> None:
    low = {"reward_low": 0.5}
    none, turns = [0.0] * 3, [[0.0] * 3, [0.25, 0.0, 0.0]]
    alone = make_batch([none], reward=torch.tensor([1.0]), values=[none])
    both = make_batch([none] * 2, reward=torch.ones(2), values=[none] * 2, turn_rewards=turns)
    assert on_mask(build("ppo", low).token_advantages(alone).returns, alone) == [1.0] * 3
    assert on_mask(build("ppo", low).token_advantages(both).returns, both) == [1.0] * 3 + [1.5, 1.0, 1.0]
    # Two trajectories with one reward each, of one turn and of three.
    rewards, rewarded = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([True, False, False, True])
    turn = torch.tensor([0, 0, 1, 2])
    group = GroupFacts(trajectory=torch.tensor([0, 1, 1, 1]), turn=turn, state=turn, rewarded=rewarded)
    assert build("grpo", {"advantage": "step_wise", **low}).group_advantages(rewards, group).tolist() == [0.0] * 4


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opmd", "red_drop"])
def test_rewards_equal_up_to_rounding_are_equal(name: str) -> None:
    sums = torch.tensor([0.7 + 0.2 + 0.1, 1.0, 1 - 2**-24], dtype=torch.float64)
    assert not build(name).group_advantages(sums, GroupFacts()).any()
    assert build(name).group_advantages(sums - torch.tensor([0.0, 0.0, 1e-4]), GroupFacts()).any()


# Two trajectories of two steps; the first ends well. Both begin in state 7; the others are met once.
STEPS = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
TURNS = GroupFacts(None, torch.tensor([5, 5, 9, 9]), torch.tensor([0, 1, 0, 1]), torch.tensor([7, 1, 7, 2]))
LONG = GroupFacts(trajectory=torch.tensor([0, 0, 0, 1]))
PROCESS = GroupFacts(trajectory=torch.tensor([5, 5, 9, 9, 9]), turn=torch.tensor([1, 0, 0, 1, 2]))
ALTERNATE = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
PLAIN = {"discount": 0.5, "step_weight": 2.0, "deviation": False}
HALF = 0.5**0.5


@pytest.mark.parametrize(
    ("name", "coefficients", "rewards", "group", "expected"),
    [
        # Returns 1 and 0: mean 0.5, unbiased variance 0.5; a trajectory of three steps weighs no more in the mean.
        ("step_wise", {}, STEPS, TURNS, [HALF, HALF, -HALF, -HALF]),
        ("step_wise", {}, torch.tensor([0.0, 0.0, 1.0, 0.0]), LONG, [HALF, HALF, HALF, -HALF]),
        # Rewards 0, 1 and 1, 0, 1: mean 0.6, unbiased variance (2 * 0.36 + 3 * 0.16) / 4 = 0.3. In units of its root
        # the steps are -0.6, 0.4 and 0.4, -0.6, 0.4; each gets what is to come. They may be in any order.
        ("process", {}, ALTERNATE, PROCESS, [value / 0.3**0.5 for value in (0.4, -0.2, 0.2, -0.2, 0.4)]),
        # Trajectories, without deviation: +-0.5. Returns to go with discount 0.5: 0.5 and 1; 0 and 0. State 7: 0.5 and
        # 0, mean 0.25: +-0.25. The others: 0. By deviations +-sqrt(0.5) for both, whatever the values.
        ("gigpo", PLAIN, STEPS, TURNS, [0.5 + 2 * 0.25, 0.5, -0.5 - 2 * 0.25, -0.5]),
        ("gigpo", {}, STEPS, TURNS, [2 * HALF, HALF, -2 * HALF, -HALF]),
        ("gigpo", {"step_weight": 0.0}, STEPS, TURNS, [HALF, HALF, -HALF, -HALF]),
    ],
)
def test_of_steps_by_hand(name: str, coefficients: Any, rewards: Any, group: GroupFacts, expected: list[float]) -> None:
    found = group_advantages.get(name).bind(coefficients)(rewards.double(), group)
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["step_wise", "process"])
def test_without_trajectories_those_of_steps_are_grpo(name: str) -> None:
    rewards = torch.randn(5, dtype=torch.float64)
    steps, grpo = (group_advantages.get(each).function(rewards, GroupFacts()) for each in (name, "grpo"))
    assert torch.equal(steps, grpo)


def test_returns_to_go_by_hand() -> None:
    # Trajectory 0 in turns 0, 1, 2 (given out of order): 1 + 0.5 (2 + 0.5 * 4) = 3, 2 + 0.5 * 4 = 4, 4.
    rewards, turn = torch.tensor([4.0, 1.0, 2.0, 8.0]), torch.tensor([2, 0, 1, 0])
    assert returns_to_go(rewards, torch.tensor([0, 0, 0, 1]), turn, 0.5).tolist() == [4.0, 3.0, 4.0, 8.0]
