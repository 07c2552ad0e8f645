"""Models on engines that a pipeline alone asks: for `rayrft data process`, and for a run's tasks before it starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager

from rayrft.config import RunConfig
from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.core.actors import Auxiliary, create_auxiliary, serve_auxiliary
from rayrft.core.cluster import connect
from rayrft.core.placement import Placement, auxiliary_part, check_room, engine_pool_part, show_plan
from rayrft.core.supervision import root_cause
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import Stalled
from rayrft.explorer.engines.auxiliary import auxiliary_models
from rayrft.pipelines.run.answering import AskedModel, Engines
from rayrft.runtime.handle import end

_START_S = 1800.0
"""Seconds in which engines load their models."""


def pipeline_engines(
    run: str, models: Mapping[str, AuxiliaryConfig], seed: int, say: Callable[[str], None] = print
) -> Engines:
    """Return what starts engines for those of ``models`` that are asked, in placement groups of their own, named after
    ``run``, and ends them afterwards. ``say`` receives the placement plan.

    Raises PlacementError if they do not fit, and the root cause if one does not start.
    """

    @asynccontextmanager
    async def engines(names: Collection[str]) -> AsyncIterator[dict[str, AskedModel]]:
        wanted = {name: config for name, config in models.items() if name in names}
        if not wanted:
            yield {}
            return
        for name, each in wanted.items():
            ChatTokenizer(each.model, f"{name}.model", each.template)  # raises if there is none, before anything starts
        connect()
        parts = [*(auxiliary_part(name, each) for name, each in wanted.items()), engine_pool_part(len(wanted))]
        say(show_plan(run, parts))
        check_room(parts)
        placement, actors = Placement(run, parts), dict[str, Auxiliary]()
        try:
            placement.reserve([part.name for part in parts])
            actors |= create_auxiliary(wanted, placement)
            await _started(actors, wanted, seed)
            found = auxiliary_models(wanted, {name: each.engine_pool for name, each in actors.items()})
            yield {name: AskedModel.on_engines(model, wanted[name]) for name, model in found.items()}
        finally:
            await asyncio.to_thread(end, [actor for each in actors.values() for actor in each.all])
            placement.remove()

    return engines


def task_engines(config: RunConfig, say: Callable[[str], None] = print) -> Engines:
    """Return what starts engines for those auxiliary models of a run that operators on its tasks ask."""
    return pipeline_engines(f"{config.name}-tasks", config.auxiliary, config.seed, say)


async def _started(actors: Mapping[str, Auxiliary], models: Mapping[str, AuxiliaryConfig], seed: int) -> None:
    from ray.exceptions import RayActorError, RayTaskError

    try:
        async with asyncio.timeout(_START_S):
            await asyncio.gather(*(serve_auxiliary(each, models[name], seed) for name, each in actors.items()))
    except TimeoutError:
        remedy = "see the engines' logs in the Ray dashboard"
        raise Stalled(f"engines did not start within {_START_S:g} s", remedy, field="models") from None
    except (RayActorError, RayTaskError) as error:
        raise root_cause(error, "models") from None
