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
from rayrft.core.weight_sync import WeightSync
from rayrft.experience import pack, to_batch
from rayrft.explorer.engine import RolloutEngine
from rayrft.explorer.explorer import Explorer
from rayrft.rewards import runs_inline
from rayrft.rewards.worker import RewardWorker
from rayrft.trainer.rank import RankSetup
from rayrft.trainer.trainer import Trainer
from rayrft.waits import TrackedActor, Waits


@dataclass(frozen=True)
class Actors:
    """Handles of the actors; ``explorer`` and ``weight_sync`` are None where nothing is rolled out."""

    buffer: Any
    trainer: Any
    explorer: Any | None
    weight_sync: Any | None
    engines: list[Any]
    shards: list[Any]
    """Of the Buffer, besides the first."""

    def watches(self) -> dict[str, Awaitable[Any]]:
        """For every actor a call that ends only when the actor fails."""
        actors = {"trainer": self.trainer}
        if self.explorer is not None and self.weight_sync is not None:
            actors |= {"explorer": self.explorer, "weight_sync": self.weight_sync}
        actors |= {f"engine-{index}": engine for index, engine in enumerate(self.engines)}
        watches = {name: actor.watch.remote() for name, actor in actors.items()}
        return {**watches, "buffer": _until_dead_for_good(self.buffer)}

    def followed(self, waits: Waits) -> Actors:
        """The same to the Master, whose calls are then among its ``waits``."""
        return replace(
            self,
            buffer=TrackedActor("buffer", self.buffer, waits, endless=("stats",)),
            trainer=TrackedActor("trainer", self.trainer, waits),
            explorer=TrackedActor("explorer", self.explorer, waits, endless=("explore",)) if self.explorer else None,
            weight_sync=TrackedActor("weight_sync", self.weight_sync, waits) if self.weight_sync else None,
            engines=[TrackedActor(f"engine-{index}", engine, waits) for index, engine in enumerate(self.engines)],
        )

    def signs_of_life(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        """For every part a call that it answers at once, with what it waits for where it waits for others."""
        parts = {"trainer": self.trainer, "weight_sync": self.weight_sync}
        parts |= {"explorer": self.explorer, "buffer": self.buffer}  # each before those that it keeps waiting
        parts = {name: part for name, part in parts.items() if part is not None}
        asks = {name: part.waiting.remote for name, part in parts.items()}
        return asks | {f"engine-{index}": engine.pid.remote for index, engine in enumerate(self.engines)}

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
    reward = config.reward
    reward_worker = None if runs_inline(reward.name) else placement.actor(RewardWorker, "reward")
    explorer = placement.actor(Explorer, "explorer", name="explorer").remote(
        config,
        prepared.model,
        engines,
        buffer,
        ray.put(prepared.tasks),
        ray.put(prepared.held_out),
        _RewardWorkerFactory(reward_worker, reward, config.plugins),
    )
    weight_sync = placement.actor(WeightSync, "weight_sync", name="weight_sync").remote(
        config.weight_sync,
        config.sync_backend,
        config.probe_bounds,
        trainer,
        engines,
        engine.tensor_parallel,
        [row.token_ids.tolist() for row in prepared.probe],
        [row.images for row in prepared.probe],
    )
    return Actors(buffer, trainer, explorer, weight_sync, engines, shards)


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
    if actors.weight_sync is not None:
        await actors.weight_sync.connect.remote()
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
