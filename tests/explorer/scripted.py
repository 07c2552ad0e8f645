"""What tests of the Explorer share: scripted engines and rewards, a Buffer and an Explorer in this process."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.events import GroupReport
from rayrft.buffer.schedule import StagePlan, Ticket
from rayrft.buffer.validation import find_faults
from rayrft.config import RunConfig, load_config
from rayrft.config.buffer import BufferConfig
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import Experience, Task, from_batch
from rayrft.explorer.engines.exchange import Answering, Completion, Request, Session
from rayrft.explorer.engines.pool import EnginePool, Member, Membership
from rayrft.explorer.explorer import Explorer
from rayrft.rewards import RewardResult, Transcript
from tests.config.given import base
from tests.scripted import remote


class ScriptedEngine(Answering):
    """Holds every request until it is told to answer one, chosen at random: the worst order there can be."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.version = 0
        self.random = random.Random(seed)
        self.waiting: list[asyncio.Event] = []
        self.arrived = asyncio.Event()
        self.abandoned, self.gave_up = 0, asyncio.Event()

    async def generate(self, request: Request) -> list[Completion]:
        version, told = self.version, asyncio.Event()
        self.waiting.append(told)
        self.arrived.set()
        try:
            await told.wait()
        except asyncio.CancelledError:
            self.abandoned += 1
            self.gave_up.set()
            raise
        return [Completion((5, 1), (-0.5, -0.5), ((0, 2, version),), "stop") for _ in range(request.n)]

    async def answer_one(self) -> None:
        while not self.waiting:
            self.arrived.clear()
            await self.arrived.wait()
        self.waiting.pop(self.random.randrange(len(self.waiting))).set()


class PromptEngine(Answering):
    """Answers at once."""

    version = 0

    async def generate(self, request: Request) -> list[Completion]:
        return [Completion((5, 1), (-0.5, -0.5), ((0, 2, self.version),), "stop")] * request.n


class ScriptedRewards:
    """The first answer of a group is right; in some groups all are, which leaves no variance."""

    def __init__(self, seed: int = 0, unknown: bool = False) -> None:
        self.random, self.unknown = random.Random(seed), unknown
        self.begun: dict[str, bool] = {}
        """Tasks of whose two answers one is scored, each with whether it is in a flat group."""

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        if self.unknown:
            return [RewardResult(None, reason="the judge is away")]
        if task.id in self.begun:
            return [RewardResult(float(self.begun.pop(task.id)))]
        self.begun[task.id] = self.random.random() < 0.3
        return [RewardResult(1.0)]


def config(**overrides: Any) -> RunConfig:
    grpo = {"name": "grpo", "algorithm": {"name": "grpo"}, "steps": 1, "batch_size": 8, "group_size": 2}
    return load_config({**base(), "stages": [grpo]}, overrides)


def spelling(words: int) -> list[Task]:
    return [Task.create("test", f"Spell this word backward: {i:03d}", "x") for i in range(words)]


def make_buffer(folder: Path, words: int = 50, sampler: str = "shuffled") -> Buffer:
    ids = [task.id for task in spelling(words)]
    tasks = TaskSetSpec(ids, [0] * words, [1.0], sampler=sampler, seed=0)
    return Buffer("run", folder, BufferConfig(), 0, tasks)


def make_explorer(
    config: RunConfig, model: Path, engine: Any, buffer: Buffer, rewards: Any, words: int = 50
) -> Explorer:
    tasks = spelling(words)
    pool = EnginePool()
    pool._membership = Membership(1, (Member(remote(engine, "engine-0"), 0),))
    explorer = Explorer(
        config, partial(ChatTokenizer, model), remote(pool, "engine_pool"), remote(buffer), tasks, tasks[:5], None
    )
    explorer._rewards = rewards
    return explorer


def plan(config: RunConfig, version: int = 0) -> StagePlan:
    stage = config.stages[0]
    return StagePlan(
        stage.groups,
        max_staleness=config.max_staleness,
        over_sampling=config.explorer.over_sampling,
        version=version,
    )


class QuickEngine(Answering):
    """Answers at once, at greater length if it is asked for the most likely answer, and notes what it was asked."""

    def __init__(self, stop_reason: str = "stop") -> None:
        super().__init__()
        self.asked: list[tuple[int, float]] = []
        self.stop_reason = stop_reason

    async def generate(self, request: Request) -> list[Completion]:
        self.asked.append((request.n, request.sampling.temperature))
        answer = (5, 6, 1) if request.sampling.temperature else (5, 6, 6, 6, 1)
        logprobs = tuple(-0.5 - place / 8 for place in range(len(answer)))
        return [Completion(answer, logprobs, ((0, len(answer), 0),), self.stop_reason) for _ in range(request.n)]


class Rewards:
    """These values for the sampled answers, in their order; the last one for all others, and for greedy answers."""

    def __init__(self, *values: float | None) -> None:
        self.sampled, self.greedy = iter(values), values[-1]

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        values = [self.greedy if len(each.response) > 2 else next(self.sampled, self.greedy) for each in transcripts]
        return [RewardResult(value, reason=None if value is not None else "away") for value in values]


class Taken:
    """Stands for the Buffer: what was put into it, and what it was told of groups that were dropped."""

    def __init__(self) -> None:
        self.rows: list[Experience] = []
        self.report = GroupReport()
        self.dropped: dict[str, int] = {}

    async def put(self, batch: pa.RecordBatch, report: GroupReport, *, ticket: Ticket, dropped: dict[str, int]) -> None:
        assert find_faults(batch) == {}
        self.rows, self.report, self.dropped = from_batch(batch), report, dropped

    async def drop(self, ticket: Ticket, dropped: dict[str, int], report: GroupReport) -> None:
        self.report, self.dropped = report, dropped


class Speaker:
    """Engines that say what ``says`` returns for the text of a prompt. ``asked`` are these texts; ``requests``,
    ``sessions`` and ``sampled``, the token ids of the answers, are in the same order."""

    def __init__(self, tokenizer: ChatTokenizer, says: Callable[[str], str], stop_reason: str = "stop") -> None:
        self.tokenizer, self.says, self.stop_reason = tokenizer, says, stop_reason
        self.asked, self.requests = list[str](), list[Request]()
        self.sessions, self.sampled = list[Session](), list[tuple[int, ...]]()

    async def generate(self, request: Request, sessions: Sequence[Session] = ()) -> list[Completion]:
        self.asked.append(str(self.tokenizer.hf.decode(request.prompt)))
        self.requests.append(request)
        self.sessions += sessions[:1]
        said = self.tokenizer.tokens(self.says(self.asked[-1]))
        ids = (*said, self.tokenizer.end_id)[: request.sampling.max_tokens]
        self.sampled.append(ids)
        return [Completion(ids, (-1.0,) * len(ids), ((0, len(ids), 0),), self.stop_reason)] * request.n


async def full_marks(task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
    """Score every answer 1."""
    return [RewardResult(1.0, answer="x")] * len(transcripts)
