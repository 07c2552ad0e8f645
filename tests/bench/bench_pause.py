"""What updates under running requests cost an engine: their KV cache kept, or computed again.

One real engine decodes answers whose lengths are log-normal, and is paused now and then, as for new weights; what an
update itself takes is not in it. The throughput has the prefills that follow a pause. All ways have the same lengths.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import numpy as np
import ray

from rayrft.config import RunConfig
from rayrft.core.preflight import PreparedRun
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.explorer.engines.client import EngineClient
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.explorer.engines.exchange import Request, Sampling
from rayrft.runtime.handle import Handle
from rayrft.runtime.waits import Waits
from tests.bench.helpers import parse, quickstart, spread, start_engines, start_pool, start_ray

_MEDIAN, _LIMIT = 40, 800
_WAYS = {"no updates": None, "cache kept": True, "computed again": False}


async def update(engine: Handle[RolloutEngine], keep_cache: bool, every_s: float, pauses: list[float]) -> None:
    """Pause again and again. Never returns."""
    while True:
        await asyncio.sleep(every_s)
        began = time.perf_counter()
        await engine.call(RolloutEngine.pause, keep_cache)
        await engine.call(RolloutEngine.resume)
        pauses.append(time.perf_counter() - began)


async def measure(
    config: RunConfig, prepared: PreparedRun, rounds: int, count: int, in_flight: int, every: float
) -> None:
    [engine] = engines = await start_engines(config, prepared.model)
    client, tokenizer = EngineClient(await start_pool(engines), Waits("bench")), ChatTokenizer(prepared.model)
    prompts = [tokenizer.prompt(task.messages) for task in prepared.tasks]

    async def decode(lengths: list[int]) -> float:
        """Return tokens per second."""
        waiting: Iterator[tuple[int, int]] = iter(enumerate(lengths))
        sampled = 0

        async def user() -> None:
            nonlocal sampled
            for number, tokens in waiting:
                # Greedy answers of a random model hardly ever end by themselves.
                request = Request(prompts[number % len(prompts)], 1, Sampling(0.0, tokens, ()))
                [completion] = await client.generate(request)
                sampled += len(completion.token_ids)

        began = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(in_flight)))
        return sampled / (time.perf_counter() - began)

    speeds, pauses = {way: list[float]() for way in _WAYS}, {way: list[float]() for way in _WAYS}
    await decode([_MEDIAN] * in_flight)  # vLLM has seen these shapes
    for number in range(rounds):
        rng = np.random.default_rng(number)
        lengths = np.exp(rng.normal(np.log(_MEDIAN), 1.0, count)).clip(3, _LIMIT).astype(int).tolist()
        for way, keep_cache in _WAYS.items():
            updates = [] if keep_cache is None else [update(engine, keep_cache, every, pauses[way])]
            updating = asyncio.gather(*updates)
            speeds[way].append(await decode(lengths))
            updating.cancel()
            await asyncio.gather(updating, return_exceptions=True)
            # One that was cancelled in a pause would leave the engine in it.
            await engine.call(RolloutEngine.resume)
            print(f"{number}: {way:15} {speeds[way][-1]:6.0f} tokens/s", flush=True)
    for way, each in speeds.items():
        paused = f", a pause {np.median(pauses[way]) * 1e3:.0f} ms ({len(pauses[way])})" if pauses[way] else ""
        print(f"{way:15} {spread(np.divide(each, speeds['no updates']))} times{paused}")


def main() -> None:
    options = parse(__doc__, rounds=3, answers=384, in_flight=64, every=(2.0, "seconds between updates"))
    start_ray()
    lengths = {"model.max_length": _LIMIT + 100, "explorer.sampling.max_tokens": _LIMIT}
    run = quickstart({**lengths, "explorer.engine.count": 1, "explorer.engine.kv_cache_mib": 512})
    asyncio.run(measure(*run, options.rounds, options.answers, options.in_flight, options.every))
    ray.shutdown()


if __name__ == "__main__":
    main()
