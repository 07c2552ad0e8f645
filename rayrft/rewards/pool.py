"""Scoring for an Explorer: in its process, by reward actors on any node, or on Serve (`rayrft.rewards.service`)."""

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
from rayrft.rewards.stats import DomainStats
from rayrft.runtime.actor_pool import TRIES, ActorPool
from rayrft.runtime.handle import Handle

Models = Callable[[], Mapping[str, ChatModel]]
"""Returns the models that judges in another process may ask, by name."""


class ScoringBackend(Protocol):
    """Scores transcripts outside of the Explorer."""

    async def open(self) -> None:
        """Start it. Raises ConfigError where a reward cannot be built."""

    async def score(self, task: Task, transcripts: list[Transcript]) -> tuple[list[RewardResult], int]:
        """Return one result per transcript, and the number of retries. Raises ConfigError if the task's domain has no
        reward, and ActorDied or ActorUnreachable if every try failed."""
        ...


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
        self._backend: Scorer | ScoringBackend = Scorer(config, plugins, models) if backend is None else backend()
        self._stats = {domain: DomainStats() for domain in config.models}

    async def open(self) -> None:
        """Start the scorer or backend. Raises ConfigError where a reward cannot be built."""
        await self._backend.open()

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        """Return one result per transcript; all unknown if every actor or replica that was tried failed. Raises
        ConfigError if the task's domain has no reward."""
        domain = self._config.domain_of(task.domain)
        self._stats[domain].pending += len(transcripts)
        try:
            if isinstance(self._backend, Scorer):
                results = await self._backend.score(task, transcripts)
            else:
                results, retries = await self._backend.score(task, transcripts)
                if retries:
                    results = [replace(each, tries=each.tries + retries) for each in results]
        except (ActorDied, ActorUnreachable) as error:
            reason = f"reward {error.field} failed: {error.problem}"
            results = [RewardResult(None, reason=reason, error=True, tries=TRIES)] * len(transcripts)
        finally:
            self._stats[domain].pending -= len(transcripts)
        self._stats[domain].add(results)
        return results

    def take_stats(self) -> dict[str, DomainStats]:
        """Return the statistics since the last call, by domain."""
        taken = self._stats
        self._stats = {domain: DomainStats(pending=stats.pending) for domain, stats in taken.items()}
        return taken


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


class ActorBackend:
    """Scores by ``count`` reward actors: each call by the one with the fewest results to return."""

    def __init__(self, create: Callable[[], Handle[RewardActor]], count: int) -> None:
        self._actors = ActorPool(create, lambda actor: actor.call(RewardActor.start), count, "actor")

    async def open(self) -> None:
        """Start the actors. Raises ConfigError where a reward cannot be built."""
        await self._actors.open()

    async def score(self, task: Task, transcripts: list[Transcript]) -> tuple[list[RewardResult], int]:
        """See `ScoringBackend`."""
        return await self._actors.call(
            lambda actor: actor.call(RewardActor.score, task, transcripts), load=len(transcripts)
        )
