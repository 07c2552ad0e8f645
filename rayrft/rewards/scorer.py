"""Scoring by the rewards of a config: each call by itself, under a deadline, in a process that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rayrft.config.base import resolved
from rayrft.config.reward import RewardModelConfig, RewardModelsConfig, RewardPart
from rayrft.errors import CallFailed, CallTimeout, ConfigError, ProcessDied
from rayrft.experience import Task
from rayrft.rewards.base import (
    Reward,
    RewardResult,
    Transcript,
    build_reward,
    combine,
    rewards,
    score,
    score_batch,
    score_inline,
    where,
)
from rayrft.rewards.judge import ChatModel
from rayrft.runtime.processes.calls import CallQueue, QueuedCall
from rayrft.runtime.processes.pool import ProcessPool
from rayrft.runtime.processes.worker import Worker

_START_S = 120.0


class Scorer:
    """Scores transcripts by the reward model of their task's domain.

    A reward that is a coroutine runs in the event loop, a blocking one in a process: the result of a call that raises,
    hangs or kills its process is unknown, and no other call is affected.
    """

    def __init__(
        self, config: RewardModelsConfig, plugins: Sequence[Path], models: Mapping[str, ChatModel] | None = None
    ) -> None:
        """``models`` are those that judges may ask, by name."""
        self._config = config
        self._rewards: dict[str, list[Reward | InLoop | InProcesses]] = {
            domain: [_reward(part, each, plugins, models or {}) for part in each.scored_by]
            for domain, each in config.models.items()
        }

    async def open(self) -> None:
        """Start the processes. Raises ConfigError where a reward cannot be built."""
        queues = (each for several in self._rewards.values() for each in several if isinstance(each, InProcesses))
        await asyncio.gather(*(each.calls.open() for each in queues))

    async def close(self) -> None:
        """End the processes."""
        for several in self._rewards.values():
            for each in several:
                if isinstance(each, InProcesses):
                    await each.calls.close()
                elif isinstance(each, InLoop) and (close := getattr(each.reward, "close", None)):
                    await close()

    async def score(self, task: Task, transcripts: Sequence[Transcript]) -> list[RewardResult]:
        """Return one result per transcript. Raises ConfigError if the task's domain has no reward."""
        domain = self._config.domain_of(task.domain)
        several, parts = self._rewards[domain], self._config.models[domain].parts
        waiting = [
            asyncio.gather(*(each.score(task, transcript) for transcript in transcripts))
            for each in several
            if isinstance(each, InLoop | InProcesses)
        ]
        found = iter(await asyncio.gather(*waiting) if waiting else ())
        by_reward = [
            next(found)
            if isinstance(each, InLoop | InProcesses)
            else [score_inline(each, task, transcript) for transcript in transcripts]
            for each in several
        ]
        return [combine(parts, results) for results in zip(*by_reward, strict=True)] if parts else by_reward[0]


def _reward(
    part: RewardPart, config: RewardModelConfig, plugins: Sequence[Path], models: Mapping[str, ChatModel]
) -> Reward | InLoop | InProcesses:
    match where(part.name):
        case "inline":
            return build_reward(part.name, part.options)
        case "loop":
            return InLoop(build_reward(part.name, part.options), config.deadline_s, models)
        case "process":
            return InProcesses(part, config, plugins)


class InLoop:
    """Scoring by a coroutine in the event loop, with at most ``concurrency`` calls in flight if the reward has it."""

    def __init__(self, reward: Reward, deadline_s: float, models: Mapping[str, ChatModel]) -> None:
        self.reward, self._deadline_s = reward, deadline_s
        if use := getattr(reward, "use", None):
            use(models)
        at_once = getattr(reward, "concurrency", None)
        self._room = contextlib.nullcontext() if at_once is None else asyncio.Semaphore(at_once)

    async def score(self, task: Task, transcript: Transcript) -> RewardResult:
        """Return the result, which is unknown after the deadline."""
        async with self._room:
            started = time.perf_counter()
            try:
                async with asyncio.timeout(self._deadline_s):
                    return await score(self.reward, task, transcript)
            except TimeoutError:  # `score` turns a timeout of the reward itself into an unknown result
                return _failed(f"timeout: no reward within {self._deadline_s:g} s", time.perf_counter() - started)


class HostedReward:
    """The object of a reward process."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._reward = build_reward(name, options)

    def max_batch(self) -> int:
        """Return how many calls may be made at a time."""
        return getattr(self._reward, "max_batch", 1)

    async def score(self, calls: list[tuple[Task, Transcript]]) -> list[RewardResult]:
        """Return the results of calls."""
        return await score_batch(self._reward, calls)


class InProcesses:
    """Scoring in processes, each of which keeps its reward for as long as it runs."""

    def __init__(self, part: RewardPart, config: RewardModelConfig, plugins: Sequence[Path]) -> None:
        self._deadline_s = config.deadline_s
        pool = ProcessPool(
            partial(HostedReward, part.name, resolved(part.options)),  # its processes lack the variables
            processes=config.workers + config.spare_workers,
            plugins=plugins,
            spares=0,
            start_s=_START_S,
            warm_up=partial(_import, part.name),
        )
        self.calls = CallQueue[tuple[Task, Transcript], RewardResult](
            pool,
            self._make,
            workers=config.workers,
            spare=config.spare_workers,
            deadline_s=config.deadline_s,
            start_s=_START_S,
            failure=lambda error: ConfigError(
                f"cannot be built: {error}",
                "see the cause, and the reward's own options",
                field="reward.name",
                value=part.name,
            ),
        )

    async def score(self, task: Task, transcript: Transcript) -> RewardResult:
        """Return the result, which is unknown if the call fails. Raises ConfigError if no process can be started."""
        call = self.calls.put((task, transcript))
        try:
            result = await call.done
        except ConfigError:
            raise
        except CallTimeout:
            result = _failed(f"timeout: no reward within {self._deadline_s:g} s", call.seconds)
        except ProcessDied as error:
            result = _failed(f"the reward's process died: {error}")
        except CallFailed as error:  # the result cannot be pickled, or is too large
            result = _failed(str(error))
        except Exception as error:  # of pickling: a task may hold anything
            result = _failed(f"the task cannot be sent: {type(error).__name__}: {error}")
        return replace(result, tries=call.tries)

    def _make(self, worker: Worker, calls: Sequence[QueuedCall[tuple[Task, Transcript], RewardResult]]) -> Any:
        return worker.call("score", [call.argument for call in calls], deadline_s=self._deadline_s)


def _failed(reason: str, seconds: float = 0.0) -> RewardResult:
    return RewardResult(None, reason=reason, seconds=seconds, error=True)


def _import(name: str) -> None:
    """Import the modules of the reward's `imports`, once for all processes that are forked from this one."""
    for module in getattr(rewards.get(name, "reward.name"), "imports", ()):
        importlib.import_module(module)
