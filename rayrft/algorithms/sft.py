"""Losses on demonstrated tokens, and schedules of their weight mu against the policy loss.

A loss takes log-probs ``[T]`` with gradient and the expert rows of a batch, zero off the mask, and returns a loss per
token. ``MIX = (1 - mu) policy + mu sft``; a schedule returns mu for every optimiser step of a stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from rayrft.algorithms.batch import TokenBatch
from rayrft.algorithms.pieces import Fraction, Pieces, Steps

SFTLoss = Callable[[Tensor, TokenBatch], Tensor]

MuSchedule = Callable[[int], float]
"""From the number of optimiser steps taken in the stage to mu in [0, 1]."""

sft_losses: Pieces[SFTLoss] = Pieces("sft")
mu_schedules: Pieces[MuSchedule] = Pieces("mu_schedule")


@sft_losses.register("nll")
def nll(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """Negative log-likelihood, ``-log pi(y_t | x, y_<t)``."""
    return -logprobs


@sft_losses.register("chord_phi")
def chord_phi(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """CHORD-phi: ``-sg(p_t (1 - p_t)) log pi(y_t)``, ``p_t = pi(y_t)`` (Zhang et al. 2025, arXiv:2508.11408).

    Tokens with probability near 1 (nothing to learn) or near 0 (too disruptive) are weighted down. The weight is at
    most 1/4 and is not renormalised.
    """
    p = logprobs.detach().exp()
    return -p * (1 - p) * logprobs


@sft_losses.register("nll_by_probability")
def nll_by_probability(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """``-sg(p_t) log pi(y_t)``: SFT with the importance weight of a deterministic expert (CHORD's comparison "SFT-IS";
    dynamic fine-tuning, Wu et al. 2025, arXiv:2508.05629)."""
    return -logprobs.detach().exp() * logprobs


@mu_schedules.register("constant")
def constant_mu(step: int, *, mu: Fraction = 0.1) -> float:
    """A constant mu. At 0 and 1 the other stream is not computed, so both extremes are exact."""
    return mu


@mu_schedules.register("cosine")
def cosine_mu(
    step: int,
    *,
    mu_peak: Fraction = 0.9,
    mu_valley: Fraction = 0.05,
    mu_warmup_steps: Steps = 0,
    mu_decay_steps: Steps = 200,
) -> float:
    """CHORD-mu: from imitation to exploration (Zhang et al. 2025, arXiv:2508.11408).

    Linear from 0 to ``mu_peak`` over the warm-up, then a half cosine down to ``mu_valley`` over the decay, then
    constant.
    """
    if step < mu_warmup_steps:
        return mu_peak * step / mu_warmup_steps
    done = (step - mu_warmup_steps) / mu_decay_steps if mu_decay_steps else 1.0
    return mu_valley + (mu_peak - mu_valley) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
