"""Advantages of trajectories of several steps."""

from __future__ import annotations

import pytest
import torch

from rayrft.algorithms import GroupFacts
from rayrft.algorithms.advantages import gigpo, grpo, process_supervision, returns_to_go, step_wise

# Two trajectories of two steps; the first ends well. Both begin in state 7; the others are met once.
REWARDS = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
GROUP = GroupFacts(
    trajectory=torch.tensor([5, 5, 9, 9]), turn=torch.tensor([0, 1, 0, 1]), state=torch.tensor([7, 1, 7, 2])
)


def test_step_wise_by_hand() -> None:
    # Returns 1 and 0: mean 0.5, unbiased variance 0.5. Advantages +-0.5 / sqrt(0.5) = +-sqrt(0.5).
    half = 0.5**0.5
    assert step_wise(REWARDS, GROUP, epsilon=1e-12).tolist() == pytest.approx([half, half, -half, -half])


def test_without_trajectories_step_wise_is_grpo() -> None:
    rewards = torch.randn(5, dtype=torch.float64)
    assert torch.equal(step_wise(rewards, GroupFacts()), grpo(rewards, GroupFacts()))


def test_long_trajectories_weigh_no_more_in_the_mean() -> None:
    # Returns 1 (three steps) and 0 (one step).
    group = GroupFacts(trajectory=torch.tensor([0, 0, 0, 1]))
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    half = 0.5**0.5
    assert step_wise(rewards, group, epsilon=1e-12).tolist() == pytest.approx([half, half, half, -half])


def test_returns_to_go_by_hand() -> None:
    # Trajectory 0 in turns 0, 1, 2 (given out of order): 1 + 0.5 (2 + 0.5 * 4) = 3, 2 + 0.5 * 4 = 4, 4.
    rewards, turn = torch.tensor([4.0, 1.0, 2.0, 8.0]), torch.tensor([2, 0, 1, 0])
    assert returns_to_go(rewards, torch.tensor([0, 0, 0, 1]), turn, 0.5).tolist() == [4.0, 3.0, 4.0, 8.0]


def test_process_supervision_by_hand() -> None:
    # Rewards 0, 1 and 1, 0, 1: mean 0.6, unbiased variance (2 * 0.36 + 3 * 0.16) / 4 = 0.3. In units of its root the
    # steps are -0.6, 0.4 and 0.4, -0.6, 0.4; each gets what is to come. They may be in any order.
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    group = GroupFacts(trajectory=torch.tensor([5, 5, 9, 9, 9]), turn=torch.tensor([1, 0, 0, 1, 2]))
    expected = [value / 0.3**0.5 for value in (0.4, -0.2, 0.2, -0.2, 0.4)]
    assert process_supervision(rewards, group, epsilon=1e-12).tolist() == pytest.approx(expected)
    assert torch.equal(process_supervision(rewards, GroupFacts()), grpo(rewards, GroupFacts()))
    with pytest.raises(ValueError, match="the turn of every step"):
        process_supervision(rewards, GroupFacts(trajectory=torch.tensor([5, 5, 9, 9, 9])))


def test_gigpo_by_hand() -> None:
    # Trajectories, without deviation: 1 - 0.5 = 0.5 and -0.5.
    # Returns to go with discount 0.5: 0.5 and 1; 0 and 0. State 7: 0.5 and 0, mean 0.25: +-0.25. The others: 0.
    found = gigpo(REWARDS, GROUP, discount=0.5, step_weight=2.0, deviation=False)
    assert found.tolist() == pytest.approx([0.5 + 2 * 0.25, 0.5, -0.5 - 2 * 0.25, -0.5])


def test_gigpo_divided_by_the_deviation_by_hand() -> None:
    # Trajectories: +-sqrt(0.5). State 7 holds two values: +-sqrt(0.5) again, whatever the values.
    half = 0.5**0.5
    found = gigpo(REWARDS, GROUP, epsilon=1e-12)
    assert found.tolist() == pytest.approx([2 * half, half, -2 * half, -half])


def test_gigpo_without_step_weight_is_step_wise() -> None:
    assert torch.equal(gigpo(REWARDS, GROUP, step_weight=0.0), step_wise(REWARDS, GROUP))


def test_gigpo_needs_to_know_the_steps() -> None:
    with pytest.raises(ValueError, match="needs the trajectory, turn and state of every step"):
        gigpo(REWARDS, GroupFacts(trajectory=GROUP.trajectory))
