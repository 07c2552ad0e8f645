"""The reward interface and its registry."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.registry import Registry


@dataclass(frozen=True)
class RewardResult:
    """The reward of a response. ``value`` None means unknown, which is not 0; ``reason`` then gives the cause."""

    value: float | None
    components: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    answer: str | None = None
    """The answer that was found in the response, for majority votes; by default the whole response."""

    @classmethod
    def of(cls, value: float, components: dict[str, float], reason: str | None, answer: str | None = None) -> Self:
        """Create a result; a value that is not finite makes it unknown."""
        if math.isfinite(value):
            return cls(value, components, reason, answer)
        return cls(None, components, reason or f"the reward is {value}", answer)


class Reward(Protocol):
    """A function that scores one response; a plain number is a result without components. Raising makes it unknown."""

    def __call__(self, task: Task, response: str) -> RewardResult | float: ...


Factory = TypeVar("Factory", bound="Callable[..., Reward]")

rewards: Registry[Callable[..., Reward]] = Registry("reward")
"""Name to factory; the factory takes the config's ``reward.options``."""

register_reward = rewards.register


def inline(factory: Factory) -> Factory:
    """Decorator of a factory whose reward takes microseconds and cannot hang, whatever the response: it is called in
    the Explorer's own process. Others run in workers, under a deadline, for these can be killed."""
    factory.inline = True  # type: ignore[attr-defined]
    return factory


def runs_inline(name: str) -> bool:
    """Whether the reward of that name is called in the Explorer's own process."""
    return getattr(rewards.get(name, "reward.name"), "inline", False)


def _numbers(components: dict[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in components.items()}


def score(reward: Reward, task: Task, response: str) -> RewardResult:
    """The result of a reward; where it raises, or gives what is no number, an unknown with the error as its reason."""
    try:
        result = reward(task, response)
        if not isinstance(result, RewardResult):
            return RewardResult.of(float(result), {}, None)
        if result.value is None:
            return result
        return RewardResult.of(float(result.value), _numbers(result.components), result.reason, result.answer)
    except Exception as error:  # user code may raise anything; it becomes data, and the run's policy decides
        return RewardResult(None, reason=f"{type(error).__name__}: {error}")


def build_reward(name: str, options: dict[str, Any]) -> Reward:
    """Build the reward of this registered name, or with the factory at ``package.module:attribute``.

    Raises ConfigError if there is none, or it does not accept the options.
    """
    factory = rewards.get(name, "reward.name")
    try:
        return factory(**options)
    except TypeError as error:
        raise ConfigError(
            f"refused by {name!r}: {error}",
            field="reward.options",
            value=options,
            remedy="see the reward's own parameters",
        ) from None
