"""What a group costs the Explorer, by the number of groups in flight, with real calls between the actors.

An engine without vLLM answers so many requests at each of its steps, the oldest first, once all are in flight.
Processor seconds are those of the Explorer's process. The lag is how late a timer of its event loop runs.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

import numpy as np
import ray

from rayrft.buffer.buffer import Buffer
from rayrft.config import RunConfig
from rayrft.core.preflight import PreparedRun
from rayrft.explorer.engines.exchange import Answering, Completion, Request, Stream
from rayrft.explorer.explorer import Explorer
from tests.bench.helpers import Exploring, actor, parse, percentiles, quickstart, start_ray

_STEP_S, _TIMER_S, _WARM_UP = 0.02, 0.01, 10


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

    async def label(self, version: int) -> int:
        """Label the tokens of later answers with this version of the weights; return the requests in flight."""
        self._version = version
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


async def measure(config: RunConfig, prepared: PreparedRun, in_flight: int, groups: int, at_once: int) -> str:
    """Return a row of the table."""
    stage = config.stages[-1]
    waves = in_flight // stage.groups
    engine = actor(PacedEngine, "engine-0", at_once, config.explorer.sampling.max_tokens - 1, waves * stage.groups)
    run = Exploring(config, prepared, MeasuredExplorer)
    await run.start([engine])
    await run.open(stage, max_staleness=waves - 1, over_sampling=1.0, version=0)
    steps, flying = groups // stage.groups, list[int]()
    began = cpu = 0.0
    for step in range(_WARM_UP + steps):
        if step == _WARM_UP:
            began, cpu = time.perf_counter(), await run.explorer.call(MeasuredExplorer.measure)
        await run.buffer.call(Buffer.lease, step, 1, 60.0)
        await run.buffer.call(Buffer.ack, step)
        flying.append(await engine.call(PacedEngine.label, step + 1))
        await run.buffer.call(Buffer.advance, step + 1)
    seconds = time.perf_counter() - began
    ended, lags = await run.explorer.call(MeasuredExplorer.measured)
    await run.close()
    run.kill()
    count = steps * stage.groups
    return (
        f"{in_flight:6} in flight (at the engine {np.median(flying[_WARM_UP:]):.0f}): "
        f"{(ended - cpu) / count * 1e3:.2f} ms of a core per group, {count / seconds:.0f} groups/s, "
        f"lag {percentiles(lags)}"
    )


def main() -> None:
    options = parse(
        __doc__,
        in_flight=[32, 320, 3_200, 10_000],
        rounds=3,
        groups=(4_000, "groups that are measured"),
        at_once=(8, "requests that are answered at each step of 20 ms"),
    )
    start_ray()
    config, prepared = quickstart({"explorer.drop_zero_variance": False, "explorer.sampling.max_tokens": 8})
    for number in range(options.rounds):
        for in_flight in options.in_flight:
            row = asyncio.run(measure(config, prepared, in_flight, options.groups, options.at_once))
            print(f"{number}: {row}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
