"""What tests of the Explorer share: scripted engines, rewards, workflows and environments; a Runner and an Explorer."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rayrft.buffer.events import GroupReport
from rayrft.buffer.schedule import Ticket
from rayrft.buffer.validation import find_faults
from rayrft.config import RunConfig, load_config
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import Experience, Task, from_batch, to_batch, unpack
from rayrft.explorer.engines.exchange import INTERRUPTED, Answering, Completion, Request, Sampling, Session
from rayrft.explorer.engines.pool import EnginePool, Member, Membership
from rayrft.explorer.environments import EnvironmentClient, Step, as_messages
from rayrft.explorer.explorer import Explorer
from rayrft.explorer.rollout import Rollout, Runner, ScoreAnswers
from rayrft.explorer.trajectory import ContextFull, Model, Trajectory
from rayrft.explorer.workflows import register_workflow
from rayrft.rewards import RewardResult, StepReward, Transcript
from tests.config.given import GRPO, base
from tests.scripted import remote


class ScriptedEngine(Answering):
    """Holds every request until it is told to answer it. An answer is ``WHOLE``, or the rest of that, under the weights
    of its request; where it is interrupted, the first token under the present weights."""

    WHOLE = (7, 5, 1)

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.version = self.abandoned = 0
        self.random = random.Random(seed)
        self.waiting: dict[asyncio.Future[str], Request] = {}
        self.changed = asyncio.Event()

    async def generate(self, request: Request) -> list[Completion]:
        version, reason = self.version, asyncio.get_running_loop().create_future()
        self.waiting[reason] = request
        self.changed.set()
        try:
            ended = await reason
        except asyncio.CancelledError:
            self.abandoned += 1
            raise
        finally:
            self.waiting.pop(reason, None)
            self.changed.set()
        ids = self.WHOLE[1:] if self.resumes(request) else self.WHOLE
        if ended == INTERRUPTED:
            ids, version = ids[:1], self.version
        return [Completion(ids, (-0.5,) * len(ids), ((0, len(ids), version),), ended)] * request.n

    async def interrupt(self, request: Request) -> None:
        next(reason for reason, each in self.waiting.items() if each is request).set_result(INTERRUPTED)

    def resumes(self, request: Request) -> bool:
        return request.prompt[-1] == self.WHOLE[0]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until requests have come or were abandoned so that this is true."""
        async with asyncio.timeout(30):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def answer_one(self) -> None:
        """Answer one of the requests at random: the worst order there can be."""
        await self.until(lambda: bool(self.waiting))
        chosen = self.random.choice(list(self.waiting))
        del self.waiting[chosen]
        chosen.set_result("stop")

    async def answer(self, count: int, resumed: bool) -> None:
        """Answer the first requests, of groups that were parked or of new ones, once there are so many."""

        def found() -> list[asyncio.Future[str]]:
            return [reason for reason, request in self.waiting.items() if self.resumes(request) == resumed]

        await self.until(lambda: len(found()) >= count)
        for reason in found()[:count]:
            reason.set_result("stop")


class ScriptedRewards:
    """The first answer of a group is right; in some groups all are, which leaves no variance."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.begun: dict[str, bool] = {}
        """Tasks of whose two answers one is scored, each with whether it is in a flat group."""

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        return [self._score(task) for _ in transcripts]

    def _score(self, task: Task) -> RewardResult:
        if task.id in self.begun:
            return RewardResult(float(self.begun.pop(task.id)))
        self.begun[task.id] = self.random.random() < 0.3
        return RewardResult(1.0)


def config(**overrides: Any) -> RunConfig:
    return load_config({**base(), "stages": [GRPO]}, overrides)


def spelling(words: int) -> list[Task]:
    return [Task.create("test", f"Spell this word backward: {i:03d}", "x") for i in range(words)]


def make_explorer(
    config: RunConfig, model: Path, engine: Any, buffer: Any, rewards: Any, tasks: Sequence[Task] = ()
) -> Explorer:
    """``buffer`` is a Buffer or `Taken`."""
    tasks, pool = list(tasks) or spelling(50), EnginePool()
    pool.membership = Membership(1, (Member(remote(engine, "engine-0"), 0),))
    tokenizer, held_out = partial(ChatTokenizer, model), tasks[:5]
    explorer = Explorer(config, tokenizer, remote(pool, "engine_pool"), remote(buffer), tasks, held_out, None)
    explorer._rewards = rewards or ScriptedRewards(1)
    if isinstance(buffer, Taken):
        explorer.flow.writer = buffer  # type: ignore[assignment]
    return explorer


class QuickEngine(Answering):
    """Answers at once, at greater length if it is asked for the most likely answer, and notes what it was asked."""

    def __init__(self, stop_reason: str = "stop") -> None:
        super().__init__()
        self.version = 0
        self.asked: list[tuple[int, float]] = []
        self.limits: list[int] = []
        self.stop_reason = stop_reason

    async def generate(self, request: Request) -> list[Completion]:
        self.asked.append((request.n, request.sampling.temperature))
        self.limits.append(request.sampling.max_tokens)
        answer = (5, 6, 1) if request.sampling.temperature else (5, 6, 6, 6, 1)
        logprobs = tuple(-0.5 - place / 8 for place in range(len(answer)))
        return [Completion(answer, logprobs, ((0, len(answer), self.version),), self.stop_reason)] * request.n


class Rewards:
    """These values for the sampled answers, in their order; the last one for all others, and for greedy answers."""

    def __init__(self, *values: float | None) -> None:
        self.sampled, self.greedy = iter(values), values[-1]

    def adjust(self, config: Any) -> None:
        self.adjusted = config

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        values = [self.greedy if len(each.response) > 2 else next(self.sampled, self.greedy) for each in transcripts]
        return [RewardResult(value, reason=None if value is not None else "away") for value in values]


class Taken:
    """Stands for the Buffer: what was put into it, what it was told of groups that were dropped, and demonstrations."""

    def __init__(self) -> None:
        self.rows: list[Experience] = []
        self.report = GroupReport()
        self.dropped: dict[str, int] = {}
        self.made: dict[str, list[Experience]] = {}

    async def put(
        self, rows: list[Experience], report: GroupReport, *, ticket: Ticket, dropped: dict[str, int]
    ) -> None:
        batch = to_batch(rows)
        assert find_faults(batch) == {}
        self.rows, self.report, self.dropped = from_batch(batch), report, dropped

    async def drop(self, ticket: Ticket, dropped: dict[str, int], report: GroupReport) -> None:
        self.report, self.dropped = report, dropped

    async def extend(self, name: str, payload: list[Any]) -> int:
        self.made.setdefault(name, []).extend(from_batch(unpack(payload[0])))
        return len(self.made[name])


async def run_group(explorer: Explorer, config: RunConfig) -> None:
    """Take the first task from its ticket to the Buffer."""
    stage, task = config.stages[0], next(iter(explorer.flow.tasks))
    await explorer.flow.run(stage, stage.algorithm.build(), Ticket(0, 0, 0, task))


Says = str | Iterable[str] | Callable[[str], str]


class Speaker:
    """Engines that say one text, several one after another, or what a function returns for the text of a prompt."""

    def __init__(self, tokenizer: ChatTokenizer, says: Says, stop_reason: str = "stop") -> None:
        texts = itertools.repeat(says) if isinstance(says, str) else says
        self._says = texts if callable(texts) else iter(texts)
        self.tokenizer, self.stop_reason = tokenizer, stop_reason
        self.asked, self.requests = list[str](), list[Request]()
        self.sessions, self.sampled = list[Session](), list[tuple[int, ...]]()

    async def generate(self, request: Request, sessions: Sequence[Session] = ()) -> list[Completion]:
        self.asked.append(str(self.tokenizer.hf.decode(request.prompt)))
        self.requests.append(request)
        self.sessions += sessions[:1]
        said = self.tokenizer.tokens(self._says(self.asked[-1]) if callable(self._says) else next(self._says))
        ids = (*said, self.tokenizer.end_id)[: request.sampling.max_tokens]
        self.sampled.append(ids)
        return [Completion(ids, (-1.0,) * len(ids), ((0, len(ids), 0),), self.stop_reason)] * request.n


async def full_marks(task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
    """Score every answer 1."""
    return [RewardResult(1.0, answer="x")] * len(transcripts)


# Attempts at tasks by a Runner

TASK = Task.create("test", "Spell this word backward: horse", "x")
CAT = Task.create("test", "Spell this word backward: cat", "tac")
ROOM = {"model.max_length": 400, "explorer.sampling.max_prompt_tokens": 300, "explorer.sampling.max_tokens": 60}


class Engines:
    """Answers three tokens, of which one closes the turn, with a log-prob that is the request's seed and place."""

    def __init__(self, stop_reason: str = "stop") -> None:
        self.requests: list[tuple[list[int], int, Sampling]] = []
        self.stop_reason = stop_reason

    async def generate(self, request: Request, sessions: Sequence[Session] = ()) -> list[Completion]:
        sampling = request.sampling
        self.requests.append((request.prompt, request.n, sampling))
        seed = sampling.seed or 0
        end = sampling.stop_token_ids[0] if self.stop_reason == "stop" else 6
        ids = (5, 6, end)[: sampling.max_tokens]
        return [
            Completion(ids, (-float((seed + k) % 997),) * len(ids), ((0, len(ids), 7),), self.stop_reason)
            for k in range(request.n)
        ]


@register_workflow("troubled")
class Troubled:
    """Repeat 0 answers; what the others do is said by the options."""

    def __init__(self, trouble: str = "") -> None:
        self._trouble = trouble
        self._of_repeat_0: list[Trajectory] = []

    async def run(self, task: Task, model: Model, env: Any = None) -> Any:
        trajectory = model.start(task.messages)
        if model.repeat == 0:
            await trajectory.act()
            if self._trouble == "another's":
                self._of_repeat_0.append(trajectory)
            return trajectory
        match self._trouble:
            case "raises":
                raise KeyError("nothing here")
            case "cancels itself":
                helper = asyncio.ensure_future(asyncio.Event().wait())
                helper.cancel()
                await helper
            case "exits":
                raise SystemExit(2)
            case "has a deadline of its own":
                async with asyncio.timeout(0):
                    await asyncio.Event().wait()
            case "hangs":
                await asyncio.Event().wait()
            case "none":
                return None
            case "never acts":
                return trajectory
            case "another's":
                await trajectory.act()
                return self._of_repeat_0
            case "twice":
                await trajectory.act()
                return [trajectory, trajectory]
            case "retells":
                text = await trajectory.act()
                trajectory.messages[-1]["content"] = f"So: {text}"
                return trajectory
            case "observes a library":
                await trajectory.act()
                trajectory.observe("x" * 1_000_000)
            case "late":
                await asyncio.sleep(0)
            case "forges tokens" | "forges log-probs" | "forges a prompt":
                await trajectory.act()
                [(prompt, answer)] = trajectory.prompted()
                if self._trouble == "forges tokens":
                    answer = replace(answer, token_ids=(6, *answer.token_ids[1:]))
                elif self._trouble == "forges log-probs":
                    answer = replace(answer, logprobs=(0.0,) * len(answer.logprobs))
                else:
                    prompt = [7, *prompt[1:]]
                trajectory.record([*prompt, *answer.token_ids], [(len(prompt), answer)])
                return trajectory
            case "forges and is full":
                await trajectory.act()
                [(prompt, answer)] = trajectory.prompted()
                trajectory.record([7, *prompt, *answer.token_ids], [(len(prompt) + 1, answer)])
                await self._full()
            case "builds its own":
                ids = model.tokenizer.prompt(task.messages)
                count, answers = len(ids), []
                for _ in range(2):
                    answers.append((len(ids), await model.generate(ids)))
                    ids += answers[-1][1].token_ids
                return model.recorded(ids, count, answers, trajectory.messages)
            case "one of two is full":
                await trajectory.act()
                await asyncio.gather(trajectory.act(), self._full())
        for _ in range(50):
            await trajectory.act()
            trajectory.observe("again")
        return [trajectory]

    async def _full(self) -> None:
        await asyncio.sleep(0)
        raise ContextFull("like this")


async def roll_out(
    model: Path, engines: Engines, n: int = 2, task: Task = TASK, score: ScoreAnswers = full_marks, **overrides: Any
) -> Rollout:
    return await Runner(config(**overrides), ChatTokenizer(model), engines, score).run(task, "group", n, 1.0)


def troubled(trouble: str) -> dict[str, Any]:
    return {"explorer.workflow": "troubled", "explorer.workflow_options": {"troubled": {"trouble": trouble}}}


class Room:
    """An environment in which trouble may come at any point, and which says in `opened` how many are open."""

    opened = 0

    def __init__(self, trouble: str = "") -> None:
        self._trouble = trouble
        if trouble == "create":
            raise OSError("no room")
        Room.opened += 1

    async def reset(self, task: Task, seed: int) -> str:
        if self._trouble == "reset":
            raise ValueError("no key")
        if self._trouble == "hang":
            await asyncio.Event().wait()
        return task.question

    async def step(self, action: str) -> Step:
        return Step(action, reward=0.5, done=True)

    async def close(self) -> None:
        Room.opened -= 1
        if self._trouble == "close":
            raise OSError("stuck")
        if self._trouble == "hang":
            await asyncio.Event().wait()


class Visit:
    """Acts once in its environment."""

    async def run(self, task: Task, model: Model, env: EnvironmentClient | None = None) -> Trajectory:
        assert env is not None
        trajectory = model.start(as_messages(await env.reset(task)))
        trajectory.reward((await env.step(await trajectory.act())).reward)
        return trajectory


def visit(trouble: str, name: str = "Room") -> dict[str, Any]:
    return {
        "explorer.workflow": f"{__name__}:Visit",
        "explorer.environment": {"name": f"{__name__}:{name}", "options": {"trouble": trouble}, "deadline_s": 0.2},
    }


async def play(
    model: Path,
    name: str,
    says: Says,
    options: dict[str, Any] | None = None,
    n: int = 1,
    *,
    task: Task = CAT,
    failures: bool = False,
    steps: bool = False,
    opens: str = "",
    stop_reason: str = "stop",
    **more: Any,
) -> tuple[Rollout, Speaker]:
    """Answers are right if they are the task's, and of unknown reward if they are "odd"; with ``steps``, each has a
    reward of a step that ends with its third last character. The template ends with ``opens``."""

    async def score(task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        results = []
        for each in transcripts:
            odd, end = each.response == "odd", len(each.answers[-1]) - 2
            value, of_step = float(each.response == task.answer), StepReward(len(each.answers) - 1, end, 1.0)
            given = (of_step,) if steps else ()
            results.append(RewardResult(None if odd else value, {}, "is odd" if odd else None, steps=given))
        return results

    tokenizer = ChatTokenizer(model)
    tokenizer.hf.chat_template += opens
    settings = config(**{**ROOM, "explorer.workflow": name, "explorer.workflow_options": {name: options or {}}, **more})
    speaker = Speaker(tokenizer, says, stop_reason)
    rollout = await Runner(settings, tokenizer, speaker, score).run(task, "group", n, 1.0)
    assert failures or not rollout.failed, rollout.problem
    return rollout, speaker


def earned(rollout: Rollout) -> list[float | None]:
    return [result.value for result in rollout.results]


def said(rollout: Rollout) -> list[list[str]]:
    """What the model said, by row."""
    return [[turn["content"] for turn in row.turns if turn["role"] == "assistant"] for row in rollout.rows]


def where(name: str = "Blocking", **more: Any) -> dict[str, Any]:
    settings = {"name": f"tests.explorer.acted_in:{name}", "deadline_s": 100.0, "processes": 4, "spares": 0, **more}
    return {
        "explorer.environment": settings,
        "explorer.workflow": "episode",
        "model.max_length": 8000,
        "explorer.sampling.max_prompt_tokens": 4000,
        "explorer.sampling.max_tokens": 60,
    }


def stored(rollout: Rollout) -> list[Experience]:
    """The rows as the Buffer has them."""
    results = zip(rollout.rows, rollout.results, strict=True)
    return from_batch(to_batch([row.with_fields(reward=result.value) for row, result in results]))
