"""Which pieces an algorithm is made of, and what a run must supply for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rayrft.algorithms.pieces import NONE, Coefficient, Need, Piece, Trait
from rayrft.algorithms.registries import REGISTRIES
from rayrft.algorithms.values import token_advantages


@dataclass(frozen=True)
class Recipe:
    """The first fields name pieces, ``none`` leaving one out; see `rayrft.algorithms.algorithm.Algorithm`."""

    name: str
    advantage: str = NONE
    policy_loss: str = NONE
    aggregation: str = "token_mean"
    correction: str = NONE
    kl: str = NONE
    entropy: str = NONE
    distillation: str = NONE
    sft: str = NONE
    sft_aggregation: str = "token_mean"
    mu_schedule: str = "constant"
    preference: str = NONE
    value_loss: str = NONE
    kl_coef: float = 1e-3
    kl_in: Literal["loss", "reward"] = "loss"
    """In the reward it is that of the old policy: every token's advantage is less by the KL from it on."""
    entropy_coef: float = 1e-3
    distillation_coef: float = 1.0
    kl_target: float | None = None
    """With one, ``kl_coef`` is where the KL's coefficient begins, and `AdaptiveCoefficient` goes on with it. The KL is
    that of the metrics: by its aggregation, of tokens or of whole answers."""
    kl_horizon: float = 10_000.0
    entropy_goal: float | None = None
    """With one, ``entropy_coef`` is where the entropy's coefficient begins, and `EntropyController` goes on with it."""
    entropy_step: float = 0.005
    teacher_candidates: int = 64
    """How many of the teacher's likeliest tokens are compared with the policy's, where whole distributions are."""
    normalise_advantages: bool = False
    """Over all own action tokens of a step; see `rayrft.algorithms.normalisation`."""
    coefficients: Mapping[str, Coefficient] = field(default_factory=dict)
    """Of the pieces, where they are not left at their defaults."""

    def piece(self, kind: str) -> Piece[Any] | None:
        """The piece that the field ``kind`` names, if any. Raises ConfigError on an unknown name."""
        name = getattr(self, kind)
        if name == NONE:
            return None
        registries = REGISTRIES[kind]
        return next((each for each in registries if name in each), registries[0]).get(name)

    @property
    def has_own(self) -> bool:
        """It has a term for own rows."""
        return self.policy_loss != NONE or self.distillation != NONE

    @property
    def mixes(self) -> bool:
        """It has terms for own rows and for expert rows, whatever they weigh."""
        return self.has_own and self.sft != NONE

    def mu(self, step: int = 0) -> float:
        """Weight of the SFT term after this many optimiser steps of the stage."""
        return float(self._bound("mu_schedule")(step)) if self.mixes else float(self.sft != NONE)

    @property
    def needs_rollouts(self) -> bool:
        return self.has_own and not (self.mixes and self.mu_schedule == "constant" and self.mu() == 1.0)

    @property
    def needs_expert(self) -> bool:
        return self.sft != NONE and not (self.mixes and self.mu_schedule == "constant" and self.mu() == 0.0)

    @property
    def needs_pairs(self) -> bool:
        return "pairs" in self.needs()

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

    @property
    def needs_turns(self) -> bool:
        return bool({"turns", "states"} & set(self.needs()))

    @property
    def needs_greedy_baseline(self) -> bool:
        return "greedy_baseline" in self.needs()

    @property
    def needs_answer_length(self) -> bool:
        """It divides by the length of the longest answer, and was not told how long that is."""
        return "answer_length" in self.needs() and "constant_length" not in self.coefficients

    @property
    def compares_answers(self) -> bool:
        """Its advantages are 0 where there is one answer to a task."""
        return self._has("advantage", "compares")

    @property
    def advantage_is_by_token(self) -> bool:
        """Its advantages are the trainer's to compute, from rewards and a critic, not found where groups are scored."""
        return self.advantage in token_advantages

    @property
    def penalises_rewards(self) -> bool:
        """It has a KL, and that in the reward."""
        return self.kl_in == "reward" and "kl" in self.terms

    @property
    def needs_entropy_gradient(self) -> bool:
        return "entropy" in self.terms

    @property
    def is_idle_at_zero(self) -> bool:
        """Own rows whose advantages are all 0 have no gradient: what they would be dropped for is not lost.

        Not so where the advantages are yet to be computed or normalised, where the policy loss has a gradient all the
        same (`kimi`), and where a KL (in loss or reward), an entropy term or a teacher has a weight.
        """
        if self.policy_loss == NONE or self._has("policy_loss", "moves_at_zero"):
            return False
        return not (self.advantage_is_by_token or self.normalise_advantages or self.terms)

    @property
    def terms(self) -> frozenset[str]:
        """The pieces of the ``own`` term besides the policy loss that have a weight."""
        weights = {"kl": self.kl_coef, "entropy": self.entropy_coef, "distillation": self.distillation_coef}
        return frozenset(kind for kind, weight in weights.items() if weight and getattr(self, kind) != NONE)

    def needs(self) -> dict[Need, str]:
        """What a run must supply, each with the piece that needs it. A term of weight 0 needs nothing."""
        idle = {"kl", "entropy", "distillation"} - self.terms
        pieces = [(kind, self.piece(kind)) for kind in REGISTRIES if kind not in idle]
        return {need: f"{kind} {piece.name!r}" for kind, piece in pieces if piece for need in piece.needs}

    def _has(self, kind: str, trait: Trait) -> bool:
        piece = self.piece(kind)
        return piece is not None and trait in piece.traits

    def _bound(self, kind: str) -> Any:
        piece = self.piece(kind)
        if piece is None:
            raise ValueError(f"algorithm {self.name!r} has no {kind}")
        return piece.bind(self.coefficients)
