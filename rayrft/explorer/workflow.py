"""Workflows: how a task is acted on, once. The runner (`rayrft.explorer.rollout`) repeats it and scores what comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.registry import Registry


class Workflow(Protocol):
    """Acts on a task once: begins a trajectory, lets the model act, and says what it observes. Several trajectories are
    rows of one attempt, such as its turns apart from each other. One instance serves all tasks of a run."""

    async def run(self, task: Task, model: Model, env: Any = None) -> Trajectory | list[Trajectory]: ...


workflows: Registry[Callable[..., Workflow]] = Registry("workflow")
"""Name to class or factory, which takes the options that the config's ``explorer.workflow_options`` has for it."""
register_workflow = workflows.register


def build_workflow(name: str, options: dict[str, Any], field: str = "explorer.workflow") -> Workflow:
    """The workflow of that registered name, or of the class at ``package.module:attribute``.

    Raises ConfigError, about ``field`` where there is none, or about ``explorer.workflow_options`` where it refuses
    them.
    """
    factory = workflows.get(name, field)
    try:
        return factory(**options)
    except TypeError as error:
        raise ConfigError(
            f"refused by workflow {name!r}: {error}",
            field=f"explorer.workflow_options.{name}",
            value=options,
            remedy="see the workflow's own parameters",
        ) from None


@register_workflow("single_turn")
class SingleTurn:
    """One question, one answer."""

    async def run(self, task: Task, model: Model, env: Any = None) -> Trajectory:
        trajectory = model.start(task.messages, task.images)
        await trajectory.act()
        return trajectory
