"""Group advantages for trajectories of several steps: the model's turns, in one row or in several, or, where the reward
gives values to steps inside a turn, these.

``rewards`` are per step; the group holds their trajectories, turns and states. Without trajectories every reward is a
trajectory of one step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayrft.algorithms.advantages import (
    GroupFacts,
    centre_rewards,
    check_shape,
    group_advantages,
    group_relative_advantages,
)
from rayrft.algorithms.pieces import Fraction, NonNegative, Positive


def trajectories(rewards: Tensor, group: GroupFacts) -> tuple[Tensor, Tensor]:
    """Sum rewards to the trajectories' returns ``[m]``; also return the trajectory index of every step ``[n]``."""
    check_shape(rewards)
    if group.trajectory is None:
        return rewards, torch.arange(rewards.numel(), device=rewards.device)
    names, index = torch.unique(group.trajectory, return_inverse=True)
    return rewards.new_zeros(names.numel()).index_add(0, index, rewards), index


@group_advantages.register("step_wise", needs=["turns"], traits=["compares"])
def step_wise(rewards: Tensor, group: GroupFacts, *, epsilon: Positive = 1e-6) -> Tensor:
    """GRPO over trajectories: a step gets its trajectory's advantage.

    ``A_k = (R_tau(k) - mean(R)) / (std(R) + epsilon)`` with R the returns of the trajectories, which count once in mean
    and deviation independent of their length. A single trajectory gives 0.
    """
    returns, index = trajectories(rewards, group)
    return group_relative_advantages(returns, epsilon=epsilon)[index]


@group_advantages.register("gigpo", needs=["turns", "states"], traits=["compares", "varies_in_row"])
def gigpo(
    rewards: Tensor,
    group: GroupFacts,
    *,
    step_weight: NonNegative = 1.0,
    discount: Fraction = 0.95,
    deviation: bool = True,
    epsilon: Positive = 1e-6,
) -> Tensor:
    """GiGPO: a group within the group (Feng et al. 2025, arXiv:2505.10978).

    ``A_k = A^E(tau(k)) + step_weight A^S(k)``. A^E compares returns of trajectories, as `step_wise`. A^S compares the
    discounted returns to go ``R_k = sum_{l >= k} discount^(l-k) r_l`` of all steps taken in the same state; a state
    visited once gives 0. Both are divided by the standard deviation, as in GRPO, or not (``deviation: false``, the
    default of the authors' verl-agent; the paper has both).

    Raises ValueError if trajectory, turn or state is None.
    """
    if group.trajectory is None or group.turn is None or group.state is None:
        raise ValueError("gigpo needs the trajectory, turn and state of every step")

    def compare(values: Tensor) -> Tensor:
        return group_relative_advantages(values, epsilon=epsilon) if deviation else centre_rewards(values)

    returns, index = trajectories(rewards, group)
    to_go = returns_to_go(rewards, group.trajectory, group.turn, discount)
    steps = torch.zeros_like(rewards)
    for state in torch.unique(group.state):
        same = group.state == state
        steps[same] = compare(to_go[same])
    return compare(returns)[index] + step_weight * steps


@group_advantages.register("process", needs=["turns"], traits=["compares", "varies_in_row"])
def process_supervision(rewards: Tensor, group: GroupFacts, *, epsilon: Positive = 1e-6) -> Tensor:
    """GRPO with process supervision (DeepSeekMath, Shao et al. 2024, arXiv:2402.03300, section 4.1.3).

    ``A_k = sum_{l >= k} (r_l - mean(r)) / (std(r) + epsilon)`` over the steps l of the trajectory from k on; mean and
    deviation are those of the rewards of all steps of the group. So a trajectory of more steps of more than the mean
    earns more, and the reward of an answer is one of its last step.

    Raises ValueError if there are trajectories without turns.
    """
    relative = group_relative_advantages(rewards, epsilon=epsilon)
    if group.trajectory is None:
        return relative
    if group.turn is None:
        raise ValueError("process needs the turn of every step")
    return returns_to_go(relative, group.trajectory, group.turn, 1.0)


def returns_to_go(rewards: Tensor, trajectory: Tensor, turn: Tensor, discount: float) -> Tensor:
    """Compute ``R_k = r_k + discount R_{k+1}`` along trajectories, ``[n]``; rows may be in any order."""
    result = torch.zeros_like(rewards)
    for name in torch.unique(trajectory):
        steps = (trajectory == name).nonzero().squeeze(1)
        steps = steps[turn[steps].argsort(descending=True)]
        future = 0.0
        for step in steps.tolist():
            future = float(rewards[step]) + discount * future
            result[step] = future
    return result
