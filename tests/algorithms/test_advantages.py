"""Group advantages against values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rayrft.algorithms import GroupFacts, build, group_advantages, group_relative_advantages
from rayrft.algorithms.advantages import (
    accept,
    asymre,
    dr_grpo,
    gdpo,
    grpo,
    opmd_advantage,
    red_drop,
    reinforce_pp,
    remax,
    rloo,
)
from rayrft.algorithms.normalisation import Moments, normalise, sum_moments
from tests.algorithms.flat import make_batch, on_mask

ONE_RIGHT = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
LONE = GroupFacts(0.5, torch.tensor([0]), torch.tensor([0]), torch.tensor([0]), {"right": torch.tensor([1.0])})


def test_grpo_by_hand() -> None:
    # mean 0.25; unbiased variance (0.5625 + 3 * 0.0625) / 3 = 0.25, deviation 0.5
    assert grpo(ONE_RIGHT, GroupFacts(), epsilon=1e-12).tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert grpo(ONE_RIGHT, GroupFacts(), epsilon=0.25).tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert grpo(ONE_RIGHT, GroupFacts()).tolist() == group_relative_advantages(ONE_RIGHT).tolist()


def test_grpo_does_not_blow_up_differences_that_are_noise() -> None:
    # Deviation 0.5: at or below a threshold of 0.5 there is no advantage, or it is not divided.
    for below, expected in (("drop", [0.0] * 4), ("centre", [0.75] + [-0.25] * 3)):
        found = grpo(ONE_RIGHT, GroupFacts(), std_threshold=0.5, below_threshold=below)  # type: ignore[arg-type]
        assert found.tolist() == expected
        assert (
            grpo(ONE_RIGHT, GroupFacts(), std_threshold=0.49, below_threshold=below).tolist()
            == grpo(  # type: ignore[arg-type]
                ONE_RIGHT, GroupFacts()
            ).tolist()
        )
    assert grpo(torch.ones(1), GroupFacts(), std_threshold=9.0).tolist() == [0.0]


def test_gdpo_by_hand() -> None:
    # "right" is ONE_RIGHT: 1.5 and -0.5; "form" 0, 2, 0, 2 of mean 1, deviation sqrt(4/3): -+sqrt(3)/2.
    form, root = torch.tensor([0.0, 2.0, 0.0, 2.0], dtype=torch.float64), math.sqrt(3) / 2
    group = GroupFacts(components={"right": ONE_RIGHT, "form": form, "flat": torch.ones(4).double()})
    found = gdpo(ONE_RIGHT + form, group, epsilon=1e-12)
    assert found.tolist() == pytest.approx([1.5 - root, -0.5 + root, -0.5 - root, -0.5 + root])
    found = gdpo(ONE_RIGHT, group, reward_components={"form": 2.0, "right": -1.0}, epsilon=1e-12)
    assert found.tolist() == pytest.approx([-1.5 - 2 * root, 0.5 + 2 * root, 0.5 - 2 * root, 0.5 + 2 * root])
    assert gdpo(ONE_RIGHT, group, reward_components={"form": 1.0}, epsilon=1.0)[0].item() == pytest.approx(
        -1 / (1 + math.sqrt(4 / 3))
    )
    assert gdpo(torch.zeros(4), group).tolist() == gdpo(ONE_RIGHT, group).tolist(), "the reward has no part in it"
    with pytest.raises(ValueError, match="needs the components"):
        gdpo(ONE_RIGHT, GroupFacts())


def test_gdpo_tells_apart_what_a_sum_of_rewards_does_not() -> None:
    # Two groups, one answer with one and with both of two rewards: the same advantages from their sums.
    none = torch.zeros(3, dtype=torch.float64)
    one, both = none.clone(), none.clone()
    one[0], both[0] = 1.0, 1.0
    groups = [GroupFacts(components={"a": one, "b": none}), GroupFacts(components={"a": both, "b": both})]
    sums = [grpo(one, GroupFacts()), grpo(2 * one, GroupFacts())]
    torch.testing.assert_close(sums[0], sums[1], atol=1e-5, rtol=0)
    first, second = (gdpo(one, group) for group in groups)
    torch.testing.assert_close(second, 2 * first)


def test_dr_grpo_by_hand() -> None:
    assert dr_grpo(ONE_RIGHT, GroupFacts()).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_rloo_by_hand() -> None:
    # The others of the first have mean 0; those of the second (1 + 0 + 0) / 3.
    assert rloo(ONE_RIGHT, GroupFacts()).tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_rloo_is_dr_grpo_scaled_by_n_over_n_less_1() -> None:
    rewards = torch.randn(6, dtype=torch.float64)
    torch.testing.assert_close(rloo(rewards, GroupFacts()), dr_grpo(rewards, GroupFacts()) * 6 / 5)


def test_remax_by_hand() -> None:
    assert remax(ONE_RIGHT, GroupFacts(greedy_reward=0.5)).tolist() == [0.5, -0.5, -0.5, -0.5]
    with pytest.raises(ValueError, match="needs the reward of the greedy answer"):
        remax(ONE_RIGHT, GroupFacts())


def test_opmd_by_hand() -> None:
    # tau = 1 / log 2: exp(r / tau) = 2^r, so 2, 1, 1, 1 of mean 5/4; baseline tau log(5/4) = log2(5/4) = 0.3219
    tau = 1 / math.log(2)
    baseline = math.log2(5 / 4)
    assert opmd_advantage(ONE_RIGHT, GroupFacts(), baseline_tau=tau).tolist() == pytest.approx(
        [1 - baseline] + [-baseline] * 3
    )


def test_opmd_goes_to_the_mean_at_high_temperature_and_to_the_best_at_low() -> None:
    assert opmd_advantage(ONE_RIGHT, GroupFacts(), baseline_tau=1e6).tolist() == pytest.approx(
        [0.75] + [-0.25] * 3, abs=1e-5
    )
    assert opmd_advantage(ONE_RIGHT, GroupFacts(), baseline_tau=1e-3).tolist() == pytest.approx(
        [0.0] + [-1.0] * 3, abs=2e-3
    )


def test_asymre_by_hand() -> None:
    # baseline 0.25 - 0.1 = 0.15
    assert asymre(ONE_RIGHT, GroupFacts()).tolist() == pytest.approx([0.85, -0.15, -0.15, -0.15])
    assert asymre(torch.ones(2), GroupFacts()).tolist() == pytest.approx([0.1, 0.1])


def test_red_drop_by_hand() -> None:
    # One is right: of the three others one is kept, and the mean of the two is 0.5.
    assert red_drop(ONE_RIGHT, GroupFacts()).tolist() == [0.5, -0.5, 0.0, 0.0]
    # Mean 0.375; 0.25 and 0 are worse, as many as are not.
    rewards = torch.tensor([0.25, 0.0, 0.375, 0.875], dtype=torch.float64)
    assert red_drop(rewards, GroupFacts()).tolist() == [-0.125, -0.375, 0.0, 0.5]
    # Mean 0.5; the last of the three that are worse goes, and the mean of the rest is 0.75.
    rewards = torch.tensor([0.0, 0.25, 1.0, -1.0, 1.75], dtype=torch.float64)
    assert red_drop(rewards, GroupFacts()).tolist() == [-0.75, -0.5, 0.25, 0.0, 1.0]


def test_accept_by_hand() -> None:
    assert accept(ONE_RIGHT, GroupFacts()).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert accept(ONE_RIGHT, GroupFacts(), accept_above=-0.5).tolist() == [1.0] * 4


def test_reinforce_pp_is_the_reward_until_the_batch_is_normalised() -> None:
    assert reinforce_pp(ONE_RIGHT, GroupFacts()).tolist() == ONE_RIGHT.tolist()


def test_reinforce_pp_with_baseline_by_hand() -> None:
    # Two groups less their means: 0.75, -0.25 (three times) and 2, -2; a token each. Over all six: mean 0, squares
    # 0.5625 + 3 * 0.0625 + 8 = 8.75, deviation sqrt(8.75 / 6), and not one for each group.
    other = torch.tensor([5.0, 1.0], dtype=torch.float64)
    algorithm = build("reinforce_pp_baseline")
    found = [algorithm.group_advantages(rewards, GroupFacts()).tolist() for rewards in (ONE_RIGHT, other)]
    assert found == [[0.75, -0.25, -0.25, -0.25], [2.0, -2.0]]
    batch = make_batch([[0.0]] * 6, [[value] for group in found for value in group])
    normal = normalise(batch, Moments.of(sum_moments([batch])))
    scale = (8.75 / 6) ** 0.5
    assert on_mask(normal.advantages, batch) == pytest.approx([v / scale for v in (0.75, -0.25, -0.25, -0.25, 2, -2)])
    assert algorithm.normalise_advantages


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
    group = GroupFacts(
        trajectory=count, turn=torch.zeros_like(count), state=torch.zeros_like(count), components=components
    )
    assert group_advantages.get(name).bind({})(torch.tensor(rewards), group).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("name", sorted(set(group_advantages) - {"red_drop"}))  # it leaves out the last
def test_the_order_of_a_group_changes_nothing(name: str) -> None:
    rewards, order = torch.randn(6, dtype=torch.float64), torch.randperm(6)
    trajectory, turn, state = torch.tensor([0, 0, 1, 1, 2, 2]), torch.arange(6) % 2, torch.tensor([0, 1, 0, 1, 1, 2])
    advantage = group_advantages.get(name).bind({})
    parts = {"a": torch.randn(6, dtype=torch.float64), "b": rewards}
    plain = advantage(rewards, GroupFacts(0.3, trajectory, turn, state, parts))
    mixed = GroupFacts(
        0.3, trajectory[order], turn[order], state[order], {name: part[order] for name, part in parts.items()}
    )
    shuffled = advantage(rewards[order], mixed)
    torch.testing.assert_close(shuffled, plain[order])


@pytest.mark.parametrize("name", group_advantages)
def test_rewards_of_another_shape_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"must have shape \[n\], got \(2, 2\)"):
        group_advantages.get(name).bind({})(torch.zeros(2, 2), LONE)


def test_the_mean_of_the_batch_is_taken_off_by_hand() -> None:
    # Own tokens 1, 1, 1 and 5: mean 2, biased variance (1 + 1 + 1 + 9) / 4 = 3.
    batch = make_batch([[0.0] * 3, [0.0]], [[1.0] * 3, [5.0]])
    moments = Moments.of(sum_moments([batch]))
    assert moments == Moments(2.0, pytest.approx(3**0.5))
    expected = [value / 3**0.5 for value in (-1, -1, -1, 3)]
    assert on_mask(normalise(batch, moments).advantages, batch) == pytest.approx(expected)


def test_rows_weigh_in_the_moments_as_in_the_loss() -> None:
    # 1 three times with weight 1/3, and 5: mean 3, variance 4.
    batch = make_batch([[0.0] * 3, [0.0]], [[1.0] * 3, [5.0]], weight=torch.tensor([1 / 3, 1.0], dtype=torch.float64))
    moments = Moments.of(sum_moments([batch]))
    assert (moments.mean, moments.deviation) == pytest.approx((3.0, 2.0))


def test_normalisation_over_the_batch_by_hand() -> None:
    # Own tokens 1, 1, 1 and -3: mean 0, biased variance (1 + 1 + 1 + 9) / 4 = 3. The expert's are not counted.
    batch = make_batch([[0.0] * 3, [0.0], [0.0] * 2], [[1.0] * 3, [-3.0], [50.0] * 2], expert=[False, False, True])
    moments = Moments.of(sum_moments([batch]))
    assert moments == Moments(0.0, pytest.approx(3**0.5))
    normal = normalise(batch, moments)
    assert on_mask(normal.advantages, batch.usual()) == pytest.approx([3**-0.5] * 3 + [-(3**0.5)])
    halves = [make_batch([[0.0] * 3], [[1.0] * 3]), make_batch([[0.0]], [[-3.0]])]
    assert Moments.of(sum(sum_moments([half]) for half in halves)) == moments
    assert Moments.of(sum_moments([])) == Moments(0.0, 0.0)


def test_by_answers_each_counts_once_whatever_its_length() -> None:
    # Advantages 1 (three tokens) and 5: mean 3, deviation 2; weights 3 and 1: mean 2, variance (3 + 9) / 4 = 3. An
    # expert's row, and one without tokens, are not counted.
    rows, values = [[0.0] * 3, [0.0], [0.0], []], [[1.0] * 3, [5.0], [70.0], []]
    batch = make_batch(rows, values, expert=[False, False, True, False])
    moments = Moments.of(sum_moments([batch], by="answers"), "answers")
    assert (moments.mean, moments.deviation) == pytest.approx((3.0, 2.0))
    assert on_mask(normalise(batch, moments).advantages, batch.usual()) == pytest.approx([-1.0] * 3 + [1.0])
    weighed = replace(batch, weight=torch.tensor([3.0, 1.0, 9.0, 9.0]))
    moments = Moments.of(sum_moments([weighed], by="answers"), "answers")
    assert (moments.mean, moments.deviation) == pytest.approx((2.0, 3**0.5))


def test_by_rewards_advantages_are_scaled_and_not_shifted() -> None:
    # Rewards 1 and 5 (the expert's 9 is not counted): deviation 2, whatever the lengths.
    rows, values = [[0.0] * 3, [0.0], [0.0]], [[1.0] * 3, [3.0], [7.0]]
    reward = torch.tensor([1.0, 5.0, 9.0])
    batch = make_batch(rows, values, expert=[False, False, True], reward=reward)
    moments = Moments.of(sum_moments([batch], by="rewards"), "rewards")
    assert (moments.mean, moments.deviation) == pytest.approx((0.0, 2.0))
    assert on_mask(normalise(batch, moments).advantages, batch.usual()) == pytest.approx([0.5] * 3 + [1.5])
    with pytest.raises(ValueError, match="needs the rewards"):
        sum_moments([replace(batch, reward=None)], by="rewards")


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
    assert build("remax", shaping).group_advantages(rewards, GroupFacts(greedy_reward=9.0)).tolist() == [
        -30.0,
        -15.0,
        0.0,
    ]
    batch = make_batch([[0.0], [0.0]], reward=torch.tensor([-3.0, 1.0]), turn_rewards=[[4.0], [0.0]])
    seen = build("grpo", shaping).token_advantages(batch)
    assert seen.reward is not None and seen.reward.tolist() == [-10.0, 10.0]
    assert seen.turn_rewards is not None and on_mask(seen.turn_rewards, batch) == [20.0, 0.0]


def test_turns_without_a_reward_stay_without_one_whatever_its_bounds() -> None:
    low = {"reward_low": 0.5}
    alone = make_batch([[0.0] * 3], reward=torch.tensor([1.0]), values=[[0.0] * 3])
    both = make_batch(
        [[0.0] * 3] * 2, reward=torch.ones(2), values=[[0.0] * 3] * 2, turn_rewards=[[0.0] * 3, [0.25, 0.0, 0.0]]
    )
    assert on_mask(build("ppo", low).token_advantages(alone).returns, alone) == [1.0] * 3
    assert on_mask(build("ppo", low).token_advantages(both).returns, both) == [1.0] * 3 + [1.5, 1.0, 1.0]
    # Two trajectories with one reward each, of one turn and of three.
    rewards, rewarded = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([True, False, False, True])
    group = GroupFacts(
        trajectory=torch.tensor([0, 1, 1, 1]),
        turn=torch.tensor([0, 0, 1, 2]),
        state=torch.tensor([0, 0, 1, 2]),
        rewarded=rewarded,
    )
    assert build("grpo", {"advantage": "step_wise", **low}).group_advantages(rewards, group).tolist() == [0.0] * 4


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opmd", "red_drop"])
def test_rewards_equal_up_to_rounding_are_equal(name: str) -> None:
    sums = torch.tensor([0.7 + 0.2 + 0.1, 1.0, 1 - 2**-24], dtype=torch.float64)
    assert not build(name).group_advantages(sums, GroupFacts()).any()
    assert build(name).group_advantages(sums - torch.tensor([0.0, 0.0, 1e-4]), GroupFacts()).any()


def test_a_reward_of_the_bound_in_single_precision_is_not_above_it() -> None:
    assert accept(torch.tensor([0.3, 0.31]).double(), GroupFacts(), accept_above=0.3).tolist() == [0.0, 1.0]
