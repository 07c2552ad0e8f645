"""Who scores for an Explorer: itself, or reward actors on any node."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rayrft.config.reward import RewardConfig
from rayrft.experience import Task
from rayrft.handle import Handle
from rayrft.registry import load_plugins
from rayrft.rewards.base import RewardResult, Transcript
from rayrft.rewards.judge import ChatModel
from rayrft.rewards.scorer import DomainStats, Scorer


class RewardActor:
    """The actor: a scorer, with its processes."""

    def __init__(self, config: RewardConfig, plugins: list[Path]) -> None:
        load_plugins(plugins)
        self._scorer = Scorer(config, plugins)

    async def start(self) -> None:
        """Start the processes. Raises ConfigError where a reward cannot be built."""
        await self._scorer.open()

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        """Return one result per transcript."""
        return await self._scorer.score(task, transcripts)

    async def take_stats(self) -> dict[str, DomainStats]:
        """Return what happened since the last call, by domain."""
        return self._scorer.take_stats()


class RewardPool:
    """Scores by a scorer of its own or, with ``create``, by reward actors: the one that owes the fewest results.

    An actor that dies is replaced, and its calls are made again, once.
    """

    def __init__(
        self,
        config: RewardConfig,
        plugins: Sequence[Path],
        create: Callable[[], Handle[RewardActor]] | None,
        models: Mapping[str, ChatModel] | None = None,
    ) -> None:
        """``models`` are those that judges may ask, of a scorer of its own."""
        self._scorer = Scorer(config, plugins, models) if create is None else None
        self._create, self._count = create, config.actors
        self._actors: dict[Handle[RewardActor], asyncio.Future[None]] = {}
        """Each with its start."""
        self._owed = Counter[Handle[RewardActor]]()

    async def open(self) -> None:
        """Start scorer or actors. Raises ConfigError where a reward cannot be built."""
        if self._scorer is not None:
            return await self._scorer.open()
        for _ in range(self._count):
            self._add()
        await asyncio.gather(*self._actors.values())

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        """Return one result per transcript; all unknown if two actors died of them."""
        from ray.exceptions import RayActorError

        if self._scorer is not None:
            return await self._scorer.score(task, transcripts)
        for _ in range(2):
            actor = min(self._actors, key=self._owed.__getitem__)
            self._owed[actor] += len(transcripts)
            try:
                await asyncio.shield(self._actors[actor])
                return await actor.call(RewardActor.score, task, transcripts)
            except RayActorError as error:
                reason = f"reward actor died: {str(error).splitlines()[0]}"
                if self._actors.pop(actor, None) is not None:
                    self._add()
            finally:
                self._owed[actor] -= len(transcripts)
        return [RewardResult(None, reason=reason)] * len(transcripts)

    async def take_stats(self) -> dict[str, DomainStats]:
        """Return what happened since the last call, by domain; nothing of actors that have died."""
        from ray.exceptions import RayActorError

        if self._scorer is not None:
            return self._scorer.take_stats()
        calls = [actor.call(RewardActor.take_stats) for actor, start in self._actors.items() if start.done()]
        found = await asyncio.gather(*calls, return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, RayActorError):
                raise each
        known = [each for each in found if not isinstance(each, BaseException)]
        domains = {domain for each in known for domain in each}
        return {domain: DomainStats.of(each.get(domain) for each in known) for domain in domains}

    def _add(self) -> None:
        assert self._create is not None  # there are actors
        actor = self._create()
        self._actors[actor] = asyncio.ensure_future(actor.call(RewardActor.start))
