"""What a group costs the Explorer, by the number of groups in flight, with real calls between the actors.

An engine without vLLM answers so many requests at each of its steps, the oldest first, once all are in flight, so that
the others stay so; a consumer leases and acknowledges every batch at once. Processor seconds are those of the whole
process of the Explorer. The lag is how much later than due a timer of its event loop runs.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
import ray

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.schedule import StagePlan
from rayrft.config import RunConfig, load_config
from rayrft.core.preflight import Prepared, prepare
from rayrft.explorer.engines.exchange import Answering, Completion, Request, Stream
from rayrft.explorer.engines.pool import EnginePool, Member
from rayrft.explorer.explorer import Explorer
from tests.bench.local_ray import actor, start_ray
from tests.conftest import ROOT

_STEP_S, _TIMER_S = 0.02, 0.01


class PacedEngine(Answering):
    """Answers ``at_once`` requests at each step, each with answers of so many tokens; the first when ``in_flight`` have
    come."""

    def __init__(self, at_once: int, tokens: int, in_flight: int) -> None:
        super().__init__()
        self._at_once, self._answer, self._first = at_once, (5,) * tokens, in_flight
        self._asked: deque[asyncio.Future[None]] = deque()
        self._stepping: asyncio.Task[None] | None = None
        self._version = 0

    async def generate(self, request: Request, stream: Stream | None = None) -> list[Completion]:
        self._asked.append(asyncio.get_running_loop().create_future())
        if len(self._asked) == self._first:
            self._stepping = self._stepping or asyncio.create_task(self._step())
        await self._asked[-1]
        ids = (*self._answer, request.sampling.stop_token_ids[0])
        return [Completion(ids, (-1.0,) * len(ids), ((0, len(ids), self._version),), "stop")] * request.n

    async def label(self, version: int) -> None:
        """Label the tokens of later answers with this version of the weights."""
        self._version = version

    async def in_flight(self) -> int:
        return len(self._asked)

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(_STEP_S)
            for _ in range(min(self._at_once, len(self._asked))):
                answered = self._asked.popleft()
                if not answered.done():
                    answered.set_result(None)


class MeasuredExplorer(Explorer):
    """The Explorer, which tells how much of the processor it took, and how late its timers were."""

    async def measure(self) -> float:
        """Return the process's processor seconds; lags are measured from now on."""
        self._lags: list[float] = []
        self._timing = asyncio.create_task(self._time())
        return time.process_time()

    async def measured(self) -> tuple[float, list[float]]:
        self._timing.cancel()
        return time.process_time(), self._lags

    async def _time(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _TIMER_S
            await asyncio.sleep(_TIMER_S)
            self._lags.append(loop.time() - due)


async def measure(config: RunConfig, prepared: Prepared, in_flight: int, groups: int, at_once: int) -> str:
    """Return a row of the table."""
    stage = config.stages[-1]
    waves = in_flight // stage.groups
    engine = actor(PacedEngine, "engine-0", at_once, config.explorer.sampling.max_tokens - 1, waves * stage.groups)
    pool = actor(EnginePool, "engine_pool")
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    buffer = actor(Buffer, "buffer", "bench", folder, config.buffer, 0, prepared.task_set, prepared.limits)
    explorer = actor(MeasuredExplorer, "explorer", config, prepared.model, pool, buffer, prepared.tasks, [], None)
    await explorer.call(Explorer.start)
    await pool.call(EnginePool.join, [Member(engine, 0)])
    plan = StagePlan(
        stage.groups, stage.group_size, max_staleness=waves - 1, over_sampling=1.0, version=0,
        name=stage.name,
    )  # fmt: skip
    await buffer.call(Buffer.open_stage, plan)
    exploring = asyncio.ensure_future(explorer.call(Explorer.explore, stage))
    warm_up, steps, flying = 10, groups // stage.groups, list[int]()
    began = cpu = 0.0
    for step in range(warm_up + steps):
        if step == warm_up:
            began, cpu = time.perf_counter(), await explorer.call(MeasuredExplorer.measure)
        await buffer.call(Buffer.lease, step, 1, 60.0)
        await buffer.call(Buffer.ack, step)
        await engine.call(PacedEngine.label, step + 1)
        await buffer.call(Buffer.advance, step + 1)
        flying.append(await engine.call(PacedEngine.in_flight))
    seconds = time.perf_counter() - began
    ended, lags = await explorer.call(MeasuredExplorer.measured)
    await buffer.call(Buffer.close_stage, stage.name)
    await exploring
    for each in (explorer, buffer, pool, engine):
        each.kill()
    count = steps * stage.groups
    lag = np.quantile(lags, [0.5, 0.99]) * 1e3
    return (
        f"{in_flight:6} in flight (at the engine {np.median(flying[warm_up:]):.0f}): {(ended - cpu) / count * 1e3:.2f} "
        f"ms of a core per group, {count / seconds:.0f} groups/s, lag p50 {lag[0]:.1f} ms, p99 {lag[1]:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "jobs" / "quickstart.yaml")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[32, 320, 3_200, 10_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=4_000, help="groups that are measured")
    parser.add_argument("--at-once", type=int, default=8, help="requests that are answered at each step of 20 ms")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="further settings of the run")
    options = parser.parse_args()
    start_ray(4)
    settings = {
        "storage": tempfile.mkdtemp(prefix="bench-"),
        "explorer.drop_zero_variance": False,
        "explorer.sampling.max_tokens": 8,
    }
    config = load_config(options.config, settings | dict(pair.split("=", 1) for pair in options.set))
    prepared = prepare(config, "bench")
    for number in range(options.rounds):
        for in_flight in options.in_flight:
            row = asyncio.run(measure(config, prepared, in_flight, options.groups, options.at_once))
            print(f"{number}: {row}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
