"""The actors of a run except the Master, in their placement groups."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rayrft.buffer.buffer import Buffer
from rayrft.config import RunConfig
from rayrft.config.reward import RewardConfig
from rayrft.core.placement import PlacedClass, Placement
from rayrft.core.preflight import Prepared
from rayrft.experience import pack, to_batch
from rayrft.explorer.engine import RolloutEngine
from rayrft.explorer.engine_pool import EnginePool
from rayrft.explorer.explorer import Explorer
from rayrft.handle import Handle, TrackedHandle
from rayrft.rewards import runs_inline
from rayrft.rewards.worker import RewardWorker
from rayrft.serve.keeper import SessionKeeper
from rayrft.trainer.commands import command_name
from rayrft.trainer.trainer import RankSetup, Trainer
from rayrft.waits import Waits


@dataclass(frozen=True)
class Actors:
    """Handles of the actors; ``explorer`` and ``engine_pool`` are None where nothing is rolled out."""

    buffer: Handle[Buffer]
    trainer: Handle[Trainer]
    explorer: Handle[Explorer] | None
    engine_pool: Handle[EnginePool] | None
    engines: list[Handle[RolloutEngine]]
    """As they were created; which of them take requests the ``engine_pool`` knows."""
    keeper: Handle[SessionKeeper] | None = None
    """Of the endpoint's sessions, if they are recorded."""

    def watches(self) -> dict[str, Awaitable[Any]]:
        """Return by actor a call that ends only when the actor fails."""
        watches: dict[str, Awaitable[Any]] = {"trainer": self.trainer.call(Trainer.watch)}
        if self.explorer is not None:
            watches["explorer"] = self.explorer.call(Explorer.watch)
        if self.engine_pool is not None:
            watches["engine_pool"] = self.engine_pool.call(EnginePool.watch)
        if self.keeper is not None:
            watches["keeper"] = self.keeper.call(SessionKeeper.watch)
        watches |= {engine.name: engine.call(RolloutEngine.watch) for engine in self.engines}
        return {**watches, "buffer": _until_dead_for_good(self.buffer)}

    def tracked(self, waits: Waits) -> Actors:
        """Return the same actors with handles that record calls as ``waits``."""
        serving = self.keeper is not None and self.explorer is None
        return replace(
            self,
            # Without an Explorer, groups come when they come.
            buffer=TrackedHandle(self.buffer, waits, endless=[Buffer.lease] if serving else []),
            trainer=TrackedHandle(self.trainer, waits, labels={Trainer.command: command_name}),
            explorer=TrackedHandle(self.explorer, waits, endless=[Explorer.explore]) if self.explorer else None,
            engine_pool=TrackedHandle(self.engine_pool, waits) if self.engine_pool else None,
            engines=[TrackedHandle(engine, waits) for engine in self.engines],
        )

    def signs_of_life(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        """Return by actor a call that it answers at once, with its `WaitReport` if it waits for others. An actor comes
        before those that it keeps waiting."""
        asks: dict[str, Callable[[], Awaitable[Any]]] = {"trainer": lambda: self.trainer.call(Trainer.waiting)}
        if (explorer := self.explorer) is not None:
            asks["explorer"] = lambda: explorer.call(Explorer.waiting)
        if (keeper := self.keeper) is not None:
            asks["keeper"] = lambda: keeper.call(SessionKeeper.pid)
        asks["buffer"] = lambda: self.buffer.call(Buffer.waiting)
        if (pool := self.engine_pool) is not None:
            asks["engine_pool"] = lambda: pool.call(EnginePool.pid)
        return asks | {engine.name: partial(engine.call, RolloutEngine.pid) for engine in self.engines}


def create_actors(config: RunConfig, prepared: Prepared, placement: Placement, logged: list[int]) -> Actors:
    """Create the actors; they are not started yet, but can be watched. ``logged``: see `Buffer`."""
    import ray

    buffer = placement.actor(Buffer, "buffer", name="buffer", restarts=True, retries=-1).create(
        prepared.run_id,
        config.buffer_folder,
        config.buffer,
        config.seed,
        prepared.task_set,
        prepared.limits,
        logged,
    )
    trainer = placement.actor(Trainer, "trainer", name="trainer").create(config.trainer, placement.ranks)
    if not config.rolls_out:
        return Actors(buffer, trainer, None, None, [])
    engine = config.explorer.engine
    engines = [
        placement.actor(RolloutEngine, "engines", name=f"engine-{index}", bundle=index).create()
        for index in range(engine.count)
    ]
    engine_pool = placement.actor(EnginePool, "engine_pool", name="engine_pool").create()
    keeper = None
    if config.records_sessions and config.endpoint is not None:
        [size] = {stage.group_size for stage in config.stages if stage.groups}
        keeper = placement.actor(SessionKeeper, "keeper", name="keeper").create(
            config.endpoint, config.name, size, buffer, drop_equal=prepared.drop_equal
        )
    if config.mode == "serve":
        return Actors(buffer, trainer, None, engine_pool, engines, keeper)
    reward = config.reward
    create_worker = (
        None
        if runs_inline(reward.name)
        else _RewardWorkerFactory(placement.actor(RewardWorker, "reward"), reward, config.plugins)
    )
    explorer = placement.actor(Explorer, "explorer", name="explorer").create(
        config,
        prepared.model,
        engine_pool,
        buffer,
        ray.put(prepared.tasks),
        ray.put(prepared.held_out),
        create_worker,
    )
    return Actors(buffer, trainer, explorer, engine_pool, engines, keeper)


async def start_actors(actors: Actors, config: RunConfig, prepared: Prepared, waits: Waits) -> str | None:
    """Start all actors concurrently; return when the run can begin, with the trainer's warning about the model."""
    import ray

    engine = config.explorer.engine
    setup = RankSetup(
        actors.trainer,
        config.trainer,
        prepared.model,
        config.model.dtype,
        config.explorer.sampling.temperature,
        config.plugins,
        config.seed,
    )
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
        for index, handle in enumerate(actors.engines)
    ]
    if actors.explorer is not None:
        others.append(actors.explorer.call(Explorer.start))
    if actors.keeper is not None:
        others.append(actors.keeper.call(SessionKeeper.start))
    for name, rows in prepared.demonstrations.items():
        others.append(actors.buffer.call(Buffer.load, name, [ray.put(pack(to_batch(rows)))]))
    warning, *_ = await asyncio.gather(actors.trainer.call(Trainer.start, config.folder, setup), *others)
    return warning


async def _until_dead_for_good(buffer: Handle[Buffer]) -> None:
    """Return only when the Buffer, which Ray restarts, fails to come back."""
    from ray.exceptions import ActorUnavailableError

    while True:
        await buffer.call(Buffer.pid)  # it is up
        with contextlib.suppress(ActorUnavailableError):
            await buffer.with_options(max_task_retries=0).call(Buffer.watch)


@dataclass(frozen=True)
class _RewardWorkerFactory:
    """Creates reward workers in their placement group; it is sent to the Explorer, which replaces workers that hang."""

    worker: PlacedClass[[RewardConfig, list[Path]], RewardWorker]
    config: RewardConfig
    plugins: list[Path]

    def __call__(self) -> Handle[RewardWorker]:
        return self.worker.create(self.config, self.plugins)
