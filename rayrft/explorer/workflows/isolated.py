"""Workflows in processes of their own: what blocks, hangs, leaks or ends its process harms no other attempt.

The model, its trajectories and the environment stay in the Explorer. The process has handles to them that ask for
everything, so that a row holds what was sampled and observed, whatever the process does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rayrft.data.images import Picture
from rayrft.data.tokenizer import Tools
from rayrft.errors import ActorDied, ModelError
from rayrft.experience import Task
from rayrft.explorer.engines.exchange import Completion
from rayrft.explorer.environments import EnvironmentClient, Observation, Step
from rayrft.explorer.trajectory import ContextFull, Model, Trajectory
from rayrft.registry import loaded_plugins
from rayrft.rewards import RewardResult
from rayrft.runtime.processes import template
from rayrft.runtime.processes.pool import ProcessPool

_LARGEST = 64 << 20
"""Bytes of what a process may ask at once, such as an observation with images."""


class Isolated:
    """The workflow that ``create`` makes, each attempt with an instance of its own in one of up to ``processes``
    processes."""

    def __init__(self, create: Callable[[], Any], processes: int) -> None:
        self._pool = ProcessPool(
            partial(_Process, create), processes=processes, plugins=loaded_plugins(), answer_limit=_LARGEST
        )

    async def run(self, task: Task, model: Model, env: EnvironmentClient | None = None) -> list[Trajectory]:
        attempt = _Attempt(model, env)
        async with contextlib.AsyncExitStack() as leases:
            with model.queued():
                worker = await leases.enter_async_context(self._pool.lease())
            made: _Made = await worker.call("run", task, attempt.about, deadline_s=math.inf, asked=attempt.asked)
        if made.uncaught is not None:
            raise attempt.problems[made.uncaught]
        return [attempt.trajectories[number] for number in made.rows]

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()


@dataclass(frozen=True)
class _About:
    """What a workflow may read of the model and its environment."""

    repeat: int
    max_tokens: int
    max_length: int
    seed: int | None
    """That of the episode; None without an environment."""


@dataclass(frozen=True)
class _Made:
    """The numbers of the trajectories that the workflow returned, or that of the problem that it did not catch."""

    rows: tuple[int, ...] = ()
    uncaught: int | None = None


@dataclass(frozen=True)
class _Problem:
    """What was asked raised an error; its number among those of the attempt."""

    number: int
    error: Exception


class _Attempt:
    """The Explorer's side of an attempt: does what its process asks."""

    def __init__(self, model: Model, env: EnvironmentClient | None) -> None:
        seed = env.seed if env is not None else None
        self.about = _About(model.repeat, model.max_tokens, model.max_length, seed)
        self.trajectories: list[Trajectory] = []
        self.problems: list[Exception] = []
        self._model, self._env = model, env

    async def asked(self, kind: str, key: Any, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a method of what a handle stands for. Raises what ends the run, whatever the workflow made of it."""
        try:
            callee = self._callee(kind, key)
            returned = getattr(callee, method)(*arguments, **named)
            if isinstance(returned, Coroutine):
                returned = await returned
        except (ActorDied, ModelError):
            raise
        except Exception as error:  # the workflow may catch it
            self.problems.append(error)
            return _Problem(len(self.problems) - 1, error)
        if isinstance(returned, Trajectory):
            self.trajectories.append(returned)
            return len(self.trajectories) - 1, returned.images
        return (returned, callee.stop_reason, callee.images) if isinstance(callee, Trajectory) else returned

    def _callee(self, kind: str, key: Any) -> Any:
        match kind:
            case "trajectory":
                return self.trajectories[key]
            case "auxiliary":
                return self._model.auxiliary(key)
            case "environment":
                return self._env
        return self._model


class _Process:
    """The workflow, in its process."""

    def __init__(self, create: Callable[[], Any]) -> None:
        self._workflow = create()

    async def run(self, task: Task, about: _About) -> _Made:
        asking = _Asking()
        env = RemoteEnvironment(asking, about.seed) if about.seed is not None else None
        try:
            made = await self._workflow.run(task, RemoteModel(asking, about), env)
        except Exception as error:
            if error in asking.problems:
                return _Made(uncaught=asking.problems[error])
            raise
        trajectories = made if isinstance(made, list) else [made]
        if not trajectories or not all(isinstance(each, RemoteTrajectory) for each in trajectories):
            raise TypeError(f"a workflow must return a Trajectory or a list of them, not {made!r}")
        return _Made(tuple(each.number for each in trajectories))


class _Asking:
    """What the handles ask with, and the numbers of the errors that came of it."""

    def __init__(self) -> None:
        self.problems: dict[Exception, int] = {}

    def now(self, kind: str, key: Any, method: str, *arguments: Any, **named: Any) -> Any:
        return self._checked(template.parent.ask(kind, key, method, arguments, named))

    async def soon(self, kind: str, key: Any, method: str, *arguments: Any, **named: Any) -> Any:
        return self._checked(await template.parent.ask_async(kind, key, method, arguments, named))

    def _checked(self, returned: Any) -> Any:
        if isinstance(returned, _Problem):
            self.problems[returned.error] = returned.number
            raise returned.error
        return returned


class RemoteModel:
    """A handle to the `Model` of an attempt, with the same methods."""

    def __init__(self, asking: _Asking, about: _About) -> None:
        self._asking = asking
        self.repeat, self.max_tokens, self.max_length = about.repeat, about.max_tokens, about.max_length

    def start(
        self, messages: list[dict[str, str]], images: Sequence[Picture] = (), tools: Tools = ()
    ) -> RemoteTrajectory:
        number, paths = self._asking.now("model", None, "start", messages, images, tools)
        return RemoteTrajectory(self._asking, number, messages, paths)

    def keep(self, images: Sequence[Picture]) -> tuple[str, ...]:
        paths: tuple[str, ...] = self._asking.now("model", None, "keep", images)
        return paths

    async def score(self, task: Task, response: str) -> RewardResult:
        result: RewardResult = await self._asking.soon("model", None, "score", task, response)
        return result

    def auxiliary(self, name: str) -> RemoteAuxiliary:
        return RemoteAuxiliary(self._asking, name)

    async def generate(
        self, token_ids: Sequence[int], images: tuple[str, ...] = (), max_tokens: int | None = None
    ) -> Completion:
        completion: Completion = await self._asking.soon("model", None, "generate", token_ids, images, max_tokens)
        return completion


class RemoteTrajectory:
    """A handle to a `Trajectory`, with the same methods."""

    def __init__(self, asking: _Asking, number: int, messages: list[dict[str, str]], images: tuple[str, ...]) -> None:
        self._asking = asking
        self.number = number
        self.messages = list(messages)
        self.images = images
        self.stop_reason: str | None = None
        self.answers = 0

    async def act(self, max_tokens: int | None = None) -> str:
        try:
            text: str = self._told(await self._asking.soon("trajectory", self.number, "act", max_tokens))
        except ContextFull:
            self.stop_reason = "length"
            raise
        self.messages.append({"role": "assistant", "content": text})
        self.answers += 1
        return text

    def observe(self, observation: str | list[dict[str, str]], images: Sequence[Picture] = ()) -> None:
        self._tell("observe", observation, images)
        self.messages += [{"role": "user", "content": observation}] if isinstance(observation, str) else observation

    def reward(self, value: float | RewardResult, components: dict[str, float] | None = None) -> None:
        self._tell("reward", value, components)

    def step_reward(self, value: float, state: float | None = None) -> None:
        self._tell("step_reward", value, state)

    def count(self, name: str, by: float = 1.0) -> None:
        self._tell("count", name, by)

    def end_for_length(self) -> None:
        self._tell("end_for_length")

    def _tell(self, method: str, *arguments: Any) -> None:
        self._told(self._asking.now("trajectory", self.number, method, *arguments))

    def _told(self, answer: tuple[Any, str | None, tuple[str, ...]]) -> Any:
        returned, self.stop_reason, self.images = answer
        return returned


class RemoteAuxiliary:
    """A handle to an `AuxiliaryModel`."""

    def __init__(self, asking: _Asking, name: str) -> None:
        self._asking, self._name = asking, name

    async def chat(
        self, messages: list[dict[str, str]], *, max_tokens: int | None = None, temperature: float | None = None
    ) -> str:
        limits = {"max_tokens": max_tokens, "temperature": temperature}
        text: str = await self._asking.soon("auxiliary", self._name, "chat", messages, **limits)
        return text


class RemoteEnvironment:
    """A handle to the `EnvironmentClient` of an attempt."""

    def __init__(self, asking: _Asking, seed: int) -> None:
        self._asking = asking
        self.seed = seed

    async def reset(self, task: Task) -> Observation:
        observation: Observation = await self._asking.soon("environment", None, "reset", task)
        return observation

    async def step(self, action: str) -> Step:
        step: Step = await self._asking.soon("environment", None, "step", action)
        return step
