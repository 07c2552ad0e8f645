"""Reward workers: actors that score under a deadline, in processes that can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayrft.config.reward import RewardConfig
from rayrft.experience import Task
from rayrft.registry import load_plugins
from rayrft.rewards.base import RewardResult, build_reward


class RewardWorker:
    """The actor, which scores the responses of one group sequentially."""

    def __init__(self, config: RewardConfig, plugins: list[Path]) -> None:
        load_plugins(plugins)
        self._reward = build_reward(config.name, config.options)

    def ready(self) -> None:
        """Return once the reward is built."""

    def score(self, task: Task, responses: list[str]) -> list[RewardResult]:
        """Return one result per response, unknown with the error as its reason if the reward raises."""
        return [self._score_one(task, response) for response in responses]

    def _score_one(self, task: Task, response: str) -> RewardResult:
        try:
            result = self._reward(task, response)
            if not isinstance(result, RewardResult):
                return RewardResult.of(float(result), {}, None)
        except Exception as error:  # user code may raise anything; the run's policy for unknown rewards applies
            return RewardResult(None, reason=f"{type(error).__name__}: {error}")
        return result if result.value is None else RewardResult.of(result.value, result.components, result.reason)


class RewardPool:
    """Distributes groups over reward workers; a worker that exceeds its deadline is killed and replaced.

    ``start`` creates a worker (an actor handle). A group is sent only to an idle, ready worker, so that its deadline
    starts with execution.
    """

    def __init__(self, config: RewardConfig, start: Callable[[], Any]) -> None:
        self._config = config
        self._start = start
        self._free: asyncio.Queue[Any] = asyncio.Queue()

    async def open(self) -> None:
        """Start the workers. Raises ConfigError if the reward cannot be built."""
        workers = [self._start() for _ in range(self._config.workers)]
        for worker in workers:
            await worker.ready.remote()
            self._free.put_nowait(worker)

    async def score(self, task: Task, responses: list[str]) -> list[RewardResult]:
        """Return one result per response; all unknown if the worker exceeded its deadline or died."""
        import ray
        from ray.exceptions import RayActorError

        worker = await self._free.get()
        try:
            async with asyncio.timeout(self._config.deadline_s):
                return await worker.score.remote(task, responses)
        except TimeoutError:
            ray.kill(worker)
            worker = self._start()
            reason = f"timeout: no reward within {self._config.deadline_s:g} s"
        except RayActorError as error:
            worker = self._start()
            reason = f"reward worker died: {str(error).splitlines()[0]}"
        finally:
            await worker.ready.remote()
            self._free.put_nowait(worker)
        return [RewardResult(None, reason=reason)] * len(responses)
