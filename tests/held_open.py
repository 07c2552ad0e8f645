"""A plugin: a workflow that tells an actor named ``gate`` what it answered to a held-out task, and waits for it."""

from __future__ import annotations

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
