"""Importance weights that correct for differences between engine and trainer policy (numerics or weight version).

A correction returns a weight per token of usual rows, without gradient, which multiplies the policy loss. With
log-probs of a proximal policy (the trainer's, before its first update on the batch) the loss uses ratios to that
policy, and the correction weighs by the proximal policy's ratio to the behaviour policy. Without them the loss uses
ratios to the behaviour policy, and a correction can only mask tokens. Masked tokens stay in the denominator, which is
counted before any forward pass.

Several corrections may be named in a list: their weights multiply, as in a truncated weight of tokens together with a
mask of whole answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from rayrft.algorithms.batch import TokenBatch
from rayrft.algorithms.pieces import Pieces, Positive
from rayrft.algorithms.ratios import bounded, log_ratio

Correction = Callable[[Tensor, TokenBatch], Tensor]
"""From ``logprobs`` ``[T]`` and the usual rows of a batch, both zero off the mask, to weights ``[T]``."""

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


@corrections.register("sequence_truncated", needs=["proximal"])
def sequence_truncated(
    logprobs: Tensor,
    batch: TokenBatch,
    *,
    sequence_cap: Positive = 2.0,
    sequence_ratio: Literal["product", "geometric"] = "product",
) -> Tensor:
    """Truncated importance sampling of whole answers: ``w_i = min(s_i, sequence_cap)`` on all tokens of an answer.
    ``s_i = prod_t pi_prox(y_t) / pi_behaviour(y_t)`` is the weight for which the gradient is unbiased. Its geometric
    mean ``s_i^(1/|y_i|)`` is biased, with far lower variance. The cap is 2 as in verl's ``rollout_is: sequence``; TRL
    has 3.
    """
    return _sequence_ratio(logprobs, batch, sequence_ratio).clamp(max=sequence_cap)


@corrections.register("sequence_masked", needs=["proximal"])
def sequence_masked(
    logprobs: Tensor,
    batch: TokenBatch,
    *,
    sequence_cap: Positive = 3.0,
    sequence_ratio: Literal["product", "geometric"] = "product",
) -> Tensor:
    """Masked importance sampling of whole answers: the weight of `sequence_truncated` where it is at most
    ``sequence_cap``, else 0 (TRL's default ``sequence_mask``, whose cap this is)."""
    weight = _sequence_ratio(logprobs, batch, sequence_ratio)
    return torch.where(weight <= sequence_cap, weight, torch.zeros_like(weight))


@corrections.register("sequence_mask")
def sequence_mask(
    logprobs: Tensor, batch: TokenBatch, *, sequence_low: Positive = 0.99, sequence_high: Positive = 1.01
) -> Tensor:
    """1 on answers whose geometric mean of token ratios to the behaviour policy is within [sequence_low,
    sequence_high], else 0. So an answer on which engine and trainer disagree is masked as a whole (Liu et al. 2025,
    "When speed kills stability"). Unlike the product, the geometric mean does not scale with length. Token noise
    averages out in it, so bounds are narrow (as in SkyRL; verl has 0.999 to 1.001)."""
    ratio = _sequence_ratio(logprobs, batch, "geometric")
    return ((ratio >= sequence_low) & (ratio <= sequence_high)).to(ratio.dtype)


@corrections.register("divergence_mask")
def divergence_mask(
    logprobs: Tensor,
    batch: TokenBatch,
    *,
    divergence: Literal["k2", "k3"] = "k3",
    divergence_of: Literal["token", "mean", "sum", "max"] = "mean",
    divergence_cap: Positive = 0.01,
) -> Tensor:
    """1 where an estimate of the KL of the behaviour policy to the proximal one is at most ``divergence_cap`` nats,
    else 0 (verl's rejection by ``token_k3``, ``seq_mean_k3``, ``seq_sum_k3``, ``seq_max_k3`` and the same of k2).

    With ``g_t = log pi_prox(y_t) - log pi_behaviour(y_t)``, k2 is ``g_t^2 / 2`` and k3 ``exp(g_t) - 1 - g_t``. Neither
    is negative, so that, unlike in `sequence_mask`, differences of opposite sign do not cancel. ``divergence_of``: each
    token, or whole answers by the mean, sum or maximum over their tokens. The cap is verl's for ``seq_mean_k3``.
    """
    gap = _gap(logprobs, batch)
    values = gap.expm1() - gap if divergence == "k3" else 0.5 * gap.square()
    if divergence_of == "mean":
        values = batch.spread(batch.mean(values))
    elif divergence_of == "sum":
        values = batch.spread(batch.sum(values))
    elif divergence_of == "max":
        # Estimates are at least 0, the value off the mask.
        values = batch.spread(values.new_zeros(batch.rows).scatter_reduce(0, batch.sequence, values, "amax"))
    return (values <= divergence_cap).to(values.dtype)


@corrections.register("off_policy_mask")
def off_policy_mask(logprobs: Tensor, batch: TokenBatch, *, off_policy_cap: Positive = 0.5) -> Tensor:
    """0 on tokens with A_t < 0 of answers that the policy has left behind, else 1 (DeepSeek-V3.2, DeepSeek-AI 2025,
    arXiv:2512.02556, sec. 3.1; OPSM in slime).

    An answer is left behind if ``1/|y_i| sum_t log (pi_behaviour(y_t) / pi(y_t)) > off_policy_cap``, in nats per token
    and with the present policy, not the proximal one. Pushing further down what is already unlikely destabilises. The
    paper does not give its threshold; 0.5 is TRL's example.
    """
    behind = batch.spread(batch.mean(log_ratio(batch.behaviour_logprobs, logprobs.detach()))) > off_policy_cap
    return (~behind | (batch.advantages >= 0)).to(logprobs.dtype)


def _gap(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """Compute the log-ratio ``[T]`` of the proximal policy (if missing, the present one) to the behaviour policy."""
    newer = logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs
    return log_ratio(newer, batch.behaviour_logprobs)


def _sequence_ratio(logprobs: Tensor, batch: TokenBatch, kind: Literal["product", "geometric"]) -> Tensor:
    """Compute the product of an answer's token ratios, or its geometric mean, on each of its tokens, ``[T]``."""
    gap = _gap(logprobs, batch)
    total = batch.sum(gap) if kind == "product" else batch.mean(gap)
    return batch.spread(bounded(total).exp())
