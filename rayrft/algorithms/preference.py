"""Losses on pairs of answers to the same prompt, one chosen, one rejected: of policies, and of reward models.

A loss takes the `Pairs` of a micro-batch and returns ``[P]``. The share of a step is their sum divided by the step's
number of pairs. Both rows of a pair are in the same micro-batch.

Notation: w is the chosen answer, l the rejected one, ``log pi(y)`` the sum over the answer's tokens, ``|y|`` their
number, ``h(y) = log pi(y) - log pi_ref(y)``, and ``m = h(w) - h(l)`` the margin, all in nats.

A negative log-likelihood of the chosen answers is not a piece: the field ``chosen_coef`` of an algorithm adds it to any
of them (`Pairs.nll`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rayrft.algorithms.batch import TokenBatch
from rayrft.algorithms.pieces import BelowHalf, NonNegative, Pieces, Positive, require

_CERTAIN = -1e-6
"""Bound of a mean log-prob, for the odds of probability 1 are infinite."""


@dataclass(frozen=True)
class Pairs:
    """P pairs; row 0 of every field is of the chosen answers, row 1 of the rejected ones, each ``[2, P]``."""

    logprobs: Tensor
    """``log pi(y)``, with gradient."""
    lengths: Tensor
    """Numbers of action tokens, at least 1."""
    ratios: Tensor | None = None
    """``h(y)``, with gradient; None without a reference."""

    @classmethod
    def of(cls, logprobs: Tensor, batch: TokenBatch) -> Self:
        """Collect the pairs of a batch, in their order. Raises ValueError as `by_pair` does."""
        reference = batch.reference_logprobs
        ratios = None if reference is None else by_pair(batch.sum(logprobs - reference), batch)
        return cls(by_pair(batch.sum(logprobs), batch), by_pair(batch.lengths.clamp(min=1), batch), ratios)

    @property
    def gains(self) -> Tensor:
        """``h(y)``. Raises ValueError without log-probs of the reference."""
        return require(self.ratios, "this preference loss needs the reference's log-probs")

    @property
    def margin(self) -> Tensor:
        """``m = h(w) - h(l)``, ``[P]``."""
        return difference(self.gains)

    @property
    def means(self) -> Tensor:
        """``log pi(y) / |y|``"""
        return self.logprobs / self.lengths

    @property
    def scores(self) -> Tensor:
        """How good the policy finds each answer, beside beta: ``h(y)``, or ``log pi(y) / |y|`` without a reference."""
        return self.means if self.ratios is None else self.ratios

    @property
    def nll(self) -> Tensor:
        """``-log pi(w) / |w|``, ``[P]``, as in RPO (Pang et al. 2024, arXiv:2404.19733). TRL takes the mean over the
        tokens of all chosen answers: in CPO (``cpo_alpha``), and with their prompts in ORPO."""
        return -self.means[0]


def by_pair(rows: Tensor, batch: TokenBatch) -> Tensor:
    """Arrange values of a batch's rows, ``[N]``, by its pairs, in their order: ``[2, P]``, those of chosen rows first.
    Raises ValueError if it has no pairs."""
    return rows[require(batch.pairs, "a loss of pairs needs pairs")]


def rows_by_pair(pairs: Sequence[int | None], chosen: Sequence[bool]) -> Tensor:
    """Return the chosen and the rejected row of every pair, ``[2, P]`` int64 on the CPU, from the rows' pairs (None for
    a row in none) and sides. Pairs are in the order of their first rows. Raises ValueError if one is not one chosen and
    one rejected row."""
    sides = [(pair, 0 if side else 1) for pair, side in zip(pairs, chosen, strict=True)]
    rows = {side: row for row, side in enumerate(sides) if side[0] is not None}
    numbers = dict.fromkeys(pair for pair in pairs if pair is not None)
    if len(rows) != 2 * len(numbers) or len(rows) != sum(pair is not None for pair in pairs):
        raise ValueError("every pair must hold one chosen and one rejected row in the same micro-batch")
    return torch.tensor([[rows[pair, side] for pair in numbers] for side in (0, 1)], dtype=torch.int64)


PreferenceLoss = Callable[[Pairs], Tensor]

RewardModelLoss = Callable[[Tensor, Tensor | None], Tensor]
"""From the scores of answers ``[2, P]``, with gradient, and by how much each chosen one is the better (``[P]``, on the
scale of the scores), if known, to ``[P]``."""

preferences: Pieces[PreferenceLoss] = Pieces("preference")
reward_model_losses: Pieces[RewardModelLoss] = Pieces("reward_model")


def difference(values: Tensor) -> Tensor:
    """Return chosen less rejected, ``[P]``, of ``[2, P]``."""
    return values[0] - values[1]


@preferences.register("dpo", needs=["pairs", "reference"])
def dpo(pairs: Pairs, *, beta: Positive = 0.1, label_smoothing: BelowHalf = 0.0) -> Tensor:
    """DPO: ``-log sigmoid(beta m)`` (Rafailov et al. 2023, arXiv:2305.18290, eq. 7).

    Label smoothing e is the probability of a wrong label: ``-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)``
    (conservative DPO, Mitchell 2023). It has a finite minimum at ``m = log((1 - e) / e) / beta``. e is below 1/2, at
    which labels carry no information.
    """
    return _smoothed(beta * pairs.margin, 1 - label_smoothing, label_smoothing)


@preferences.register("dpo_robust", needs=["pairs", "reference"])
def dpo_robust(pairs: Pairs, *, beta: Positive = 0.1, label_smoothing: BelowHalf = 0.1) -> Tensor:
    """Robust DPO: ``(-(1 - e) log sigmoid(beta m) + e log sigmoid(-beta m)) / (1 - 2e)`` (Chowdhury et al. 2024,
    arXiv:2403.00409; TRL's ``robust``). Its mean over labels that are wrong with probability e is DPO's loss on the
    right ones. Unlike with smoothed labels, the margin has no finite goal."""
    e = label_smoothing
    return _smoothed(beta * pairs.margin, 1 - e, -e) / (1 - 2 * e)


@preferences.register("dpo_by_length", needs=["pairs", "reference"])
def dpo_by_length(pairs: Pairs, *, beta: Positive = 5.0, label_smoothing: BelowHalf = 0.0) -> Tensor:
    """DPO normalised by length: ``-log sigmoid(beta (h(w) / |w| - h(l) / |l|))``, in which long answers have no larger
    margins (Lambert et al. 2024, "Tulu 3", arXiv:2411.15124, whose beta this is; TRL's ``sigmoid_norm``). Label
    smoothing as in `dpo`."""
    return _smoothed(beta * difference(pairs.gains / pairs.lengths), 1 - label_smoothing, label_smoothing)


@preferences.register("ipo", needs=["pairs", "reference"])
def ipo(pairs: Pairs, *, beta: Positive = 0.1) -> Tensor:
    """IPO: ``(m - 1 / (2 beta))^2``: regression of the margin to a target (Azar et al. 2023, arXiv:2310.12036). The
    margin uses sums over tokens, as in the paper's text; see `ipo_by_length`."""
    return (pairs.margin - 1 / (2 * beta)).square()


@preferences.register("ipo_by_length", needs=["pairs", "reference"])
def ipo_by_length(pairs: Pairs, *, beta: Positive = 0.1) -> Tensor:
    """IPO normalised by length: ``(h(w) / |w| - h(l) / |l| - 1 / (2 beta))^2``, TRL's ``ipo``; according to its authors
    this is the form of the paper's experiments."""
    return (difference(pairs.gains / pairs.lengths) - 1 / (2 * beta)).square()


@preferences.register("hinge", needs=["pairs", "reference"])
def hinge(pairs: Pairs, *, beta: Positive = 0.1) -> Tensor:
    """``max(0, 1 - beta m)``: the loss of SLiC (Zhao et al. 2023, arXiv:2305.10425) on DPO's margin (RSO, Liu et al.
    2023, arXiv:2309.06657; TRL's ``hinge``), beyond 1 without a gradient."""
    return (1 - beta * pairs.margin).clamp(min=0)


@preferences.register("apo_zero", needs=["pairs", "reference"])
def apo_zero(pairs: Pairs, *, beta: Positive = 0.1) -> Tensor:
    """APO-zero: ``1 - sigmoid(beta h(w)) + sigmoid(beta h(l))`` (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7,
    plus 1 as in TRL). The chosen answer becomes likelier and the rejected one less likely, each for itself. For chosen
    answers that are better than the policy's."""
    chosen, rejected = (beta * pairs.gains).sigmoid()
    return 1 - chosen + rejected


@preferences.register("apo_down", needs=["pairs", "reference"])
def apo_down(pairs: Pairs, *, beta: Positive = 0.1) -> Tensor:
    """APO-down: ``sigmoid(beta h(w)) + 1 - sigmoid(beta m)``: both become less likely, the rejected one by more
    (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8, plus 1 as in TRL). For policies that are better than the chosen
    answers."""
    return (beta * pairs.gains[0]).sigmoid() + 1 - (beta * pairs.margin).sigmoid()


@preferences.register("cpo", needs=["pairs"])
def cpo(pairs: Pairs, *, beta: Positive = 0.1, label_smoothing: BelowHalf = 0.0) -> Tensor:
    """CPO: DPO without a reference, ``-log sigmoid(beta (log pi(w) - log pi(l)))`` (Xu et al. 2024, arXiv:2401.08417).
    The preset adds the paper's likelihood of the chosen answer (``chosen_coef: 1``). Label smoothing as in
    `dpo`."""
    return _smoothed(beta * difference(pairs.logprobs), 1 - label_smoothing, label_smoothing)


@preferences.register("simpo", needs=["pairs"])
def simpo(pairs: Pairs, *, beta: Positive = 2.0, target_margin: NonNegative = 1.0) -> Tensor:
    """SimPO: ``-log sigmoid(beta (log pi(w) / |w| - log pi(l) / |l|) - target_margin)`` (Meng et al. 2024,
    arXiv:2405.14734, eq. 6), without a reference. ``target_margin`` is the paper's gamma, here half of beta, as its
    authors advise for a start (TRL's ``simpo_gamma`` is the same number, 0.5 by default)."""
    return -logsigmoid(beta * difference(pairs.means) - target_margin)


@preferences.register("orpo", needs=["pairs"])
def orpo(pairs: Pairs, *, beta: Positive = 0.1) -> Tensor:
    """ORPO's odds ratio, without a reference: ``-beta log sigmoid(log odds(w) - log odds(l))`` with
    ``odds(y) = p / (1 - p)`` of the geometric mean ``p = pi(y)^(1/|y|)``. Source: Hong et al. 2024, arXiv:2403.07691,
    eq. 6 and 7; beta is its lambda, 0.1 in TRL. The preset adds the likelihood of the chosen answer
    (``chosen_coef: 1``)."""
    means = pairs.means.clamp(max=_CERTAIN)
    return -beta * logsigmoid(difference(means - torch.log(-torch.expm1(means))))


@reward_model_losses.register("bradley_terry", needs=["pairs"])
def bradley_terry(scores: Tensor, margin: Tensor | None = None, *, center: NonNegative = 0.0) -> Tensor:
    """``-log sigmoid(r_w - r_l - margin) + center (r_w + r_l)^2`` with scores r_w of the chosen and r_l of the rejected
    answer (Ouyang et al. 2022, arXiv:2203.02155, eq. 1; margin: Touvron et al. 2023, "Llama 2", arXiv:2307.09288,
    sec. 3.2.2).

    The first term knows only differences. ``center`` keeps the scores of a prompt around 0, so that those of different
    prompts can be compared (Eisenstein et al. 2023, arXiv:2312.09244). TRL's examples have 0.01; it is off by default
    there, too.
    """
    gap = difference(scores) if margin is None else difference(scores) - margin
    return -logsigmoid(gap) + center * scores.sum(0).square()


def _smoothed(margin: Tensor, right: float, wrong: float) -> Tensor:
    """Return ``-right log sigmoid(margin) - wrong log sigmoid(-margin)``."""
    return -right * logsigmoid(margin) - wrong * logsigmoid(-margin)
