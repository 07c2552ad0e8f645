"""Algorithms by name, and any of them with other pieces or coefficients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from rayrft.algorithms.algorithm import Algorithm
from rayrft.algorithms.critic import token_advantages
from rayrft.algorithms.pieces import NONE, Count, NonNegative, Piece, Positive, fault
from rayrft.algorithms.registries import REGISTRIES
from rayrft.errors import ConfigError, nearest
from rayrft.registry import Registry

presets: Registry[Algorithm] = Registry("algorithm")

for _preset in (
    # Expert rows.
    Algorithm("sft", sft="nll"),
    # Own rows in groups. `grpo` is GRPO as it is run today: the token mean and the higher upper clip of DAPO, no KL.
    # The paper's own is `aggregation: sequence_mean_token_mean, clip_high: 0.2, kl: k3, kl_coef: 0.04`.
    Algorithm("grpo", advantage="grpo", policy_loss="ppo"),
    Algorithm("dr_grpo", advantage="dr_grpo", policy_loss="ppo", aggregation="constant"),
    # DAPO's loss is the token mean and the higher upper clip, which `grpo` here has by default: this names the same one
    # with its bounds fixed. Its other devices are of the run: dynamic sampling (`explorer.drop_zero_variance`),
    # overlong filtering and soft punishment (`reward.truncated`: mask, soft).
    Algorithm("dapo", advantage="grpo", policy_loss="ppo", coefficients={"clip_low": 0.2, "clip_high": 0.28}),
    Algorithm("gspo", advantage="grpo", policy_loss="gspo", aggregation="sequence_mean_token_mean"),
    Algorithm("cispo", advantage="grpo", policy_loss="cispo"),
    Algorithm("sapo", advantage="grpo", policy_loss="sapo", aggregation="sequence_mean_token_mean"),
    Algorithm("rloo", advantage="rloo", policy_loss="ppo"),
    # The mean is Trinity-RFT's default baseline; `advantage: opmd` is the estimate of tau log Z.
    Algorithm("opmd", advantage="dr_grpo", policy_loss="opmd"),
    Algorithm("kimi", advantage="dr_grpo", policy_loss="kimi", aggregation="sequence_mean_token_mean"),
    Algorithm("topr", advantage="dr_grpo", policy_loss="topr"),
    Algorithm("sppo", advantage="dr_grpo", policy_loss="sppo"),
    Algorithm("asymre", advantage="asymre", policy_loss="reinforce"),
    Algorithm("rec", advantage="dr_grpo", policy_loss="rec"),
    Algorithm("red_drop", advantage="red_drop", policy_loss="reinforce"),
    Algorithm("red_weight", advantage="dr_grpo", policy_loss="red_weight"),
    Algorithm("raft", advantage="accept", policy_loss="raft"),
    Algorithm("gigpo", advantage="gigpo", policy_loss="ppo"),
    # Own rows without groups.
    Algorithm("reinforce_pp", advantage="reinforce_pp", policy_loss="ppo", normalise_advantages=True),
    Algorithm("reinforce_pp_baseline", advantage="reinforce_pp_baseline", policy_loss="ppo", normalise_advantages=True),
    Algorithm("remax", advantage="remax", policy_loss="reinforce"),
    Algorithm(
        "ppo",
        advantage="gae",
        policy_loss="ppo",
        value_loss="clipped",
        normalise_advantages=True,
        coefficients={"clip_high": 0.2},
    ),
    # Own and expert rows.
    Algorithm("mix", advantage="grpo", policy_loss="ppo", sft="nll"),
    Algorithm("chord", advantage="grpo", policy_loss="ppo", sft="chord_phi"),
    Algorithm("chord_mu", advantage="grpo", policy_loss="ppo", sft="nll", mu_schedule="cosine"),
    # Pairs.
    Algorithm("dpo", preference="dpo"),
    Algorithm("ipo", preference="ipo"),
    # A teacher.
    Algorithm("distill", distillation="reverse_kl"),
    Algorithm("jsd", distillation="jsd"),
):
    presets.register(_preset.name)(_preset)

_WEIGHTS = {
    "kl_coef": "kl",
    "kl_in": "kl",
    "kl_target": "kl",
    "kl_horizon": "kl",
    "entropy_coef": "entropy",
    "entropy_goal": "entropy",
    "entropy_step": "entropy",
    "distillation_coef": "distillation",
    "teacher_candidates": "distillation",
}
"""Fields that mean something only where another one names a piece."""

_REQUIRED = ("aggregation", "sft_aggregation", "mu_schedule")
"""Pieces that cannot be left out."""

_WHOLE = "sequence_mean_token_mean"
"""The aggregation of losses of whole answers, where none is named."""

_HINTS: dict[str, Any] = {
    "kl_coef": NonNegative,
    "kl_target": Positive | None,
    "kl_horizon": Positive,
    "entropy_coef": NonNegative,
    "entropy_goal": NonNegative | None,
    "entropy_step": Positive,
    "distillation_coef": NonNegative,
    "teacher_candidates": Count,
    "normalise_advantages": bool,
}
"""What fields may hold that are not names."""


def build(name: str, overrides: Mapping[str, Any] | None = None) -> Algorithm:
    """The preset of that name with other pieces (``policy_loss: gspo``) or coefficients (``clip_low: 0.1``).

    Raises ConfigError on an unknown preset, piece or key, naming the nearest right one; on a coefficient that the
    algorithm's pieces do not use; and on a value that it cannot have.
    """
    overrides = dict(overrides or {})
    preset = presets.get(name, "algorithm.name")
    own = {each.name for each in fields(Algorithm)} - {"name", "coefficients"}
    algorithm = replace(preset, **{key: value for key, value in overrides.items() if key in own})
    for key, value in overrides.items():
        if key in own:
            _check_field(algorithm, key, value)
    pieces = [piece for kind in REGISTRIES if (piece := algorithm.piece(kind)) and _is_used(algorithm, kind)]
    given = {key: value for key, value in overrides.items() if key not in own}
    for key, value in given.items():
        _check_coefficient(algorithm, pieces, own, key, value)
    if algorithm.policy_loss != NONE and algorithm.advantage == NONE:
        raise ConfigError(
            f"policy_loss {algorithm.policy_loss!r} needs one",
            field="algorithm.advantage",
            value=NONE,
            remedy="name one, or use a preset that has both",
        )
    if algorithm.advantage in token_advantages and algorithm.value_loss == NONE:
        raise ConfigError(
            f"advantage {algorithm.advantage!r} needs one",
            field="algorithm.value_loss",
            value=NONE,
            remedy="name one, such as clipped or squared",
        )
    if algorithm.kl_in == "reward":
        _check_penalty(algorithm)
    _check_controllers(algorithm, overrides)
    algorithm = _with_fit_aggregation(algorithm, named="aggregation" in overrides)
    used = {key for piece in pieces for key in piece.coefficients}
    kept = {key: value for key, value in preset.coefficients.items() if key in used}
    return replace(algorithm, coefficients={**kept, **given})


def _check_field(algorithm: Algorithm, key: str, value: Any) -> None:
    if wrong := fault(value, _HINTS.get(key, str)):
        raise ConfigError(wrong, field=f"algorithm.{key}", value=value)
    if key in REGISTRIES:
        algorithm.piece(key)
        if value == NONE and key in _REQUIRED:
            raise ConfigError("must name one", field=f"algorithm.{key}", value=value, remedy="leave it at its default")
    if value not in (NONE, False) and not _is_used(algorithm, key):
        raise ConfigError(
            f"is not used: {algorithm.name!r} has no term that it acts on",
            field=f"algorithm.{key}",
            value=value,
            remedy="leave it out",
        )
    if key == "kl_in" and value not in ("loss", "reward"):
        raise ConfigError(
            "must be one of loss, reward",
            field="algorithm.kl_in",
            value=value,
            remedy="write kl_in: loss or kl_in: reward",
        )
    if key in _WEIGHTS and getattr(algorithm, _WEIGHTS[key]) == NONE:
        raise ConfigError(
            f"is not used: {algorithm.name!r} has no {_WEIGHTS[key]} term",
            field=f"algorithm.{key}",
            value=value,
            remedy=f"name one with '{_WEIGHTS[key]}', or leave this out",
        )
    if key == "teacher_candidates" and not algorithm.needs_candidates:
        raise ConfigError(
            f"is not used: distillation {algorithm.distillation!r} looks at the sampled token alone",
            field="algorithm.teacher_candidates",
            value=value,
            remedy="leave it out, or use distillation jsd",
        )


def _check_penalty(algorithm: Algorithm) -> None:
    advantage, loss = algorithm.piece("advantage"), algorithm.piece("policy_loss")
    if loss is None or advantage is None:
        problem = f"{algorithm.name!r} has no policy loss, hence no rewards"
    elif algorithm.advantage_is_by_token:
        return
    elif deaf := [piece for piece in (loss, advantage) if piece.traits & {"whole_answers", "selects"}]:
        problem = f"{deaf[0].kind} {deaf[0].name!r} looks at whole answers, and the KL in the reward is one of tokens"
    else:
        return
    raise ConfigError(problem, field="algorithm.kl_in", value="reward", remedy="use kl_in: loss")


def _with_fit_aggregation(algorithm: Algorithm, *, named: bool) -> Algorithm:
    """The algorithm with an aggregation that takes a loss of whole answers once for each, unless one was ``named``."""
    loss, aggregation = algorithm.piece("policy_loss"), algorithm.piece("aggregation")
    if loss is None or aggregation is None or "whole_answers" not in loss.traits - aggregation.traits:
        return algorithm
    if named:
        raise ConfigError(
            f"would count long answers once for every token: policy_loss {loss.name!r} is a loss of whole answers",
            field="algorithm.aggregation",
            value=aggregation.name,
            remedy=f"use {_WHOLE}, or leave this out",
        )
    return replace(algorithm, aggregation=_WHOLE)


def _check_controllers(algorithm: Algorithm, overrides: Mapping[str, Any]) -> None:
    for key, target in (("kl_horizon", "kl_target"), ("entropy_step", "entropy_goal")):
        if key in overrides and getattr(algorithm, target) is None:
            raise ConfigError(
                f"is not used: the coefficient is fixed without {target}",
                field=f"algorithm.{key}",
                value=overrides[key],
                remedy=f"give {target}, or leave this out",
            )
    if algorithm.kl_target is not None and not algorithm.kl_coef:
        raise ConfigError(
            "must be above 0: it is multiplied to reach kl_target",
            field="algorithm.kl_coef",
            value=algorithm.kl_coef,
            remedy="give the coefficient to begin with",
        )


def _is_used(algorithm: Algorithm, kind: str) -> bool:
    """Whether the piece or choice in that field has any effect in this algorithm."""
    return {
        "advantage": algorithm.policy_loss != NONE,
        "correction": algorithm.policy_loss != NONE,
        "normalise_advantages": algorithm.policy_loss != NONE,
        "aggregation": algorithm.has_own,
        "kl": algorithm.has_own,
        "entropy": algorithm.has_own,
        "sft_aggregation": algorithm.sft != NONE,
        "mu_schedule": algorithm.mixes,
        "value_loss": algorithm.advantage in token_advantages,
        # Rows are sides of pairs there, not demonstrations and not samples of the policy.
        "sft": algorithm.preference == NONE,
        "distillation": algorithm.preference == NONE,
    }.get(kind, True)


def _check_coefficient(algorithm: Algorithm, pieces: list[Piece[Any]], own: set[str], key: str, value: Any) -> None:
    users = [piece for piece in pieces if key in piece.coefficients]
    for piece in users:
        if wrong := piece.fault(key, value):
            raise ConfigError(wrong, field=f"algorithm.{key}", value=value)
    if users:
        return
    used = {each for piece in pieces for each in piece.coefficients}
    everywhere = {
        f"{kind} {name!r}"
        for kind, registries in REGISTRIES.items()
        for registry in registries
        for name in registry
        if key in registry.get(name).coefficients
    }
    if not everywhere:
        raise ConfigError("unknown key", field=f"algorithm.{key}", value=key, remedy=nearest(key, own | used))
    raise ConfigError(
        f"is not used: it belongs to {', '.join(sorted(everywhere))}, which {algorithm.name!r} does not contain",
        field=f"algorithm.{key}",
        value=value,
        remedy=f"its coefficients are {', '.join(sorted(used)) or 'none'}",
    )
