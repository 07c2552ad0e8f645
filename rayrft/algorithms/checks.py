"""Validation of algorithms: invalid values, options without effect, and combinations that do not work.

Every check raises ConfigError with the key under ``algorithm``, the value, and a remedy.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from typing import Any, cast

from rayrft.algorithms.algorithm import Algorithm
from rayrft.algorithms.pieces import NONE, Piece, fault
from rayrft.algorithms.registries import REGISTRIES
from rayrft.algorithms.values import token_advantages
from rayrft.errors import ConfigError, nearest

_HINTS = typing.get_type_hints(Algorithm, include_extras=True)
"""The accepted types of the fields of an algorithm."""

_TERM_OF = {
    **dict.fromkeys(("kl_coef", "kl_in", "kl_target", "kl_horizon"), "kl"),
    **dict.fromkeys(("entropy_coef", "entropy_goal", "entropy_step"), "entropy"),
    **dict.fromkeys(("distillation_coef", "teacher_candidates"), "distillation"),
    "chosen_coef": "preference",
}
"""Fields that have an effect only if another field names a piece."""

_POLICY_TERMS = ("policy_loss", "distillation", "sft", "preference", "unpaired")
"""Pieces that train the policy."""

_REQUIRED = ("aggregation", "sft_aggregation", "mu_schedule")
"""Pieces that cannot be left out."""


def refuse(key: str, problem: str, remedy: str = "", value: Any = None) -> ConfigError:
    """Create the error for a key under ``algorithm``."""
    return ConfigError(problem, remedy, field=f"algorithm.{key}", value=value)


def check_field(algorithm: Algorithm, key: str, value: Any) -> None:
    """Check that a given field has a valid value and an effect."""
    several = key == "correction" and isinstance(value, tuple)
    names, hint = (value, str) if several else ((value,), str if key == "correction" else _HINTS[key])
    if wrong := next(filter(None, (fault(name, hint) for name in names)), None):
        raise refuse(key, wrong, value=value)
    if key in REGISTRIES:
        algorithm.pieces(key)
        if len(names) != 1 and (len(set(names)) < len(names) or not names or NONE in names):
            problem = f"must list different pieces, without {NONE!r}"
            raise refuse(key, problem, "name each once, or leave the key out", list(names))
        if value == NONE and key in _REQUIRED:
            raise refuse(key, "must name a piece", "leave the key out for its default", value)
    if value not in (NONE, False) and not is_used(algorithm, key):
        raise refuse(key, f"is not used: {algorithm.name!r} has no term that it acts on", "leave it out", value)
    if key in _TERM_OF and getattr(algorithm, term := _TERM_OF[key]) == NONE:
        problem = f"is not used: {algorithm.name!r} has no {term} term"
        raise refuse(key, problem, f"set {term!r}, or remove {key}", value)
    if key == "teacher_candidates" and key not in algorithm.needs:
        problem = f"is not used: distillation {algorithm.distillation!r} looks at the sampled token alone"
        raise refuse(key, problem, "leave it out, or use distillation: jsd", value)


def check_coefficient(algorithm: Algorithm, pieces: list[Piece[Any]], known: set[str], key: str, value: Any) -> None:
    """Check that a key that is not a field (``known``) is a coefficient of one of the pieces, with a valid value."""
    users = [piece for piece in pieces if key in piece.coefficients]
    for piece in users:
        if wrong := piece.fault(key, value):
            raise refuse(key, wrong, value=value)
    if users:
        return
    used = {coefficient for piece in pieces for coefficient in piece.coefficients}
    everywhere = {
        f"{kind} {name!r}"
        for kind, registries in REGISTRIES.items()
        for registry in registries
        for name in registry
        if key in registry.get(name).coefficients
    }
    if not everywhere:
        raise refuse(key, "unknown key", nearest(key, known | used), key)
    problem = f"is not used: it belongs to {', '.join(sorted(everywhere))}, which {algorithm.name!r} does not contain"
    raise refuse(key, problem, f"use a coefficient of its pieces: {', '.join(sorted(used)) or 'none'}", value)


def check_whole(algorithm: Algorithm, overrides: Mapping[str, Any]) -> None:
    """Check that the pieces work together; ``overrides`` are the keys given by the user."""
    others = [kind for kind in _POLICY_TERMS if getattr(algorithm, kind) != NONE]
    if algorithm.trains_reward_model and others:
        problem = f"is not used: {algorithm.name!r} trains a reward model, and not the policy"
        remedy = "leave it out, or train the policy in a stage of its own"
        raise refuse(others[0], problem, remedy, getattr(algorithm, others[0]))
    if algorithm.unpaired != NONE and (algorithm.policy_loss != NONE or algorithm.preference != NONE):
        problem = f"needs rows of another kind than the other terms of {algorithm.name!r}"
        remedy = "train on labelled answers in a stage of its own, with algorithm kto"
        raise refuse("unpaired", problem, remedy, algorithm.unpaired)
    if algorithm.policy_loss != NONE and algorithm.advantage == NONE:
        problem = f"is required by policy_loss {algorithm.policy_loss!r}"
        raise refuse("advantage", problem, "name one, or use a preset that has both", NONE)
    if algorithm.advantage in token_advantages and algorithm.value_loss == NONE:
        problem = f"is required by advantage {algorithm.advantage!r}"
        raise refuse("value_loss", problem, "name one, such as clipped or squared", NONE)
    _check_advantage(algorithm)
    _check_rewards(algorithm, overrides)
    if algorithm.kl_in == "reward":
        _check_penalty(algorithm)
    elif "kl" in algorithm.terms and (kl := algorithm.piece("kl")) and "no_gradient" in kl.traits:
        remedy = "use k1_st, which has its value and the gradient of the KL, or kl_in: reward"
        raise refuse("kl", "cannot be a loss: its gradient is 0 in the mean", remedy, kl.name)
    for key, target in (("kl_horizon", "kl_target"), ("entropy_step", "entropy_goal")):
        if key in overrides and getattr(algorithm, target) is None:
            problem = f"is not used: the coefficient is fixed without {target}"
            raise refuse(key, problem, f"give {target}, or remove {key}", overrides[key])
    if algorithm.kl_target is not None and not algorithm.kl_coef:
        problem = "must be above 0, because it is multiplied to reach kl_target"
        raise refuse("kl_coef", problem, "give the coefficient to begin with", algorithm.kl_coef)


def check_bounds(algorithm: Algorithm) -> None:
    """Check that the bounds of an interval are in order."""
    for piece in algorithm.pieces("correction"):
        bounds = {**piece.coefficients, **algorithm.coefficients}
        for key in ("weight", "sequence"):
            low, high = bounds.get(f"{key}_low"), bounds.get(f"{key}_high")
            if f"{key}_low" in piece.coefficients and cast(float, low) >= cast(float, high):
                problem = f"must be below {key}_high, {high:g}, or every weight is masked"
                raise refuse(f"{key}_low", problem, f"lower it, or raise {key}_high", low)


def is_used(algorithm: Algorithm, kind: str) -> bool:
    """Return whether the piece or option in this field has any effect in the algorithm."""
    of_rewards = ("advantage", "correction", "normalise_by", "reward_low", "reward_high", "reward_scale")
    return {
        **dict.fromkeys((*of_rewards, "normalise_advantages"), algorithm.policy_loss != NONE),
        **dict.fromkeys(("aggregation", "kl", "entropy"), algorithm.has_usual),
        "sft_aggregation": algorithm.sft != NONE,
        "mu_schedule": algorithm.mixes,
        "value_loss": algorithm.advantage in token_advantages,
        # With a preference loss all rows are in pairs or labelled: there are no demonstrations and no usual rows.
        **dict.fromkeys(("sft", "distillation"), NONE == algorithm.preference == algorithm.unpaired),
    }.get(kind, True)


def _check_advantage(algorithm: Algorithm) -> None:
    """Check that the advantage fits the policy loss and the normalisation."""
    advantage, loss = algorithm.piece("advantage"), algorithm.piece("policy_loss")
    if advantage is None or loss is None:
        return
    if "selects" in advantage.traits and algorithm.normalise_advantages and algorithm.normalise_by != "rewards":
        problem = f"would train on answers that advantage {advantage.name!r} rejects: 0 is not the mean of the batch"
        raise refuse("normalise_advantages", problem, "leave it out, or use another advantage", True)
    if "one_advantage" in loss.traits and "varies_in_row" in advantage.traits:
        problem = f"would average the advantages of {advantage.name!r}, which differ within an answer"
        raise refuse("policy_loss", problem, "use gspo_token, or a loss of each token", loss.name)
    if "moves_at_zero" in loss.traits and "selects" in advantage.traits:
        problem = f"would train on answers that advantage {advantage.name!r} rejects: it has a gradient at advantage 0"
        raise refuse("policy_loss", problem, "use another loss, or another advantage", loss.name)
    by_answer = algorithm.normalise_advantages and algorithm.normalise_by != "tokens"
    if by_answer and "varies_in_row" in advantage.traits:
        problem = f"needs one advantage per answer, and those of {advantage.name!r} differ within one"
        raise refuse("normalise_by", problem, "use normalise_by: tokens", algorithm.normalise_by)


def _check_rewards(algorithm: Algorithm, overrides: Mapping[str, Any]) -> None:
    """Check that options on rewards and advantages have an effect."""
    if "normalise_by" in overrides and not algorithm.normalise_advantages:
        remedy = "add normalise_advantages: true, or remove normalise_by"
        problem = "is not used: advantages are not normalised over the batch"
        raise refuse("normalise_by", problem, remedy, algorithm.normalise_by)
    shaping = [key for key in ("reward_low", "reward_high", "reward_scale") if key in overrides]
    if shaping and "components" in algorithm.needs:
        problem = f"is not used: {algorithm.needs['components']} looks at the components of the reward"
        raise refuse(shaping[0], problem, "leave it out", overrides[shaping[0]])
    low, high = algorithm.reward_low, algorithm.reward_high
    if low is not None and high is not None and low >= high:
        problem = f"must be below reward_high, {high:g}, or all rewards are equal"
        raise refuse("reward_low", problem, "lower it, or raise reward_high", low)


def _check_penalty(algorithm: Algorithm) -> None:
    """Check that a KL in the reward of tokens reaches the loss."""
    advantage, loss = algorithm.piece("advantage"), algorithm.piece("policy_loss")
    if loss is None or advantage is None:
        problem = f"cannot be 'reward': {algorithm.name!r} has no policy loss, hence no rewards"
    elif algorithm.advantage_is_by_token:
        return
    elif unfit := [piece for piece in (loss, advantage) if piece.traits & {"one_advantage", "selects"}]:
        problem = f"cannot be 'reward': {unfit[0].kind} {unfit[0].name!r} takes whole answers, and this KL is per token"
    else:
        return
    raise refuse("kl_in", problem, "use kl_in: loss", "reward")
