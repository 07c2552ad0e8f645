"""Workflows: one attempt at a task. The runner (`rayrft.explorer.rollout`) repeats it and scores the trajectories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.explorer.environment import Environment
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.registry import Registry


class Workflow(Protocol):
    """One attempt at a task: starts a trajectory, lets the model act, and appends observations. Several trajectories
    are rows of one attempt, such as its turns as separate rows. One instance serves all tasks of a run; ``env`` is the
    attempt's own, if the config names an environment."""

    async def run(self, task: Task, model: Model, env: Environment | None = None) -> Trajectory | list[Trajectory]: ...


workflows: Registry[Callable[..., Workflow]] = Registry("workflow")
"""Name to class or factory, which is called with its options in ``explorer.workflow_options``."""
register_workflow = workflows.register


def build_workflow(name: str, options: dict[str, Any], field: str = "explorer.workflow") -> Workflow:
    """Create the workflow with that registered name, or of the class at ``package.module:attribute``.

    Raises ConfigError for ``field`` if there is none, or for ``explorer.workflow_options`` if it rejects them.
    """
    factory = workflows.get(name, field)
    try:
        return factory(**options)
    except TypeError as error:
        raise ConfigError(
            f"workflow {name!r} rejects its options: {error}",
            field=f"explorer.workflow_options.{name}",
            value=options,
            remedy="see the parameters of the workflow",
        ) from None


@register_workflow("single_turn")
class SingleTurn:
    """One question, one answer."""

    async def run(self, task: Task, model: Model, env: Environment | None = None) -> Trajectory:
        trajectory = model.start(task.messages, task.images)
        await trajectory.act()
        return trajectory
