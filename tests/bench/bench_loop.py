"""Answers per second of the loop of Explorer, engines and Buffer, beside the same engines fed by a plain driver.

Nothing is trained: a consumer leases and acknowledges every batch at once. Both sides have the same engines, prompts,
sampling and groups in flight, and take turns. Weights are random and no group is dropped.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import ray

from rayrft.buffer.buffer import Buffer
from rayrft.config import RunConfig
from rayrft.core.preflight import PreparedRun
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.explorer.engines.client import EngineClient
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.explorer.engines.exchange import Request, Sampling
from rayrft.explorer.explorer import Explorer
from rayrft.runtime.waits import Waits
from tests.bench.helpers import Exploring, parse, quickstart, spread, start_engines, start_ray


class MeasuredExplorer(Explorer):
    """The Explorer, which tells how much of the processor it took, and when groups had finished."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._finished, put = list[float](), self.flow.writer.put

        async def noted(*given: Any, **named: Any) -> Any:
            self._finished.append(time.time())
            return await put(*given, **named)

        self.flow.writer.put = noted  # type: ignore[method-assign]

    async def finished(self) -> list[float]:
        """Return the times since the last call."""
        finished, self._finished = self._finished, []
        return finished

    async def cpu_s(self) -> float:
        return time.process_time()


class LabelledEngine(RolloutEngine):
    """An engine that labels its tokens with a version that brings no weights."""

    async def label(self, version: int) -> None:
        await self._engine.update_weight_version(str(version))


class Sides:
    """Both sides, on the same engines."""

    def __init__(self, config: RunConfig, prepared: PreparedRun, over_sampling: float, staleness: int) -> None:
        self._config, self._prepared, self._stage = config, prepared, config.stages[-1]
        self._plan: dict[str, Any] = {"max_staleness": staleness, "over_sampling": over_sampling}
        self._in_flight = int(over_sampling * (staleness + 1) * self._stage.groups)
        self._run = Exploring(config, prepared, MeasuredExplorer)
        self._step, self._taken = 0, 0

    async def start(self) -> None:
        self._engines = await start_engines(self._config, self._prepared.model, LabelledEngine)
        await self._run.start(self._engines)

    async def bare(self, steps: int) -> float:
        """Return answers per second of the engines, fed by this process."""
        tokenizer, sampling = ChatTokenizer(self._prepared.model), self._config.explorer.sampling
        client = EngineClient(self._run.pool, Waits("bench"))
        count, n = steps * self._stage.groups, self._stage.group_size
        prompts = [tokenizer.prompt(task.messages) for task in self._prepared.tasks[self._taken : self._taken + count]]
        self._taken += count
        waiting = iter(prompts)
        asked = Sampling(sampling.temperature, sampling.max_tokens, tokenizer.stop_ids)

        async def loop() -> None:
            for prompt in waiting:
                await client.generate(Request(prompt, n, asked))

        began = time.perf_counter()
        await asyncio.gather(*(loop() for _ in range(self._in_flight)))
        return len(prompts) * n / (time.perf_counter() - began)

    async def loop(self, steps: int) -> tuple[float, float, tuple[float, float]]:
        """Return answers per second of the loop, from its second batch on, processor milliseconds of the Explorer per
        group, and seconds to the lease of the first batch since its first and its last group had finished."""
        first, buffer, explorer = self._step, self._run.buffer, self._run.explorer
        stage = self._stage.model_copy(update={"name": f"{self._stage.name}-{first}"})
        await self._run.open(stage, version=first, **self._plan)
        began, answers, cpu, leased = 0.0, 0, 0.0, (0.0, 0.0)
        for step in range(first, first + steps + 1):
            lease = await buffer.call(Buffer.lease, step, 1, 600.0)
            if step == first:
                now, finished = time.time(), await explorer.call(MeasuredExplorer.finished)
                leased = now - finished[0], now - finished[stage.groups - 1]
                began, cpu = time.perf_counter(), await explorer.call(MeasuredExplorer.cpu_s)
            else:
                answers += lease.usual_rows
            await buffer.call(Buffer.ack, step)
            await asyncio.gather(*(engine.call(LabelledEngine.label, step + 1) for engine in self._engines))
            await buffer.call(Buffer.advance, step + 1)
        seconds = time.perf_counter() - began
        used = await explorer.call(MeasuredExplorer.cpu_s) - cpu
        self._step = first + steps + 1
        await self._run.close()
        await explorer.call(MeasuredExplorer.finished)
        return answers / seconds, used / (answers / stage.group_size) * 1e3, leased


async def measure(sides: Sides, rounds: int, steps: int) -> None:
    await sides.start()
    await sides.bare(1)
    await sides.loop(1)  # both have imported everything, and vLLM has seen these shapes
    ratios, since = [], []
    for number in range(rounds):
        bare = await sides.bare(steps)
        loop, milliseconds, leased = await sides.loop(steps)
        ratios.append(loop / bare)
        since.append(leased)
        ratio = f"bare {bare:.0f}/s, loop {loop:.0f}/s, {loop / bare:.2f}"
        print(f"{number}: {ratio}; Explorer {milliseconds:.1f} ms a group", flush=True)
    print(f"loop of bare: {spread(ratios)}")
    first, last = np.median(since, axis=0) * 1e3
    print(f"the first batch is leased {first:.0f} ms after its first group, {last:.1f} ms after its last")


def main() -> None:
    options = parse(
        __doc__,
        engines=2,
        rounds=5,
        steps=(10, "batches of a round"),
        staleness=1,
        over=(1.0, "over-sampling"),
        set=([], "further settings of the run: key=value"),
    )
    start_ray()
    settings = {"explorer.drop_zero_variance": False, "explorer.engine.count": options.engines}
    config, prepared = quickstart(settings | dict(pair.split("=", 1) for pair in options.set))
    asyncio.run(measure(Sides(config, prepared, options.over, options.staleness), options.rounds, options.steps))
    ray.shutdown()


if __name__ == "__main__":
    main()
