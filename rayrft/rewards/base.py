"""The reward interface and its registry."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.registry import Registry


@dataclass(frozen=True)
class RewardResult:
    """The reward of a response. ``value`` None means unknown, which is not 0; ``reason`` then gives the cause."""

    value: float | None
    components: dict[str, float] = field(default_factory=dict)
    reason: str | None = None

    @classmethod
    def of(cls, value: float, components: dict[str, float], reason: str | None) -> Self:
        """Create a result; a value that is not finite makes it unknown."""
        if math.isfinite(value):
            return cls(value, components, reason)
        return cls(None, components, reason=f"the reward is {value}")


class Reward(Protocol):
    """A function that scores one response; a plain number is a result without components. Raising makes it unknown."""

    def __call__(self, task: Task, response: str) -> RewardResult | float: ...


rewards: Registry[Callable[..., Reward]] = Registry("reward")
"""Name to factory; the factory takes the config's ``reward.options``."""

register_reward = rewards.register


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
