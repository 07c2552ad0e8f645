"""The Explorer actor: turns tasks into groups of rows, as many concurrently as the Buffer admits."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.schedule import Ticket
from rayrft.config import RunConfig, StageConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import Task
from rayrft.explorer.engines.client import EngineClient
from rayrft.explorer.engines.pool import EnginePool
from rayrft.explorer.evaluation import Evaluation, measure
from rayrft.explorer.evaluator import TaskActor
from rayrft.explorer.group_flow import GroupFlow
from rayrft.explorer.unstored import UnstoredAnswers
from rayrft.files import Room
from rayrft.pipelines.experiences import ExperiencePipeline, experience_chain
from rayrft.pipelines.report import OperatorStats
from rayrft.pipelines.run.groups import LocalOperators, Operators
from rayrft.pipelines.run.models import open_models, running_engines
from rayrft.rewards.scorer import DomainStats, ScoringBackend
from rayrft.runtime.handle import Handle, TrackedHandle, once
from rayrft.runtime.trace import Trace
from rayrft.runtime.waits import WaitReport, Waits


@dataclass(frozen=True)
class Timings:
    """What took how long, of one Explorer or several."""

    rollout_s: float = 0.0
    """In which any rollout was running; of several Explorers, where it was most."""
    reward_s: float = 0.0
    """In which any scoring was running, likewise."""
    pipeline_s: float = 0.0
    """In which any group was verified, likewise."""
    rewards: dict[str, DomainStats] = field(default_factory=dict)
    """By domain."""
    operators: dict[str, OperatorStats] = field(default_factory=dict)
    """By operator on experiences."""
    problems: dict[str, str] = field(default_factory=dict)
    """Failures of attempts whose kind is new since the previous record, by reason."""

    @classmethod
    def of(cls, several: Sequence[Timings]) -> Timings:
        """Join those of several Explorers."""
        domains = {domain for each in several for domain in each.rewards}
        operators = dict.fromkeys(name for each in several for name in each.operators)
        return cls(
            max((each.rollout_s for each in several), default=0.0),
            max((each.reward_s for each in several), default=0.0),
            max((each.pipeline_s for each in several), default=0.0),
            {domain: DomainStats.of(each.rewards.get(domain) for each in several) for domain in sorted(domains)},
            {
                name: sum((each.operators[name] for each in several if name in each.operators), OperatorStats())
                for name in operators
            },
            {reason: text for each in several for reason, text in each.problems.items()},
        )


class Explorer(TaskActor):
    """The actor. The Buffer's tickets name the next tasks; held-out tasks are used for evaluation only."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Callable[[], ChatTokenizer],
        engine_pool: Handle[EnginePool],
        buffer: Handle[Buffer],
        tasks: list[Task],
        held_out: list[Task],
        scoring: Callable[[], ScoringBackend] | None,
        feed: str = "",
        auxiliary: Mapping[str, Handle[EnginePool]] | None = None,
        evaluation_pool: Handle[EnginePool] | None = None,
        operators: Callable[[], Operators] | None = None,
        name: str = "explorer",
    ) -> None:
        """``tokenizer`` loads the model's; ``operators`` makes remote operators on experiences, unless the Explorer
        runs them. ``feed`` is that of an explore job, whose Buffer belongs to no run; for others see `TaskActor`."""
        Room.limit_s = config.monitor.stall_s / 2
        share, loaded = 1 / config.explorer.count, tokenizer()
        super().__init__(
            config, loaded, engine_pool, scoring, auxiliary or {}, Waits(name, Trace(config.trace_folder, name)), share
        )
        self._buffer = TrackedHandle(buffer, self._waits, endless=[Buffer.admit, Buffer.leased])
        self._feed = feed
        self._tasks = {task.id: task for task in tasks}
        self._calls = 0
        self._held_out = held_out
        self._unstored = UnstoredAnswers(config.trace_folder, name)
        self._stage: StageConfig | None = None
        """The stage that is explored."""
        self.flow = GroupFlow(
            config,
            self._runner,
            self._buffer,
            self._tasks,
            self._waits,
            self._unstored,
            pipeline=self._make_pipeline(loaded.path, operators) if config.pipelines.experiences else None,
            limits_tries=not feed,
        )
        self._evaluating = EngineClient(evaluation_pool, self._waits) if evaluation_pool else None

    @once
    async def start(self) -> None:
        """Start what verifies, and what scores unless a stage trains it first: then it starts when it is needed."""
        if not self._config.reward.stages:
            await self._open_rewards()
        if self.flow.pipeline is not None:
            with self._waits.on("operators", "ready"):
                await self.flow.pipeline.operators.open()
        gc.collect()
        # What lives as long as the actor, and thousands of groups in flight, are not traversed for every few groups.
        gc.freeze()
        gc.set_threshold(400_000, 20, 100)

    async def explore(self, stage: StageConfig, producer: str) -> None:
        """Fill the Buffer until the stage is closed; then abandon the groups in flight. A feed is filled until its
        tasks are exhausted and its groups have finished. ``producer`` names this call to the Buffer.

        Raises RayrftError if too many consecutive groups fail.
        """
        self._stage = stage
        if self._config.reward.stages:
            await self._open_rewards()
        try:
            async with asyncio.TaskGroup() as groups:
                surplus = None if self._feed else groups.create_task(self._end_surplus(stage))
                while tickets := await self._admit(stage, producer):
                    for ticket in tickets:
                        groups.create_task(self.flow.run(self._stage, self._stage.algorithm.build(), ticket))
                if surplus is not None:  # after the last ticket the running groups finish, until the stage is closed
                    await surplus
                    raise _Closed
        except BaseExceptionGroup as failed:
            if not any(isinstance(each, _Closed) for each in failed.exceptions):
                raise failed.exceptions[0] from None

    async def adjust(self, config: RunConfig) -> None:
        """Continue with a config in which changeable keys differ. Groups in flight keep their temperature."""
        self._config = self.flow.config = config
        self._rewards.adjust(config.scoring)
        if self._stage is not None:
            self._stage = next(each for each in config.stages if each.name == self._stage.name)

    async def evaluate(self, temperature: float, samples: int = 1, beside: bool = False) -> Evaluation:
        """Attempt every held-out task, as in training, on the rollout engines or, ``beside`` them, on those that only
        evaluate: so many times at temperatures above 0, else once."""
        engines = self._evaluating if beside else self._engines
        assert engines is not None  # there are such engines
        evaluator = self._evaluator_on(engines, self._config.evaluation.max_tokens)
        if self._config.reward.stages:
            await self._open_rewards()
        samples = samples if temperature else 1
        groups = [group async for group in evaluator.each(self._held_out, samples, temperature)]
        attempts = [*chain.from_iterable(groups)]
        await self._unstored.add_evaluated(self._held_out, attempts, temperature)
        return measure(attempts, [samples], seed=self._config.seed)

    async def timings(self) -> Timings:
        """Return the timings since the last call."""
        return Timings(
            self._runner.rolling.take(),
            self._runner.scoring.take(),
            self.flow.verifying.take(),
            self._rewards.take_stats(),
            {} if self.flow.pipeline is None else self.flow.pipeline.take_stats(),
            self._runner.take_problems(),
        )

    async def waiting(self) -> WaitReport:
        """Report what groups and evaluation wait for, and for how long, and why no group succeeds, if none does."""
        return replace(self._waits.report(), trouble=self.flow.trouble)

    @once
    async def _open_rewards(self) -> None:
        """Start what scores. Raises ConfigError where a reward cannot be built."""
        with self._waits.on("rewards", "ready"):
            await self._rewards.open()

    def _admit(self, stage: StageConfig, producer: str) -> Awaitable[list[Ticket]]:
        self._calls += 1
        count = -(-stage.groups // self._config.explorer.count)  # else the first one to ask gets all of a step
        return self._buffer.call(Buffer.admit, producer, self._calls, count, self._feed)

    def _make_pipeline(self, model: str, operators: Callable[[], Operators] | None) -> ExperiencePipeline:
        """Return the operators on experiences, which use the auxiliary models and rewards of the Explorer."""
        pipelines, chain = self._config.pipelines, experience_chain(self._config, model)
        if operators is not None:
            return ExperiencePipeline(pipelines, chain.build(), operators())
        opened = partial(
            open_models,
            engines=running_engines(self._models, self._config.auxiliary),
            endpoints=pipelines.endpoints,
            score=self._reward,
            tasks=self._tasks.get,
            answer_s=pipelines.answer_s,
        )
        return ExperiencePipeline(pipelines, chain.build(), LocalOperators(chain, pipelines, opened))

    async def _end_surplus(self, stage: StageConfig) -> None:
        """End the groups in flight of every step that has been leased. Returns once the stage is closed."""
        step = -1
        while (newest := await self._buffer.call(Buffer.leased, step)) > step:
            step = newest
            self.flow.end_due(stage, step)


class _Closed(Exception):
    """The stage is closed: its groups in flight are abandoned."""
