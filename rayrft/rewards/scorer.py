"""Scoring by the rewards of a config: each call by itself, under a deadline, in a process that can be killed. It runs
in the process of an Explorer, or in reward actors on any node (on Ray Serve: `rayrft.rewards.service`)."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rayrft.config.base import resolved
from rayrft.config.reward import RewardModelConfig, RewardModelsConfig, RewardPart
from rayrft.errors import ActorDied, ActorUnreachable, CallFailed, CallTimeout, ConfigError, ProcessDied
from rayrft.experience import Task
from rayrft.registry import load_plugins
from rayrft.rewards import base
from rayrft.rewards.base import Reward, RewardResult, Transcript, build_reward
from rayrft.rewards.judge import ChatModel
from rayrft.runtime.actor_pool import TRIES, ActorPool
from rayrft.runtime.handle import Handle, Watched, once
from rayrft.runtime.processes.calls import CallQueue
from rayrft.runtime.processes.pool import ProcessPool

_START_S = 120.0
Models = Callable[[], Mapping[str, ChatModel]]
"""Returns the models that judges in another process may ask, by name."""


class Scorer:
    """Scores transcripts by the reward model of their task's domain.

    A reward that is a coroutine runs in the event loop, a blocking one in a process. The result of a call that raises,
    hangs or kills its process is unknown, and no other call is affected.
    """

    def __init__(
        self, config: RewardModelsConfig, plugins: Sequence[Path], models: Mapping[str, ChatModel] | None = None
    ) -> None:
        """``models`` are those that judges may ask, by name."""
        self.config = config
        self._rewards: dict[str, list[Reward | InLoop | InProcesses]] = {}
        for domain, each in config.models.items():
            self._rewards[domain] = [_reward(part, each, plugins, models or {}) for part in each.scored_by]

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

    def is_inline(self, domain: str) -> bool:
        """Return whether the rewards of a domain run in the caller, without waiting."""
        return not any(isinstance(each, InLoop | InProcesses) for each in self._rewards[domain])

    async def score(self, task: Task, transcripts: Sequence[Transcript]) -> list[RewardResult]:
        """Return one result per transcript: of several right answers of the task, the best that one of them gives.
        Raises ConfigError if the task's domain has no reward."""
        if task.other_answers:
            alone = [replace(task, answer=each, other_answers=()) for each in (task.answer, *task.other_answers)]
            scored = [self.score(each, transcripts) for each in alone]
            inline = self.is_inline(self.config.domain_of(task.domain))
            found = [await each for each in scored] if inline else await asyncio.gather(*scored)
            return [max(several, key=_rank) for several in zip(*found, strict=True)]
        domain = self.config.domain_of(task.domain)
        several, model, seen = self._rewards[domain], self.config.models[domain], transcripts
        if model.reasoning is not None:
            hide = model.reasoning == "hide"
            seen = [each.without_reasoning() if hide else replace(each, whole=True) for each in transcripts]
        apart = (each for each in several if isinstance(each, InLoop | InProcesses))
        waiting = [each.score(task, transcript) for each in apart for transcript in seen]
        waited = iter(await asyncio.gather(*waiting) if waiting else [])
        by_reward = [
            [next(waited) for _ in seen]
            if isinstance(each, InLoop | InProcesses)
            else [base.score_inline(each, task, transcript) for transcript in seen]
            for each in several
        ]
        parts = model.parts
        joined = [base.combine(parts, each) for each in zip(*by_reward, strict=True)] if parts else by_reward[0]
        return joined if seen is transcripts else list(map(_moved, joined, seen, transcripts))


def _moved(result: RewardResult, seen: Transcript, said: Transcript) -> RewardResult:
    """Return a result whose steps end where they do in the answers with their reasoning."""
    hidden = [len(whole) - len(shown) for whole, shown in zip(said.answers, seen.answers, strict=True)]
    return replace(result, steps=tuple(replace(step, end=step.end + hidden[step.turn]) for step in result.steps))


def _rank(result: RewardResult) -> float:
    return -math.inf if result.value is None else result.value


def _reward(
    part: RewardPart, config: RewardModelConfig, plugins: Sequence[Path], models: Mapping[str, ChatModel]
) -> Reward | InLoop | InProcesses:
    if (where := base.where(part.name)) == "process":
        return InProcesses(part, config, plugins)
    reward = build_reward(part.name, part.options)
    return reward if where == "inline" else InLoop(reward, config.deadline_s, models)


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
                    return await base.score(self.reward, task, transcript)
            except TimeoutError:  # `score` turns a timeout of the reward itself into an unknown result
                return _failed(f"timeout: no reward within {self._deadline_s:g} s", time.perf_counter() - started)


class HostedReward:
    """The object of a reward process."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._reward: Any = build_reward(name, options)

    def max_batch(self) -> int:
        """Return how many calls may be made at a time."""
        return getattr(self._reward, "max_batch", 1)

    async def score(self, calls: list[tuple[Task, Transcript]]) -> list[RewardResult]:
        """Return the results of calls: of several together, if the reward can; one by one, if together they fail."""
        if len(calls) > 1:
            started = time.perf_counter()
            with contextlib.suppress(Exception):  # whose fault it is shows when each is alone
                found = self._reward.score_batch(calls)
                results = [base.checked(each, call[1]) for each, call in zip(found, calls, strict=True)]
                return [replace(each, seconds=time.perf_counter() - started) for each in results]
        return [await base.score(self._reward, *call) for call in calls]


class InProcesses:
    """Scoring in processes, each of which keeps its reward for as long as it runs."""

    def __init__(self, part: RewardPart, config: RewardModelConfig, plugins: Sequence[Path]) -> None:
        self._deadline_s, remedy = config.deadline_s, "see the cause, and the reward's own options"
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
            lambda worker, calls: worker.call("score", [each.argument for each in calls], deadline_s=config.deadline_s),
            workers=config.workers,
            spare=config.spare_workers,
            deadline_s=config.deadline_s,
            start_s=_START_S,
            failure=lambda why: ConfigError(f"cannot be built: {why}", remedy, field="reward.name", value=part.name),
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


def _failed(reason: str, seconds: float = 0.0) -> RewardResult:
    return RewardResult(None, reason=reason, seconds=seconds, error=True)


def _import(name: str) -> None:
    """Import the modules of the reward's `imports`, once for all processes that are forked from this one."""
    for module in getattr(base.rewards.get(name, "reward.name"), "imports", ()):
        importlib.import_module(module)


class ScoringBackend(Protocol):
    """Scores transcripts outside of the Explorer."""

    async def open(self) -> None:
        """Start it. Raises ConfigError where a reward cannot be built."""

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        """Return one result per transcript. Raises ConfigError if the task's domain has no reward, and ActorDied or
        ActorUnreachable if every try failed."""
        ...


def with_retries(results: list[RewardResult], retries: int) -> list[RewardResult]:
    """Return the results of a call with its retries counted as tries of each."""
    return [replace(each, tries=each.tries + retries) for each in results]


@dataclass
class DomainStats:
    """The scoring of a domain in some period."""

    scored: int = 0
    unknown: int = 0
    errors: int = 0
    """Unknown rewards of calls that raised, missed the deadline, or died."""
    retried: int = 0
    """How often a call was made again because a process or an actor died."""
    seconds: float = 0.0
    """Of all calls together, from the start of execution."""
    slowest_s: float = 0.0
    pending: int = 0
    """Transcripts that wait for their reward now."""

    @classmethod
    def of(cls, several: Iterable[DomainStats | None]) -> DomainStats:
        """Join statistics of several Explorers, or periods."""
        known = [each for each in several if each is not None]
        sums = {field.name: sum(getattr(each, field.name) for each in known) for field in fields(cls)}
        return cls(**{**sums, "slowest_s": max((each.slowest_s for each in known), default=0.0)})

    def add(self, results: Sequence[RewardResult]) -> None:
        """Count the results of a call."""
        self.scored += len(results)
        for result in results:
            self.unknown += result.value is None
            self.errors += result.error
            self.retried += result.tries - 1
            self.seconds += result.seconds
            self.slowest_s = max(self.slowest_s, result.seconds)


class Rewards:
    """Scores, in this process or by a backend, and counts by domain."""

    def __init__(
        self,
        config: RewardModelsConfig,
        plugins: Sequence[Path],
        backend: Callable[[], ScoringBackend] | None,
        models: Mapping[str, ChatModel] | None = None,
    ) -> None:
        """Without ``backend`` a `Scorer` of this process scores; ``models`` are those that its judges may ask."""
        self._config = config
        self._backend: ScoringBackend = Scorer(config, plugins, models) if backend is None else backend()
        self._stats = {domain: DomainStats() for domain in config.models}

    def adjust(self, config: RewardModelsConfig) -> None:
        """Continue with other weights of parts, if this process scores."""
        self._config = config
        if isinstance(self._backend, Scorer):
            self._backend.config = config

    async def open(self) -> None:
        """Start the scorer or backend. Raises ConfigError where a reward cannot be built."""
        await self._backend.open()

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        """Return one result per transcript; all unknown if every actor or replica that was tried failed. Raises
        ConfigError if the task's domain has no reward."""
        domain = self._config.domain_of(task.domain)
        self._stats[domain].pending += len(transcripts)
        try:
            results = await self._backend.score(task, transcripts)
        except (ActorDied, ActorUnreachable) as error:
            reason = f"reward {error.field} failed: {error.problem}"
            results = [RewardResult(None, reason=reason, error=True, tries=TRIES)] * len(transcripts)
        finally:
            self._stats[domain].pending -= len(transcripts)
        self._stats[domain].add(results)
        return results

    def scores_inline(self, task: Task) -> bool:
        """Return whether a task is scored without waiting. Raises ConfigError if the task's domain has no reward."""
        domain = self._config.domain_of(task.domain)
        return isinstance(self._backend, Scorer) and self._backend.is_inline(domain)

    def take_stats(self) -> dict[str, DomainStats]:
        """Return the statistics since the last call, by domain."""
        taken = self._stats
        self._stats = {domain: DomainStats(pending=stats.pending) for domain, stats in taken.items()}
        return taken


class RewardActor(Scorer, Watched):
    """The actor: a scorer, with its processes."""

    def __init__(self, config: RewardModelsConfig, plugins: list[Path], models: Models | None = None) -> None:
        load_plugins(plugins)
        super().__init__(config, plugins, models() if models else None)

    @once
    async def open(self) -> None:
        await super().open()

    async def score(self, task: Task, transcripts: Sequence[Transcript]) -> list[RewardResult]:
        await self.open()  # the call may have been sent to a predecessor that has died
        return await super().score(task, transcripts)


class ActorBackend(ActorPool[RewardActor]):
    """Scores by reward actors that Ray restarts: each call by the one with the fewest results to return."""

    def __init__(self, actors: Sequence[Handle[RewardActor]]) -> None:
        create, count = iter(actors).__next__, len(actors)
        super().__init__(create, lambda actor: actor.call(RewardActor.open), count, "actor", restarted=True)

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        """See `ScoringBackend`."""
        call = self.call(lambda actor: actor.call(RewardActor.score, task, transcripts), load=len(transcripts))
        return with_retries(*await call)
