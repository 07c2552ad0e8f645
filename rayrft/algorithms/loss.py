"""What comes out of a loss, and what it is divided by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from rayrft.algorithms.batch import TokenBatch


@dataclass(frozen=True)
class Amount:
    """How much of a stream one optimiser step holds, over all ranks and micro-batches.

    A stream without tokens contributes nothing, so that its amounts are taken as 1.
    """

    tokens: float
    sequences: float


@dataclass(frozen=True)
class Denominators:
    """Action tokens and rows of every stream over all ranks and micro-batches of one optimiser step, counted before
    the first backward pass. Rows without an action token are not counted.
    """

    policy_tokens: float = 0.0
    policy_sequences: float = 0.0
    expert_tokens: float = 0.0
    expert_sequences: float = 0.0
    pairs: float = 0.0

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) < 0:
                raise ValueError(f"{each.name} must not be negative, got {getattr(self, each.name)}")

    @classmethod
    def of(cls, counts: Tensor) -> Self:
        """From the sum of what `count` gave for each micro-batch on each rank."""
        return cls(*counts.tolist())

    @property
    def policy(self) -> Amount:
        """Of own rows: the policy loss, KL, entropy, distillation and the critic."""
        return Amount(self.policy_tokens or 1.0, self.policy_sequences or 1.0)

    @property
    def expert(self) -> Amount:
        """Of expert rows: SFT."""
        return Amount(self.expert_tokens or 1.0, self.expert_sequences or 1.0)


def count(batches: Iterable[TokenBatch], device: torch.device | None = None) -> Tensor:
    """``[5]`` float64: the fields of `Denominators`, in their order, over these micro-batches."""
    total = torch.zeros(len(fields(Denominators)), dtype=torch.float64, device=device)
    for batch in batches:
        own, expert = batch.own(), batch.demonstrated()
        pairs = batch.paired & (torch.zeros_like(batch.expert) if batch.chosen is None else batch.chosen)
        parts = [own.mask, own.lengths > 0, expert.mask, expert.lengths > 0, pairs]
        total += torch.stack([part.sum() for part in parts])
    return total


@dataclass(frozen=True)
class LossParts:
    """A micro-batch's share of the step's loss, and of the sums that the step's metrics are made of; all scalars.

    ``loss`` carries the gradient. Each term stands without its coefficient, over its own global denominator; the KL
    without importance weights, too, for its coefficient may follow it. The last five are sums over own action tokens,
    to be divided by ``Denominators.policy.tokens`` once added up.
    """

    loss: Tensor
    policy: Tensor
    kl: Tensor
    entropy_term: Tensor
    distillation: Tensor
    sft: Tensor
    preference: Tensor

    entropy: Tensor
    ratio: Tensor
    logprob_gap: Tensor
    """``|logprobs - behaviour_logprobs|``"""
    clipped: Tensor
    """Tokens on which the policy loss binds the ratio."""
    correction: Tensor
    """Weights that make up for the gap between engine and trainer."""

    @classmethod
    def zero(cls, loss: Tensor) -> Self:
        """No term yet: ``loss`` is a zero that is joined to the graph."""
        return cls(loss, *[loss.detach()] * (len(fields(cls)) - 1))

    def add(self, term: str, share: Tensor, weight: float) -> Self:
        """With a term in its place and ``weight`` times it in the loss."""
        return replace(self, loss=self.loss + weight * share, **{term: share.detach()})

    def metric(self, name: str, values: Tensor) -> Self:
        """With the sum of ``values``, zero off the mask, in its place."""
        return replace(self, **{name: values.detach().sum().to(self.loss.dtype)})

    def stack(self) -> Tensor:
        """``[fields]``, detached: what is added up over micro-batches and ranks."""
        return torch.stack([getattr(self, each.name).detach() for each in fields(self)])

    @classmethod
    def unstack(cls, values: Tensor) -> Self:
        """From a sum of `stack`."""
        return cls(*values.unbind())
