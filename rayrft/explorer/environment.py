"""Environments: what a workflow lets the model act in. Every attempt at a task has one of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.registry import Registry


@dataclass(frozen=True)
class Step:
    """An environment's answer to an action; after ``done`` it takes no more of them."""

    observation: str
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """Something to act in by text. The runner creates it for an attempt, and closes it however the attempt ends."""

    async def reset(self, task: Task) -> str:
        """Start an episode on a task; return the first observation."""

    async def step(self, action: str) -> Step:
        """Act."""

    async def close(self) -> None:
        """Free what it holds."""


environments: Registry[Callable[..., Environment]] = Registry("environment")
"""Name to class or factory, which is called with ``explorer.environment_options``."""
register_environment = environments.register


def environment_factory(name: str, options: dict[str, Any]) -> Callable[[], Environment]:
    """Return what creates environments of that registered name, or of the class at ``package.module:attribute``.

    Raises ConfigError for ``explorer.environment`` if there is none, or for ``explorer.environment_options`` if it does
    not take them.
    """
    factory = environments.get(name, "explorer.environment")
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"environment {name!r} rejects its options: {error}",
            field="explorer.environment_options",
            value=options,
            remedy="see the parameters of the environment",
        ) from None
    return partial(factory, **options)
