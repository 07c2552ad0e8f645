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
    for the chosen answer, by how much, and the scores themselves, which are `Pairs.scores` or a reward model's. Of
    labelled answers, good and bad ones: the mean score ``log pi(y) - log pi_ref(y)``, which times beta is TRL's
    ``rewards/chosen`` or ``rewards/rejected``, its ``label_margin`` if there are both, the mean log-prob ``log pi(y)``
    (``logps``), and the KL from the reference that they are compared with, at least 0; all in nats, 0 without any.
    ``value_errors``: see `rayrft.trainer.annotation.value_errors`; empty without a critic. ``reward_sum`` is over the
    ``scored`` own rows of this rank, whose reward is known.
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
    train_s: float
    first_update: FirstUpdate
    value_errors: dict[str, tuple[float, int]]
    reward_sum: float = 0.0
    scored: int = 0

    @classmethod
    def of(
        cls,
        updates: list[Update],
        critic_updates: list[CriticUpdate],
        algorithm: Algorithm,
        train_s: float,
        epochs: int,
        value_errors: dict[str, tuple[float, int]],
        rewards: list[float],
    ) -> Self:
        """Combine the updates of one step of ``epochs`` passes over the batch."""
        from rayrft.algorithms.pieces import NONE

        def total(name: str) -> float:
            return sum(float(getattr(update.parts, name)) for update in updates)

        def mean(name: str) -> float:
            return total(name) / len(updates)

        def per_token(name: str, some: list[Update]) -> float:
            tokens = sum(update.over.policy_tokens for update in some)
            return sum(float(getattr(update.parts, name)) for update in some) / max(tokens, 1.0)

        def per_pair(name: str) -> float:
            pairs = sum(update.over.pairs for update in updates)
            return total(name) / max(pairs, 1.0)

        def labelled() -> dict[str, float]:
            """Average over good and over bad answers."""
            rows = sum(update.over.expert_sequences for update in updates)
            good = total("good_rows")
            counts = {"good": good, "bad": rows - good}
            kinds = [(kind, what) for kind in counts for what in ("score", "logprob")]
            means = {f"{kind}_{what}": total(f"{kind}_{what}") / max(counts[kind], 1.0) for kind, what in kinds}
            both = all(counts.values())
            margin = means["good_score"] - means["bad_score"] if both else 0.0
            return means | {"label_margin": margin, "reference_kl": total("reference_kl") / max(rows, 1.0)}

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
            **labelled(),
            policy_tokens=round(sum(update.over.policy_tokens for update in updates) / epochs),
            expert_tokens=round(sum(update.over.expert_tokens for update in updates) / epochs),
            train_s=train_s,
            first_update=FirstUpdate(kl(first), per_token("clipped", first)),
            value_errors=value_errors,
            reward_sum=sum(rewards),
            scored=len(rewards),
        )


@dataclass(frozen=True)
class PairRanking:
    """How many of the held-out preference ``pairs`` have the higher score for the chosen answer, and by how much on
    average over all of them; scores as for `StepResult`."""

    pairs: int
    right: int
    margin: float


def mean_value_errors(results: list[StepResult]) -> dict[str, float]:
    """Return the critic's mean error over a group's rows by group id, from the results of all ranks."""
    sums: dict[str, float] = {}
    counts = Counter[str]()
    for result in results:
        for group, (total, rows) in result.value_errors.items():
            sums[group] = sums.get(group, 0.0) + total
            counts[group] += rows
    return {group: total / counts[group] for group, total in sums.items()}
