"""Advantages from the rewards of one group, which is all answers to one task.

A group advantage maps ``rewards`` ``[n]`` and a `GroupFacts` with further facts to ``[n]``: one advantage for all
action tokens of a row. One that needs ``turns`` takes and returns one number per step instead. Steps are the model's
turns, in one row or in several, or, where the reward gives values to steps inside a turn, these. Without trajectories
in the group every reward is a trajectory of one step. All raise ValueError on rewards of another shape.

A group of one has no comparison: an advantage returns 0 for it and has the trait ``compares``, unless it uses the
reward alone. (Other systems use the single reward itself, which reinforces any sample.) Standard deviations have
divisor n - 1, as in TRL, verl and Trinity-RFT; advantages normalised over a batch use divisor n, as in OpenRLHF
(`rayrft.algorithms.normalisation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rayrft.algorithms.pieces import Fraction, NonNegative, Pieces, Positive, Weight, require

_ROUNDING = 1e-6
"""Rewards that differ by less than this share of them are equal."""


@dataclass(frozen=True)
class GroupFacts:
    """Facts about a group besides its rewards; tensors have shape ``[n]``."""

    greedy_reward: float | None = None
    """Reward of the greedy answer to the same task."""
    trajectory: Tensor | None = None
    """int64: the trajectory of a reward's step; None if every row is one trajectory."""
    turn: Tensor | None = None
    """int64: index of the step in its trajectory, ascending."""
    state: Tensor | None = None
    """int64: the state in which the step was taken; equal states have equal numbers."""
    components: Mapping[str, Tensor] | None = None
    """The parts of the rewards, by name, each of the same shape."""
    rewarded: Tensor | None = None
    """bool: whether the step has a reward, or its 0 means none; None if all have one."""


GroupAdvantage = Callable[[Tensor, GroupFacts], Tensor]
"""From ``rewards`` and a group to advantages."""

group_advantages: Pieces[GroupAdvantage] = Pieces("advantage")


def check_shape(rewards: Tensor) -> None:
    """Raise ValueError unless rewards have shape ``[n]``."""
    if rewards.dim() != 1:
        raise ValueError(f"rewards of one group must have shape [n], got {tuple(rewards.shape)}")


def centre_rewards(rewards: Tensor) -> Tensor:
    """Compute ``r_i - mean(r)`` for ``[n]`` rewards; exactly 0 if all are equal up to the rounding of sums and of
    float32. Such differences are noise, which a division by the standard deviation would enlarge."""
    check_shape(rewards)
    if rewards.numel() < 2 or bool(rewards.max() - rewards.min() <= _ROUNDING * rewards.abs().max()):
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()


def group_relative_advantages(rewards: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """Compute ``A_i = (r_i - mean(r)) / (std(r) + epsilon)`` for ``[n]`` rewards; 0 if all are equal. See `grpo`."""
    centred = centre_rewards(rewards)
    return centred / (rewards.std() + epsilon) if bool(centred.any()) else centred


@group_advantages.register("grpo", traits=["compares"])
def grpo(
    rewards: Tensor,
    group: GroupFacts,
    *,
    epsilon: Positive = 1e-6,
    std_threshold: NonNegative = 0.0,
    below_threshold: Literal["drop", "centre"] = "drop",
) -> Tensor:
    """GRPO: the reward of an answer relative to its group (Shao et al. 2024, arXiv:2402.03300, eq. 3).

    ``A_i = (r_i - mean(r)) / (std(r) + epsilon)``. A group whose rewards are all equal carries no preference: 0.
    epsilon: 1e-6 as in verl; TRL has 1e-4.

    Differences that are noise become as large as any by the division. A group whose deviation is at most
    ``std_threshold`` gets 0 (``drop``, as with Trinity-RFT's threshold of this name), so that it may be dropped as a
    whole (`explorer.drop_zero_variance`), or ``r_i - mean(r)`` (``centre``).
    """
    check_shape(rewards)
    if rewards.numel() > 1 and rewards.std() <= std_threshold:
        return centre_rewards(rewards) if below_threshold == "centre" else torch.zeros_like(rewards)
    return group_relative_advantages(rewards, epsilon=epsilon)


@group_advantages.register("gdpo", needs=["components"], traits=["compares"])
def gdpo(
    rewards: Tensor,
    group: GroupFacts,
    *,
    reward_components: Mapping[str, Weight] | None = None,
    epsilon: Positive = 1e-6,
) -> Tensor:
    """GDPO: several rewards, each relative to its group (Liu et al. 2026, arXiv:2601.05242).

    ``A_i = sum_k w_k (r_ik - mean(r_k)) / (std(r_k) + epsilon)`` over the components k of the rewards, with weights
    ``w_k = reward_components[k]``; by default all components of the rows, with weights 1. The preset then normalises
    over the answers of the batch, so that the scale does not depend on the number of components. Were the rewards
    summed first, as in `grpo`, groups with different components would often have the same advantages, and the component
    of the largest deviation would decide.

    The reward itself has no part in it, nor have penalties that are in no component. Raises ValueError if the group has
    no components, and KeyError if it lacks one.
    """
    check_shape(rewards)
    components = require(group.components, "gdpo needs the components of the rewards")
    weights = reward_components or dict.fromkeys(components, 1.0)
    parts = [w * group_relative_advantages(components[name], epsilon=epsilon) for name, w in weights.items()]
    return torch.stack(parts).sum(0) if parts else torch.zeros_like(rewards)


@group_advantages.register("dr_grpo", traits=["compares"])
def dr_grpo(rewards: Tensor, group: GroupFacts) -> Tensor:
    """Dr. GRPO: ``A_i = r_i - mean(r)`` (Liu et al. 2025, arXiv:2503.20783). Dividing by the standard deviation would
    favour tasks that almost always succeed or almost always fail."""
    return centre_rewards(rewards)


@group_advantages.register("rloo", traits=["compares"])
def rloo(rewards: Tensor, group: GroupFacts) -> Tensor:
    """RLOO: an answer's reward minus the mean of the others (Ahmadian et al. 2024, arXiv:2402.14740).

    ``A_i = r_i - 1/(n-1) sum_{j != i} r_j = n/(n-1) (r_i - mean(r))``: the baseline does not depend on the answer, so
    the gradient is unbiased.
    """
    n = rewards.numel()
    return centre_rewards(rewards) * (n / max(n - 1, 1))


@group_advantages.register("reinforce_pp")
def reinforce_pp(rewards: Tensor, group: GroupFacts) -> Tensor:
    """REINFORCE++: ``A_i = r_i``, which the trainer then normalises over the whole batch (Hu et al. 2025,
    arXiv:2501.03262; see `rayrft.algorithms.normalisation`). It compares nothing: a group of one gets its reward.
    """
    check_shape(rewards)
    return rewards


@group_advantages.register("reinforce_pp_baseline", traits=["compares"])
def reinforce_pp_baseline(rewards: Tensor, group: GroupFacts) -> Tensor:
    """REINFORCE++ with baseline: ``A_i = r_i - mean(r)``, which the trainer then normalises over the whole batch (Hu et
    al. 2025, arXiv:2501.03262). Unlike in GRPO, the deviation is over all answers to all tasks."""
    return centre_rewards(rewards)


@group_advantages.register("remax", needs=["greedy_baseline"])
def remax(rewards: Tensor, group: GroupFacts) -> Tensor:
    """ReMax: ``A_i = r_i - r_greedy`` (Li et al. 2023, arXiv:2310.10505). Works with a group of one.

    Raises ValueError if ``group.greedy_reward`` is None.
    """
    check_shape(rewards)
    return rewards - require(group.greedy_reward, "remax needs the reward of the greedy answer")


@group_advantages.register("opmd", traits=["compares"])
def opmd_advantage(rewards: Tensor, group: GroupFacts, *, baseline_tau: Positive = 1.0) -> Tensor:
    """OPMD: ``A_i = r_i - tau log(1/n sum_j exp(r_j / tau))`` (Pan et al. 2025, arXiv:2505.17826).

    The baseline estimates tau log Z, where Z normalises the policy that maximises reward minus tau times the KL to the
    old one. It is the mean for tau to infinity, the maximum for tau to 0, and never below the mean. 0 if all rewards
    are equal.

    Trinity-RFT's default baseline is the plain mean (`dr_grpo`), which the preset `opmd` uses; this one is its option
    ``logavgexp``.
    """
    if not bool(centre_rewards(rewards).any()):
        return torch.zeros_like(rewards)
    baseline = baseline_tau * ((rewards / baseline_tau).logsumexp(0) - math.log(rewards.numel()))
    return rewards - baseline


@group_advantages.register("asymre", traits=["compares"])
def asymre(rewards: Tensor, group: GroupFacts, *, baseline_shift: float = -0.1) -> Tensor:
    """AsymRE: ``A_i = r_i - (mean(r) + shift)`` (Arnal et al. 2025, arXiv:2506.20520).

    A shift below 0 weighs successes more than failures, which keeps off-policy REINFORCE without a ratio stable; at 0
    or above it collapses. Rewards that are all equal give -shift, so such answers are imitated a little. A group of one
    gives 0.
    """
    return centre_rewards(rewards) - (baseline_shift if rewards.numel() > 1 else 0.0)


@group_advantages.register("red_drop", traits=["compares", "selects"])
def red_drop(rewards: Tensor, group: GroupFacts) -> Tensor:
    """RED-Drop: drop the surplus of answers below the group's mean over the others (Yao et al. 2025, arXiv:2509.24203):
    ``A_i = r_i - mean of the rewards kept``, and 0 for the dropped ones.

    The last ones below the mean are dropped, where Trinity-RFT draws at random. Rows are in the order of the requests,
    so this is equivalent to a random draw and reproducible; rows from other sources must not be sorted. Tokens of
    dropped answers stay in the denominator; KL and entropy terms include them.
    """
    worse = centre_rewards(rewards) < -_ROUNDING * rewards.abs().max()
    better = int((~worse).sum())
    kept = ~worse | (worse.cumsum(0) <= better)
    return torch.zeros_like(rewards).masked_scatter(kept, centre_rewards(rewards[kept]))


@group_advantages.register("accept", traits=["selects"])
def accept(rewards: Tensor, group: GroupFacts, *, accept_above: float = 0.0) -> Tensor:
    """Rejection sampling: ``A_i = 1`` if ``r_i > accept_above``, else 0. A threshold on the reward, where RAFT as
    published takes the best of K answers; so a group of one counts like any other. KL and entropy terms include
    rejected answers."""
    check_shape(rewards)
    return (rewards > accept_above + _ROUNDING * abs(accept_above)).to(rewards.dtype)


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
    turn = require(group.turn, "process needs the turn of every step")
    return returns_to_go(relative, group.trajectory, turn, 1.0)


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
