"""The pieces of an algorithm, and the inputs that they need from a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from rayrft.algorithms.pieces import NONE, Coefficient, Need, Piece, Trait
from rayrft.algorithms.registries import REGISTRIES
from rayrft.algorithms.values import token_advantages


@dataclass(frozen=True)
class Recipe:
    """Names of pieces (``none`` for no piece) and their coefficients; see `rayrft.algorithms.algorithm.Algorithm`."""

    name: str
    advantage: str = NONE
    policy_loss: str = NONE
    aggregation: str = "token_mean"
    correction: str | tuple[str, ...] = NONE
    """One or several, whose weights multiply."""
    kl: str = NONE
    entropy: str = NONE
    distillation: str = NONE
    sft: str = NONE
    sft_aggregation: str = "token_mean"
    mu_schedule: str = "constant"
    preference: str = NONE
    unpaired: str = NONE
    """A loss of single answers that are labelled good or bad."""
    reward_model: str = NONE
    """A loss of the scores of pairs. What is trained is then a reward model, and the policy stays as it is."""
    value_loss: str = NONE
    chosen_coef: float = 0.0
    """Weight of the negative log-likelihood per token of chosen answers, added to the preference loss."""
    kl_coef: float = 1e-3
    kl_in: Literal["loss", "reward"] = "loss"
    """With ``reward``, the old policy's KL from a token to the end of its row is subtracted from its advantage."""
    entropy_coef: float = 1e-3
    distillation_coef: float = 1.0
    kl_target: float | None = None
    """If set, ``kl_coef`` is the initial coefficient, and `AdaptiveCoefficient` adapts it. The KL is the metric's: per
    token or per answer, depending on the aggregation."""
    kl_horizon: float = 10_000.0
    entropy_goal: float | None = None
    """If set, ``entropy_coef`` is the initial coefficient, and `EntropyController` adapts it."""
    entropy_step: float = 0.005
    teacher_candidates: int = 64
    """Top-k of the teacher's distribution that distillation over distributions compares with the policy's."""
    normalise_advantages: bool = False
    """Normalise over all own rows of a step; see `rayrft.algorithms.normalisation`."""
    normalise_by: Literal["tokens", "answers", "rewards"] = "tokens"
    """Mean and deviation are those of all tokens, or of answers; or the deviation alone, of the answers' rewards."""
    reward_low: float | None = None
    """Rewards below are raised to this, before advantages are computed. The 0 of a turn or step means no reward."""
    reward_high: float | None = None
    """Rewards above are lowered to this."""
    reward_scale: float = 1.0
    """Factor of the rewards after that."""
    coefficients: Mapping[str, Coefficient] = field(default_factory=dict)
    """Coefficients of the pieces that differ from their defaults."""

    def piece(self, kind: str) -> Piece[Any] | None:
        """Return the piece that the field ``kind`` names, if any. Raises ConfigError on an unknown name."""
        return next(iter(self.pieces(kind)), None)

    def pieces(self, kind: str) -> list[Piece[Any]]:
        """Return the pieces that the field ``kind`` names: one, none, or, of corrections, several. Raises ConfigError
        on an unknown name."""
        names, registries = getattr(self, kind), REGISTRIES[kind]
        return [
            next((registry for registry in registries if name in registry), registries[0]).get(name)
            for name in ([names] if isinstance(names, str) else names)
            if name != NONE
        ]

    @property
    def has_own(self) -> bool:
        """Whether it has a term for own rows."""
        return self.policy_loss != NONE or self.distillation != NONE

    @property
    def mixes(self) -> bool:
        """Whether it has terms for both own and expert rows, of any weight."""
        return self.has_own and self.sft != NONE

    def mu(self, step: int = 0) -> float:
        """Return the weight of the SFT term after this many optimiser steps of the stage."""
        return float(self._bound("mu_schedule")(step)) if self.mixes else float(self.sft != NONE)

    @property
    def needs_rollouts(self) -> bool:
        return self.has_own and not (self.mixes and self.mu_schedule == "constant" and self.mu() == 1.0)

    @property
    def needs_expert(self) -> bool:
        if self.needs_labels:
            return True
        return self.sft != NONE and not (self.mixes and self.mu_schedule == "constant" and self.mu() == 0.0)

    @property
    def trains_reward_model(self) -> bool:
        """Whether it trains a reward model instead of the policy."""
        return self.reward_model != NONE

    @property
    def needs_pairs(self) -> bool:
        return "pairs" in self.needs()

    @property
    def needs_labels(self) -> bool:
        return "labels" in self.needs()

    @property
    def needs_reference_kl(self) -> bool:
        return "reference_kl" in self.needs()

    @property
    def needs_reference(self) -> bool:
        return "reference" in self.needs()

    @property
    def needs_critic(self) -> bool:
        return "critic" in self.needs()

    @property
    def needs_proximal(self) -> bool:
        return "proximal" in self.needs()

    @property
    def needs_teacher(self) -> bool:
        return self.needs_teacher_logprobs or self.needs_candidates

    @property
    def needs_teacher_logprobs(self) -> bool:
        return "teacher" in self.needs()

    @property
    def needs_candidates(self) -> bool:
        return "teacher_candidates" in self.needs()

    @cached_property  # asked for every group
    def needs_turns(self) -> bool:
        return bool({"turns", "states"} & set(self.needs()))

    @cached_property  # asked for every group
    def needs_components(self) -> bool:
        return "components" in self.needs()

    @property
    def reward_components(self) -> tuple[str, ...]:
        """Names of the components of rewards that its advantages use; empty for all that there are."""
        named = self.coefficients.get("reward_components")
        return tuple(named) if isinstance(named, Mapping) else ()

    @property
    def shapes_rewards(self) -> bool:
        """Whether it clips or scales rewards."""
        return (self.reward_low, self.reward_high, self.reward_scale) != (None, None, 1.0)

    @property
    def bootstraps(self) -> bool:
        """Whether its advantages need the critic's values of the states in which answers were truncated."""
        return bool(self.coefficients.get("bootstrap_truncated"))

    @cached_property  # asked for every group
    def needs_greedy_baseline(self) -> bool:
        return "greedy_baseline" in self.needs()

    @property
    def needs_answer_length(self) -> bool:
        """Whether it divides by the length of the longest answer and that length is not given."""
        return "answer_length" in self.needs() and "constant_length" not in self.coefficients

    @property
    def compares_answers(self) -> bool:
        """Whether its advantages are 0 for a task with a single answer."""
        return self._has("advantage", "compares")

    @property
    def advantage_is_by_token(self) -> bool:
        """Whether the trainer computes its advantages, from rewards and a critic, instead of group rewards alone."""
        return self.advantage in token_advantages

    @property
    def penalises_rewards(self) -> bool:
        """Whether it has a KL term in the reward."""
        return self.kl_in == "reward" and "kl" in self.terms

    @property
    def needs_entropy_gradient(self) -> bool:
        return "entropy" in self.terms

    @cached_property  # asked for every group
    def zero_advantage_is_noop(self) -> bool:
        """Whether own rows with zero advantage contribute no gradient, so that dropping them loses nothing.

        False if advantages are still to be computed or normalised, if the policy loss has a gradient at 0 (`kimi`), or
        if a KL (in loss or reward), an entropy term or a teacher has a weight.
        """
        if self.policy_loss == NONE or self._has("policy_loss", "moves_at_zero"):
            return False
        return not (self.advantage_is_by_token or self.normalise_advantages or self.terms)

    @property
    def terms(self) -> frozenset[str]:
        """Pieces of the ``own`` term with a weight, besides the policy loss."""
        weights = {"kl": self.kl_coef, "entropy": self.entropy_coef, "distillation": self.distillation_coef}
        return frozenset(kind for kind, weight in weights.items() if weight and getattr(self, kind) != NONE)

    def needs(self) -> dict[Need, str]:
        """Return the inputs that a run must supply, with the piece that needs them. A term of weight 0 needs none."""
        idle = {"kl", "entropy", "distillation"} - self.terms
        pieces = [(kind, piece) for kind in REGISTRIES if kind not in idle for piece in self.pieces(kind)]
        return {need: f"{kind} {piece.name!r}" for kind, piece in pieces for need in piece.needs}

    def _has(self, kind: str, trait: Trait) -> bool:
        piece = self.piece(kind)
        return piece is not None and trait in piece.traits

    def _bound(self, kind: str) -> Any:
        piece = self.piece(kind)
        if piece is None:
            raise ValueError(f"algorithm {self.name!r} has no {kind}")
        return piece.bind(self.coefficients)
