"""The actors of a run except the Master, in their placement groups."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.shared import SharedBuffer
from rayrft.config import RunConfig
from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.pipelines import PipelinesConfig
from rayrft.config.reward import RewardConfig
from rayrft.core.placement import PlacedClass, Placement
from rayrft.core.preflight import Prepared
from rayrft.endpoint.keeper import SessionKeeper
from rayrft.experience import pack, to_batch
from rayrft.explorer.engines.auxiliary import auxiliary_models
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.explorer.engines.pool import EnginePool, Member
from rayrft.explorer.explorer import Explorer
from rayrft.pipelines.experiences import experience_chain
from rayrft.pipelines.run.groups import ActorOperators, Asked, GroupChain, OperatorActor, Operators
from rayrft.rewards.pool import ActorScoring, Models, RewardActor, Scoring
from rayrft.runtime.handle import Handle, TrackedHandle, Watched, when_reachable
from rayrft.runtime.waits import Waits
from rayrft.trainer.api import RankSetup
from rayrft.trainer.batch_pipeline import BatchPipeline, batch_chain
from rayrft.trainer.trainer import Trainer

if TYPE_CHECKING:
    from rayrft.rewards.service import RewardService


@dataclass(frozen=True)
class Auxiliary:
    """The actors of an auxiliary model."""

    engine_pool: Handle[EnginePool]
    engines: list[Handle[RolloutEngine]]

    @property
    def all(self) -> list[Handle[Any]]:
        return [self.engine_pool, *self.engines]

    @property
    def members(self) -> list[Member]:
        """The engines as members of their pool, whose weights stay as they are."""
        return [Member(engine, 0) for engine in self.engines]


@dataclass(frozen=True)
class Actors:
    """Handles of the actors; ``trainer`` is None where nothing is trained, and there are no ``explorers`` and no
    ``engine_pool`` where nothing is rolled out."""

    buffer: Handle[Buffer]
    trainer: Handle[Trainer] | None
    explorers: list[Handle[Explorer]]
    """They share the tasks; the first one evaluates."""
    engine_pool: Handle[EnginePool] | None
    engines: list[Handle[RolloutEngine]]
    """As they were created; which of them take requests the ``engine_pool`` knows."""
    auxiliary: dict[str, Auxiliary] = field(default_factory=dict)
    """By the models' names."""
    evaluation_pool: Handle[EnginePool] | None = None
    evaluation_engines: list[Handle[RolloutEngine]] = field(default_factory=list)
    """Those that only evaluate; the run goes on if they die."""
    keeper: Handle[SessionKeeper] | None = None
    """Of the endpoint's sessions, if they are recorded."""

    def watches(self) -> dict[str, Awaitable[Any]]:
        """Return by actor a call that ends only when the actor fails."""
        pools = [self.engine_pool, *self._auxiliary_pools, self.evaluation_pool]
        watched: list[Handle[Any] | None] = [self.trainer, *self.explorers, *pools, *self.all_engines, self.keeper]
        watches = {actor.name: until_failed(actor) for actor in watched if actor is not None}
        return {**watches, "buffer": _until_dead_for_good(self.buffer)}

    def tracked(self, waits: Waits) -> Actors:
        """Return the same actors with handles that record calls as ``waits``."""
        serving = self.keeper is not None and not self.explorers
        return replace(
            self,
            # Without an Explorer, groups come when they come.
            buffer=TrackedHandle(self.buffer, waits, endless=[Buffer.lease] if serving else []),
            trainer=TrackedHandle(self.trainer, waits, labels={Trainer.call_ranks: lambda call: call.method})
            if self.trainer
            else None,
            explorers=[TrackedHandle(explorer, waits, endless=[Explorer.explore]) for explorer in self.explorers],
            engine_pool=TrackedHandle(self.engine_pool, waits) if self.engine_pool else None,
            engines=[TrackedHandle(engine, waits) for engine in self.engines],
            auxiliary={
                name: Auxiliary(
                    TrackedHandle(each.engine_pool, waits), [TrackedHandle(engine, waits) for engine in each.engines]
                )
                for name, each in self.auxiliary.items()
            },
            evaluation_pool=TrackedHandle(self.evaluation_pool, waits) if self.evaluation_pool else None,
            evaluation_engines=[
                TrackedHandle(engine, waits, endless=[Watched.watch]) for engine in self.evaluation_engines
            ],
        )

    def signs_of_life(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        """Return by actor a call that it answers at once, with its `WaitReport` if it waits for others. An actor comes
        before those that it keeps waiting."""
        asks: dict[str, Callable[[], Awaitable[Any]]] = {}
        if self.trainer is not None:
            asks["trainer"] = partial(self.trainer.call, Trainer.waiting)
        asks |= {explorer.name: partial(explorer.call, Explorer.waiting) for explorer in self.explorers}
        others = [self.keeper, self.buffer, self.engine_pool, *self._auxiliary_pools, *self.all_engines]
        asks |= {actor.name: partial(actor.call, Watched.pid) for actor in others if actor is not None}
        # What a Buffer waits for is what a train job waits for, be it another one.
        return asks | ({"buffer": partial(self.buffer.call, Buffer.waiting)} if self.trainer is not None else {})

    @property
    def _auxiliary_pools(self) -> list[Handle[EnginePool]]:
        return [auxiliary.engine_pool for auxiliary in self.auxiliary.values()]

    @property
    def all_engines(self) -> list[Handle[RolloutEngine]]:
        """The engines of the policy and of the auxiliary models."""
        return [*self.engines, *chain.from_iterable(auxiliary.engines for auxiliary in self.auxiliary.values())]


def create_actors(
    config: RunConfig,
    prepared: Prepared,
    placement: Placement,
    logged: list[int],
    shared: Handle[SharedBuffer] | None = None,
) -> Actors:
    """Create the actors; they are not started yet, but can be watched. ``logged``: see `Buffer`. A ``shared`` Buffer
    is the one that the config names."""
    import ray

    buffer: Handle[Buffer] = shared or placement.actor(
        Buffer, "buffer", name="buffer", restarts=True, retries=-1
    ).create(
        prepared.run_id,
        config.buffer_folder,
        config.buffer,
        config.seed,
        prepared.task_set,
        prepared.limits,
        logged,
    )
    trainer = None
    if config.trains:
        trainer = placement.actor(Trainer, "trainer", name="trainer").create(
            config.trainer, placement.ranks, batches(config, prepared.model)
        )
    if not config.rolls_out:
        return Actors(buffer, trainer, [], None, [])
    engines = create_engines(placement, config.explorer.engine.count)
    engine_pool = placement.actor(EnginePool, "engine_pool", name="engine_pool").create()
    keeper = None
    if config.records_sessions and config.endpoint is not None:
        [size] = {stage.group_size for stage in config.stages if stage.groups}
        keeper = placement.actor(SessionKeeper, "keeper", name="keeper").create(
            config.endpoint,
            config.name,
            size,
            buffer,
            drop_equal=prepared.drop_equal,
            mask_truncated=config.reward.truncated == "mask",
        )
    if config.mode == "serve":
        return Actors(buffer, trainer, [], engine_pool, engines, keeper=keeper)
    evaluation_engines = create_engines(placement, config.evaluation_engines, "evaluation", "evaluation")
    evaluation_pool = (
        placement.actor(EnginePool, "engine_pool", name="evaluation_pool").create(expendable=True)
        if evaluation_engines
        else None
    )
    auxiliary = create_auxiliary(config.auxiliary, placement)
    pools = {name: each.engine_pool for name, each in auxiliary.items()}
    tasks, held_out = ray.put(prepared.tasks), ray.put(prepared.held_out)
    explorers = [
        placement.actor(Explorer, "explorer", name=f"explorer-{index}", bundle=index).create(
            config,
            prepared.model,
            engine_pool,
            buffer,
            tasks,
            held_out,
            scoring(config, placement, pools),
            prepared.run_id if config.mode == "explore" else "",
            pools,
            evaluation_pool,
            operators(config, prepared.model, placement, pools),
        )
        for index in range(config.explorer.count)
    ]
    return Actors(
        buffer, trainer, explorers, engine_pool, engines, auxiliary, evaluation_pool, evaluation_engines, keeper
    )


def create_engines(
    placement: Placement, count: int, part: str = "engines", name: str = "engine"
) -> list[Handle[RolloutEngine]]:
    """Create engines, one per bundle of a part; they are not started yet."""
    return [
        placement.actor(RolloutEngine, part, name=f"{name}-{index}", bundle=index).create() for index in range(count)
    ]


def create_auxiliary(models: Mapping[str, AuxiliaryConfig], placement: Placement) -> dict[str, Auxiliary]:
    """Create the actors of the auxiliary models, by name; they are not started yet."""
    return {
        name: Auxiliary(
            placement.actor(EnginePool, "engine_pool", name=f"engine_pool-{name}").create(),
            create_engines(placement, each.engine.count, f"auxiliary-{name}", f"auxiliary-{name}"),
        )
        for name, each in models.items()
    }


def judges(config: RunConfig, pools: Mapping[str, Handle[EnginePool]]) -> Models | None:
    """Return what gives those that score elsewhere than the Explorers the auxiliary models of these pools."""
    askers = {
        "beside": config.explorer.count,
        "pool": config.explorer.count * config.reward.actors,
        "serve": sum(model.replicas.max for model in config.reward.models.values()),
    }[config.reward.placement]
    return partial(auxiliary_models, config.auxiliary, dict(pools), share=1 / askers) if pools else None


def scoring(
    config: RunConfig, placement: Placement, pools: Mapping[str, Handle[EnginePool]]
) -> Callable[[], Scoring] | None:
    """Return what gives an Explorer those that score for it, who may ask the auxiliary models of these pools; None
    where it scores itself."""
    if config.reward.placement == "beside":
        return None
    if (service := reward_service(config)) is not None:
        from rayrft.rewards.service import ServedScoring

        return partial(ServedScoring, service, config.scoring)
    placed = placement.actor(RewardActor, "reward")
    create = _RewardActors(placed, config.scoring, config.plugins, judges(config, pools))
    return partial(ActorScoring, create, config.reward.actors)


def operators(
    config: RunConfig, model: str, placement: Placement, pools: Mapping[str, Handle[EnginePool]]
) -> Callable[[], Operators] | None:
    """Return what gives an Explorer the operators that verify for it, who may ask the auxiliary models of these pools;
    None where they work in its own processes."""
    pipelines = config.pipelines
    if not pipelines.experiences or pipelines.actors is None:
        return None
    share = 1 / (config.explorer.count * pipelines.actors.count)
    models = partial(auxiliary_models, config.auxiliary, dict(pools), share=share) if pools else None
    asked = Asked(models, config.auxiliary, config.scoring)
    placed = placement.actor(OperatorActor, "operators")
    create = _OperatorActors(placed, experience_chain(config, model), pipelines, asked)
    return partial(ActorOperators, create, pipelines.actors.count)


def batches(config: RunConfig, model: str) -> Callable[[], BatchPipeline] | None:
    """Return what gives the Trainer the operators on batches, if there are any."""
    if not config.pipelines.batch:
        return None
    return partial(BatchPipeline, config.pipelines, batch_chain(config, model))


def reward_service(config: RunConfig) -> RewardService | None:
    """Return the applications on Ray Serve that score for the run, if it has them."""
    if config.reward.placement != "serve" or not config.rolls_out or config.mode == "serve":
        return None
    from rayrft.rewards.service import RewardService

    name = f"{config.name}-bench" if config.mode == "bench" else config.name  # both may be on one cluster
    return RewardService.of(name, config.scoring, config.plugins)


async def start_actors(
    actors: Actors, config: RunConfig, prepared: Prepared, waits: Waits, rewards: Awaitable[None]
) -> str | None:
    """Start all actors concurrently; return when the run can begin, with the trainer's warning about the model. The
    Explorers start when ``rewards`` are there."""
    import ray

    engine, trainer = config.explorer.engine, actors.trainer
    actors = actors.tracked(waits)
    others: list[Awaitable[Any]] = [
        handle.call(
            RolloutEngine.start,
            prepared.model,
            engine,
            max_length=config.model.max_length,
            dtype=config.model.dtype,
            seed=config.seed + index,
        )
        for index, handle in enumerate([*actors.engines, *actors.evaluation_engines])
    ]
    others.append(_start_explorers(actors.explorers, rewards))
    others += [serve_auxiliary(each, config.auxiliary[name], config.seed) for name, each in actors.auxiliary.items()]
    if actors.keeper is not None:
        others.append(actors.keeper.call(SessionKeeper.start))
    if actors.trainer is None or trainer is None:
        await asyncio.gather(*others)
        return None
    for name, rows in prepared.demonstrations.items():
        others.append(actors.buffer.call(Buffer.load, name, [ray.put(pack(to_batch(rows)))]))
    setup = RankSetup(
        trainer,
        config.trainer,
        prepared.model,
        config.model.dtype,
        config.explorer.sampling.temperature,
        config.plugins,
        config.seed,
        config.model.template,
    )
    warning, *_ = await asyncio.gather(actors.trainer.call(Trainer.start, config.folder, setup), *others)
    return warning


async def _start_explorers(explorers: list[Handle[Explorer]], rewards: Awaitable[None]) -> None:
    await rewards
    await asyncio.gather(*(explorer.call(Explorer.start) for explorer in explorers))


def start_auxiliary(actors: Auxiliary, config: AuxiliaryConfig, seed: int) -> list[Awaitable[None]]:
    """Start the engines of an auxiliary model, by engine; they take requests once they are in their pool."""
    return [
        handle.call(
            RolloutEngine.start,
            config.model,
            config.engine,
            max_length=config.max_length,
            dtype=config.dtype,
            seed=seed + index,
            structured=True,
        )
        for index, handle in enumerate(actors.engines)
    ]


async def serve_auxiliary(actors: Auxiliary, config: AuxiliaryConfig, seed: int) -> None:
    """Start the engines of an auxiliary model, and let them take requests."""
    await asyncio.gather(*start_auxiliary(actors, config, seed))
    await actors.engine_pool.call(EnginePool.join, actors.members)


async def until_failed(actor: Handle[Watched]) -> None:
    """Return only by raising the error with which an actor fails, or that of its death."""
    await when_reachable(lambda: actor.call(Watched.watch))


async def _until_dead_for_good(buffer: Handle[Buffer]) -> None:
    """Return only when the Buffer, which Ray restarts, fails to come back."""
    from ray.exceptions import ActorUnavailableError

    while True:
        await buffer.call(Buffer.pid)  # it is up
        with contextlib.suppress(ActorUnavailableError):
            await buffer.with_options(max_task_retries=0).call(Buffer.watch)


@dataclass(frozen=True)
class _RewardActors:
    """Creates reward actors in their placement group; it is sent to the Explorer, which replaces those that die."""

    placed: PlacedClass[[RewardConfig, list[Path], Models | None], RewardActor]
    config: RewardConfig
    plugins: list[Path]
    models: Models | None

    def __call__(self) -> Handle[RewardActor]:
        return self.placed.create(self.config, self.plugins, self.models)


@dataclass(frozen=True)
class _OperatorActors:
    """Creates the actors of operators in their placement group, likewise."""

    placed: PlacedClass[[GroupChain, PipelinesConfig, Asked], OperatorActor]
    chain: GroupChain
    config: PipelinesConfig
    asked: Asked

    def __call__(self) -> Handle[OperatorActor]:
        return self.placed.create(self.chain, self.config, self.asked)
