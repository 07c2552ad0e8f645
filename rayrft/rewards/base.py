"""The reward interface and its registry."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, Protocol, Self, SupportsIndex, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from rayrft.config.base import resolved
from rayrft.config.reward import RewardPart
from rayrft.data.reasoning import split_reasoning
from rayrft.errors import ConfigError, DataError
from rayrft.experience import Task
from rayrft.registry import Registry
from rayrft.runtime.waits import cancelled


@dataclass(frozen=True)
class StepReward:
    """The reward of a step inside the ``turn``-th answer of `Transcript.answers`, from 0. The step ends before
    character ``end`` of the answer's text, reasoning included."""

    turn: int
    end: int
    value: float


@dataclass(frozen=True)
class RewardResult:
    """The reward of a response. ``value`` None means unknown, which is not 0; ``reason`` then gives the cause."""

    value: float | None
    components: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    answer: str | None = None
    """The answer that was found in the response, for majority votes; by default the response without reasoning."""
    turns: tuple[float, ...] = ()
    """Rewards of the model's answers, in order, in addition to the value: empty, or one for each answer."""
    steps: tuple[StepReward, ...] = field(default=(), kw_only=True)
    """Rewards of steps inside answers, in addition to value and turns, in the order in which the steps end. Each
    belongs to the token in which its step ends."""
    shaping: float = 0.0
    """Added to the value for training; filters and evaluations do not see it."""
    seconds: float = 0.0
    """Duration of scoring."""
    error: bool = False
    """Whether the value is unknown because scoring raised, missed the deadline, or died."""
    tries: int = 1
    """How often scoring was started; again after the death of a process or actor."""


@dataclass(frozen=True)
class Transcript:
    """The whole conversation of a trajectory and its end, as rewards see it."""

    turns: tuple[Mapping[str, str], ...]
    """Messages with ``role`` and ``content``; the last one is the model's."""
    images: tuple[str, ...] = ()
    """Paths of all images in the conversation, in order; data URLs of those in requests of the endpoint."""
    stop_reason: str | None = None
    given: int = 0
    """Number of the first assistant messages that the model did not write, such as examples in the prompt."""
    token_ids: tuple[int, ...] = ()
    """The tokens after the prompt; none where they are not known."""
    whole: bool = False
    """Whether `response` has the reasoning."""

    @classmethod
    def of(cls, task: Task, response: str) -> Self:
        """Return the transcript of a task with one answer."""
        given = sum(message["role"] == "assistant" for message in task.messages)
        return cls((*task.messages, {"role": "assistant", "content": response}), task.images, given=given)

    @property
    def response(self) -> str:
        """The model's last answer, without the reasoning before it."""
        content = self.turns[-1]["content"]
        return content if self.whole else split_reasoning(content)[1]

    @property
    def answers(self) -> list[str]:
        """The model's answers with their reasoning, which begins with ``<think>`` even if the prompt has opened it."""
        return [turn["content"] for turn in self.turns if turn["role"] == "assistant"][self.given :]

    def without_reasoning(self) -> Self:
        """Return the transcript without the reasoning in the model's answers."""
        turns, before = list[Mapping[str, str]](), self.given
        for turn in self.turns:
            if turn["role"] == "assistant" and (before := before - 1) < 0:
                turn = {**turn, "content": split_reasoning(turn["content"])[1]}
            turns.append(turn)
        return replace(self, turns=tuple(turns))


Scored = RewardResult | float
"""A plain number is a result without components."""


class RewardFunction(Protocol):
    """Scores a last answer without its reasoning. Raising makes the reward unknown."""

    def __call__(self, task: Task, response: str, /) -> Scored: ...


class RewardModel(Protocol):
    """Scores a whole transcript, likewise."""

    def score(self, task: Task, transcript: Transcript, /) -> Scored | Awaitable[Scored]: ...


Reward = RewardFunction | RewardModel
"""The product of a factory. Optional attributes: ``needs_auxiliary`` has the names of auxiliary models that it asks.
``longest_s`` is its own time limit in seconds, which must be below its deadline. ``notice`` is a line that is printed
before a run starts. ``accepts_truth`` is whether it gives 1 to the reference answer of a task, which is checked. With
``max_batch``, the most calls at a time, and ``score_batch(calls)``, which takes pairs of task and transcript and
returns a result of each, calls that wait are scored together, which is faster; no result depends on the other calls."""
Factory = TypeVar("Factory", bound="Callable[..., Reward]")

rewards: Registry[Callable[..., Reward]] = Registry("reward")
"""Name to factory; the factory takes the config's ``reward.options``."""

register_reward = rewards.register


def inline(factory: Factory) -> Factory:
    """Decorator of a factory whose reward takes microseconds and cannot hang, whatever the response: it is called in
    the Explorer's process. Other rewards run under a deadline in processes that can be killed."""
    factory.inline = True  # type: ignore[attr-defined]
    return factory


def imports(*modules: str) -> Callable[[Factory], Factory]:
    """Decorator of a factory whose reward needs these modules, which take long to import and start no thread: its
    processes are forked from one that has imported them."""

    def decorate(factory: Factory) -> Factory:
        factory.imports = modules  # type: ignore[attr-defined]
        return factory

    return decorate


def where(name: str) -> Literal["inline", "loop", "process"]:
    """Return where the reward of that name runs: in the caller, in its event loop as a coroutine, or in a process."""
    factory = rewards.get(name, "reward.name")
    if getattr(factory, "inline", False):
        return "inline"
    return "loop" if inspect.iscoroutinefunction(getattr(factory, "score", None)) else "process"


def checked(found: object, transcript: Transcript, *, whole: bool = True) -> RewardResult:
    """Return a result whose numbers are finite, or an unknown one. Raises ValueError or TypeError for other values.
    Unless the reward saw the ``whole`` transcript, steps of the last answer count from the end of its reasoning."""
    if not isinstance(found, RewardResult):
        found = RewardResult(float(cast("float", found)))
    if found.value is None:
        return _unknown(found, found.reason)
    plain = (found.components, found.turns, found.steps, found.shaping) == ({}, (), (), 0.0)
    if plain and type(found.value) is float and math.isfinite(found.value):
        return found
    if len(found.turns) not in (0, len(transcript.answers)):
        raise ValueError(f"{len(found.turns)} rewards of turns, and the model had {len(transcript.answers)}")
    components = {name: float(value) for name, value in found.components.items()}
    value, turns, shaping = float(found.value), tuple(map(float, found.turns)), float(found.shaping)
    steps = _checked_steps(found.steps, transcript, whole) if found.steps else ()
    wrong = [number for number in (value, shaping, *turns, *components.values()) if not math.isfinite(number)]
    result = replace(found, value=value, components=components, turns=turns, steps=steps, shaping=shaping)
    return _unknown(result, found.reason or f"the reward is {wrong[0]}") if wrong else result


def _checked_steps(steps: Sequence[StepReward], transcript: Transcript, whole: bool) -> tuple[StepReward, ...]:
    """Return steps as plain numbers. Raises TypeError or ValueError unless they are in order, inside and finite."""
    answers, checked_steps, before = transcript.answers, list[StepReward](), (0, -1)
    reasoned = 0 if whole else len(transcript.turns[-1]["content"]) - len(transcript.response)
    for number, step in enumerate(steps):
        if not isinstance(step, StepReward):
            raise TypeError(f"steps[{number}] is not a StepReward but {step!r}")
        _check_index(f"steps[{number}].turn", step.turn, len(answers) - 1)
        end = step.end + reasoned if reasoned and step.turn == len(answers) - 1 else step.end
        _check_index(f"steps[{number}].end", end, len(answers[step.turn]))
        if (step.turn, end) <= before:
            raise ValueError(f"steps[{number}].end is {step.end}, not after the end of the step before it")
        if not math.isfinite(step.value):
            raise ValueError(f"steps[{number}].value is {step.value}")
        before = (step.turn, end)
        checked_steps.append(StepReward(int(step.turn), int(end), float(step.value)))
    return tuple(checked_steps)


def _check_index(name: str, index: SupportsIndex, last: int) -> None:
    if not isinstance(index, SupportsIndex) or not 0 <= int(index) <= last:
        raise ValueError(f"{name} is {index!r}, and may be 0 to {last}")


_adapter = lru_cache(TypeAdapter)


def task_value(task: Task, name: str, kind: Any, default: Any = None) -> Any:
    """Return a value of a task's metadata, by default that one. Raises DataError if it is not of the type ``kind``."""
    if (given := task.metadata.get(name)) is None:
        return default
    try:
        return _adapter(kind).validate_python(given, strict=True)
    except ValidationError as error:
        problem, remedy = f"does not fit: {error.errors()[0]['msg']}", "give what its description says"
        raise DataError(problem, remedy, field=f"metadata.{name}", value=given) from None


def _unknown(found: RewardResult, reason: str | None) -> RewardResult:
    """Return an unknown result with those components that are finite numbers."""
    known = {name: float(value) for name, value in found.components.items()}
    components = {name: value for name, value in known.items() if math.isfinite(value)}
    return RewardResult(None, components, reason, found.answer)


def score_inline(reward: Reward, task: Task, transcript: Transcript) -> RewardResult:
    """Return the result of a reward that is not a coroutine, which is unknown if it raises or returns no number."""
    try:
        whole, call = hasattr(reward, "score"), cast("Any", reward)
        found = call.score(task, transcript) if whole else call(task, transcript.response)
        return checked(found, transcript, whole=whole)
    except (Exception, SystemExit) as error:  # user code may raise anything; it becomes data
        return _raised(error)


async def score(reward: Reward, task: Task, transcript: Transcript) -> RewardResult:
    """Return the result of a reward, as `score_inline` does, be it a coroutine, with the seconds that it took."""
    started = time.perf_counter()
    try:
        whole, call = hasattr(reward, "score"), cast("Any", reward)
        found = call.score(task, transcript) if whole else call(task, transcript.response)
        result = checked(await found if inspect.isawaitable(found) else found, transcript, whole=whole)
    except (Exception, SystemExit) as error:  # likewise
        result = _raised(error)
    except asyncio.CancelledError as error:
        if cancelled():
            raise
        result = _raised(error)  # of a task of the reward's own
    return replace(result, seconds=time.perf_counter() - started)


def _raised(error: BaseException) -> RewardResult:
    return RewardResult(None, reason=f"{type(error).__name__}: {error}", error=True)


def combine(parts: Sequence[RewardPart], results: Sequence[RewardResult]) -> RewardResult:
    """Return the reward of several parts: the sum of the parts that add, or 0 if a gate is shut."""
    pairs = list(zip(parts, results, strict=True))
    adding, gates, shaping = ([pair for pair in pairs if pair[0].role == role] for role in ("add", "gate", "shape"))
    shut = any(result.value is not None and result.value <= 0 for _, result in gates)
    counted = shaping if shut else pairs
    unknown = [f"{part.component}: {result.reason}" for part, result in counted if result.value is None]
    known = [f"{part.component}: {each.reason}" for part, each in pairs if each.value is not None and each.reason]
    components: dict[str, float] = {}
    for part, result in pairs:
        components |= {f"{part.component}.{name}": value for name, value in result.components.items()}
        if result.value is not None:
            components[part.component] = result.value
    turns = [[part.weight * reward for reward in result.turns] for part, result in adding if result.turns]
    steps = dict[tuple[int, int], float]()
    for part, step in ((part, step) for part, result in adding if not shut for step in result.steps):
        at = step.turn, step.end
        steps[at] = steps.get(at, 0.0) + part.weight * step.value
    return RewardResult(
        None if unknown else 0.0 if shut else _weighted(adding),
        components,
        "; ".join(unknown or known) or None,
        next((result.answer for result in results if result.answer is not None), None),
        () if shut else tuple(map(math.fsum, zip(*turns, strict=True))),
        _weighted(shaping) + sum(part.weight * result.shaping for part, result in pairs),
        max(result.seconds for result in results),
        any(result.error for _, result in counted if result.value is None),
        1 + sum(result.tries - 1 for result in results),
        steps=tuple(StepReward(*at, value) for at, value in sorted(steps.items())),
    )


def _weighted(pairs: Sequence[tuple[RewardPart, RewardResult]]) -> float:
    """Return the weighted sum of what is known."""
    return math.fsum(part.weight * (result.value or 0.0) for part, result in pairs)


def build_reward(name: str, options: dict[str, Any]) -> Reward:
    """Build the reward of this registered name, or with the factory at ``package.module:attribute``. Raises ConfigError
    if there is none, or it does not accept the options."""
    factory = rewards.get(name, "reward.name")
    try:
        return factory(**resolved(options))
    except TypeError as error:
        remedy = "see the reward's own parameters; it returns the function of task and response"
        raise ConfigError(f"refused by {name!r}: {error}", remedy, field="reward.options", value=options) from None
