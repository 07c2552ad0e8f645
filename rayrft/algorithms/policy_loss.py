"""Policy-gradient losses on own (usual) rows."""

from __future__ import annotations

import torch
from torch import Tensor

from rayrft.algorithms.loss import TokenBatch, masked_sum


def clipped_policy_loss(
    logprobs: Tensor, batch: TokenBatch, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate of PPO with an upper bound of its own (Schulman et al. 2017, arXiv:1707.06347, eq. 7;
    "clip higher": Yu et al. 2025, arXiv:2503.14476).

    ``sum_t -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)`` with
    ``rho_t = exp(logprobs_t - behaviour_logprobs_t)``: the ratio is taken to the policy that sampled the token, however
    many versions ago.

    logprobs: ``[B, T]`` with gradient. Returns the summed loss (a scalar; divide by the global number of RL tokens for
    the token mean) and masked sums for metrics: ``clipped`` (tokens on which the bound was active), ``ratio``,
    ``logprob_gap`` (``|logprobs - behaviour_logprobs|``).
    """
    mask = batch.policy_mask
    # Padding and prompts hold arbitrary log-probs: zero the difference, or exp() could overflow into the gradient.
    difference = torch.where(mask.bool(), logprobs - batch.behaviour_logprobs, torch.zeros_like(logprobs))
    ratio = difference.exp()
    plain = ratio * batch.advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * batch.advantages
    loss = masked_sum(-torch.minimum(plain, bounded), mask)
    with torch.no_grad():
        sums = {
            "clipped": masked_sum((bounded < plain).to(ratio.dtype), mask),
            "ratio": masked_sum(ratio, mask),
            "logprob_gap": masked_sum(difference.abs(), mask),
        }
    return loss, sums
