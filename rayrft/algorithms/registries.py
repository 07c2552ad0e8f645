"""All registries of pieces, by field of an algorithm."""

from __future__ import annotations

from typing import Any

from rayrft.algorithms import clipped, reinforce  # noqa: F401  (they register their pieces)
from rayrft.algorithms.advantages import group_advantages
from rayrft.algorithms.corrections import corrections
from rayrft.algorithms.distillation import distillations
from rayrft.algorithms.kl import entropies, kls
from rayrft.algorithms.loss import aggregations
from rayrft.algorithms.pieces import Pieces
from rayrft.algorithms.preference import preferences, reward_model_losses
from rayrft.algorithms.ratios import policy_losses
from rayrft.algorithms.sft import mu_schedules, sft_losses
from rayrft.algorithms.unpaired import unpaired_losses
from rayrft.algorithms.values import token_advantages, value_losses

REGISTRIES: dict[str, tuple[Pieces[Any], ...]] = {
    "advantage": (group_advantages, token_advantages),
    "policy_loss": (policy_losses,),
    "aggregation": (aggregations,),
    "correction": (corrections,),
    "kl": (kls,),
    "entropy": (entropies,),
    "distillation": (distillations,),
    "sft": (sft_losses,),
    "sft_aggregation": (aggregations,),
    "mu_schedule": (mu_schedules,),
    "preference": (preferences,),
    "unpaired": (unpaired_losses,),
    "reward_model": (reward_model_losses,),
    "value_loss": (value_losses,),
}
"""The fields of an `Algorithm` that name a piece, and the registries in which the name is looked up."""
