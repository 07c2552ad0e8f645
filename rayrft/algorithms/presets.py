"""Algorithm presets by name, and building one with overrides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from rayrft.algorithms.algorithm import Algorithm
from rayrft.algorithms.checks import check_bounds, check_coefficient, check_field, check_whole, is_used, refuse
from rayrft.algorithms.pieces import NONE
from rayrft.algorithms.registries import REGISTRIES
from rayrft.registry import Registry

presets: Registry[Algorithm] = Registry("algorithm")

_WHOLE = "sequence_mean_token_mean"
"""The default aggregation of losses of whole answers."""

_TIS = "truncated"
"""The default correction of losses that use ratios to the proximal policy."""

for _preset in (
    # Expert rows.
    Algorithm("sft", sft="nll"),
    # Usual rows in groups. `grpo` is GRPO in its present form: the token mean and the higher upper clip of DAPO, no KL.
    # The paper's own is `aggregation: sequence_mean_token_mean, clip_high: 0.2, kl: k3, kl_coef: 0.04`.
    Algorithm("grpo", advantage="grpo", policy_loss="ppo", coefficients={"clip_high": 0.28}),
    Algorithm("dr_grpo", advantage="dr_grpo", policy_loss="ppo", aggregation="constant"),
    # DAPO's loss is the token mean and the higher upper clip, as in `grpo` here. Its other techniques are run settings:
    # dynamic sampling (`explorer.drop_zero_variance`), overlong filtering and soft punishment (`reward.truncated`:
    # mask, soft).
    Algorithm("dapo", advantage="grpo", policy_loss="ppo", coefficients={"clip_low": 0.2, "clip_high": 0.28}),
    Algorithm("gspo", advantage="grpo", policy_loss="gspo", aggregation="sequence_mean_token_mean", correction=_TIS),
    Algorithm("cispo", advantage="grpo", policy_loss="cispo"),
    Algorithm("sapo", advantage="grpo", policy_loss="sapo", aggregation="sequence_mean_token_mean"),
    Algorithm("gdpo", advantage="gdpo", policy_loss="ppo", normalise_advantages=True, normalise_by="answers"),
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
    # Usual rows without groups.
    Algorithm("reinforce_pp", advantage="reinforce_pp", policy_loss="ppo", normalise_advantages=True),
    Algorithm("reinforce_pp_baseline", advantage="reinforce_pp_baseline", policy_loss="ppo", normalise_advantages=True),
    Algorithm("remax", advantage="remax", policy_loss="reinforce"),
    Algorithm("ppo", advantage="gae", policy_loss="ppo", value_loss="clipped", normalise_advantages=True),
    # Own and expert rows.
    Algorithm("mix", advantage="grpo", policy_loss="ppo", sft="nll"),
    Algorithm("chord", advantage="grpo", policy_loss="ppo", sft="chord_phi"),
    Algorithm("chord_mu", advantage="grpo", policy_loss="ppo", sft="nll", mu_schedule="cosine"),
    # Pairs.
    Algorithm("dpo", preference="dpo"),
    Algorithm("ipo", preference="ipo"),
    Algorithm("simpo", preference="simpo"),
    Algorithm("cpo", preference="cpo", chosen_coef=1.0),
    Algorithm("orpo", preference="orpo", chosen_coef=1.0),
    # Labelled answers.
    Algorithm("kto", unpaired="kto"),
    # A reward model, on pairs.
    Algorithm("reward_model", reward_model="bradley_terry"),
    # A teacher.
    Algorithm("distill", distillation="reverse_kl"),
    Algorithm("jsd", distillation="jsd"),
):
    presets.register(_preset.name)(_preset)


def build(name: str, overrides: Mapping[str, Any] | None = None) -> Algorithm:
    """Build a preset with overrides: other pieces (``policy_loss: gspo``) or coefficients (``clip_low: 0.1``).
    ``correction`` may be a list.

    Raises ConfigError on an unknown preset, piece or key, naming the nearest valid one; on a coefficient that the
    algorithm's pieces do not use; and on an invalid value.
    """
    overrides = {key: tuple(value) if isinstance(value, list) else value for key, value in (overrides or {}).items()}
    preset = presets.get(name, "algorithm.name")
    known = {field.name for field in fields(Algorithm)} - {"name", "coefficients"}
    algorithm = replace(preset, **{key: value for key, value in overrides.items() if key in known})
    for key, value in overrides.items():
        if key in known:
            check_field(algorithm, key, value)
    algorithm = _with_default_correction(algorithm, named="correction" in overrides)
    pieces = [piece for kind in REGISTRIES if is_used(algorithm, kind) for piece in algorithm.pieces(kind)]
    given = {key: value for key, value in overrides.items() if key not in known}
    for key, value in given.items():
        check_coefficient(algorithm, pieces, known, key, value)
    check_whole(algorithm, overrides)
    algorithm = _with_default_aggregation(algorithm, named="aggregation" in overrides)
    # Drop the preset's coefficients of replaced pieces, even if the new piece has a coefficient of the same name.
    before = {(kind, piece.name) for kind in REGISTRIES for piece in preset.pieces(kind)}
    used = {key for piece in pieces if (piece.kind, piece.name) in before for key in piece.coefficients}
    kept = {key: value for key, value in preset.coefficients.items() if key in used}
    algorithm = replace(algorithm, coefficients={**kept, **given})
    check_bounds(algorithm)
    return algorithm


def _with_default_correction(algorithm: Algorithm, *, named: bool) -> Algorithm:
    """Return the algorithm with the default correction if its loss uses ratios to the proximal policy, unless one was
    ``named``: nothing else accounts for the ratio of proximal to behaviour policy."""
    loss = algorithm.piece("policy_loss")
    if named or loss is None or "proximal" not in loss.needs or algorithm.correction != NONE:
        return algorithm
    return replace(algorithm, correction=_TIS)


def _with_default_aggregation(algorithm: Algorithm, *, named: bool) -> Algorithm:
    """Return the algorithm with an aggregation that counts losses of whole answers once. Raises ConfigError if another
    one was ``named``."""
    loss, aggregation = algorithm.piece("policy_loss"), algorithm.piece("aggregation")
    if loss is None or aggregation is None or "whole_answers" not in loss.traits - aggregation.traits:
        return algorithm
    if named:
        problem = f"would count long answers once for every token: policy_loss {loss.name!r} is a loss of whole answers"
        raise refuse("aggregation", problem, f"use {_WHOLE}, or leave the key out", aggregation.name)
    return replace(algorithm, aggregation=_WHOLE)
