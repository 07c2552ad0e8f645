"""A debate: several rows of one attempt."""

from __future__ import annotations

import asyncio

from rayrft.data.reasoning import split_reasoning
from rayrft.experience import Task
from rayrft.explorer.environments import EnvironmentClient
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.workflows.base import register_workflow


@register_workflow("debate")
class Debate:
    """Two debaters answer, read each other's answer and answer again, ``rounds`` times. Each is a row of the attempt,
    scored by its last answer. ``prompt`` has the other's answer at ``{answer}``."""

    def __init__(
        self, rounds: int = 1, prompt: str = "Somebody else answers: {answer}\nWho is right? Answer again."
    ) -> None:
        self._rounds, self._prompt = rounds, prompt

    async def run(self, task: Task, model: Model, env: EnvironmentClient | None = None) -> list[Trajectory]:
        debaters = [model.start(task.messages, task.images) for _ in range(2)]
        answers = await asyncio.gather(*(debater.act() for debater in debaters))
        for _ in range(self._rounds):
            for debater, other in zip(debaters, reversed(answers), strict=True):
                shown = model.tokenizer.defuse(split_reasoning(other)[1])
                debater.observe(self._prompt.replace("{answer}", shown))
            answers = await asyncio.gather(*(debater.act() for debater in debaters))
        return debaters
