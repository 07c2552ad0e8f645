"""The protocol of environments, their registry, and what a workflow sees of the one that it acts in."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from rayrft.config.base import resolved
from rayrft.config.explorer import EnvironmentConfig
from rayrft.data.images import IMAGE_MARK, Picture
from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.registry import Registry


@dataclass(frozen=True)
class Pictured:
    """An observation with images, which stand where its messages say ``<image>``, else before the user's first text."""

    text: str | list[dict[str, str]]
    images: tuple[Picture, ...]


Observation = str | list[dict[str, str]] | Pictured
"""One user message, messages in chat form, or either with images."""


def as_messages(observation: Observation) -> list[dict[str, str]]:
    """Return an observation in chat form, with marks where its images stand."""
    said = observation.text if isinstance(observation, Pictured) else observation
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if not (images := images_of(observation)) or any(IMAGE_MARK in message["content"] for message in messages):
        return messages
    first = next(place for place, message in enumerate(messages) if message["role"] == "user")
    marked = {**messages[first], "content": IMAGE_MARK * len(images) + messages[first]["content"]}
    return [*messages[:first], marked, *messages[first + 1 :]]


def images_of(observation: Observation) -> tuple[Picture, ...]:
    """Return the images of an observation."""
    return observation.images if isinstance(observation, Pictured) else ()


@dataclass(frozen=True)
class Step:
    """An environment's answer to an action; after ``done`` it takes no more of them.

    ``info`` is not shown to the model. The `episode` workflow adds up its numbers as metrics of the row.
    """

    observation: Observation
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """Something to act in by text, made for an attempt at a task and closed however that ends.

    If the class's ``step`` is a coroutine function, the environment runs in the Explorer's event loop. If it is a plain
    one, which may block, or the class has an attribute ``blocking = True``, it runs in a process of its own. What it
    does depends on task, seed and actions alone. Two optional static methods are called with the options. ``check`` is
    called before the run starts, to raise ConfigError for what cannot be; then one environment is created and closed.
    ``prepare`` is called before processes are forked, to import or load what they share.
    """

    def reset(self, task: Task, seed: int) -> Observation | Awaitable[Observation]:
        """Start an episode on a task; return the first observation."""

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Act."""

    def close(self) -> Awaitable[None] | None:
        """Free what it holds."""


environments: Registry[Callable[..., Environment]] = Registry("environment")
"""Name to class or factory, which is called with ``explorer.environment.options``."""
register_environment = environments.register


def environment_factory(config: EnvironmentConfig) -> partial[Environment]:
    """Return a factory of environments: of a registered name, or of the class at ``package.module:attribute``.

    Raises ConfigError for ``explorer.environment.name`` if there is none or a class lacks a method, or for
    ``explorer.environment.options`` if it does not take them.
    """
    factory = environments.get(config.name, "explorer.environment.name")
    missing = [name for name in ("reset", "step", "close") if isinstance(factory, type) and not hasattr(factory, name)]
    if missing:
        problem, remedy = f"environment {config.name!r} lacks {', '.join(missing)}", "define it in the class"
        raise ConfigError(problem, remedy, field="explorer.environment.name", value=config.name)
    try:
        inspect.signature(factory).bind(**config.options)
    except TypeError as error:
        problem = f"environment {config.name!r} rejects its options: {error}"
        remedy = "see the parameters of the environment"
        raise ConfigError(problem, remedy, field="explorer.environment.options", value=config.options) from None
    return partial(factory, **resolved(config.options))
