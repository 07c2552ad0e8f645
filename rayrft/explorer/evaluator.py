"""Attempts at tasks that are scored and measured, and not trained on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from rayrft.config import RunConfig
from rayrft.data.reasoning import split_reasoning
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import TRUNCATED, Experience, Task
from rayrft.explorer.engines.auxiliary import auxiliary_models
from rayrft.explorer.engines.client import EngineClient
from rayrft.explorer.engines.pool import EnginePool
from rayrft.explorer.evaluation import Attempt
from rayrft.explorer.rollout import Runner
from rayrft.explorer.scoring import reward_after_truncation
from rayrft.registry import load_plugins
from rayrft.rewards import RewardResult, Transcript
from rayrft.rewards.scorer import Rewards, ScoringBackend
from rayrft.runtime.handle import Handle, Watched
from rayrft.runtime.waits import Waits, cancel


class TaskActor(Watched):
    """Base of the actors that attempt tasks, with the engines, auxiliary models, rewards and workflows of a run."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: ChatTokenizer,
        engine_pool: Handle[EnginePool],
        scoring: Callable[[], ScoringBackend] | None,
        auxiliary: Mapping[str, Handle[EnginePool]],
        waits: Waits,
        share: float = 1.0,
    ) -> None:
        """``scoring`` makes remote scorers, unless the actor scores; ``auxiliary`` has the pools of the auxiliary
        models; ``share``: see `EngineClient`."""
        load_plugins(config.plugins)
        self._config, self._waits = config, waits
        self._engines = EngineClient(engine_pool, waits, share)
        self._models = auxiliary_models(config.auxiliary, auxiliary, waits, share)
        self._rewards = Rewards(config.scoring, config.plugins, scoring, self._models)
        self._runner = Runner(config, tokenizer, self._engines, self._reward, self._models, self._rewards.scores_inline)

    def _evaluator_on(self, engines: EngineClient, max_tokens: int | None) -> Evaluator:
        return Evaluator(self._config, self._runner.beside(engines, max_tokens))

    async def _reward(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        with self._waits.on(f"reward of domain {task.domain!r}", task.id, name="score"):
            return await self._rewards.score(task, transcripts)


class Evaluator:
    """Attempts tasks as a run does."""

    def __init__(self, config: RunConfig, runner: Runner) -> None:
        self._config = config
        self._runner = runner

    async def each(
        self, tasks: Sequence[Task], samples: int, temperature: float, done: dict[str, int] | None = None
    ) -> AsyncIterator[list[Attempt]]:
        """Attempt every task ``samples`` times, less the attempts that are ``done`` by its id; yield the attempts at
        each task as they end. Raises ActorDied if an engine has died."""
        # More at once would only wait for the engines.
        engine = self._config.explorer.engine
        room = asyncio.Semaphore(max(1, engine.count * engine.most_running // samples))
        have = done or {}

        async def attempt(task: Task) -> list[Attempt]:
            async with room:
                return await self._attempt(task, have.get(task.id, 0), samples, temperature)

        running = [asyncio.ensure_future(attempt(task)) for task in tasks if have.get(task.id, 0) < samples]
        try:
            for ended in asyncio.as_completed(running):
                yield await ended
        finally:
            await cancel(*running)

    async def _attempt(self, task: Task, first: int, samples: int, temperature: float) -> list[Attempt]:
        """Make the attempts at a task from number ``first`` to ``samples``."""
        name = f"{task.id}/{first}" if first else task.id  # the seeds of requests are derived from it
        rollout = await self._runner.run(task, name, samples - first, temperature)
        scored: dict[int, list[tuple[Experience, RewardResult]]] = {}
        for row, result in zip(rollout.rows, rollout.results, strict=True):
            scored.setdefault(first + int(row.repeat), []).append((row, result))
        attempts = [self._attempt_of(task, repeat, rows) for repeat, rows in scored.items()]
        missing = [repeat for repeat in range(first, samples) if repeat not in scored]
        failed = zip(missing, rollout.failed.elements(), strict=True)
        attempts += [Attempt(task.id, repeat, None, problem=reason, error=rollout.problem) for repeat, reason in failed]
        return sorted(attempts, key=lambda attempt: attempt.repeat)

    def _attempt_of(self, task: Task, repeat: int, rows: list[tuple[Experience, RewardResult]]) -> Attempt:
        """Build an attempt from its rows. Its reward is their mean; if that of one is unknown, so is the attempt's."""
        values = [
            reward_after_truncation(row.stop_reason, result.value, self._config.reward)
            if row.reward is None
            else result.value
            for row, result in rows
            if result.value is not None
        ]
        unknown = [result.reason or "no reason given" for _, result in rows if result.value is None]
        last, result = rows[-1]
        response = last.turns[-1]["content"]
        return Attempt(
            task.id,
            repeat,
            None if unknown else sum(values) / len(values),
            (split_reasoning(response)[1].strip() if result.answer is None else result.answer) or None,
            response,
            tokens=sum(int(row.action_mask.sum()) for row, _ in rows),
            cut=any(row.stop_reason in TRUNCATED for row, _ in rows),
            problem=unknown[-1] if unknown else None,
            versions=tuple(sorted({span.version for row, _ in rows for span in row.weight_versions})),
        )
