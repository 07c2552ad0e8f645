"""Advantages normalised over all own action tokens of an optimiser step (REINFORCE++)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from rayrft.algorithms.batch import TokenBatch, keep


@dataclass(frozen=True)
class Moments:
    """Mean and standard deviation of the advantages of all own action tokens of a step, over ranks and micro-batches.

    The deviation has divisor n, as in OpenRLHF; verl and TRL, which whiten PPO's advantages, use n - 1. With thousands
    of tokens the difference is negligible.
    """

    mean: float
    deviation: float

    @classmethod
    def of(cls, sums: Tensor) -> Self:
        """Convert the sum of `sum_moments` over all ranks."""
        tokens, total, squares = sums.tolist()
        if not tokens:
            return cls(0.0, 0.0)
        mean = total / tokens
        return cls(mean, max(squares / tokens - mean**2, 0.0) ** 0.5)


def sum_moments(batches: Iterable[TokenBatch], device: torch.device | None = None) -> Tensor:
    """Return number, sum and sum of squares of the advantages of own action tokens, weighted by the importance weights
    of their rows; ``[3]`` float64."""
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        own = batch.own()
        values, weights = own.advantages.double(), own.weighted(own.mask.double())
        total += torch.stack([weights.sum(), (weights * values).sum(), (weights * values.square()).sum()])
    return total


def normalise(batch: TokenBatch, moments: Moments, *, epsilon: float = 1e-8) -> TokenBatch:
    """Return the batch with advantages ``(A - mean) / (deviation + epsilon)``; 0 off the mask."""
    normal = (batch.advantages - moments.mean) / (moments.deviation + epsilon)
    return replace(batch, advantages=keep(normal, batch.mask))
