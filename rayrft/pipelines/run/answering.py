"""The parent's side of what operators ask: models, each so many requests at a time, rewards, and tasks by their ids."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.base import resolved
from rayrft.config.pipelines import EndpointConfig
from rayrft.config.reward import RewardModelsConfig
from rayrft.errors import CallTimeout, DataError, EndpointFailed, RequestRefused
from rayrft.experience import Task
from rayrft.json_lines import open_lines
from rayrft.pipelines.run.asking import Reply
from rayrft.rewards import RewardResult, Transcript, build_reward, where
from rayrft.rewards.judge import ChatModel, Messages, OpenAIModel, digest
from rayrft.rewards.scorer import Scorer
from rayrft.runtime.processes.pool import Worker

Score = Callable[[Task, list[Transcript]], Awaitable[list[RewardResult]]]

_FAILURES_IN_A_ROW = 32
"""Consecutive requests that a model may leave without an answer before it counts as dead."""


@dataclass(frozen=True)
class AskedModel:
    """A model that operators may ask, ``calls`` requests at a time. ``identity`` tells it from others in a journal, and
    what it answers where a call does not say how."""

    chat: ChatModel
    calls: int = 256
    identity: str = ""

    @classmethod
    def on_engines(cls, chat: ChatModel, config: AuxiliaryConfig) -> AskedModel:
        """Return an auxiliary model, of which no more is asked at a time than its engines decode."""
        identity = f"{config.model} {config.temperature} {config.max_tokens} {config.max_length}"
        return cls(chat, config.engine.count * config.engine.max_running, identity)


class Journal:
    """Answers of models in a JSONL file, by what was asked: work that was cut off goes on without asking it again.

    Memory: 100 bytes or so for each answer. Raises StorageError if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._file, keys = open_lines(path, lambda line: str(next(iter(json.loads(line)))))
        self._numbers = {key: number for number, key in enumerate(keys)}

    def get(self, key: str) -> str | None:
        """Return the answer to what was asked, if it is there."""
        if (number := self._numbers.get(key)) is None:
            return None
        [line] = self._file.lines(number, number + 1)
        text: str = json.loads(line)[key]
        return text

    def add(self, key: str, text: str) -> None:
        self._file.append(json.dumps({key: text}).encode() + b"\n")
        self._numbers[key] = len(self._file) - 1

    def close(self) -> None:
        self._file.close()


class Answerer:
    """Answers what operators ask during a `call` to their process.

    A request that fails, or has no answer within ``answer_s`` from when it is made, is answered with the problem. What
    ends the call, with the error, is an engine that died (ActorDied), and a model that leaves many requests in a row
    without an answer (EndpointFailed).
    """

    def __init__(
        self,
        models: Mapping[str, AskedModel],
        score: Score | None = None,
        *,
        tasks: Callable[[str], Task | None] = lambda task_id: None,
        answer_s: float = 300.0,
        journal: Journal | None = None,
    ) -> None:
        self._models, self._score, self._tasks = models, score, tasks
        self._answer_s, self._journal = answer_s, journal
        self._room = {name: asyncio.Semaphore(model.calls) for name, model in models.items()}
        self._failed = Counter[str]()
        """Consecutive requests without an answer, by model."""

    async def call(self, worker: Worker, method: str, *arguments: Any, deadline_s: float) -> Any:
        """Call a method of an object in a process, whose deadline stands still while it waits for what it asks.

        Raises the errors of `Worker.call`, and what ends the call.
        """
        loop, waiting = asyncio.get_running_loop(), 0

        async def asked(kind: str, *what: Any) -> Any:
            nonlocal waiting
            waiting += 1
            if not limit.expired():
                limit.reschedule(None)
            try:
                return await self._reply(kind, *what)
            finally:
                waiting -= 1
                if not waiting and not limit.expired():
                    limit.reschedule(loop.time() + deadline_s)

        try:
            async with asyncio.timeout(deadline_s) as limit:
                return await worker.call(method, *arguments, deadline_s=math.inf, asked=asked)
        except TimeoutError:
            problem = f"not done within {deadline_s:g} s"
            raise CallTimeout(problem, "raise the deadline, or make it faster", field=method) from None

    async def _reply(self, kind: str, *arguments: Any) -> Any:
        if kind == "chat":
            return await self._chat(*arguments)
        if kind == "score":
            assert self._score is not None  # it was checked that there is a reward
            return await self._score(*arguments)
        return {name: task for name in arguments[0] if (task := self._tasks(name)) is not None}

    async def _chat(self, name: str, seed: int | None, messages: Messages, sampling: dict[str, Any]) -> Reply:
        model = self._models[name]
        key = digest(model.identity or name, json.dumps([messages, sampling, seed], sort_keys=True)).hex()
        if self._journal is not None and (known := self._journal.get(key)) is not None:
            return Reply(known)
        async with self._room[name]:
            try:
                async with asyncio.timeout(self._answer_s):
                    text = await model.chat.with_seed(seed).chat(messages, **sampling)
            except TimeoutError:
                return self._without(name, EndpointFailed(f"no answer within {self._answer_s:g} s", field=name))
            except EndpointFailed as error:
                return self._without(name, error)
            except (RequestRefused, DataError) as error:
                return Reply(problem=error.problem)
        self._failed[name] = 0
        if self._journal is not None:
            self._journal.add(key, text)
        return Reply(text)

    def _without(self, name: str, error: EndpointFailed) -> Reply:
        self._failed[name] += 1
        if self._failed[name] < _FAILURES_IN_A_ROW:
            return Reply(problem=error.problem)
        problem = f"{self._failed[name]} requests in a row had no answer; the last: {error.problem}"
        raise EndpointFailed(problem, error.remedy, field=name, value=error.value)


Engines = Callable[[Collection[str]], AbstractAsyncContextManager[Mapping[str, AskedModel]]]
"""Has those of the named models that it knows on engines, for as long as they are asked."""


def running(models: Mapping[str, ChatModel], configs: Mapping[str, AuxiliaryConfig]) -> Engines:
    """Return what has models whose engines are running already."""

    @asynccontextmanager
    async def engines(names: Collection[str]) -> AsyncIterator[Mapping[str, AskedModel]]:
        yield {name: AskedModel.on_engines(models[name], configs[name]) for name in names if name in models}

    return engines


@asynccontextmanager
async def no_engines(names: Collection[str]) -> AsyncIterator[Mapping[str, AskedModel]]:
    """Have no model on engines."""
    yield {}


@asynccontextmanager
async def answering(
    names: Collection[str],
    scores: bool,
    *,
    engines: Engines,
    endpoints: Mapping[str, EndpointConfig],
    reward: RewardModelsConfig | None = None,
    score: Score | None = None,
    plugins: Sequence[Path] = (),
    tasks: Callable[[str], Task | None] = lambda task_id: None,
    answer_s: float = 300.0,
    journal: Path | None = None,
) -> AsyncIterator[Answerer]:
    """Have an `Answerer` inside an ``async with``, for the named models, on engines and at endpoints, and with
    ``scores`` for a reward, whose judges may ask these kinds of models, too, unless ``score`` scores for it. A
    ``journal`` is the file of a `Journal`.

    Raises ConfigError where the reward cannot be built, and what starting engines raises.
    """
    built = reward if scores and score is None else None
    judges = needed_models(built) if built is not None else set[str]()
    async with AsyncExitStack() as stack:
        models = dict[str, AskedModel]()
        for name in endpoints.keys() & {*names, *judges}:
            models[name] = _at_endpoint(endpoints[name])
            stack.push_async_callback(models[name].chat.close)  # type: ignore[attr-defined]
        models |= await stack.enter_async_context(engines({*names, *judges} - models.keys()))
        if built is not None:
            scorer = Scorer(built, plugins, {name: model.chat for name, model in models.items()})
            stack.push_async_callback(scorer.close)
            await scorer.open()
            score = scorer.score
        written = stack.enter_context(closing(Journal(journal))) if journal is not None else None
        yield Answerer(models, score, tasks=tasks, answer_s=answer_s, journal=written)


def needed_models(config: RewardModelsConfig) -> set[str]:
    """Return the names of the models that judges of a reward ask."""
    parts = [part for model in config.models.values() for part in model.scored_by if where(part.name) == "loop"]
    return {name for part in parts for name in getattr(build_reward(part.name, part.options), "needs_auxiliary", ())}


def _at_endpoint(config: EndpointConfig) -> AskedModel:
    sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens}
    model = OpenAIModel(resolved(config.url), config.model, config.key_variable, retries=config.retries, **sampling)
    identity = f"{config.model} {config.url} {config.temperature} {config.max_tokens}"
    return AskedModel(model, config.calls, identity)
