"""Rewards: what a response is worth."""

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
    """``value`` is None where the reward is unknown, and ``reason`` then says why; unknown is not 0."""

    value: float | None
    components: dict[str, float] = field(default_factory=dict)
    reason: str | None = None

    @classmethod
    def of(cls, value: float, components: dict[str, float], reason: str | None) -> Self:
        """The result, unknown where the value is no finite number."""
        if math.isfinite(value):
            return cls(value, components, reason)
        return cls(None, components, reason=f"the reward is {value}")


class Reward(Protocol):
    """Scores one response; a plain number stands for a result without components. May raise: that makes it unknown."""

    def __call__(self, task: Task, response: str) -> RewardResult | float: ...


rewards: Registry[Callable[..., Reward]] = Registry("reward")
"""Name to factory; the factory takes the config's ``reward.options``."""

register_reward = rewards.register


def build_reward(name: str, options: dict[str, Any]) -> Reward:
    """The reward of that registered name, or the factory at ``package.module:attribute``.

    Raises ConfigError where there is none, or it refuses the options.
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
