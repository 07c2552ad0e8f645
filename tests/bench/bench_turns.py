"""Tokens that are prefilled in the later turns of conversations, beside the fewest possible.

Each turn's prompt begins with all of the turns before, whose keys and values are in the cache of the engine that had
them, but for the last sampled token. The fewest are that token and the observation; vLLM's cache is of whole blocks.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import ray
from vllm.outputs import RequestOutput

from rayrft.config import RunConfig
from rayrft.core.preflight import PreparedRun
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import Experience, Task
from rayrft.explorer.engines.client import EngineClient
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.explorer.rollout import Runner
from rayrft.rewards import RewardResult, Transcript
from rayrft.runtime.waits import Waits
from tests.bench.helpers import parse, quickstart, start_engines, start_pool, start_ray

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


async def measure(config: RunConfig, prepared: PreparedRun, groups: int, in_flight: int) -> None:
    engines = await start_engines(config, prepared.model, CountingEngine)
    pool, tokenizer = await start_pool(engines), ChatTokenizer(prepared.model)

    async def score(task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        return [RewardResult(0.0)] * len(transcripts)

    runner = Runner(config, tokenizer, EngineClient(pool, Waits("bench")), score)
    waiting, rows = iter(list(enumerate(prepared.tasks[:groups]))), list[Experience]()

    async def loop() -> None:
        for number, task in waiting:
            rows.extend((await runner.run(task, f"group-{number}", 8, 1.0)).rows)

    await asyncio.gather(*(loop() for _ in range(in_flight)))
    longest = max(len(tokenizer.prompt(task.messages)) for task in prepared.tasks)
    prompts = [each for engine in engines for each in await engine.call(CountingEngine.prefilled)]
    later = [(size, cached) for size, cached in prompts if size > longest]
    computed, least = sum(size - cached for size, cached in later), sum(map(fewest, rows))
    block = await engines[0].call(CountingEngine.block_size)
    print(
        f"{len(rows)} conversations, {len(later)} later turns of {sum(size for size, _ in later)} tokens: "
        f"{computed} prefilled, {least} at least, {computed / least:.2f} times; "
        f"{(computed - least) / len(later):.1f} more a turn, with blocks of {block}"
    )


def main() -> None:
    options = parse(__doc__, turns=6, groups=64, in_flight=16, engines=2)
    start_ray()
    run = quickstart(
        {
            "model.max_length": 1024,
            "explorer.engine.count": options.engines,
            "explorer.engine.kv_cache_mib": 512,
            "explorer.sampling.max_tokens": 32,
            "explorer.workflow": "multi_turn",
            "explorer.workflow_options": {"multi_turn": {"turns": [_SAYS] * (options.turns - 1)}},
        }
    )
    asyncio.run(measure(*run, options.groups, options.in_flight))
    ray.shutdown()


if __name__ == "__main__":
    main()
