"""An algorithm: one piece from each registry, their coefficients, which may adapt from step to step, and the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor

from rayrft.algorithms.advantages import GroupFacts
from rayrft.algorithms.batch import PolicyOutput, TokenBatch, keep
from rayrft.algorithms.loss import Denominators, LossParts
from rayrft.algorithms.pieces import NONE, Coefficient, Count, Need, NonNegative, Piece, Positive, Trait, Weight
from rayrft.algorithms.preference import Pairs, by_pair
from rayrft.algorithms.ratios import token_ratio
from rayrft.algorithms.registries import REGISTRIES
from rayrft.algorithms.unpaired import Labelled
from rayrft.algorithms.values import token_advantages, token_rewards, with_penalty

_FIELDS: dict[Need, str] = {"reference": "reference_logprobs", "labels": "chosen"}
"""Fields of a batch that have another name than the need for them."""


@dataclass(frozen=True)
class Algorithm:
    """The loss of a step is ``(1 - mu) usual + mu sft + preference + unpaired``, where
    ``usual = policy + kl_coef kl + entropy_coef entropy + distillation_coef distillation``.

    Usual rows (sampled by the policy) feed only the first term, expert rows the second (MIX as in Trinity-RFT, Pan et
    al. 2025, arXiv:2505.17826), pairs the third, and labelled rows the fourth. ``chosen_coef`` adds the likelihood of
    the chosen answers to the third. Every stream has its own global denominator. GRPO has mu = 0, SFT mu = 1. A term of
    weight 0 is not computed, so both extremes are exact. The loss of a reward model is `score_loss` instead.

    `rayrft.algorithms.presets.build` makes an Algorithm with all names and coefficients checked.
    """

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
    """A loss of the scores of pairs. It trains a reward model, and leaves the policy unchanged."""
    value_loss: str = NONE
    chosen_coef: NonNegative = 0.0
    """Weight of the negative log-likelihood per token of chosen answers, added to the preference loss."""
    kl_coef: NonNegative = 1e-3
    kl_in: Literal["loss", "reward"] = "loss"
    """With ``reward``, the old policy's KL from a token to the end of its row is subtracted from its advantage."""
    entropy_coef: NonNegative = 1e-3
    distillation_coef: NonNegative = 1.0
    kl_target: Positive | None = None
    """If set, ``kl_coef`` is the initial coefficient, and `Coefficients` adapts it. The KL is the metric's: per token
    or per answer, depending on the aggregation."""
    kl_horizon: Positive = 10_000.0
    entropy_goal: NonNegative | None = None
    """If set, ``entropy_coef`` is the initial coefficient, and `Coefficients` adapts it."""
    entropy_step: Positive = 0.005
    teacher_candidates: Count = 64
    """Top-k of the teacher's distribution that distillation over distributions compares with the policy's."""
    normalise_advantages: bool = False
    """Normalise over all usual rows of a step; see `rayrft.algorithms.normalisation`."""
    normalise_by: Literal["tokens", "answers", "rewards"] = "tokens"
    """Mean and deviation are those of all tokens, or of answers; or the deviation alone, of the answers' rewards."""
    reward_low: Weight | None = None
    """Rewards below are raised to this, before advantages are computed. The 0 of a turn or step means no reward."""
    reward_high: Weight | None = None
    """Rewards above are lowered to this."""
    reward_scale: Positive = 1.0
    """Factor of the rewards after that."""
    coefficients: Mapping[str, Coefficient] = field(default_factory=dict)
    """Coefficients of the pieces that differ from their defaults."""

    def group_advantages(self, rewards: Tensor, group: GroupFacts) -> Tensor:
        """Compute ``[n]`` advantages, one per row of a group, or per turn of its rows if the piece needs turns; see
        `rayrft.algorithms.advantages`. Rewards are clipped and scaled first. Zeros without a policy loss.

        Raises ValueError if they come from a critic instead.
        """
        if self.advantage == NONE:
            return torch.zeros_like(rewards)
        if self.advantage_is_by_token:
            raise ValueError(f"advantage {self.advantage!r} is computed by the trainer, not where groups are scored")
        if group.greedy_reward is not None:
            group = replace(group, greedy_reward=self._shaped(rewards.new_tensor(group.greedy_reward)).item())
        return self._bound("advantage")(self._shaped(rewards, group.rewarded), group)

    def token_advantages(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with rewards clipped and scaled, and with the advantages that only the trainer can compute.
        They are computed from rewards and values, with returns. With a KL in the reward, the old policy's KL is
        subtracted, summed from the token to the end of its row.

        Raises ValueError if the batch lacks a field.
        """
        if (self.reward_low, self.reward_high, self.reward_scale) != (None, None, 1.0):
            turns = batch.turn_rewards
            batch = replace(
                batch,
                reward=None if batch.reward is None else self._shaped(batch.reward),
                turn_rewards=None if turns is None else self._shaped(turns, turns != 0),
            )
        if not (self.penalises_rewards or self.advantage_is_by_token):
            return batch
        usual, penalty = batch.usual(), None
        if self.penalises_rewards:
            self._check(batch, "kl")
            kl = self._bound("kl")(usual.old_logprobs, usual.reference_logprobs, usual.behaviour_logprobs)
            penalty = self.kl_coef * kl
        if self.advantage_is_by_token:
            advantages, returns = self._bound("advantage")(token_rewards(usual, penalty), usual)
            return replace(batch, advantages=advantages, returns=returns)
        assert penalty is not None
        return with_penalty(batch, penalty)

    def _shaped(self, rewards: Tensor, rewarded: Tensor | None = None) -> Tensor:
        """Return ``reward_scale clip(r, reward_low, reward_high)``, and 0 where nothing is ``rewarded``."""
        if self.reward_low is not None or self.reward_high is not None:
            clipped = rewards.clamp(self.reward_low, self.reward_high)
            rewards = clipped if rewarded is None else torch.where(rewarded, clipped, rewards)
        return rewards * self.reward_scale

    def value_loss_of(self, values: Tensor, batch: TokenBatch, over: Denominators) -> Tensor:
        """Compute this micro-batch's share of the critic's loss, the mean over action tokens of usual rows, from the
        critic's new ``values`` ``[T]`` and the batch's returns."""
        usual = batch.usual()
        losses = usual.weighted(self._bound("value_loss")(keep(values, usual.mask), usual))
        return keep(losses, usual.mask).sum() / over.policy.tokens

    def score_loss(self, scores: Tensor, batch: TokenBatch, over: Denominators) -> LossParts:
        """Compute this micro-batch's share of the loss of a reward model, the mean over pairs, from its ``scores``
        ``[N]``, with gradient. Raises ValueError as `by_pair` does."""
        pairs = by_pair(scores, batch)
        margin = None if batch.margin is None else by_pair(batch.margin, batch)[0]
        # Zero, but part of the graph: a rank without pairs must still take part in the backward pass.
        parts = LossParts.zero(keep(scores, torch.zeros_like(batch.expert)).sum())
        share = self._bound("reward_model")(pairs, margin).sum() / (over.pairs or 1.0)
        return parts.add("preference", share, 1.0).of_pairs(pairs)

    def loss(self, output: PolicyOutput, batch: TokenBatch, over: Denominators, *, step: int = 0) -> LossParts:
        """Compute this micro-batch's share of the step's loss; the sum over all micro-batches and ranks is the loss.

        ``step`` counts the stage's steps in which the policy was trained. If proximal log-probs are needed and missing,
        the present policy is the proximal one, as in a step of one update. Raises ValueError on another missing field.
        """
        mu = self.mu(step)
        # Zero, but part of the graph: a rank without rows must still take part in the backward pass.
        parts = LossParts.zero(keep(output.logprobs, torch.zeros_like(batch.mask)).sum())
        if self.has_usual and mu < 1.0:
            parts = self._usual(parts, output, batch, over, 1.0 - mu)
        if self.sft != NONE and mu > 0.0:
            rows = batch.demonstrated()
            values = rows.weighted(self._bound("sft")(keep(output.logprobs, rows.mask), rows))
            parts = parts.add("sft", self._bound("sft_aggregation")(values, rows, over.expert), mu)
        if self.preference != NONE:
            self._check(batch, "preference")
            rows = batch.only(batch.paired)
            pairs, number = Pairs.of(keep(output.logprobs, rows.mask), rows), over.pairs or 1.0
            parts = parts.add("preference", self._bound("preference")(pairs).sum() / number, 1.0)
            parts = parts.of_pairs(pairs.scores)
            if self.chosen_coef:
                parts = parts.add("sft", pairs.nll.sum() / number, self.chosen_coef)
        if self.unpaired != NONE:
            self._check(batch, "unpaired")
            rows = batch.demonstrated()
            labelled = Labelled.of(keep(output.logprobs, rows.mask), rows)
            losses = keep(self._bound("unpaired")(labelled), labelled.present)
            parts = parts.add("preference", losses.sum() / over.expert.sequences, 1.0)
            parts = parts.of_labelled(labelled, rows.sum(output.logprobs))
        return parts

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
    def has_usual(self) -> bool:
        """Whether it has a term for usual rows."""
        return self.policy_loss != NONE or self.distillation != NONE

    @property
    def mixes(self) -> bool:
        """Whether it has terms for both usual and expert rows, of any weight."""
        return self.has_usual and self.sft != NONE

    def mu(self, step: int = 0) -> float:
        """Return the weight of the SFT term after this many optimiser steps of the stage."""
        return float(self._bound("mu_schedule")(step)) if self.mixes else float(self.sft != NONE)

    @property
    def trains_reward_model(self) -> bool:
        """Whether it trains a reward model instead of the policy."""
        return self.reward_model != NONE

    @property
    def reward_components(self) -> tuple[str, ...]:
        """Names of the components of rewards that its advantages use; empty for all that there are."""
        named = self.coefficients.get("reward_components")
        return tuple(named) if isinstance(named, Mapping) else ()

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

    @cached_property  # asked for every group
    def zero_advantage_is_noop(self) -> bool:
        """Whether usual rows with zero advantage contribute no gradient, so that dropping them loses nothing.

        False if advantages are still to be computed or normalised, or if the policy loss has a gradient at 0 (`kimi`).
        False also if a KL (in loss or reward), an entropy term or a teacher has a weight.
        """
        if self.policy_loss == NONE or self._has("policy_loss", "moves_at_zero"):
            return False
        return not (self.advantage_is_by_token or self.normalise_advantages or self.terms)

    @property
    def terms(self) -> frozenset[str]:
        """Pieces of the ``usual`` term with a weight, besides the policy loss."""
        weights = {"kl": self.kl_coef, "entropy": self.entropy_coef, "distillation": self.distillation_coef}
        return frozenset(kind for kind, weight in weights.items() if weight and getattr(self, kind) != NONE)

    @cached_property
    def needs(self) -> Mapping[Need, str]:
        """The inputs that a run must supply, each with the piece that needs it. A term of weight 0 needs none."""
        idle = {"kl", "entropy", "distillation"} - self.terms
        pieces = [(kind, piece) for kind in REGISTRIES if kind not in idle for piece in self.pieces(kind)]
        needs: dict[Need, str] = {need: f"{kind} {piece.name!r}" for kind, piece in pieces for need in piece.needs}
        mu = self.mu() if self.mu_schedule == "constant" else None
        if self.has_usual and not (self.mixes and mu == 1.0):
            needs["rollouts"] = "the policy"
        if "labels" in needs or (self.sft != NONE and not (self.mixes and mu == 0.0)):
            needs["expert"] = "the demonstrations"
        if "constant_length" in self.coefficients:
            needs.pop("answer_length", None)
        return needs

    def _usual(
        self, parts: LossParts, output: PolicyOutput, batch: TokenBatch, over: Denominators, weight: float
    ) -> LossParts:
        usual = batch.usual()
        output = output.only(usual.mask)
        if "proximal" in self.needs and usual.proximal_logprobs is None:
            usual = replace(usual, proximal_logprobs=output.logprobs.detach())
        aggregate = self._bound("aggregation")
        if self.policy_loss != NONE:
            token_loss = self._bound("policy_loss")(output.logprobs, usual)
            values = usual.weighted(token_loss.values)
            if self.correction != NONE:
                corrections = (piece.bind(self.coefficients) for piece in self.pieces("correction"))
                factor = math.prod(correction(output.logprobs, usual) for correction in corrections)
                values = values * factor
                parts = parts.metric("correction", keep(factor, usual.mask))
            parts = parts.add("policy", aggregate(values, usual, over.policy), weight)
            if token_loss.clipped is not None:
                parts = parts.metric("clipped", token_loss.clipped & usual.mask)
        if "kl" in self.terms:
            self._check(batch, "kl")
            in_loss = self.kl_in == "loss"
            logprobs = output.logprobs if in_loss else output.logprobs.detach()
            values = self._bound("kl")(logprobs, usual.reference_logprobs, usual.behaviour_logprobs)
            if in_loss:
                parts = parts.add("kl", aggregate(usual.weighted(values), usual, over.policy), weight * self.kl_coef)
            parts = parts.metric("kl", aggregate(values, usual, over.policy))
        if "entropy" in self.terms:
            values = usual.weighted(self._bound("entropy")(output.entropy))
            parts = parts.add("entropy_term", aggregate(values, usual, over.policy), weight * self.entropy_coef)
        if "distillation" in self.terms:
            self._check(batch, "distillation")
            values = usual.weighted(self._bound("distillation")(output, usual))
            parts = parts.add("distillation", aggregate(values, usual, over.policy), weight * self.distillation_coef)
        parts = parts.metric("entropy", output.entropy)
        parts = parts.metric("ratio", keep(token_ratio(output.logprobs, usual), usual.mask))
        return parts.metric("logprob_gap", (output.logprobs - usual.behaviour_logprobs).abs())

    def _check(self, batch: TokenBatch, kind: str) -> None:
        piece = self.piece(kind)
        for need in piece.needs if piece else ():
            name = _FIELDS.get(need, need)
            if getattr(batch, name, True) is None:  # else it is given, or supplied in another way
                raise ValueError(f"{kind} {getattr(self, kind)!r} needs {name}, which the batch does not hold")

    def _has(self, kind: str, trait: Trait) -> bool:
        piece = self.piece(kind)
        return piece is not None and trait in piece.traits

    def _bound(self, kind: str) -> Any:
        piece = self.piece(kind)
        if piece is None:
            raise ValueError(f"algorithm {self.name!r} has no {kind}")
        return piece.bind(self.coefficients)


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of KL and entropy between two steps; each stays as configured if the algorithm has no target.

    KL (Ziegler et al. 2019, arXiv:1909.08593): ``coef <- coef max(1 + clip(KL / target - 1, -0.2, 0.2) n / horizon,
    1/2)`` after n sequences. A KL of 20 % or more over the target raises it by e^0.2 within about ``kl_horizon``
    sequences. One step at most halves it; without this floor, which the paper lacks, steps of 5 horizons or more would
    make it 0 or negative.

    Entropy (Skywork-OR1, He et al. 2025, arXiv:2505.22312): after a step the coefficient grows by ``entropy_step`` if
    the mean entropy was below the goal, else it shrinks by it, never below 0. It is applied only while the entropy is
    at or below the goal.
    """

    initial: Algorithm
    kl: float
    entropy: float
    last_entropy: float = 0.0
    """Mean over tokens of usual rows in the previous step (nats); before the first step 0, below every goal."""

    @classmethod
    def of(cls, algorithm: Algorithm) -> Self:
        """Return the algorithm's initial coefficients."""
        return cls(algorithm, algorithm.kl_coef, algorithm.entropy_coef)

    @cached_property
    def applied(self) -> Algorithm:
        """The algorithm with the coefficients of the next step."""
        goal = self.initial.entropy_goal
        entropy = self.entropy if goal is None or self.last_entropy <= goal else 0.0
        return replace(self.initial, kl_coef=self.kl, entropy_coef=entropy)

    def update(self, *, kl: float, entropy: float, sequences: int) -> Self:
        """Return the state after a step over ``sequences`` rows, unchanged for 0: with this mean KL (nats per token, or
        per sequence if the target is) and mean entropy (nats per token)."""
        if not sequences:
            return self
        algorithm, kl_coef, entropy_coef = self.initial, self.kl, self.entropy
        if algorithm.kl_target is not None:
            error = min(max(kl / algorithm.kl_target - 1.0, -0.2), 0.2)
            kl_coef *= max(1.0 + error * sequences / algorithm.kl_horizon, 0.5)
        if algorithm.entropy_goal is not None:
            step = algorithm.entropy_step
            entropy_coef = max(0.0, entropy_coef + (step if entropy < algorithm.entropy_goal else -step))
        return replace(self, kl=kl_coef, entropy=entropy_coef, last_entropy=entropy)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        kl = {} if self.initial.kl_target is None else {"kl": self.kl}
        entropy = {"entropy": self.entropy, "last_entropy": self.last_entropy}
        return kl if self.initial.entropy_goal is None else kl | entropy

    def restored(self, state: dict[str, float]) -> Self:
        """Restore what `state` returned."""
        kept = {"kl": self.kl, "entropy": self.entropy} | {name: state[name] for name in self.state()}
        return type(self)(self.initial, **kept)
