"""Metrics of an optimiser step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rayrft.algorithms import Algorithm, Denominators, LossParts  # imports torch, which readers do not need


@dataclass(frozen=True)
class Update:
    """One update of the policy: its loss parts over all ranks, and their denominators."""

    parts: LossParts
    over: Denominators
    grad_norm: float
    lr: float


@dataclass(frozen=True)
class CriticUpdate:
    """One update of the critic: its loss over all ranks, and its gradient norm before clipping."""

    loss: float
    grad_norm: float


@dataclass(frozen=True)
class FirstUpdate:
    """KL and clip fraction of a step's first update, before which the policy equals the published one and, in a stage's
    first step, the reference."""

    kl: float
    clip_fraction: float


@dataclass(frozen=True)
class StepResult:
    """Metrics of one step over all ranks: means over its updates (epochs times mini-batches).

    Losses are unweighted. Policy metrics are means over own action tokens, 0 if there are none. ``kl`` is the mean of
    the first epoch, which sees every row once. ``logprob_gap`` and ``first_update`` are of the first update that has
    own rows. ``correction_weight`` is 1 without a correction. Coefficients are those of this step, 0 without such a
    term. Those of pairs are means over the pairs of a preference loss or a reward model: how many have the higher score
    for the chosen answer, by how much, and the scores themselves, which are `Pairs.scores` or a reward model's.
    ``value_errors``: see `rayrft.trainer.annotation.value_errors`; empty without a critic.
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
    policy_tokens: int
    expert_tokens: int
    train_s: float
    first_update: FirstUpdate
    value_errors: dict[str, tuple[float, int]]

    @classmethod
    def of(
        cls,
        updates: list[Update],
        critic_updates: list[CriticUpdate],
        algorithm: Algorithm,
        train_s: float,
        epochs: int,
        value_errors: dict[str, tuple[float, int]],
    ) -> Self:
        """Combine the updates of one step of ``epochs`` passes over the batch."""
        from rayrft.algorithms.pieces import NONE

        def mean(name: str) -> float:
            return sum(float(getattr(update.parts, name)) for update in updates) / len(updates)

        def per_token(name: str, some: list[Update]) -> float:
            tokens = sum(update.over.policy_tokens for update in some)
            return sum(float(getattr(update.parts, name)) for update in some) / max(tokens, 1.0)

        def per_pair(name: str) -> float:
            pairs = sum(update.over.pairs for update in updates)
            return sum(float(getattr(update.parts, name)) for update in updates) / max(pairs, 1.0)

        def kl(some: list[Update]) -> float:
            """Average the updates' means, weighted by their tokens."""
            tokens = sum(update.over.policy_tokens for update in some)
            return sum(float(update.parts.kl) * update.over.policy_tokens for update in some) / max(tokens, 1.0)

        first = [update for update in updates if update.over.policy_tokens][:1]
        return cls(
            loss=mean("loss"),
            policy_loss=mean("policy"),
            sft_loss=mean("sft"),
            preference_loss=mean("preference"),
            distillation_loss=mean("distillation"),
            value_loss=sum(update.loss for update in critic_updates) / max(len(critic_updates), 1),
            value_grad_norm=sum(update.grad_norm for update in critic_updates) / max(len(critic_updates), 1),
            kl=kl(updates[: len(updates) // epochs]),
            kl_coef=algorithm.kl_coef if "kl" in algorithm.terms else 0.0,
            entropy_coef=algorithm.entropy_coef if "entropy" in algorithm.terms else 0.0,
            grad_norm=sum(update.grad_norm for update in updates) / len(updates),
            lr=updates[-1].lr,
            entropy=per_token("entropy", updates),
            clip_fraction=per_token("clipped", updates),
            ratio=per_token("ratio", updates),
            correction_weight=1.0 if algorithm.correction == NONE else per_token("correction", updates),
            logprob_gap=per_token("logprob_gap", first),
            pair_accuracy=per_pair("pair_accuracy"),
            pair_margin=per_pair("pair_margin"),
            pair_score=per_pair("pair_score"),
            policy_tokens=round(sum(update.over.policy_tokens for update in updates) / epochs),
            expert_tokens=round(sum(update.over.expert_tokens for update in updates) / epochs),
            train_s=train_s,
            first_update=FirstUpdate(kl(first), per_token("clipped", first)),
            value_errors=value_errors,
        )


def mean_value_errors(results: list[StepResult]) -> dict[str, float]:
    """Return the critic's mean error over a group's rows by group id, from the results of all ranks."""
    sums: dict[str, float] = {}
    counts = Counter[str]()
    for result in results:
        for group, (total, rows) in result.value_errors.items():
            sums[group] = sums.get(group, 0.0) + total
            counts[group] += rows
    return {group: total / counts[group] for group, total in sums.items()}
