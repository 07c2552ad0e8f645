"""The table of all kinds of actors, in the order of the placement plan, which the Master leads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rayrft.config import RunConfig
from rayrft.core.bundles import Bundles
from rayrft.core.parts.base import Part
from rayrft.core.parts.buffer import BufferPart
from rayrft.core.parts.endpoint import KeeperPart
from rayrft.core.parts.engines import AuxiliaryEngines, EnginePools, EvaluationEngines, PolicyEngines
from rayrft.core.parts.explorer import ExplorerPart, OperatorsPart
from rayrft.core.parts.rewards import RewardsPart
from rayrft.core.parts.trainer import TrainerPart
from rayrft.errors import ConfigError, nearest

MASTER = Bundles("master", 1, 0.05, 0, 0.3, "paces and supervises")
"""The process that starts the run creates the Master, which creates the actors of all other kinds."""

KINDS: list[type[Part[Any]]] = [
    ExplorerPart,
    PolicyEngines,
    EvaluationEngines,
    AuxiliaryEngines,
    RewardsPart,
    OperatorsPart,
    BufferPart,
    EnginePools,
    TrainerPart,
    KeeperPart,
]


def plan_placement(config: RunConfig) -> list[Bundles]:
    """Return the placement groups of a run, and the replicas that it has on Ray Serve. Raises ConfigError if
    ``placement.labels`` names another group."""
    plan, labels = [MASTER] if config.mode != "bench" else [], config.placement.labels
    plan += [bundles for kind in KINDS for bundles in kind.bundles(config)]
    names = [each.name for each in plan if not each.served]
    if unknown := next(iter(labels.keys() - names), None):
        problem = "the run has no such placement group"
        raise ConfigError(problem, nearest(unknown, names), field="placement.labels", value=unknown)
    spread = {PolicyEngines.name} if config.placement.engines == "spread" else set()
    return [replace(each, spread=each.name in spread, labels=labels.get(each.name, {})) for each in plan]
