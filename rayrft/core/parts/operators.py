"""Actors of operators on experiences, which the Explorers create and replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from rayrft.config import RunConfig
from rayrft.core.parts.base import Part, has_explorers
from rayrft.core.placement import Bundles, Placement
from rayrft.explorer.engines.auxiliary import auxiliary_models
from rayrft.explorer.engines.pool import EnginePool
from rayrft.pipelines.experiences import experience_chain
from rayrft.pipelines.run.groups import ActorOperators, OperatorActor, Operators
from rayrft.runtime.handle import Handle


class OperatorsPart(Part[OperatorActor]):
    """The actors of operators on experiences, unless these run in the Explorers."""

    name = "operators"
    on_death = "restart"

    @classmethod
    def bundles(cls, config: RunConfig) -> list[Bundles]:
        actors, experiences = config.pipelines.actors, config.pipelines.experiences
        if not experiences or actors is None or not has_explorers(config) or config.mode == "bench":
            return []
        count, note = config.explorer.count * actors.count, ", ".join(each.name for each in experiences)
        return [Bundles(cls.name, count, actors.cpus, actors.gpus, actors.memory_gib, note)]


def remote_operators(
    config: RunConfig, model: str, placement: Placement, pools: Mapping[str, Handle[EnginePool]]
) -> Callable[[], Operators] | None:
    """Return a factory of an Explorer's remote operators, which may ask these models; None if they are not remote."""
    pipelines = config.pipelines
    if not pipelines.experiences or pipelines.actors is None:
        return None
    share = 1 / (config.explorer.count * pipelines.actors.count)
    models = partial(auxiliary_models, config.auxiliary, dict(pools), share=share) if pools else None
    placed = placement.actor(OperatorActor, OperatorsPart.name)
    chain = experience_chain(config, model)
    create = partial(placed.create, chain, pipelines, models, config.auxiliary, config.scoring)
    return partial(ActorOperators, create, pipelines.actors.count)
