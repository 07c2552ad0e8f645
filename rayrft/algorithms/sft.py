"""Supervised fine-tuning on expert rows."""

from __future__ import annotations

from torch import Tensor

from rayrft.algorithms.loss import TokenBatch, masked_sum


def sft_loss(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """Negative log-likelihood of the demonstrated tokens, ``sum_t -log pi(y_t | x, y_<t)``.

    logprobs: ``[B, T]`` with gradient. Returns a scalar sum over the expert rows; divide by the global number of
    demonstrated tokens for the token mean.
    """
    return masked_sum(-logprobs, batch.expert_mask)
