"""Answers per second of the loop of Explorer, engines and Buffer, beside the same engines fed by a plain driver.

Nothing is trained: a consumer leases and acknowledges every batch at once. Both sides have the same engines, prompts,
sampling and number of groups in flight, and take turns. Weights are random and no group is dropped. The Explorer's
processor seconds per group are printed, too, and how long after its first and its last group the first batch is leased.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.schedule import StagePlan
from rayrft.config import RunConfig, StageConfig, load_config
from rayrft.core.preflight import Prepared, prepare
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.explorer.engines.client import EngineClient
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.explorer.engines.exchange import Request, Sampling
from rayrft.explorer.engines.pool import EnginePool, Member
from rayrft.explorer.explorer import Explorer
from rayrft.runtime.waits import Waits
from tests.bench.local_ray import actor, start_ray
from tests.conftest import ROOT


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

    def __init__(self, config: RunConfig, engines: int, over_sampling: float, staleness: int) -> None:
        self._config, self._over_sampling, self._staleness = config, over_sampling, staleness
        self._stage: StageConfig = config.stages[-1]
        self._in_flight = int(over_sampling * (staleness + 1) * self._stage.groups)
        self._prepared: Prepared = prepare(config, "bench")
        self._engines = [actor(LabelledEngine, f"engine-{number}") for number in range(engines)]
        self._pool = actor(EnginePool, "engine_pool")
        self._buffer = actor(
            Buffer, "buffer", "bench", config.buffer_folder, config.buffer, 0, self._prepared.task_set,
            self._prepared.limits,
        )  # fmt: skip
        tasks, held_out = ray.put(self._prepared.tasks), ray.put(self._prepared.held_out)
        self._explorer = actor(
            MeasuredExplorer, "explorer", config, self._prepared.model, self._pool, self._buffer, tasks, held_out, None
        )
        self._step, self._taken = 0, 0

    async def start(self) -> None:
        """Start the engines and open the stage."""
        config = self._config
        given = self._prepared.model, config.explorer.engine
        length, dtype = config.model.max_length, config.model.dtype
        starts = [
            engine.call(RolloutEngine.start, *given, max_length=length, dtype=dtype, seed=i)
            for i, engine in enumerate(self._engines)
        ]
        await asyncio.gather(*starts, self._explorer.call(Explorer.start))
        await self._pool.call(EnginePool.join, [Member(engine, 0) for engine in self._engines])

    async def bare(self, steps: int) -> float:
        """Return answers per second of the engines, fed by this process."""
        tokenizer, sampling = ChatTokenizer(self._prepared.model), self._config.explorer.sampling
        client = EngineClient(self._pool, Waits("bench"))
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
        stage, buffer, first = self._stage, self._buffer, self._step
        name = f"{stage.name}-{first}"
        plan = StagePlan(
            stage.groups, stage.group_size, max_staleness=self._staleness, over_sampling=self._over_sampling,
            version=first, name=name,
        )  # fmt: skip
        await buffer.call(Buffer.open_stage, plan)
        renamed = stage.model_copy(update={"name": name})
        exploring = asyncio.ensure_future(self._explorer.call(Explorer.explore, renamed))
        began, answers, cpu, leased = 0.0, 0, 0.0, (0.0, 0.0)
        for step in range(first, first + steps + 1):
            lease = await buffer.call(Buffer.lease, step, 1, 600.0)
            if step == first:
                now, finished = time.time(), await self._explorer.call(MeasuredExplorer.finished)
                leased = now - finished[0], now - finished[stage.groups - 1]
                began, cpu = time.perf_counter(), await self._explorer.call(MeasuredExplorer.cpu_s)
            else:
                answers += lease.usual_rows
            await buffer.call(Buffer.ack, step)
            await asyncio.gather(*(engine.call(LabelledEngine.label, step + 1) for engine in self._engines))
            await buffer.call(Buffer.advance, step + 1)
        seconds = time.perf_counter() - began
        used = await self._explorer.call(MeasuredExplorer.cpu_s) - cpu
        self._step = first + steps + 1
        await buffer.call(Buffer.close_stage, name)
        await exploring
        await self._explorer.call(MeasuredExplorer.finished)
        return answers / seconds, used / (answers / stage.group_size) * 1e3, leased


async def measure(sides: Sides, rounds: int, steps: int) -> None:
    await sides.start()
    await sides.bare(1)
    await sides.loop(1)  # both have imported everything, and vLLM has seen these shapes
    ratios, first, last = [], [], []
    for number in range(rounds):
        bare = await sides.bare(steps)
        loop, milliseconds, (since_first, since_last) = await sides.loop(steps)
        ratios.append(loop / bare)
        first.append(since_first)
        last.append(since_last)
        ratio = f"bare {bare:.0f}/s, loop {loop:.0f}/s, {loop / bare:.2f}"
        print(f"{number}: {ratio}; Explorer {milliseconds:.1f} ms a group", flush=True)
    print(f"loop of bare: {np.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
    since = f"{np.median(first) * 1e3:.0f} ms after its first group, {np.median(last) * 1e3:.1f} ms after its last"
    print(f"the first batch is leased {since}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "jobs" / "quickstart.yaml")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="batches of a round")
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--over", type=float, default=1.0, help="over-sampling")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="further settings of the run")
    options = parser.parse_args()
    start_ray(4)
    settings = {"storage": tempfile.mkdtemp(prefix="bench-"), "explorer.drop_zero_variance": False}
    config = load_config(options.config, settings | dict(pair.split("=", 1) for pair in options.set))
    asyncio.run(measure(Sides(config, options.engines, options.over, options.staleness), options.rounds, options.steps))
    ray.shutdown()


if __name__ == "__main__":
    main()
