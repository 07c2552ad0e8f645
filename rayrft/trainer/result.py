"""Metrics of an optimiser step."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rayrft.algorithms import Algorithm, Denominators, LossParts  # imports torch, which readers do not need


@dataclass(frozen=True)
class Update:
    """One update: the policy's loss parts over all ranks, their denominators and the gradient norm before clipping;
    the critic's loss over all ranks and gradient norm, 0 without a critic."""

    parts: LossParts
    over: Denominators
    grad_norm: float
    lr: float
    value_loss: float = 0.0
    value_grad_norm: float = 0.0

    @property
    def is_finite(self) -> bool:
        """Whether it was applied to all models, and not skipped."""
        return all(math.isfinite(x) for x in (self.parts.loss, self.grad_norm, self.value_loss, self.value_grad_norm))


@dataclass(frozen=True)
class FirstUpdate:
    """KL and clip fraction of a step's first update, before which the policy equals the published one and, in a stage's
    first step, the reference."""

    kl: float
    clip_fraction: float


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one step over all ranks, nested in the step's record: means over its updates (epochs x mini-batches).

    Losses are unweighted (before mu). Policy metrics are means over own action tokens, 0 if there are none. ``kl`` is
    the mean of the first epoch, which sees every row once; ``logprob_gap`` is that of the first update with usual rows.
    ``correction_weight`` is 1 without a correction. Coefficients are those of this step, 0 without such a term.
    ``skipped_updates`` is the number of updates whose loss or gradient is not finite (`TrainerConfig.not_finite`).

    Pairs of a preference loss or a reward model: ``pair_accuracy`` is the share whose chosen answer has the higher
    score (`Pairs.scores`, or the reward model's), ``pair_margin`` the mean difference, ``pair_score`` the mean score.

    Labelled answers, in nats, 0 if there are none. ``good_score`` and ``bad_score`` are means of
    ``log pi(y) - log pi_ref(y)``, which times beta is TRL's ``rewards/chosen`` and ``rewards/rejected``.
    ``label_margin`` is their difference if there are both. ``good_logprob`` and ``bad_logprob`` are means of
    ``log pi(y)`` (``logps``). ``reference_kl`` is the KL from the reference that scores are compared with, at least 0.
    """

    loss: float
    policy_loss: float
    sft_loss: float
    preference_loss: float
    distillation_loss: float
    value_loss: float
    value_grad_norm: float
    kl: float
    kl_coef: float
    entropy_coef: float
    grad_norm: float
    lr: float
    entropy: float
    clip_fraction: float
    ratio: float
    correction_weight: float
    logprob_gap: float
    pair_accuracy: float
    pair_margin: float
    pair_score: float
    good_score: float
    bad_score: float
    label_margin: float
    good_logprob: float
    bad_logprob: float
    reference_kl: float
    policy_tokens: int
    expert_tokens: int
    skipped_updates: int = 0


@dataclass(frozen=True)
class RowGap:
    """The row of a step whose log-probs of engine and trainer differ most: its id, the mean difference by token in
    nats, and the tokens of the largest differences, by index, with trainer minus engine."""

    row: str
    mean: float
    tokens: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class StepResult:
    """A rank's report of one step. ``first_update`` is the first one that has usual rows.

    ``value_errors``: see `rayrft.trainer.annotation.value_errors`; empty without a critic. ``reward_sum`` is over the
    ``scored`` usual rows of this rank, whose reward is known.
    """

    metrics: StepMetrics
    first_update: FirstUpdate
    value_errors: dict[str, list[float]]
    reward_sum: float = 0.0
    scored: int = 0
    widest_gap: RowGap | None = None
    """In the first update that has usual rows, of this rank's."""

    @classmethod
    def of(
        cls,
        updates: list[Update],
        algorithm: Algorithm,
        epochs: int,
        value_errors: dict[str, list[float]],
        rewards: list[float],
        widest_gap: RowGap | None,
    ) -> Self:
        """Combine the updates of one step of ``epochs`` passes over the batch."""
        from rayrft.algorithms.pieces import NONE

        def count(name: str, some: list[Update] = updates) -> float:
            return sum(getattr(update.over, name) for update in some)

        def total(name: str, some: list[Update] = updates) -> float:
            return sum(float(getattr(update.parts, name)) for update in some)

        def mean(name: str) -> float:
            return sum(getattr(update, name) for update in updates) / len(updates)

        def per_token(name: str, some: list[Update] = updates) -> float:
            return total(name, some) / max(count("policy_tokens", some), 1.0)

        def kl(some: list[Update]) -> float:
            """Average the updates' means, weighted by their tokens."""
            weighted = sum(float(update.parts.kl) * update.over.policy_tokens for update in some)
            return weighted / max(count("policy_tokens", some), 1.0)

        labelled = count("expert_sequences")
        rows = {"good": total("good_rows"), "bad": labelled - total("good_rows")}
        parts = [f"{kind}_{what}" for kind in rows for what in ("score", "logprob")]
        scores = {name: total(name) / max(rows[name.partition("_")[0]], 1.0) for name in parts}
        first = [update for update in updates if update.over.policy_tokens][:1]
        metrics = StepMetrics(
            loss=total("loss") / len(updates),
            **{f"{name}_loss": total(name) / len(updates) for name in ("policy", "sft", "preference", "distillation")},
            value_loss=mean("value_loss"),
            value_grad_norm=mean("value_grad_norm"),
            kl=kl(updates[: len(updates) // epochs]),
            kl_coef=algorithm.kl_coef if "kl" in algorithm.terms else 0.0,
            entropy_coef=algorithm.entropy_coef if "entropy" in algorithm.terms else 0.0,
            grad_norm=mean("grad_norm"),
            lr=updates[-1].lr,
            entropy=per_token("entropy"),
            clip_fraction=per_token("clipped"),
            ratio=per_token("ratio"),
            correction_weight=1.0 if algorithm.correction == NONE else per_token("correction"),
            logprob_gap=per_token("logprob_gap", first),
            **{name: total(name) / max(count("pairs"), 1.0) for name in ("pair_accuracy", "pair_margin", "pair_score")},
            **scores,
            label_margin=scores["good_score"] - scores["bad_score"] if all(rows.values()) else 0.0,
            reference_kl=total("reference_kl") / max(labelled, 1.0),
            policy_tokens=round(count("policy_tokens") / epochs),
            expert_tokens=round(count("expert_tokens") / epochs),
            skipped_updates=sum(not update.is_finite for update in updates),
        )
        first_update = FirstUpdate(kl(first), per_token("clipped", first))
        return cls(metrics, first_update, value_errors, sum(rewards), len(rewards), widest_gap)


@dataclass(frozen=True)
class PairRanking:
    """How many of the held-out preference ``pairs`` have the higher score for the chosen answer, and by how much on
    average over all of them; scores as for `StepMetrics`."""

    pairs: int
    right: int
    margin: float


def group_value_errors(results: list[StepResult]) -> dict[str, float]:
    """Return the critic's mean error over a group's rows by group id, from the results of all ranks."""
    errors = defaultdict[str, list[float]](list)
    for result in results:
        for group, found in result.value_errors.items():
            errors[group] += found
    return {group: fmean(found) for group, found in errors.items()}
