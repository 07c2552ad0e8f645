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
    """Mean and deviation of the advantages of all own action tokens of a step, over ranks and micro-batches.

    The deviation is the biased one, with divisor n, as in OpenRLHF; verl and TRL, which whiten PPO's advantages, take
    n - 1. At thousands of tokens the choice is immaterial.
    """

    mean: float
    deviation: float

    @classmethod
    def of(cls, sums: Tensor) -> Self:
        """From the sum of what `sum_moments` gave on each rank."""
        tokens, total, squares = sums.tolist()
        if not tokens:
            return cls(0.0, 0.0)
        mean = total / tokens
        return cls(mean, max(squares / tokens - mean**2, 0.0) ** 0.5)


def sum_moments(batches: Iterable[TokenBatch], device: torch.device | None = None) -> Tensor:
    """``[3]`` float64: number, sum and sum of squares of the advantages of own action tokens, each token counting as
    much as its row weighs in the loss."""
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        own = batch.own()
        values, weights = own.advantages.double(), own.weighed(own.mask.double())
        total += torch.stack([weights.sum(), (weights * values).sum(), (weights * values.square()).sum()])
    return total


def normalise(batch: TokenBatch, moments: Moments, *, epsilon: float = 1e-8) -> TokenBatch:
    """The batch with ``(A - mean) / (deviation + epsilon)`` in place of each advantage; 0 off the mask."""
    normal = (batch.advantages - moments.mean) / (moments.deviation + epsilon)
    return replace(batch, advantages=keep(normal, batch.mask))
