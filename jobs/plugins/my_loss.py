"""A policy loss of one's own, and an advantage to go with it. In the config:

plugins: [jobs/plugins/my_loss.py]
stages:
  - algorithm: {name: grpo, policy_loss: tanh_ratio, advantage: above_median, sharpness: 4.0}
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayrft.algorithms import GroupFacts, Positive, TokenBatch, TokenLoss, group_advantages, policy_losses, token_ratio


@policy_losses.register("tanh_ratio")
def tanh_ratio(logprobs: Tensor, batch: TokenBatch, *, sharpness: Positive = 5.0) -> TokenLoss:
    """``-tanh(s (rho_t - 1)) / s A_t``: REINFORCE's gradient at ratio 1, fading on both sides. ``sharpness`` is s."""
    ratio = token_ratio(logprobs, batch)
    return TokenLoss(-torch.tanh(sharpness * (ratio - 1)) / sharpness * batch.advantages)


@group_advantages.register("above_median")
def above_median(rewards: Tensor, group: GroupFacts) -> Tensor:
    """``A_i = r_i - median(r)``, the lower median of an even number."""
    return rewards - rewards.median()
