"""Importance weights that correct for differences between engine and trainer policy (numerics or weight version).

A correction returns a weight per own token, without gradient, which multiplies the policy loss. With log-probs of a
proximal policy (the trainer's, before its first update on the batch) the loss uses ratios to that policy, and the
correction weighs by the proximal policy's ratio to the behaviour policy. Without them the loss uses ratios to the
behaviour policy, and a correction can only mask tokens. Masked tokens stay in the denominator, which is counted before
any forward pass.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rayrft.algorithms.batch import TokenBatch
from rayrft.algorithms.pieces import Pieces, Positive
from rayrft.algorithms.ratios import log_ratio


class Correction(Protocol):
    """A function of ``logprobs`` ``[T]`` and the own rows of a batch, both zero off the mask, to weights ``[T]``."""

    def __call__(self, logprobs: Tensor, batch: TokenBatch, /) -> Tensor: ...


corrections: Pieces[Correction] = Pieces("correction")


@corrections.register("decoupled", needs=["proximal"])
def decoupled(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """Decoupled PPO: ``w_t = pi_prox(y_t) / pi_behaviour(y_t)`` (Hilton et al. 2021, arXiv:2110.00641; AReaL, Fu
    et al. 2025, arXiv:2505.24298): full importance weights, while the clip is relative to the recent policy."""
    return _gap(logprobs, batch).exp()


@corrections.register("truncated", needs=["proximal"])
def truncated(logprobs: Tensor, batch: TokenBatch, *, weight_cap: Positive = 2.0) -> Tensor:
    """Truncated importance sampling: ``w_t = min(pi_prox(y_t) / pi_behaviour(y_t), weight_cap)`` (Yao et al. 2025,
    "Your efficient RL framework secretly brings you off-policy RL training"; cap 2 as in verl)."""
    return _gap(logprobs, batch).exp().clamp(max=weight_cap)


@corrections.register("masked", needs=["proximal"])
def masked(logprobs: Tensor, batch: TokenBatch, *, weight_low: Positive = 0.5, weight_high: Positive = 5.0) -> Tensor:
    """Masked importance sampling, two-sided: ``w_t = pi_prox(y_t) / pi_behaviour(y_t)`` within [weight_low,
    weight_high], else 0 (IcePop, Ling Team 2025, arXiv:2510.18855, whose bounds these are)."""
    weight = _gap(logprobs, batch).exp()
    return torch.where((weight >= weight_low) & (weight <= weight_high), weight, torch.zeros_like(weight))


@corrections.register("token_mask")
def token_mask(
    logprobs: Tensor, batch: TokenBatch, *, weight_low: Positive = 0.5, weight_high: Positive = 2.0
) -> Tensor:
    """1 on tokens whose ratio to the behaviour policy is within [weight_low, weight_high], else 0."""
    ratio = _gap(logprobs, batch).exp()
    return ((ratio >= weight_low) & (ratio <= weight_high)).to(ratio.dtype)


@corrections.register("sequence_mask")
def sequence_mask(
    logprobs: Tensor, batch: TokenBatch, *, weight_low: Positive = 0.99, weight_high: Positive = 1.01
) -> Tensor:
    """1 on answers whose geometric mean of token ratios to the behaviour policy is within [weight_low, weight_high],
    else 0: an answer on which engine and trainer disagree is masked as a whole (Liu et al. 2025, "When speed kills
    stability"). Unlike the product, the geometric mean does not scale with length. Token noise averages out in it, so
    bounds are narrow (as in SkyRL; verl has 0.999 to 1.001)."""
    ratio = batch.mean(_gap(logprobs, batch)).exp()
    return batch.spread(((ratio >= weight_low) & (ratio <= weight_high)).to(ratio.dtype))


def _gap(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """Compute the log-ratio ``[T]`` of the proximal policy (if missing, the present one) to the behaviour policy."""
    newer = logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs
    return log_ratio(newer, batch.behaviour_logprobs)
