"""Models, rewards and tasks for operators: handles in the operators' process, and the server in its parent.

Models and rewards are with the parent, which answers thousands of requests at a time over the socket of the process.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.base import resolved
from rayrft.config.pipelines import EndpointConfig
from rayrft.config.reward import RewardModelsConfig
from rayrft.data.chat_template import Messages
from rayrft.errors import DataError, EndpointFailed, RequestRefused
from rayrft.experience import Task, json_digest
from rayrft.json_lines import open_lines
from rayrft.rewards import RewardResult, Transcript, build_reward, where
from rayrft.rewards.judge import ChatModel, OpenAIModel
from rayrft.rewards.scorer import Scorer
from rayrft.runtime.processes.remote import ErrorReply, Remote, call_object, remote_method

Score = Callable[[Task, list[Transcript]], Awaitable[list[RewardResult]]]

_FAILURES_IN_A_ROW = 32
"""Consecutive requests that a model may leave without an answer before it counts as dead."""


@dataclass(frozen=True)
class AskedModel:
    """A model that operators may ask, ``calls`` requests at a time. In a journal ``identity`` stands for the model and
    the sampling that a call does not set."""

    chat: ChatModel
    calls: int = 256
    identity: str = ""

    @classmethod
    def on_engines(cls, chat: ChatModel, config: AuxiliaryConfig) -> AskedModel:
        """Return an auxiliary model, with at most as many requests in flight as its engines decode."""
        identity = f"{config.model} {config.temperature} {config.max_tokens} {config.max_length}"
        return cls(chat, config.engine.count * config.engine.most_running, identity)

    @classmethod
    def at_endpoint(cls, config: EndpointConfig) -> AskedModel:
        """Return a model at an endpoint, to be closed."""
        sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        url, key = resolved(config.url), config.key_variable
        identity = f"{config.model} {config.url} {config.temperature} {config.max_tokens}"
        return cls(OpenAIModel(url, config.model, key, retries=config.retries, **sampling), config.calls, identity)


class AnswerJournal:
    """Answers of models in a JSONL file, by request: resumed work does not ask again.

    Memory: about 100 bytes for each answer. Raises StorageError if the file cannot be written.
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


class ModelServer:
    """Answers the requests of operators during a call of their process.

    A request that fails, or has no answer ``answer_s`` after it was sent, raises RequestRefused in the operator. The
    call ends with ActorDied if an engine died, with EndpointFailed if a model leaves many requests in a row unanswered.
    """

    def __init__(
        self,
        models: Mapping[str, AskedModel],
        score: Score | None = None,
        *,
        tasks: Callable[[str], Task | None] = lambda task_id: None,
        answer_s: float = 300.0,
        journal: AnswerJournal | None = None,
    ) -> None:
        self._models, self._score, self._tasks = models, score, tasks
        self._answer_s, self._journal = answer_s, journal
        self._room = {name: asyncio.Semaphore(model.calls) for name, model in models.items()}
        self._failed = Counter[str]()
        """Consecutive requests without an answer, by model."""

    async def serve(self, key: Any, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Answer a handle, for `Worker.call`."""
        try:
            if key is None:
                return await call_object(self, method, arguments, named)
            return await self.chat(*key, *arguments, **named)
        except RequestRefused as error:
            return ErrorReply(error)

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        """Return the rewards of answers to a task."""
        assert self._score is not None  # preflight checks that there is a reward
        return await self._score(task, transcripts)

    def tasks(self, ids: Sequence[str]) -> dict[str, Task]:
        """Return the known tasks with these ids."""
        return {name: task for name in ids if (task := self._tasks(name)) is not None}

    async def chat(self, name: str, seed: int | None, messages: Messages, **sampling: Any) -> str:
        """Return a model's answer to a conversation."""
        model = self._models[name]
        key = json_digest([model.identity or name, json.dumps([messages, sampling, seed], sort_keys=True)])
        if self._journal is not None and (known := self._journal.get(key)) is not None:
            return known
        async with self._room[name]:
            try:
                async with asyncio.timeout(self._answer_s):
                    text = await model.chat.with_seed(seed).chat(messages, **sampling)
            except TimeoutError:
                self._count_failure(name, EndpointFailed(f"no answer within {self._answer_s:g} s", field=name))
            except EndpointFailed as error:
                self._count_failure(name, error)
            except DataError as error:
                raise RequestRefused(error.problem, field=name) from None
        self._failed[name] = 0
        if self._journal is not None:
            self._journal.add(key, text)
        return text

    def _count_failure(self, name: str, error: EndpointFailed) -> NoReturn:
        self._failed[name] += 1
        if self._failed[name] < _FAILURES_IN_A_ROW:
            raise RequestRefused(error.problem, field=name) from None
        problem = f"{self._failed[name]} requests in a row had no answer; the last: {error.problem}"
        raise EndpointFailed(problem, error.remedy, field=name, value=error.value) from None


class RemoteModels(Remote):
    """A handle to the `ModelServer` of the parent."""

    score = remote_method(ModelServer.score)
    tasks = remote_method(ModelServer.tasks)


class RemoteChat(Remote):
    """A handle to a model of the parent, which judges take. Its answers raise RequestRefused if there is none."""

    def __init__(self, name: str, seed: int | None = None) -> None:
        super().__init__((name, seed))

    chat = remote_method(ChatModel.chat)

    def with_seed(self, seed: int | None) -> RemoteChat:
        """Return the model with another seed."""
        return RemoteChat(self.key[0], seed)


RunEngines = Callable[[Collection[str]], AbstractAsyncContextManager[Mapping[str, AskedModel]]]
"""Runs engines for the models of these names that it knows, inside an ``async with``."""
OpenModels = Callable[[Collection[str], bool], AbstractAsyncContextManager[ModelServer]]
"""Opens a `ModelServer`: takes the names of the models that operators ask, and whether answers are scored."""


def running_engines(models: Mapping[str, ChatModel], configs: Mapping[str, AuxiliaryConfig]) -> RunEngines:
    """Return `RunEngines` of models that are running already."""

    @asynccontextmanager
    async def engines(names: Collection[str]) -> AsyncIterator[Mapping[str, AskedModel]]:
        yield {name: AskedModel.on_engines(models[name], configs[name]) for name in names if name in models}

    return engines


no_engines = running_engines({}, {})
"""`RunEngines` without a model."""


@asynccontextmanager
async def open_models(
    names: Collection[str],
    scores: bool,
    *,
    engines: RunEngines,
    endpoints: Mapping[str, EndpointConfig],
    reward: RewardModelsConfig | None = None,
    score: Score | None = None,
    plugins: Sequence[Path] = (),
    tasks: Callable[[str], Task | None] = lambda task_id: None,
    answer_s: float = 300.0,
    journal: Path | None = None,
) -> AsyncIterator[ModelServer]:
    """Open a `ModelServer` for the named models, on engines and at endpoints; with ``scores`` also for a reward, whose
    judges may ask such models, unless ``score`` scores. ``journal`` is the file of a `AnswerJournal`.

    Raises ConfigError where the reward cannot be built, and the errors of starting engines.
    """
    built = reward if scores and score is None else None
    parts = [part for model in (built.models.values() if built is not None else ()) for part in model.scored_by]
    judges = [build_reward(part.name, part.options) for part in parts if where(part.name) == "loop"]
    wanted = {*names, *chain.from_iterable(getattr(judge, "needs_auxiliary", ()) for judge in judges)}
    async with AsyncExitStack() as stack:
        models = dict[str, AskedModel]()
        for name in endpoints.keys() & wanted:
            models[name] = AskedModel.at_endpoint(endpoints[name])
            stack.push_async_callback(models[name].chat.close)  # type: ignore[attr-defined]
        models |= await stack.enter_async_context(engines(wanted - models.keys()))
        if built is not None:
            scorer = Scorer(built, plugins, {name: model.chat for name, model in models.items()})
            stack.push_async_callback(scorer.close)
            await scorer.open()
            score = scorer.score
        written = stack.enter_context(closing(AnswerJournal(journal))) if journal is not None else None
        yield ModelServer(models, score, tasks=tasks, answer_s=answer_s, journal=written)
