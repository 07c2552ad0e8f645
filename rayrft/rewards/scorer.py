"""Scoring by the rewards of a config: each call by itself, under a deadline, where it can be ended."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

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
    needed_modules,
    score,
    score_batch,
    score_inline,
    where,
)
from rayrft.rewards.judge import ChatModel
from rayrft.runtime.processes.pool import ProcessPool, Worker

_TRIES = 2
"""How often a call is made whose process dies: it may have been ended by something else."""
_START_S = 120.0
_SLOW, _LEAST_SLOW_S, _SLOWEST_SHARE = 10.0, 0.05, 0.25
"""A call is slow, and another process is started, once it takes so many times as long as usual, but not
before so many seconds, and at the latest after this share of the deadline."""
_STARTS = 3
"""How often in a row a process is started that dies, or is not there in time."""


class Scorer:
    """Scores transcripts by the reward model of their task's domain.

    A reward that is a coroutine runs in the event loop, one that blocks in a process: a call that raises, hangs or
    kills its process is unknown, and touches no other.
    """

    def __init__(
        self, config: RewardModelsConfig, plugins: Sequence[Path], models: Mapping[str, ChatModel] | None = None
    ) -> None:
        """``models`` are those that judges may ask, by name."""
        self._config = config
        self._models = {domain: _Model(each, plugins, models or {}) for domain, each in config.models.items()}

    async def open(self) -> None:
        """Start the processes. Raises ConfigError where a reward cannot be built."""
        await asyncio.gather(*(model.open() for model in self._models.values()))

    async def close(self) -> None:
        """End the processes."""
        await asyncio.gather(*(model.close() for model in self._models.values()))

    async def score(self, task: Task, transcripts: Sequence[Transcript]) -> list[RewardResult]:
        """Return one result per transcript. Raises ConfigError if the task's domain has no reward."""
        model = self._models[self._config.domain_of(task.domain)]
        if model.inline:
            return [model.score_inline(task, each) for each in transcripts]
        return await asyncio.gather(*(model.score(task, each) for each in transcripts))


class _Model:
    """The rewards of a domain."""

    def __init__(self, config: RewardModelConfig, plugins: Sequence[Path], models: Mapping[str, ChatModel]) -> None:
        self._parts = config.parts
        self._scorings = [_scoring(part, config, plugins, models) for part in config.scored_by]
        self._inline = [each.reward for each in self._scorings if isinstance(each, _Here) and each.inline]
        self.inline = len(self._inline) == len(self._scorings)

    async def open(self) -> None:
        await asyncio.gather(*(scoring.open() for scoring in self._scorings))

    async def close(self) -> None:
        await asyncio.gather(*(scoring.close() for scoring in self._scorings))

    def score_inline(self, task: Task, transcript: Transcript) -> RewardResult:
        """Score where all rewards run inline."""
        results = [score_inline(reward, task, transcript) for reward in self._inline]
        return combine(self._parts, results) if self._parts else results[0]

    async def score(self, task: Task, transcript: Transcript) -> RewardResult:
        if not self._parts:
            return await self._scorings[0].score(task, transcript)
        results = await asyncio.gather(*(scoring.score(task, transcript) for scoring in self._scorings))
        return combine(self._parts, results)


class _Scoring(Protocol):
    """Scoring by one reward."""

    async def open(self) -> None: ...
    async def score(self, task: Task, transcript: Transcript) -> RewardResult: ...
    async def close(self) -> None: ...


def _scoring(
    part: RewardPart, config: RewardModelConfig, plugins: Sequence[Path], models: Mapping[str, ChatModel]
) -> _Scoring:
    match where(part.name):
        case "inline":
            return _Here(build_reward(part.name, part.options), None)
        case "loop":
            reward = build_reward(part.name, part.options)
            if use := getattr(reward, "use", None):
                use(models)
            return _Here(reward, config.deadline_s)
        case "process":
            return _InProcesses(part, config, plugins)


class _Here:
    """Scoring in the event loop, of as many at a time as the reward's ``concurrency`` says, if it has one."""

    def __init__(self, reward: Reward, deadline_s: float | None) -> None:
        self.reward, self.inline = reward, deadline_s is None
        self._deadline_s = deadline_s
        at_once = getattr(reward, "concurrency", None)
        self._room = contextlib.nullcontext() if at_once is None else asyncio.Semaphore(at_once)

    async def open(self) -> None:
        pass

    async def score(self, task: Task, transcript: Transcript) -> RewardResult:
        async with self._room:
            started = time.perf_counter()
            try:
                async with asyncio.timeout(self._deadline_s):
                    return await score(self.reward, task, transcript)
            except TimeoutError:  # that of the reward itself is its error
                return _timeout(self._deadline_s or 0.0, time.perf_counter() - started)

    async def close(self) -> None:
        if close := getattr(self.reward, "close", None):
            await close()


def _timeout(deadline_s: float, seconds: float) -> RewardResult:
    return RewardResult(None, reason=f"timeout: no reward within {deadline_s:g} s", seconds=seconds, error=True)


class InProcess:
    """A reward, in a process of its own."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._reward = build_reward(name, options)

    def most(self) -> int:
        """Return how many calls may be made at a time."""
        return getattr(self._reward, "max_batch", 1)

    async def score(self, calls: list[tuple[Task, Transcript]]) -> list[RewardResult]:
        return await score_batch(self._reward, calls)


def _import(name: str) -> None:
    """Import what the reward of that name needs, once for all processes that are forked from this one."""
    for module in needed_modules(name):
        importlib.import_module(module)


@dataclass
class _Call:
    task: Task
    transcript: Transcript
    result: asyncio.Future[RewardResult]
    tries: int = 0


class _InProcesses:
    """Scoring in processes, each of which keeps its reward for as long as it lives.

    A process whose reward takes several calls at a time takes those that wait when it is free, as many as are done in a
    fraction of the deadline. Where they fail together, each is made again alone.

    A call that hangs would hold up others until its deadline: once it is slow, another process works beside it, until
    it ends. A process whose call was only slow stays, as first calls are slow, and calls on a busy machine.
    """

    def __init__(self, part: RewardPart, config: RewardModelConfig, plugins: Sequence[Path]) -> None:
        self._name, self._deadline_s = part.name, config.deadline_s
        self._pool = ProcessPool(
            partial(InProcess, part.name, resolved(part.options)),  # its processes lack the variables
            processes=config.workers + config.spare_workers,
            plugins=plugins,
            spares=0,
            start_s=_START_S,
            warm_up=partial(_import, part.name),
        )
        self._workers = config.workers
        self._working = set[asyncio.Task[None]]()
        self._active = 0
        """Processes that make calls."""
        self._slow, self._most_slow = 0, config.spare_workers
        """Slow calls in flight: each allows one active process more."""
        self._usual_s: float | None = None
        """Of recent calls that came to their end, each by its share of those made at a time."""
        self._calls: asyncio.Queue[_Call] = asyncio.Queue()
        self._error: ConfigError | None = None
        """Why no process can be started any more."""

    async def open(self) -> None:
        ready = [asyncio.get_running_loop().create_future() for _ in range(self._workers)]
        for each in ready:
            self._start(each)
        await asyncio.gather(*ready)

    async def score(self, task: Task, transcript: Transcript) -> RewardResult:
        if self._error is not None:
            raise self._error
        call = _Call(task, transcript, asyncio.get_running_loop().create_future())
        self._calls.put_nowait(call)
        return await call.result

    async def close(self) -> None:
        for each in self._working:
            each.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        await self._pool.close()

    def _start(self, ready: asyncio.Future[None] | None = None) -> None:
        task = asyncio.create_task(self._work(ready))
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _work(self, ready: asyncio.Future[None] | None) -> None:
        """Make calls, in one process after another, until none can be started, or enough others are active."""
        starts = 0
        while not self._is_surplus(1):
            try:
                async with self._pool.lease() as worker:
                    starts = 0
                    if ready is not None and not ready.done():
                        ready.set_result(None)
                    self._active += 1
                    try:
                        await self._make_calls(worker)
                    finally:
                        self._active -= 1
            except CallFailed as error:
                starts += 1
                if self._active >= self._workers:
                    return
                if starts < _STARTS and isinstance(error, ProcessDied | CallTimeout):
                    continue
                return self._fail(error, [ready] if ready else [])

    def _fail(self, error: CallFailed, waiting: list[asyncio.Future[Any]]) -> None:
        """Raise the error in all calls, now and later."""
        self._error = ConfigError(
            f"cannot be built: {error}",
            "see the cause, and the reward's own options",
            field="reward.name",
            value=self._name,
        )
        while not self._calls.empty():
            waiting.append(self._calls.get_nowait().result)
        for each in waiting:
            if not each.done():
                each.set_exception(self._error)

    def _is_surplus(self, more: int = 0) -> bool:
        """Whether with so many ``more`` too many processes are active."""
        return self._active + more > self._workers + self._slow

    async def _make_calls(self, worker: Worker) -> None:
        """Make calls until the process has died, or too many are active."""
        most: int = await worker.call("most", deadline_s=_START_S)
        while worker.at_rest and not self._is_surplus():
            calls = await self._take(most)
            slow = asyncio.Event()
            timer = asyncio.get_running_loop().call_later(self._slow_after(len(calls)), self._stand_in, slow)
            try:
                results = await self._make(worker, calls)
            finally:
                timer.cancel()
                self._slow -= slow.is_set()
            for call, result in zip(calls, results, strict=True):
                if result is None:
                    self._calls.put_nowait(call)
                elif not call.result.done():
                    call.result.set_result(replace(result, tries=call.tries))

    async def _take(self, most: int) -> list[_Call]:
        """Wait for a call, and return it with others that wait; one that was made before, alone."""
        most = min(most, int(_SLOWEST_SHARE * self._deadline_s / self._usual_s)) if self._usual_s else 1
        calls = list[_Call]()
        while not calls or (len(calls) < most and not calls[0].tries and not self._calls.empty()):
            call = await self._calls.get()
            if call.result.done():  # nobody waits any more
                continue
            if calls and call.tries:
                self._calls.put_nowait(call)
                break
            calls.append(call)
        for call in calls:
            call.tries += 1
        return calls

    def _slow_after(self, calls: int) -> float:
        latest = _SLOWEST_SHARE * self._deadline_s
        if self._usual_s is None:
            return latest
        usual_s = calls * self._usual_s
        return max(_LEAST_SLOW_S, min(latest, _SLOW * usual_s), 2 * usual_s)

    def _stand_in(self, slow: asyncio.Event) -> None:
        """Let another process work while a call is slow."""
        if self._slow < self._most_slow:
            self._slow += 1
            slow.set()
            self._start()

    async def _make(self, worker: Worker, calls: list[_Call]) -> list[RewardResult | None]:
        """Return the results of calls; None for those that are to be made again."""
        started = time.perf_counter()
        failed = RewardResult(None, error=True)
        again: list[RewardResult | None] = [None] * len(calls)
        alone = len(calls) == 1
        try:
            found: list[RewardResult] = await worker.call(
                "score", [(call.task, call.transcript) for call in calls], deadline_s=self._deadline_s
            )
        except CallTimeout:
            return [_timeout(self._deadline_s, time.perf_counter() - started)] if alone else again
        except ProcessDied as error:
            if not alone or calls[0].tries < _TRIES:
                return again
            return [replace(failed, reason=f"the reward's process died: {error}")]
        except CallFailed as error:  # the result is no pickle, or too large
            return [replace(failed, reason=str(error))] if alone else again
        except Exception as error:  # of pickling: a task may hold anything
            reason = f"the task cannot be sent: {type(error).__name__}: {error}"
            return [replace(failed, reason=reason)] if alone else again
        took = (time.perf_counter() - started) / len(calls)
        self._usual_s = took if self._usual_s is None else 0.9 * self._usual_s + 0.1 * took
        return list(found)
