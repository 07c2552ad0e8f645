"""A plugin: a workflow that tells an actor named ``gate`` what it answered to a held-out task, and waits for it; and a
reward that a model of random weights gets, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

import rayrft


@rayrft.register_workflow("held_open")
class HeldOpen:
    async def run(self, task: rayrft.Task, model: rayrft.Model, env: Any = None) -> rayrft.Trajectory:
        trajectory = model.start(task.messages)
        await trajectory.act()
        if task.metadata.get("held_out"):
            await ray.get_actor("gate", "tests").passed.remote(trajectory.to_experience(task.id, task.id, task))
        return trajectory


@rayrft.register_reward("letters")
def letters() -> Callable[[rayrft.Task, str], float]:
    """The share of an answer of six tokens that is letters."""
    return lambda task, response: sum(map(str.isalpha, response)) / 6
