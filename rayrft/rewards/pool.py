"""Who scores for an Explorer: itself, reward actors on any node, or Serve deployments (`rayrft.rewards.service`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from rayrft.config.reward import RewardModelsConfig
from rayrft.errors import ActorDied, ActorUnreachable
from rayrft.experience import Task
from rayrft.registry import load_plugins
from rayrft.rewards.base import RewardResult, Transcript
from rayrft.rewards.judge import ChatModel
from rayrft.rewards.scorer import Scorer
from rayrft.rewards.stats import DomainStats, Tally
from rayrft.runtime.actor_pool import TRIES, ActorPool
from rayrft.runtime.handle import Handle

Models = Callable[[], Mapping[str, ChatModel]]
"""Gives a process elsewhere the models that its judges may ask, by name."""


class Scoring(Protocol):
    """Scores transcripts of a task, here or elsewhere."""

    async def open(self) -> None:
        """Start what scores. Raises ConfigError where a reward cannot be built."""

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        """Return one result per transcript. Raises ConfigError if the task's domain has no reward."""
        ...


class RewardPool:
    """Scores, wherever that is done, and counts by domain."""

    def __init__(
        self,
        config: RewardModelsConfig,
        plugins: Sequence[Path],
        elsewhere: Callable[[], Scoring] | None,
        models: Mapping[str, ChatModel] | None = None,
    ) -> None:
        """Without ``elsewhere`` a scorer of this process scores; ``models`` are those that its judges may ask."""
        self._config = config
        self._scoring: Scoring = Scorer(config, plugins, models) if elsewhere is None else elsewhere()
        self._tallies = {domain: Tally() for domain in config.models}

    async def open(self) -> None:
        """Start what scores. Raises ConfigError where a reward cannot be built."""
        await self._scoring.open()

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        """Return one result per transcript. Raises ConfigError if the task's domain has no reward."""
        tally = self._tallies[self._config.domain_of(task.domain)]
        tally.pending += len(transcripts)
        try:
            results = await self._scoring.score(task, transcripts)
        finally:
            tally.pending -= len(transcripts)
        for result in results:
            tally.add(result)
        return results

    def take_stats(self) -> dict[str, DomainStats]:
        """Return what happened since the last call, by domain."""
        return {domain: tally.take() for domain, tally in self._tallies.items()}


class RewardActor:
    """The actor: a scorer, with its processes."""

    def __init__(self, config: RewardModelsConfig, plugins: list[Path], models: Models | None = None) -> None:
        load_plugins(plugins)
        self._scorer = Scorer(config, plugins, models() if models else None)

    async def start(self) -> None:
        """Start the processes. Raises ConfigError where a reward cannot be built."""
        await self._scorer.open()

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        """Return one result per transcript."""
        return await self._scorer.score(task, transcripts)


class ActorScoring:
    """Scores by ``count`` reward actors: each call by the one that owes the fewest results.

    An actor that dies is replaced, and its calls are made again, once.
    """

    def __init__(self, create: Callable[[], Handle[RewardActor]], count: int) -> None:
        self._actors = ActorPool(create, lambda actor: actor.call(RewardActor.start), count)

    async def open(self) -> None:
        """Start the actors. Raises ConfigError where a reward cannot be built."""
        await self._actors.open()

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        """Return one result per transcript; all unknown if two actors died of them, or were not reached."""
        try:
            results, tries = await self._actors.call(
                lambda actor: actor.call(RewardActor.score, task, transcripts), owed=len(transcripts)
            )
        except (ActorDied, ActorUnreachable) as error:
            return died(f"reward actor failed: {error.problem}", transcripts)
        return again(tries, results)


def again(tries: int, results: list[RewardResult]) -> list[RewardResult]:
    """Return the results of a call that was made so many times before."""
    return [replace(each, tries=each.tries + tries) for each in results] if tries else results


def died(reason: str, transcripts: Sequence[Transcript]) -> list[RewardResult]:
    """Return the results of a call of which every actor died."""
    return [RewardResult(None, reason=reason, error=True, tries=TRIES)] * len(transcripts)
