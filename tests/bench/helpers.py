"""What the benches share: their options, a Ray of their own, the parts of a run in it, and how figures are written."""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.schedule import StagePlan
from rayrft.config import RunConfig, StageConfig, load_config
from rayrft.core.preflight import PreparedRun, prepare
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.explorer.engines.pool import EnginePool, Member
from rayrft.explorer.explorer import Explorer
from rayrft.runtime.handle import Handle
from tests.conftest import ROOT


def parse(doc: str | None, **options: Any) -> argparse.Namespace:
    """Parse the command line. An option is given by its default, or by a pair (default, help): False makes a switch, a
    list takes several values, and a type is that of the value, which is None by default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, given in options.items():
        default, about = given if isinstance(given, tuple) else (given, None)
        how: dict[str, Any] = {"type": type(default), "default": default}
        if default is False:
            how = {"action": "store_true"}
        elif isinstance(default, list):
            how = {"type": type(default[0]) if default else str, "nargs": "*", "default": default}
        elif isinstance(default, type):
            how = {"type": default}
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"{about or ''} (default: {default})", **how)
    return parser.parse_args()


def spread(values: Iterable[float], form: str = ".2f") -> str:
    """Write the median, with the range in brackets."""
    found = np.array([*values])
    return f"{np.median(found):{form}} ({found.min():{form}}-{found.max():{form}})"


def percentiles(seconds: Sequence[float] | np.ndarray, form: str = ".1f") -> str:
    """Write the median and the 99th percentile of times, in milliseconds."""
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return f"p50 {p50:{form}} ms, p99 {p99:{form}} ms"


def race(contenders: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 0) -> dict[str, np.ndarray]:
    """Call every contender once a round, in an order that rotates. Return the seconds of each by the clock and of the
    processor: a row for each round after the first ``warm_up``."""
    seconds, order = {name: list[tuple[float, float]]() for name in contenders}, list(contenders)
    for number in range(warm_up + rounds):
        first = number % len(order)
        for name in order[first:] + order[:first]:
            wall, processor = time.perf_counter(), time.process_time()
            contenders[name]()
            seconds[name].append((time.perf_counter() - wall, time.process_time() - processor))
    return {name: np.array(times[warm_up:]) for name, times in seconds.items()}


def start_ray(cpus: int = 4, *, dashboard: bool = False) -> None:
    """Start Ray with so many logical CPUs.

    Its workers run at the niceness of any other process. By default they give way to everything, also to what they are
    measured beside.
    """
    os.environ.update(RAY_worker_niceness="0")
    ray.init(
        address="local",
        num_cpus=cpus,
        namespace="rayrft",
        log_to_driver=False,
        logging_level="ERROR",
        include_dashboard=dashboard,
    )


def actor(cls: Any, name: str, *arguments: Any) -> Handle[Any]:
    """Start an actor whose calls run concurrently."""
    return Handle(name, ray.remote(cls).options(num_cpus=0, max_concurrency=100_000).remote(*arguments))


def quickstart(settings: dict[str, Any]) -> tuple[RunConfig, PreparedRun]:
    """Return the quickstart's config with these settings, and what its run prepares in a new storage."""
    config = load_config(ROOT / "jobs" / "quickstart.yaml", {"storage": tempfile.mkdtemp(prefix="bench-")} | settings)
    return config, prepare(config, "bench")


async def start_engines(config: RunConfig, model: str, cls: type[RolloutEngine] = RolloutEngine) -> list[Handle[Any]]:
    """Start the engines of a config."""
    engines = [actor(cls, f"engine-{number}") for number in range(config.explorer.engine.count)]
    given, length, dtype = (model, config.explorer.engine), config.model.max_length, config.model.dtype
    starts = (
        each.call(RolloutEngine.start, *given, max_length=length, dtype=dtype, seed=seed)
        for seed, each in enumerate(engines)
    )
    await asyncio.gather(*starts)
    return engines


async def start_pool(engines: list[Handle[Any]]) -> Handle[EnginePool]:
    """Start a pool of engines."""
    pool = actor(EnginePool, "engine_pool")
    await pool.call(EnginePool.join, [Member(engine, 0) for engine in engines])
    return pool


class Exploring:
    """The Explorer and the Buffer of a run, around its engines or their stand-ins."""

    def __init__(self, config: RunConfig, prepared: PreparedRun, explorer: type[Explorer] = Explorer) -> None:
        self._config, self._prepared, self._class = config, prepared, explorer

    async def start(self, engines: list[Handle[Any]]) -> None:
        config, prepared, folder = self._config, self._prepared, Path(tempfile.mkdtemp(prefix="bench-"))
        self.pool = await start_pool(engines)
        self.buffer = actor(Buffer, "buffer", "bench", folder, config.buffer, 0, prepared.task_set, prepared.limits)
        given: Any = config, prepared.tokenizer, self.pool, self.buffer, prepared.tasks, [], None
        self.explorer = actor(self._class, "explorer", *given)
        await self.explorer.call(Explorer.start)
        self._actors = [self.explorer, self.buffer, self.pool, *engines]

    async def open(self, stage: StageConfig, **plan: Any) -> None:
        """Open a stage, and start to explore it."""
        planned = StagePlan(stage.groups, stage.group_size, name=stage.name, **plan)
        await self.buffer.call(Buffer.open_stage, planned)
        self._name, self._running = (
            stage.name,
            asyncio.ensure_future(self.explorer.call(Explorer.explore, stage, "explorer-0")),
        )

    async def close(self) -> None:
        """Close the stage; return when the Explorer has ended it."""
        await self.buffer.call(Buffer.close_stage, self._name)
        await self._running

    def kill(self) -> None:
        """End the actors, the engines, too."""
        for each in self._actors:
            each.kill()
