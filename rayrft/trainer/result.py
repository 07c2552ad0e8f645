"""What an optimiser step says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rayrft.algorithms import Algorithm, Denominators, LossParts  # with them comes torch, which readers do without


@dataclass(frozen=True)
class Update:
    """One update of the policy: the parts of its loss over all ranks, and what they are over."""

    parts: LossParts
    over: Denominators
    grad_norm: float
    lr: float


@dataclass(frozen=True)
class CriticUpdate:
    """One update of the critic: its loss over all ranks, and the norm of its gradient before it was clipped."""

    loss: float
    grad_norm: float


@dataclass(frozen=True)
class Unmoved:
    """Of the first update of a step, before which the policy is the one that was published and, in a stage's first
    step, the reference: ``kl``, and the share of own tokens on which the loss binds the ratio."""

    kl: float
    clip_fraction: float


@dataclass(frozen=True)
class StepResult:
    """Metrics of one step over all ranks: means over its updates, of which there are epochs times mini-batches.

    Losses are raw, before their weights. Figures of the policy are means over own action tokens, 0 where there are
    none. ``kl`` is that of the first epoch, which sees every row once. ``logprob_gap`` and ``unmoved`` are of the first
    update that has own rows. ``correction_weight`` is 1 without a correction. Coefficients are those of this step, 0
    without such a term. ``value_errors``: by id, how far the critic missed each group of this rank before the first
    update; empty without a critic.
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
    policy_tokens: int
    expert_tokens: int
    train_s: float
    unmoved: Unmoved
    value_errors: dict[str, float]

    @classmethod
    def of(
        cls,
        updates: list[Update],
        valued: list[CriticUpdate],
        algorithm: Algorithm,
        train_s: float,
        epochs: int,
        value_errors: dict[str, float],
    ) -> Self:
        """From the updates of one step, which went ``epochs`` times over the batch."""
        from rayrft.algorithms.pieces import NONE

        def mean(name: str) -> float:
            return sum(float(getattr(each.parts, name)) for each in updates) / len(updates)

        def per_token(name: str, some: list[Update]) -> float:
            tokens = sum(each.over.policy_tokens for each in some)
            return sum(float(getattr(each.parts, name)) for each in some) / max(tokens, 1.0)

        def kl(some: list[Update]) -> float:
            """Each update's is a mean already, over what it holds."""
            tokens = sum(each.over.policy_tokens for each in some)
            return sum(float(each.parts.kl) * each.over.policy_tokens for each in some) / max(tokens, 1.0)

        first = [each for each in updates if each.over.policy_tokens][:1]
        return cls(
            loss=mean("loss"),
            policy_loss=mean("policy"),
            sft_loss=mean("sft"),
            preference_loss=mean("preference"),
            distillation_loss=mean("distillation"),
            value_loss=sum(each.loss for each in valued) / max(len(valued), 1),
            value_grad_norm=sum(each.grad_norm for each in valued) / max(len(valued), 1),
            kl=kl(updates[: len(updates) // epochs]),
            kl_coef=algorithm.kl_coef if "kl" in algorithm.terms else 0.0,
            entropy_coef=algorithm.entropy_coef if "entropy" in algorithm.terms else 0.0,
            grad_norm=sum(each.grad_norm for each in updates) / len(updates),
            lr=updates[-1].lr,
            entropy=per_token("entropy", updates),
            clip_fraction=per_token("clipped", updates),
            ratio=per_token("ratio", updates),
            correction_weight=1.0 if algorithm.correction == NONE else per_token("correction", updates),
            logprob_gap=per_token("logprob_gap", first),
            policy_tokens=round(sum(each.over.policy_tokens for each in updates) / epochs),
            expert_tokens=round(sum(each.over.expert_tokens for each in updates) / epochs),
            train_s=train_s,
            unmoved=Unmoved(kl(first), per_token("clipped", first)),
            value_errors=value_errors,
        )
