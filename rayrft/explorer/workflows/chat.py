"""Conversations: with a user, who says what was fixed before or what another model thinks of, and a debate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rayrft.data.reasoning import split_reasoning
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


@register_workflow("user_simulator")
class UserSimulator:
    """Answers the task's question, then what the auxiliary model ``user`` says in the user's place, ``turns`` times.
    The last answer is scored.

    ``prompt`` is what the simulator is asked; it has the conversation at ``{conversation}``.
    """

    def __init__(
        self,
        user: str = "user",
        turns: int = 1,
        prompt: str = "You play a user who talks with an assistant. Write the user's next message, and nothing else.\n"
        "{conversation}\nuser:",
    ) -> None:
        if "{conversation}" not in prompt:
            raise TypeError("prompt has no {conversation}")
        self.needs_auxiliary = (user,)
        self._user, self._turns, self._prompt = user, turns, prompt

    async def run(self, task: Task, model: Model, env: EnvironmentClient | None = None) -> Trajectory:
        user = model.auxiliary(self._user)
        trajectory = model.start(task.messages, task.images)
        await trajectory.act()
        for _ in range(self._turns):
            said = [
                f"{each['role']}: {split_reasoning(each['content'])[1]}"
                for each in trajectory.messages
                if each["role"] != "system"
            ]
            prompt = self._prompt.replace("{conversation}", "\n".join(said))
            _, message = split_reasoning(await user.chat([{"role": "user", "content": prompt}]))
            trajectory.observe(model.tokenizer.defuse(message))
            await trajectory.act()
        return trajectory


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
