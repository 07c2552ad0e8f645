"""Conversations whose user says what was fixed before."""

from __future__ import annotations

from collections.abc import Sequence

from rayrft.experience import Task
from rayrft.explorer.environments import EnvironmentClient
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.workflows.base import register_workflow


@register_workflow("single_turn")
class SingleTurn:
    """One question, one answer."""

    async def run(self, task: Task, model: Model, env: EnvironmentClient | None = None) -> Trajectory:
        trajectory = model.start(task.messages, task.images)
        await trajectory.act()
        return trajectory


@register_workflow("multi_turn")
class MultiTurn:
    """Answers the task's question, then the user's further messages one by one: those in the task's
    ``metadata["turns"]``, else ``turns``. The last answer is scored."""

    def __init__(self, turns: Sequence[str] = ()) -> None:
        self._turns = tuple(turns)

    async def run(self, task: Task, model: Model, env: EnvironmentClient | None = None) -> Trajectory:
        trajectory = model.start(task.messages, task.images)
        await trajectory.act()
        for message in task.metadata.get("turns", self._turns):
            trajectory.observe(message)
            await trajectory.act()
        return trajectory
