"""Attempts at tasks by a Runner: engines, workflows and environments that behave as tests say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import RequestRefused
from rayrft.experience import Experience, Task, from_batch, to_batch
from rayrft.explorer.engines.exchange import Completion, Request, Sampling, Session
from rayrft.explorer.environments import EnvironmentClient, Step, as_messages
from rayrft.explorer.rollout import Rollout, Runner
from rayrft.explorer.trajectory import ContextFull, Model, Trajectory
from rayrft.explorer.workflows import register_workflow
from rayrft.rewards import RewardResult, StepReward, Transcript
from tests.explorer.scripted import Speaker, config, full_marks

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
            case "no number":
                trajectory.reward("good")  # type: ignore[arg-type]
            case "refused":
                raise RequestRefused("too long", field="request")
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


async def roll_out(tiny_model: Path, engines: Engines, n: int = 2, task: Task = TASK, **overrides: Any) -> Rollout:
    runner = Runner(config(**overrides), ChatTokenizer(tiny_model), engines, full_marks)
    return await runner.run(task, "group", n, 1.0)


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
    says: Callable[[str], str],
    options: dict[str, Any] | None = None,
    n: int = 1,
    failures: bool = False,
    **more: Any,
) -> tuple[Rollout, Speaker]:
    """Answers are right if they are the task's, and of unknown reward if they are "odd". Each has a reward of a step
    that ends with its third last character. The template ends with ``opens``."""

    async def score(task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        said = [each.response for each in transcripts]
        values = [None if each == "odd" else float(each == task.answer) for each in said]
        ends = [len(each.answers[-1]) - 2 for each in transcripts]
        return [
            RewardResult(
                value, {}, "is odd" if value is None else None, steps=(StepReward(len(t.answers) - 1, end, 1.0),)
            )
            for value, end, t in zip(values, ends, transcripts, strict=True)
        ]

    task = more.pop("task", CAT)
    tokenizer = ChatTokenizer(model)
    tokenizer.hf.chat_template += more.pop("opens", "")
    settings = config(**{**ROOM, "explorer.workflow": name, "explorer.workflow_options": {name: options or {}}, **more})
    speaker = Speaker(tokenizer, says)
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
