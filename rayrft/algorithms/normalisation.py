"""Advantages normalised over all usual rows of an optimiser step.

``by`` says what they are divided by:

* ``tokens``: ``(A - mean) / deviation`` over all action tokens of usual rows, so that long answers count for more
  (REINFORCE++, Hu et al. 2025, arXiv:2501.03262; PPO);
* ``answers``: the same, each answer counted once, by the mean of its advantages (GDPO, Liu et al. 2026,
  arXiv:2601.05242);
* ``rewards``: ``A / deviation`` of the answers' rewards. With `dr_grpo` it is the group's mean with the batch's
  deviation (Liu et al. 2025, "Tricks or traps?", arXiv:2508.08221; TRL's ``scale_rewards: batch``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from rayrft.algorithms.batch import TokenBatch, keep
from rayrft.algorithms.pieces import require

By = Literal["tokens", "answers", "rewards"]
_FLAT = 1e-6
"""Deviations up to this are rounding errors of equal values: nothing is divided by them."""


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation that advantages are normalised by, over all ranks and micro-batches of a step.

    The deviation has divisor n, as in OpenRLHF; verl and TRL, which whiten PPO's advantages, use n - 1. With thousands
    of tokens the difference is negligible.
    """

    mean: float
    deviation: float

    @classmethod
    def of(cls, sums: Tensor, by: By = "tokens") -> Self:
        """Convert the sum of `sum_moments` over all ranks. By rewards the mean is 0: they only scale."""
        tokens, total, squares = sums.tolist()
        if not tokens:
            return cls(0.0, 0.0)
        mean = total / tokens
        return cls(0.0 if by == "rewards" else mean, max(squares / tokens - mean**2, 0.0) ** 0.5)


def sum_moments(batches: Iterable[TokenBatch], device: torch.device | None = None, by: By = "tokens") -> Tensor:
    """Compute number, sum and sum of squares of the advantages of action tokens of usual rows, or of whole answers, or
    of the answers' rewards, weighted by the importance weights of their rows; ``[3]`` float64. Raises ValueError if
    rewards are missing."""
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        usual = batch.usual()
        if by == "tokens":
            values, weights = usual.advantages.double(), usual.weighted(usual.mask.double())
        else:
            answers = usual.lengths > 0
            if by == "answers":
                each = usual.mean(usual.advantages)
            else:
                each = require(usual.reward, "the deviation of rewards needs the rewards of the rows")
            values = keep(each, answers).double()
            weights = answers.double() if usual.weight is None else answers * usual.weight.double()
        total += torch.stack([weights.sum(), (weights * values).sum(), (weights * values.square()).sum()])
    return total


def normalise(batch: TokenBatch, moments: Moments) -> TokenBatch:
    """Return the batch with advantages ``(A - mean) / (deviation + 1e-8)``; 0 off the mask. They are only centred if
    the deviation is 0 up to rounding."""
    scale = moments.deviation + 1e-8 if moments.deviation > _FLAT else 1.0
    return replace(batch, advantages=keep((batch.advantages - moments.mean) / scale, batch.mask))
