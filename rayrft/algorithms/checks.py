"""Validation of algorithms: invalid values, options without effect, and combinations that do not work.

Every function raises ConfigError with the key under ``algorithm``, the value, and a remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from rayrft.algorithms.algorithm import Algorithm
from rayrft.algorithms.pieces import NONE, Count, NonNegative, Piece, Positive, Weight, fault
from rayrft.algorithms.registries import REGISTRIES
from rayrft.algorithms.values import token_advantages
from rayrft.errors import ConfigError, nearest

_WEIGHTS = {
    "kl_coef": "kl",
    "kl_in": "kl",
    "kl_target": "kl",
    "kl_horizon": "kl",
    "entropy_coef": "entropy",
    "entropy_goal": "entropy",
    "entropy_step": "entropy",
    "distillation_coef": "distillation",
    "chosen_coef": "preference",
    "teacher_candidates": "distillation",
}
"""Fields that have an effect only if another field names a piece."""

_OF_REWARDS = ("normalise_by", "reward_low", "reward_high", "reward_scale")
"""Fields that act on rewards and advantages."""

_TERMS = ("policy_loss", "distillation", "sft", "preference", "unpaired")
"""Pieces that train the policy."""

_REQUIRED = ("aggregation", "sft_aggregation", "mu_schedule")
"""Pieces that cannot be left out."""

_CHOICES = {"kl_in": ("loss", "reward"), "normalise_by": ("tokens", "answers", "rewards")}

_HINTS: dict[str, Any] = {
    "kl_coef": NonNegative,
    "kl_target": Positive | None,
    "kl_horizon": Positive,
    "entropy_coef": NonNegative,
    "entropy_goal": NonNegative | None,
    "entropy_step": Positive,
    "distillation_coef": NonNegative,
    "chosen_coef": NonNegative,
    "reward_scale": Positive,
    "reward_low": Weight | None,
    "reward_high": Weight | None,
    "teacher_candidates": Count,
    "normalise_advantages": bool,
}
"""Types of the fields that are not names of pieces."""


def check_field(algorithm: Algorithm, key: str, value: Any) -> None:
    """Check that a given field has a valid value and an effect."""
    names = value if key == "correction" and isinstance(value, tuple) else (value,)
    if wrong := next(filter(None, (fault(name, _HINTS.get(key, str)) for name in names)), None):
        raise ConfigError(wrong, field=f"algorithm.{key}", value=value)
    if key in REGISTRIES:
        algorithm.pieces(key)
        if len(names) != 1 and (len(set(names)) < len(names) or not names or NONE in names):
            raise ConfigError(
                "must be different ones", "name each once, or leave it out", field=f"algorithm.{key}", value=list(names)
            )
        if value == NONE and key in _REQUIRED:
            raise ConfigError("must name one", "leave it at its default", field=f"algorithm.{key}", value=value)
    if value not in (NONE, False) and not is_used(algorithm, key):
        raise ConfigError(
            f"is not used: {algorithm.name!r} has no term that it acts on",
            "leave it out",
            field=f"algorithm.{key}",
            value=value,
        )
    if key in _CHOICES and value not in _CHOICES[key]:
        raise ConfigError(
            f"must be one of {', '.join(_CHOICES[key])}",
            f"write {' or '.join(f'{key}: {choice}' for choice in _CHOICES[key])}",
            field=f"algorithm.{key}",
            value=value,
        )
    if key in _WEIGHTS and getattr(algorithm, _WEIGHTS[key]) == NONE:
        raise ConfigError(
            f"is not used: {algorithm.name!r} has no {_WEIGHTS[key]} term",
            f"name one with '{_WEIGHTS[key]}', or leave this out",
            field=f"algorithm.{key}",
            value=value,
        )
    if key == "teacher_candidates" and not algorithm.needs_candidates:
        raise ConfigError(
            f"is not used: distillation {algorithm.distillation!r} looks at the sampled token alone",
            "leave it out, or use distillation jsd",
            field="algorithm.teacher_candidates",
            value=value,
        )


def check_coefficient(algorithm: Algorithm, pieces: list[Piece[Any]], own: set[str], key: str, value: Any) -> None:
    """Check that a key that is not a field (``own``) is a coefficient of one of the pieces, with a valid value."""
    users = [piece for piece in pieces if key in piece.coefficients]
    for piece in users:
        if wrong := piece.fault(key, value):
            raise ConfigError(wrong, field=f"algorithm.{key}", value=value)
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
        raise ConfigError("unknown key", nearest(key, own | used), field=f"algorithm.{key}", value=key)
    raise ConfigError(
        f"is not used: it belongs to {', '.join(sorted(everywhere))}, which {algorithm.name!r} does not contain",
        f"its coefficients are {', '.join(sorted(used)) or 'none'}",
        field=f"algorithm.{key}",
        value=value,
    )


def check_whole(algorithm: Algorithm, overrides: Mapping[str, Any]) -> None:
    """Check that the pieces work together; ``overrides`` are the keys given by the user."""
    others = [kind for kind in _TERMS if getattr(algorithm, kind) != NONE]
    if algorithm.trains_reward_model and others:
        raise ConfigError(
            f"is not used: {algorithm.name!r} trains a reward model, and not the policy",
            "leave it out, or train the policy in a stage of its own",
            field=f"algorithm.{others[0]}",
            value=getattr(algorithm, others[0]),
        )
    if algorithm.unpaired != NONE and (algorithm.policy_loss != NONE or algorithm.preference != NONE):
        raise ConfigError(
            f"needs rows of another kind than the other terms of {algorithm.name!r}",
            "train on labelled answers in a stage of its own: algorithm kto",
            field="algorithm.unpaired",
            value=algorithm.unpaired,
        )
    if algorithm.policy_loss != NONE and algorithm.advantage == NONE:
        raise ConfigError(
            f"policy_loss {algorithm.policy_loss!r} needs one",
            "name one, or use a preset that has both",
            field="algorithm.advantage",
            value=NONE,
        )
    if algorithm.advantage in token_advantages and algorithm.value_loss == NONE:
        raise ConfigError(
            f"advantage {algorithm.advantage!r} needs one",
            "name one, such as clipped or squared",
            field="algorithm.value_loss",
            value=NONE,
        )
    centres = algorithm.normalise_advantages and algorithm.normalise_by != "rewards"
    if centres and (selects := algorithm.piece("advantage")) and "selects" in selects.traits:
        raise ConfigError(
            f"would train on what advantage {selects.name!r} leaves out: 0 is not the mean of the batch",
            "leave it out, or use another advantage",
            field="algorithm.normalise_advantages",
            value=True,
        )
    _check_advantage(algorithm)
    _check_rewards(algorithm, overrides)
    if algorithm.kl_in == "reward":
        _check_penalty(algorithm)
    elif "kl" in algorithm.terms and (kl := algorithm.piece("kl")) and "no_gradient" in kl.traits:
        raise ConfigError(
            "is no loss: its gradient is 0 in the mean",
            "use k1_st, which has its value and the gradient of the KL, or kl_in: reward",
            field="algorithm.kl",
            value=kl.name,
        )
    _check_controllers(algorithm, overrides)


def check_bounds(algorithm: Algorithm) -> None:
    """Check that the bounds of an interval are in order."""
    for piece in algorithm.pieces("correction"):
        bounds = {**piece.coefficients, **algorithm.coefficients}
        for key in ("weight", "sequence"):
            low, high = bounds.get(f"{key}_low"), bounds.get(f"{key}_high")
            if f"{key}_low" in piece.coefficients and cast(float, low) >= cast(float, high):
                raise ConfigError(
                    f"leaves nothing: it is not below {key}_high {high:g}",
                    f"correction {piece.name!r} keeps weights between the two",
                    field=f"algorithm.{key}_low",
                    value=low,
                )


def is_used(algorithm: Algorithm, kind: str) -> bool:
    """Return whether the piece or option in this field has any effect in the algorithm."""
    return {
        "advantage": algorithm.policy_loss != NONE,
        "correction": algorithm.policy_loss != NONE,
        "normalise_advantages": algorithm.policy_loss != NONE,
        **dict.fromkeys(_OF_REWARDS, algorithm.policy_loss != NONE),
        "aggregation": algorithm.has_own,
        "kl": algorithm.has_own,
        "entropy": algorithm.has_own,
        "sft_aggregation": algorithm.sft != NONE,
        "mu_schedule": algorithm.mixes,
        "value_loss": algorithm.advantage in token_advantages,
        # With a preference loss all rows are in pairs or labelled: there are no demonstrations and no own rows.
        **dict.fromkeys(("sft", "distillation"), NONE == algorithm.preference == algorithm.unpaired),
    }.get(kind, True)


def _check_advantage(algorithm: Algorithm) -> None:
    advantage, loss = algorithm.piece("advantage"), algorithm.piece("policy_loss")
    if advantage is None or loss is None:
        return
    if "one_advantage" in loss.traits and "varies_in_row" in advantage.traits:
        raise ConfigError(
            f"would average away what advantage {advantage.name!r} tells apart within an answer",
            "use gspo_token, or a loss of each token",
            field="algorithm.policy_loss",
            value=loss.name,
        )
    if "moves_at_zero" in loss.traits and "selects" in advantage.traits:
        raise ConfigError(
            f"would train on what advantage {advantage.name!r} leaves out: it has a gradient where that is 0",
            "use another loss, or another advantage",
            field="algorithm.policy_loss",
            value=loss.name,
        )


def _check_rewards(algorithm: Algorithm, overrides: Mapping[str, Any]) -> None:
    if "normalise_by" in overrides and not algorithm.normalise_advantages:
        raise ConfigError(
            "is not used: advantages are not normalised over the batch",
            "add normalise_advantages: true, or leave this out",
            field="algorithm.normalise_by",
            value=algorithm.normalise_by,
        )
    advantage = algorithm.piece("advantage")
    by_answer = algorithm.normalise_advantages and algorithm.normalise_by != "tokens"
    if by_answer and advantage and "varies_in_row" in advantage.traits:
        raise ConfigError(
            f"is for advantages of whole answers, and those of {advantage.name!r} differ within one",
            "use normalise_by: tokens",
            field="algorithm.normalise_by",
            value=algorithm.normalise_by,
        )
    shaping = [key for key in ("reward_low", "reward_high", "reward_scale") if key in overrides]
    if shaping and algorithm.needs_components:
        raise ConfigError(
            f"is not used: {algorithm.needs()['components']} looks at the components of the reward",
            "leave it out",
            field=f"algorithm.{shaping[0]}",
            value=overrides[shaping[0]],
        )
    low, high = algorithm.reward_low, algorithm.reward_high
    if low is not None and high is not None and low >= high:
        raise ConfigError(
            f"makes all rewards equal: it is not below reward_high {high:g}",
            "rewards are clipped to the interval of the two",
            field="algorithm.reward_low",
            value=low,
        )


def _check_penalty(algorithm: Algorithm) -> None:
    advantage, loss = algorithm.piece("advantage"), algorithm.piece("policy_loss")
    if loss is None or advantage is None:
        problem = f"{algorithm.name!r} has no policy loss, hence no rewards"
    elif algorithm.advantage_is_by_token:
        return
    elif unfit := [piece for piece in (loss, advantage) if piece.traits & {"one_advantage", "selects"}]:
        problem = f"{unfit[0].kind} {unfit[0].name!r} looks at whole answers, and the KL in the reward is one of tokens"
    else:
        return
    raise ConfigError(problem, "use kl_in: loss", field="algorithm.kl_in", value="reward")


def _check_controllers(algorithm: Algorithm, overrides: Mapping[str, Any]) -> None:
    for key, target in (("kl_horizon", "kl_target"), ("entropy_step", "entropy_goal")):
        if key in overrides and getattr(algorithm, target) is None:
            raise ConfigError(
                f"is not used: the coefficient is fixed without {target}",
                f"give {target}, or leave this out",
                field=f"algorithm.{key}",
                value=overrides[key],
            )
    if algorithm.kl_target is not None and not algorithm.kl_coef:
        raise ConfigError(
            "must be above 0: it is multiplied to reach kl_target",
            "give the coefficient to begin with",
            field="algorithm.kl_coef",
            value=algorithm.kl_coef,
        )
