"""The actors of a run: every actor but the Master, started in its placement group."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.log.shard import Shard
from rayrft.buffer.log.storage import Storage
from rayrft.config import RunConfig
from rayrft.core.placement import Placement, plan_placement
from rayrft.core.preflight import Prepared
from rayrft.experience import pack, to_batch
from rayrft.explorer.engine import RolloutEngine
from rayrft.explorer.engine_pool import EnginePool
from rayrft.explorer.explorer import Explorer
from rayrft.rewards import runs_inline
from rayrft.rewards.worker import RewardWorker
from rayrft.trainer.rank import RankSetup
from rayrft.trainer.trainer import Trainer
from rayrft.waits import TrackedActor, Waits


@dataclass(frozen=True)
class Actors:
    """Handles of the actors; ``explorer`` and ``engine_pool`` are None where nothing is rolled out."""

    buffer: Any
    trainer: Any
    explorer: Any | None
    engine_pool: Any | None
    engines: list[Any]
    """As they were created; which of them take requests the ``engine_pool`` knows."""
    shards: list[Any]
    """Of the Buffer, besides the first."""

    def watches(self) -> dict[str, Awaitable[Any]]:
        """For every actor a call that ends only when the actor fails."""
        actors = {"trainer": self.trainer}
        if self.explorer is not None and self.engine_pool is not None:
            actors |= {"explorer": self.explorer, "engine_pool": self.engine_pool}
        actors |= self.engines_by_name()
        watches = {name: actor.watch.remote() for name, actor in actors.items()}
        return {**watches, "buffer": _until_dead_for_good(self.buffer)}

    def followed(self, waits: Waits) -> Actors:
        """The same to the Master, whose calls are then among its ``waits``."""
        return replace(
            self,
            buffer=TrackedActor("buffer", self.buffer, waits, endless=("stats",)),
            trainer=TrackedActor("trainer", self.trainer, waits),
            explorer=TrackedActor("explorer", self.explorer, waits, endless=("explore",)) if self.explorer else None,
            engine_pool=TrackedActor("engine_pool", self.engine_pool, waits) if self.engine_pool else None,
            engines=[TrackedActor(name, engine, waits) for name, engine in self.engines_by_name().items()],
        )

    def signs_of_life(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        """For every part a call that it answers at once, with what it waits for where it waits for others."""
        # Every part before those that it keeps waiting.
        parts = {"trainer": self.trainer, "explorer": self.explorer, "buffer": self.buffer}
        asks = {name: part.waiting.remote for name, part in parts.items() if part is not None}
        pool = {"engine_pool": self.engine_pool} if self.engine_pool is not None else {}
        return asks | {name: actor.pid.remote for name, actor in (pool | self.engines_by_name()).items()}

    def engines_by_name(self) -> dict[str, Any]:
        return {f"engine-{index}": engine for index, engine in enumerate(self.engines)}

    def kill_restartable(self) -> None:
        """End the actors that Ray would start again: without their placement group they never could."""
        import ray

        for actor in (self.buffer, *self.shards):
            ray.kill(actor)


def create_actors(config: RunConfig, prepared: Prepared, placement: Placement, logged: list[int]) -> Actors:
    """Create the actors; they are not started yet, but can be watched. ``logged``: see `Buffer`."""
    import ray

    shards = _create_shards(config, placement)
    buffer = placement.actor(Buffer, "buffer", name="buffer", bundle=0, restarts=True, retries=-1).remote(
        prepared.run_id,
        config.buffer_location,
        config.buffer,
        config.seed,
        prepared.task_set,
        shards,
        prepared.limits,
        logged,
    )
    trainer = placement.actor(Trainer, "trainer", name="trainer").remote(config.trainer, placement.ranks)
    if "explorer" not in {part.name for part in plan_placement(config)}:
        return Actors(buffer, trainer, None, None, [], shards)
    engine = config.explorer.engine
    engines = [
        placement.actor(RolloutEngine, "engines", name=f"engine-{index}", bundle=index).remote()
        for index in range(engine.count)
    ]
    engine_pool = placement.actor(EnginePool, "engine_pool", name="engine_pool").remote()
    reward = config.reward
    reward_worker = None if runs_inline(reward.name) else placement.actor(RewardWorker, "reward")
    explorer = placement.actor(Explorer, "explorer", name="explorer").remote(
        config,
        prepared.model,
        engine_pool,
        buffer,
        ray.put(prepared.tasks),
        ray.put(prepared.held_out),
        _RewardWorkerFactory(reward_worker, reward, config.plugins),
    )
    return Actors(buffer, trainer, explorer, engine_pool, engines, shards)


def _create_shards(config: RunConfig, placement: Placement) -> list[Any]:
    """The Buffer's shards besides the first, which is in its own process."""
    return [
        placement.actor(Shard, "buffer", name=f"shard-{number}", bundle=number, restarts=True, retries=-1).remote(
            Storage(config.buffer_location).folder(f"shard-{number}"), config.buffer
        )
        for number in range(1, config.buffer.shards)
    ]


async def start_actors(actors: Actors, config: RunConfig, prepared: Prepared, waits: Waits) -> str | None:
    """Bring every actor up, side by side; returns when the run can begin, with what is unusual about the model."""
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
    actors = actors.followed(waits)
    starting = [actors.trainer.start.remote(config.folder, setup)]
    for index, each in enumerate(actors.engines):
        starting.append(
            each.start.remote(
                prepared.model,
                engine,
                max_length=config.model.max_length,
                dtype=config.model.dtype,
                seed=config.seed + index,
            )
        )
    if actors.explorer is not None:
        starting.append(actors.explorer.start.remote())
    for name, rows in prepared.demonstrations.items():
        starting.append(actors.buffer.load.remote(name, [ray.put(pack(to_batch(rows)))]))
    remark, *_ = await asyncio.gather(*starting)
    return remark


async def _until_dead_for_good(actor: Any) -> None:
    """Ends only when an actor that Ray starts again fails to come back."""
    from ray.exceptions import ActorUnavailableError

    while True:
        await actor.pid.remote()  # it is up
        with contextlib.suppress(ActorUnavailableError):
            await actor.watch.options(max_task_retries=0).remote()


@dataclass(frozen=True)
class _RewardWorkerFactory:
    """Makes a reward worker in its placement group; travels to the Explorer, which replaces workers that hang."""

    actor_class: Any
    config: Any
    plugins: Any

    def __call__(self) -> Any:
        return self.actor_class.remote(self.config, self.plugins)
