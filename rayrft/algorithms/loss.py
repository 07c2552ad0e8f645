"""The parts of a loss, their denominators, and aggregations of per-token losses to shares of the step's loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from rayrft.algorithms.batch import TokenBatch, keep
from rayrft.algorithms.pieces import Pieces, Positive
from rayrft.algorithms.unpaired import Labelled


@dataclass(frozen=True)
class Amount:
    """Tokens and sequences of a stream in one optimiser step, over all ranks and micro-batches.

    For a stream without tokens, which contributes nothing, both are 1.
    """

    tokens: float
    sequences: float


@dataclass(frozen=True)
class Denominators:
    """Action tokens and rows of every stream over all ranks and micro-batches of one optimiser step, counted before
    the first backward pass: the sum of `count`. Rows without an action token are not counted.
    """

    policy_tokens: float = 0.0
    policy_sequences: float = 0.0
    expert_tokens: float = 0.0
    expert_sequences: float = 0.0
    pairs: float = 0.0

    @property
    def policy(self) -> Amount:
        """Denominators of usual rows: policy loss, KL, entropy, distillation and critic."""
        return Amount(self.policy_tokens or 1.0, self.policy_sequences or 1.0)

    @property
    def expert(self) -> Amount:
        """Denominators of expert rows: SFT."""
        return Amount(self.expert_tokens or 1.0, self.expert_sequences or 1.0)


def count(batches: Iterable[TokenBatch], device: torch.device | None = None) -> Tensor:
    """Count the fields of `Denominators`, in their order, over these micro-batches; ``[5]`` float64."""
    total = torch.zeros(len(fields(Denominators)), dtype=torch.float64, device=device)
    for batch in batches:
        usual, expert = batch.usual(), batch.demonstrated()
        pairs = batch.paired & (torch.zeros_like(batch.expert) if batch.chosen is None else batch.chosen)
        parts = [usual.mask, usual.lengths > 0, expert.mask, expert.lengths > 0, pairs]
        total += torch.stack([part.sum() for part in parts])
    return total


@dataclass(frozen=True)
class LossParts:
    """A micro-batch's share of the step's loss and of the step's metrics; all scalars.

    ``loss`` carries the gradient. Terms exclude their coefficients and are divided by their global denominators; the KL
    also excludes importance weights, because its controller may follow it. From the entropy on, fields are sums over
    action tokens of usual rows, to be divided by ``Denominators.policy.tokens`` after summation. The fields of pairs
    are sums over pairs, and the others after them sums over labelled answers.
    """

    loss: Tensor
    policy: Tensor
    kl: Tensor
    entropy_term: Tensor
    distillation: Tensor
    sft: Tensor
    preference: Tensor
    """Of a preference loss, of one of labelled answers, or of a reward model's."""

    entropy: Tensor
    ratio: Tensor
    logprob_gap: Tensor
    """``|logprobs - behaviour_logprobs|``"""
    clipped: Tensor
    """Tokens on which the policy loss binds the ratio."""
    correction: Tensor
    """Weights of the correction for the gap between engine and trainer."""

    pair_accuracy: Tensor
    """Pairs whose chosen answer has the higher score: a reward model's, or `Pairs.scores`."""
    pair_margin: Tensor
    """Scores of chosen answers less those of rejected ones."""
    pair_score: Tensor
    """Mean scores of pairs."""

    good_rows: Tensor
    """Labelled answers that are good; the other rows with a label are bad."""
    good_score: Tensor
    """``h(y)`` of good answers, see `rayrft.algorithms.unpaired`."""
    bad_score: Tensor
    good_logprob: Tensor
    """``log pi(y)`` of good answers."""
    bad_logprob: Tensor
    reference_kl: Tensor
    """z0, once for each labelled answer; 0 without it."""

    @classmethod
    def zero(cls, loss: Tensor) -> Self:
        """Return parts without a term; ``loss`` is a zero connected to the graph."""
        return cls(loss, *[loss.detach()] * (len(fields(cls)) - 1))

    def add(self, term: str, share: Tensor, weight: float) -> Self:
        """Return the parts with a term set and ``weight`` times it added to the loss."""
        return replace(self, loss=self.loss + weight * share, **{term: share.detach()})

    def metric(self, name: str, values: Tensor) -> Self:
        """Return the parts with a metric set to the sum of ``values``, which are zero off the mask."""
        return replace(self, **{name: values.detach().sum().to(self.loss.dtype)})

    def of_pairs(self, scores: Tensor) -> Self:
        """Return the parts with the metrics of pairs, from scores ``[2, P]``."""
        gaps = scores[0] - scores[1]
        parts = self.metric("pair_accuracy", gaps > 0).metric("pair_margin", gaps)
        return parts.metric("pair_score", scores.mean(0))

    def of_labelled(self, rows: Labelled, logprobs: Tensor) -> Self:
        """Return the parts with the metrics of labelled answers, from these rows and their ``log pi(y)``, ``[N]``."""
        parts, good, bad = self, rows.good & rows.present, ~rows.good & rows.present
        for name, some in (("good", good), ("bad", bad)):
            parts = parts.metric(f"{name}_score", keep(rows.gains, some))
            parts = parts.metric(f"{name}_logprob", keep(logprobs, some))
        if rows.reference_kl is not None:
            parts = parts.metric("reference_kl", keep(rows.reference_kl, rows.present))
        return parts.metric("good_rows", good)

    def stack(self) -> Tensor:
        """Return all fields as one detached tensor, to be summed over micro-batches and ranks; ``LossParts(*sums)`` are
        the sums as parts."""
        return torch.stack([getattr(self, field.name).detach() for field in fields(self)])


Aggregation = Callable[[Tensor, TokenBatch, Amount], Tensor]
"""Aggregates per-token losses to a micro-batch's share of the step's loss. Takes ``values`` ``[T]``, the batch whose
mask selects the stream's tokens, and the stream's `Amount` in the whole step. Returns a scalar; the sum over all
micro-batches and ranks is the loss of the step."""

aggregations: Pieces[Aggregation] = Pieces("aggregation")


@aggregations.register("token_mean")
def token_mean(values: Tensor, batch: TokenBatch, over: Amount) -> Tensor:
    """``1/T sum_i sum_t l_it``: every token counts the same, so long answers count for more (DAPO, Yu et al. 2025,
    arXiv:2503.14476)."""
    return keep(values, batch.mask).sum() / over.tokens


@aggregations.register("sequence_mean_token_mean", traits=["whole_answers"])
def sequence_mean_token_mean(values: Tensor, batch: TokenBatch, over: Amount) -> Tensor:
    """``1/N sum_i 1/|y_i| sum_t l_it``: every answer counts the same, so tokens of long answers count for less (GRPO,
    Shao et al. 2024, arXiv:2402.03300, eq. 3). Use it for losses of whole answers, which repeat on all their tokens."""
    return batch.mean(values).sum() / over.sequences


@aggregations.register("sequence_mean_token_sum")
def sequence_mean_token_sum(values: Tensor, batch: TokenBatch, over: Amount) -> Tensor:
    """``1/N sum_i sum_t l_it``: the log-likelihood of whole answers, not normalised by length."""
    return keep(values, batch.mask).sum() / over.sequences


@aggregations.register("constant", needs=["answer_length"])
def constant(values: Tensor, batch: TokenBatch, over: Amount, *, constant_length: Positive = 1024.0) -> Tensor:
    """``1/(N L) sum_i sum_t l_it`` with one L for all answers (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

    L is the longest answer that may be sampled; its default in a run is `explorer.sampling.max_tokens`. It only scales
    the loss, which under Adam affects the gradient clipping and the balance with other streams.
    """
    return keep(values, batch.mask).sum() / (over.sequences * constant_length)
