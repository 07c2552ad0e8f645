"""Losses on pairs of answers to the same prompt, one chosen, one rejected.

With ``h(y) = log pi(y) - log pi_ref(y)``, the sum over the answer's tokens, all depend only on the margin
``m = h(chosen) - h(rejected)`` (``[P]`` nats), and return ``[P]``. The share of a step is their sum divided by the
step's number of pairs. Both rows of a pair are in the same micro-batch.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rayrft.algorithms.batch import TokenBatch
from rayrft.algorithms.pieces import BelowHalf, Pieces, Positive


class PreferenceLoss(Protocol):
    def __call__(self, margin: Tensor, /) -> Tensor: ...


preferences: Pieces[PreferenceLoss] = Pieces("preference")


def margins(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """Compute the margin of every pair in the batch, ``[P]``. Raises ValueError if pairs or reference log-probs are
    missing, or a pair is not one chosen and one rejected row."""
    if batch.pair is None or batch.chosen is None or batch.reference_logprobs is None:
        raise ValueError("a preference loss needs pairs and the reference's log-probs")
    paired = batch.paired
    pair, chosen = batch.pair[paired], batch.chosen[paired]
    count = int(pair.max()) + 1 if pair.numel() else 0
    if (torch.bincount(pair * 2 + chosen, minlength=2 * count) != 1).any():
        raise ValueError("every pair must hold one chosen and one rejected row in the same micro-batch")
    gain = batch.sum(logprobs - batch.reference_logprobs)[paired]
    return gain.new_zeros(count).index_add(0, pair, torch.where(chosen, gain, -gain))


@preferences.register("dpo", needs=["pairs", "reference"])
def dpo(margin: Tensor, *, beta: Positive = 0.1, label_smoothing: BelowHalf = 0.0) -> Tensor:
    """DPO: ``-log sigmoid(beta m)`` (Rafailov et al. 2023, arXiv:2305.18290, eq. 7).

    With label smoothing e, the probability of a wrong label: ``-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)``
    (conservative DPO, Mitchell 2023), which has a finite minimum at ``m = log((1 - e) / e) / beta``. e is below 1/2, at
    which labels carry no information.
    """
    right, wrong = logsigmoid(beta * margin), logsigmoid(-beta * margin)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


@preferences.register("ipo", needs=["pairs", "reference"])
def ipo(margin: Tensor, *, beta: Positive = 0.1) -> Tensor:
    """IPO: ``(m - 1 / (2 beta))^2``: regression of the margin to a target (Azar et al. 2023, arXiv:2310.12036). The
    margin uses sums over tokens, as in the paper; TRL uses means."""
    return (margin - 1 / (2 * beta)).square()
