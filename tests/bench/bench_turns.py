"""Tokens that are prefilled in the later turns of conversations, beside the fewest possible.

Conversations of several turns by the runner and the client, over two engines: each turn's prompt begins with all of the
turns before, whose keys and values are in the cache of the engine that had them, but for the last sampled token. The
fewest are that token and the observation; vLLM's cache is of whole blocks, so up to a block more is computed each time.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from typing import Any

import numpy as np
import ray
from vllm.outputs import RequestOutput

from rayrft.config import RunConfig, load_config
from rayrft.core.preflight import Prepared, prepare
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import Experience, Task
from rayrft.explorer.engines.client import EngineClient
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.explorer.engines.pool import EnginePool, Member
from rayrft.explorer.rollout import Runner
from rayrft.rewards import RewardResult, Transcript
from rayrft.runtime.waits import Waits
from tests.bench.local_ray import actor, start_ray
from tests.conftest import ROOT

_SAYS = "Look at it again, letter by letter, from the last one to the first: what is it?"


class CountingEngine(RolloutEngine):
    """An engine that counts what it prefills."""

    async def _run(self, token_ids: list[int], images: tuple[str, ...], *rest: Any) -> RequestOutput:
        output = await super()._run(token_ids, images, *rest)
        self._prefilled = [*getattr(self, "_prefilled", []), (len(token_ids), output.num_cached_tokens or 0)]
        return output

    async def prefilled(self) -> list[tuple[int, int]]:
        """Return length and cached tokens of every prompt."""
        return self._prefilled

    async def block_size(self) -> int:
        return int(self._engine.vllm_config.cache_config.block_size)


def fewest(row: Experience) -> int:
    """Return how many tokens the later turns of a conversation must prefill."""
    observed = (row.action_mask == 0)[row.prompt_length :].sum()
    turns = (np.diff(row.action_mask.astype(int)) == 1).sum() - 1
    return int(observed + turns)


async def measure(config: RunConfig, prepared: Prepared, groups: int, in_flight: int) -> None:
    engines = [actor(CountingEngine, f"engine-{number}") for number in range(config.explorer.engine.count)]
    given = prepared.model, config.explorer.engine
    length, dtype = config.model.max_length, config.model.dtype
    await asyncio.gather(
        *(each.call(RolloutEngine.start, *given, max_length=length, dtype=dtype, seed=0) for each in engines)
    )
    pool = actor(EnginePool, "engine_pool")
    await pool.call(EnginePool.join, [Member(engine, 0) for engine in engines])

    async def score(task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        return [RewardResult(0.0)] * len(transcripts)

    client = EngineClient(pool, Waits("bench"))
    runner = Runner(config, ChatTokenizer(prepared.model), client, score)
    waiting, rows = iter(list(enumerate(prepared.tasks[:groups]))), list[Experience]()

    async def loop() -> None:
        for number, task in waiting:
            rows.extend((await runner.run(task, f"group-{number}", 8, 1.0)).rows)

    await asyncio.gather(*(loop() for _ in range(in_flight)))
    lengths = {len(task) for task in map(ChatTokenizer(prepared.model).prompt, [t.messages for t in prepared.tasks])}
    prompts = [each for engine in engines for each in await engine.call(CountingEngine.prefilled)]
    later = [(size, cached) for size, cached in prompts if size > max(lengths)]
    computed, least = sum(size - cached for size, cached in later), sum(map(fewest, rows))
    block = await engines[0].call(CountingEngine.block_size)
    print(
        f"{len(rows)} conversations, {len(later)} later turns of {sum(size for size, _ in later)} tokens: "
        f"{computed} prefilled, {least} at least, {computed / least:.2f} times; "
        f"{(computed - least) / len(later):.1f} more a turn, with blocks of {block}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--engines", type=int, default=2)
    options = parser.parse_args()
    start_ray(4)
    says = [_SAYS] * (options.turns - 1)
    settings = {
        "storage": tempfile.mkdtemp(prefix="bench-"),
        "model.max_length": 1024,
        "explorer.engine.count": options.engines,
        "explorer.engine.kv_cache_mib": 512,
        "explorer.sampling.max_tokens": 32,
        "explorer.workflow": "multi_turn",
        "explorer.workflow_options": {"multi_turn": {"turns": says}},
    }
    config = load_config(ROOT / "jobs" / "quickstart.yaml", settings)
    asyncio.run(measure(config, prepare(config, "bench"), options.groups, options.in_flight))
    ray.shutdown()


if __name__ == "__main__":
    main()
