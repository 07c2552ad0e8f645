"""Advantages from rewards."""

from __future__ import annotations

import torch
from torch import Tensor


def group_relative_advantages(rewards: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """GRPO: how much better than its own group each answer was (Shao et al. 2024, arXiv:2402.03300, eq. 3).

    ``A_i = (r_i - mean(r)) / (std(r) + epsilon)`` with the unbiased deviation (divisor n - 1).

    rewards: ``[n]``, the rewards of the n answers to one task; returns ``[n]``. A group of one, or one whose rewards
    are all equal, carries no preference: its advantages are 0. Raises ValueError on another number of dimensions.
    """
    if rewards.dim() != 1:
        raise ValueError(f"rewards of one group must have shape [n], got {tuple(rewards.shape)}")
    if rewards.numel() < 2 or bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + epsilon)
