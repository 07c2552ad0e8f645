"""Scoring by the rewards of a config: each call by itself, under a deadline, where it can be ended."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rayrft.config.reward import RewardConfig, RewardModelConfig, RewardPart
from rayrft.errors import CallFailed, CallTimeout, ConfigError, ProcessDied
from rayrft.experience import Task
from rayrft.processes import ProcessPool, Worker
from rayrft.rewards.base import (
    Reward,
    RewardResult,
    Transcript,
    build_reward,
    combine,
    needed_modules,
    score,
    score_inline,
    where,
)
from rayrft.rewards.judge import ChatModel

_TRIES = 2
"""How often a call is made whose process dies: it may have been ended by something else."""
_START_S = 120.0
_SLOW, _LEAST_SLOW_S, _SLOWEST_SHARE = 10.0, 0.05, 0.25
"""A call is slow, and takes no worker from others any more, once it takes so many times as long as usual, but not
before so many seconds, and at the latest after this share of the deadline."""
_STARTS = 3
"""How often in a row a process is started that dies, or is not there in time."""


@dataclass(frozen=True)
class DomainStats:
    """What a domain's scoring was like since it was last asked."""

    scored: int = 0
    unknown: int = 0
    seconds: float = 0.0
    """Of all calls together, from the start of execution."""
    slowest_s: float = 0.0
    pending: int = 0
    """Transcripts that wait for their reward now."""

    @classmethod
    def of(cls, several: Iterable[DomainStats | None]) -> DomainStats:
        """Join those of several scorers, or times."""
        known = [each for each in several if each is not None]
        return cls(
            sum(each.scored for each in known),
            sum(each.unknown for each in known),
            sum(each.seconds for each in known),
            max((each.slowest_s for each in known), default=0.0),
            sum(each.pending for each in known),
        )


@dataclass
class _Tally:
    """Counts what `DomainStats` says."""

    scored: int = 0
    unknown: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    pending: int = 0

    def add(self, result: RewardResult) -> None:
        self.scored += 1
        self.unknown += result.value is None
        self.seconds += result.seconds
        self.slowest_s = max(self.slowest_s, result.seconds)

    def take(self) -> DomainStats:
        """Return what was counted, and begin anew."""
        taken = DomainStats(self.scored, self.unknown, self.seconds, self.slowest_s, self.pending)
        self.scored, self.unknown, self.seconds, self.slowest_s = 0, 0, 0.0, 0.0
        return taken


class Scorer:
    """Scores transcripts by the reward model of their task's domain.

    A reward that is a coroutine runs in the event loop, one that blocks in a process: a call that raises, hangs or
    kills its process is unknown, and touches no other.
    """

    def __init__(
        self, config: RewardConfig, plugins: Sequence[Path], models: Mapping[str, ChatModel] | None = None
    ) -> None:
        """``models`` are those that judges may ask, by name."""
        self._config = config
        self._models = {domain: _Model(each, plugins, models or {}) for domain, each in config.models.items()}
        self._stats = {domain: _Tally() for domain in self._models}

    async def open(self) -> None:
        """Start the processes. Raises ConfigError where a reward cannot be built."""
        await asyncio.gather(*(model.open() for model in self._models.values()))

    async def close(self) -> None:
        """End the processes."""
        await asyncio.gather(*(model.close() for model in self._models.values()))

    async def score(self, task: Task, transcripts: Sequence[Transcript]) -> list[RewardResult]:
        """Return one result per transcript. Raises ConfigError if the task's domain has no reward."""
        domain = self._config.domain_of(task.domain)
        if domain not in self._models:
            raise unknown_domain(task.domain, self._models)
        model, stats = self._models[domain], self._stats[domain]
        if model.inline:
            results = [model.score_inline(task, each) for each in transcripts]
        else:
            stats.pending += len(transcripts)
            try:
                results = await asyncio.gather(*(model.score(task, each) for each in transcripts))
            finally:
                stats.pending -= len(transcripts)
        for result in results:
            stats.add(result)
        return results

    def take_stats(self) -> dict[str, DomainStats]:
        """Return what happened since the last call, by domain."""
        return {domain: stats.take() for domain, stats in self._stats.items()}


def unknown_domain(domain: str, known: Iterable[str]) -> ConfigError:
    """Create the error for a task that no reward scores."""
    remedy = f"give it one, or give the task another domain than those of {', '.join(sorted(known))}"
    return ConfigError("no reward scores tasks of this domain", field="reward.domains", value=domain, remedy=remedy)


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
    return RewardResult(None, reason=f"timeout: no reward within {deadline_s:g} s", seconds=seconds)


class InProcess:
    """A reward, in a process of its own."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._reward = build_reward(name, options)

    async def score(self, task: Task, transcript: Transcript) -> RewardResult:
        return await score(self._reward, task, transcript)


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

    A call that hangs would hold up others until its deadline: once it is slow, another process works in its place, and
    its own gives way to others in the kernel's scheduler, and ends with it.
    """

    def __init__(self, part: RewardPart, config: RewardModelConfig, plugins: Sequence[Path]) -> None:
        self._name, self._deadline_s = part.name, config.deadline_s
        self._pool = ProcessPool(
            partial(InProcess, part.name, part.options),
            processes=config.workers + config.spare_workers,
            plugins=plugins,
            spares=0,
            start_s=_START_S,
            warm_up=partial(_import, part.name),
        )
        self._workers = config.workers
        self._working = set[asyncio.Task[None]]()
        self._slow, self._most_slow = 0, config.spare_workers
        self._missing = 0
        """Slow calls whose places were to be taken, and were not."""
        self._usual_s: float | None = None
        """Of recent calls that came to their end."""
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
        """Make calls, in one process after another, until none can be started, or another works in its place. One that
        stands in for another (``ready`` is None) gives up where it cannot start, if others go on."""
        again: _Call | None = None
        starts = 0
        while True:
            try:
                async with self._pool.lease() as worker:
                    starts = 0
                    if ready is not None and not ready.done():
                        ready.set_result(None)
                    again, replaced = await self._make_calls(worker, again)
            except CallFailed as error:
                starts += 1
                if ready is None and len(self._working) > 1 and again is None:
                    self._missing += 1
                    return
                if starts < _STARTS and isinstance(error, ProcessDied | CallTimeout):
                    continue
                return self._fail(error, [*filter(None, [ready]), *([again.result] if again else [])])
            if replaced and not self._missing:
                return
            self._missing -= replaced

    def _fail(self, error: CallFailed, waiting: list[asyncio.Future[Any]]) -> None:
        """Raise the error in all calls, now and later."""
        self._error = ConfigError(
            f"cannot be built: {error}",
            field="reward.name",
            value=self._name,
            remedy="see the cause, and the reward's own options",
        )
        while not self._calls.empty():
            waiting.append(self._calls.get_nowait().result)
        for each in waiting:
            if not each.done():
                each.set_exception(self._error)

    async def _make_calls(self, worker: Worker, call: _Call | None) -> tuple[_Call | None, bool]:
        """Make this call, and others, until the process has died. Return the call that is to be made again, and whether
        another one works in this one's place."""
        replaced = asyncio.Event()
        while worker.at_rest and not replaced.is_set():
            call = call or await self._calls.get()
            if not call.result.done():  # else nobody waits any more
                call.tries += 1
                timer = asyncio.get_running_loop().call_later(self._slow_after(), self._replace, worker, replaced)
                try:
                    result = await self._make(worker, call)
                finally:
                    timer.cancel()
                if result is None and not replaced.is_set():
                    return call, False
                if result is None:  # it goes on in the other's process
                    self._calls.put_nowait(call)
                elif not call.result.done():
                    call.result.set_result(result)
            call = None
        if replaced.is_set():
            self._slow -= 1
            worker.kill()  # its niceness would stay
        return None, replaced.is_set()

    def _slow_after(self) -> float:
        latest = _SLOWEST_SHARE * self._deadline_s
        if self._usual_s is None:
            return latest
        return max(_LEAST_SLOW_S, min(latest, _SLOW * self._usual_s), 2 * self._usual_s)

    def _replace(self, worker: Worker, replaced: asyncio.Event) -> None:
        """Let another process work in the place of one that is slow, which gives way to all others."""
        if self._slow < self._most_slow:
            self._slow += 1
            replaced.set()
            with contextlib.suppress(OSError):  # it has just died
                os.setpriority(os.PRIO_PROCESS, worker.pid, 19)
            self._start()

    async def _make(self, worker: Worker, call: _Call) -> RewardResult | None:
        """Return the result of a call; None where its process died, and it may be tried again."""
        started = time.perf_counter()
        try:
            found: RewardResult = await worker.call("score", call.task, call.transcript, deadline_s=self._deadline_s)
        except CallTimeout:
            return _timeout(self._deadline_s, time.perf_counter() - started)
        except ProcessDied as error:
            return None if call.tries < _TRIES else RewardResult(None, reason=f"the reward's process died: {error}")
        except CallFailed as error:  # the result is no pickle, or too large
            return RewardResult(None, reason=str(error))
        except Exception as error:  # of pickling: a task may hold anything
            return RewardResult(None, reason=f"the task cannot be sent: {type(error).__name__}: {error}")
        took = time.perf_counter() - started
        self._usual_s = took if self._usual_s is None else 0.9 * self._usual_s + 0.1 * took
        return found
