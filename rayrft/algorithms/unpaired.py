"""Losses on single answers that are labelled good or bad.

A loss takes the `Labelled` rows of a micro-batch and returns ``[N]``. The share of a step is its sum over the rows that
have an action token, divided by the step's number of them.

Notation, as in `preference`: ``h(y) = log pi(y) - log pi_ref(y)``, in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rayrft.algorithms.batch import TokenBatch, keep
from rayrft.algorithms.pieces import NonNegative, Pieces, Positive, require


@dataclass(frozen=True)
class Labelled:
    """N rows; every field has shape ``[N]``."""

    gains: Tensor
    """``h(y)``, with gradient."""
    good: Tensor
    """Whether the answer is labelled good."""
    present: Tensor
    """Whether the row is labelled and has an action token."""
    reference_kl: Tensor | None = None
    """z0, the same for all rows of a step: the policy's mean KL from the reference, at least 0."""

    @classmethod
    def of(cls, logprobs: Tensor, batch: TokenBatch) -> Self:
        """Collect the labelled rows of a batch. Raises ValueError if it has no labels, or no log-probs of the
        reference."""
        if batch.chosen is None or batch.reference_logprobs is None:
            raise ValueError("a loss of labelled answers needs labels, and the reference's log-probs")
        present = batch.expert & ~batch.paired & (batch.lengths > 0)
        gains = batch.sum(logprobs - batch.reference_logprobs)
        point = None if batch.reference_kl is None else batch.reference_kl.to(gains.dtype)
        return cls(gains, batch.chosen, present, point)


def sum_gains(batches: Iterable[TokenBatch], device: torch.device | None = None) -> Tensor:
    """Sum ``h(y)`` of labelled rows, by their proximal log-probs, and count the rows: ``[2]`` float64."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        assert batch.proximal_logprobs is not None
        rows = Labelled.of(batch.proximal_logprobs, batch.demonstrated())
        total += torch.stack([keep(rows.gains, rows.present).sum(), rows.present.sum()])
    return total


UnpairedLoss = Callable[[Labelled], Tensor]

unpaired_losses: Pieces[UnpairedLoss] = Pieces("unpaired")


@unpaired_losses.register("kto", needs=["labels", "reference", "reference_kl"])
def kto(
    rows: Labelled, *, beta: Positive = 0.1, desirable_weight: NonNegative = 1.0, undesirable_weight: NonNegative = 1.0
) -> Tensor:
    """KTO: ``lambda_D (1 - sigmoid(beta (h(y) - z0)))`` of a good answer, ``lambda_U (1 - sigmoid(beta (z0 - h(y))))``
    of a bad one (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7 and 8). ``desirable_weight`` is lambda_D,
    ``undesirable_weight`` lambda_U: where answers of one kind are fewer, the paper weighs them so that the ratio of
    ``lambda_D n_D`` to ``lambda_U n_U`` lies in [1, 4/3].

    z0 estimates ``KL(pi || pi_ref)``, and has no gradient: ``max(0, mean of h)`` over answers to *other* prompts, as in
    the paper and TRL, which take those of a micro-batch. Here it is over all rows of an update, whatever rank or
    micro-batch they are in, by the policy before the step: see `rayrft.trainer.batches.mismatched`. An update whose
    rows have one prompt has z0 = 0. Raises ValueError without z0.
    """
    point = require(rows.reference_kl, "kto needs the mean KL from the reference")
    return _by_label(beta * (rows.gains - point), rows.good, desirable_weight, undesirable_weight)


@unpaired_losses.register("apo_zero_unpaired", needs=["labels", "reference"])
def apo_zero_unpaired(
    rows: Labelled, *, beta: Positive = 0.1, desirable_weight: NonNegative = 1.0, undesirable_weight: NonNegative = 1.0
) -> Tensor:
    """KTO with z0 = 0: `apo_zero` (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7, plus 1) on single answers, as
    TRL's loss of the same name."""
    return _by_label(beta * rows.gains, rows.good, desirable_weight, undesirable_weight)


def _by_label(gap: Tensor, good: Tensor, desirable_weight: float, undesirable_weight: float) -> Tensor:
    return torch.where(good, desirable_weight * torch.sigmoid(-gap), undesirable_weight * torch.sigmoid(gap))
