"""Reward workers: actors that score under a deadline, in processes that can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rayrft.config.reward import RewardConfig
from rayrft.experience import Task
from rayrft.handle import Handle
from rayrft.registry import load_plugins
from rayrft.rewards.base import RewardResult, build_reward, score


class RewardWorker:
    """The actor, which scores the responses of one group sequentially."""

    def __init__(self, config: RewardConfig, plugins: list[Path]) -> None:
        load_plugins(plugins)
        self._reward = build_reward(config.name, config.options)

    def ready(self) -> None:
        """Return once the reward is built."""

    def score(self, task: Task, responses: list[str]) -> list[RewardResult]:
        """One result per response. A reward that raises gives an unknown with the error as its reason."""
        return [score(self._reward, task, response) for response in responses]


class RewardPool:
    """Distributes groups over reward workers; a worker that exceeds its deadline is killed and replaced.

    ``create`` creates a worker; it is None for a reward that runs inline. A worker takes a group only when it is free
    and up, so the deadline starts with execution, not with waiting.
    """

    def __init__(self, config: RewardConfig, create: Callable[[], Handle[RewardWorker]] | None) -> None:
        self._config = config
        self._free: asyncio.Queue[Handle[RewardWorker] | BaseException] = asyncio.Queue()
        """Workers, or the error of a worker that could not be started again."""
        self._returning: set[asyncio.Future[None]] = set()
        self._create = create
        self._inline = build_reward(config.name, config.options) if create is None else None

    async def open(self) -> None:
        """Start the workers; raises ConfigError where the reward cannot be built."""
        if self._inline is not None:
            return
        workers = [self._start() for _ in range(self._config.workers)]
        for worker in workers:
            await worker.call(RewardWorker.ready)
            self._free.put_nowait(worker)

    async def score(self, task: Task, responses: list[str]) -> list[RewardResult]:
        """Return one result per response; all unknown if the worker exceeded its deadline or died."""
        from ray.exceptions import RayActorError

        if self._inline is not None:
            return [score(self._inline, task, response) for response in responses]
        worker = await self._take()
        try:
            async with asyncio.timeout(self._config.deadline_s):
                results = await worker.call(RewardWorker.score, task, responses)
        except TimeoutError:
            worker.kill()
            self._free_when_ready(self._start())
            reason = f"timeout: no reward within {self._config.deadline_s:g} s"
        except RayActorError as error:
            self._free_when_ready(self._start())
            reason = f"reward worker died: {str(error).splitlines()[0]}"
        except BaseException:
            self._free_when_ready(worker)  # it may still be at work on what nobody waits for any more
            raise
        else:
            self._free.put_nowait(worker)
            return results
        return [RewardResult(None, reason=reason)] * len(responses)

    async def _take(self) -> Handle[RewardWorker]:
        worker = await self._free.get()
        if isinstance(worker, BaseException):
            self._free.put_nowait(worker)  # for whoever else waits
            raise worker
        return worker

    def _start(self) -> Handle[RewardWorker]:
        assert self._create is not None  # it is None only for rewards that run inline
        return self._create()

    def _free_when_ready(self, worker: Handle[RewardWorker]) -> None:
        async def wait() -> None:
            try:
                await worker.call(RewardWorker.ready)
            except Exception as error:  # raised in the callers of `score`, which wait for a worker
                self._free.put_nowait(error)
            else:
                self._free.put_nowait(worker)

        task = asyncio.ensure_future(wait())
        self._returning.add(task)  # the loop itself does not keep it
        task.add_done_callback(self._returning.discard)
