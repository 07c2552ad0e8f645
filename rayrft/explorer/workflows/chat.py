"""Conversations: with a user, fixed or a model; a debate; and workflows whose next turn depends on a reward."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence

from rayrft.data.reasoning import split_reasoning
from rayrft.experience import Task, reaches
from rayrft.explorer.environments import EnvironmentClient
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.workflows.base import register_workflow
from rayrft.rewards import RewardResult
from rayrft.rewards.base import task_value


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
        for message in task_value(task, "turns", Sequence[str], self._turns):
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
            shown = [each for each in trajectory.messages if each["role"] != "system"]
            said = [f"{each['role']}: {split_reasoning(each['content'])[1]}" for each in shown]
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


@register_workflow("reflect_and_retry")
class ReflectAndRetry:
    """Answers again after ``hint`` while the reward is below ``enough``, at most ``attempts`` times in all.

    The last answer is scored. A retry multiplies a positive reward by ``discount``; an unknown one ends the attempt.
    """

    def __init__(
        self,
        attempts: int = 2,
        hint: str = "That is not right. Find the mistake, and answer again.",
        enough: float = 1.0,
        discount: float = 1.0,
    ) -> None:
        self._attempts, self._hint, self._enough, self._discount = attempts, hint, enough, discount

    async def run(self, task: Task, model: Model, env: EnvironmentClient | None = None) -> Trajectory:
        trajectory = model.start(task.messages, task.images)
        for retries in range(self._attempts):
            if retries:
                trajectory.observe(self._hint)
            result = await model.score(task, await trajectory.act())
            if result.value is None:
                trajectory.reward(result)
                break
            trajectory.reward(min(result.value, result.value * self._discount**retries), result.components)
            if reaches(result.value, self._enough):
                break
        return trajectory


@register_workflow("self_verification")
class SelfVerification:
    """Answers, then says "yes" or "no" to whether its answer is right, which it is from a reward of ``enough`` on.

    The reward is ``1 - weight`` times the answer's plus ``weight`` if the verdict is true; unknown if the answer's is.
    """

    def __init__(
        self, question: str = "Is your answer right? Say yes or no.", weight: float = 0.5, enough: float = 1.0
    ) -> None:
        self._question, self._weight, self._enough = question, weight, enough

    async def run(self, task: Task, model: Model, env: EnvironmentClient | None = None) -> Trajectory:
        trajectory = model.start(task.messages, task.images)
        result = await model.score(task, await trajectory.act())
        self._reward(trajectory, result, 0.0)  # where the context has no room for a verdict
        trajectory.observe(self._question)
        said = re.findall(r"\b(yes|no)\b", split_reasoning(await trajectory.act())[1].lower())
        if result.value is not None:
            right = "yes" if reaches(result.value, self._enough) else "no"
            self._reward(trajectory, result, float(said[-1:] == [right]))
        return trajectory

    def _reward(self, trajectory: Trajectory, answer: RewardResult, verdict: float) -> None:
        if answer.value is None:
            trajectory.reward(answer)
        else:
            value = (1 - self._weight) * answer.value + self._weight * verdict
            trajectory.reward(value, {"answer": answer.value, "verdict": verdict})


@register_workflow("best_of_n")
class BestOfN:
    """Answers ``n`` times and keeps the answer with the greatest reward, the first of several."""

    def __init__(self, n: int = 4) -> None:
        self._n = n

    async def run(self, task: Task, model: Model, env: EnvironmentClient | None = None) -> Trajectory:
        candidates = [model.start(task.messages, task.images) for _ in range(self._n)]

        async def act(candidate: Trajectory) -> RewardResult:
            return await model.score(task, await candidate.act())

        results = await asyncio.gather(*map(act, candidates))
        values = [-math.inf if result.value is None else result.value for result in results]
        best = values.index(max(values))
        candidates[best].reward(results[best])
        return candidates[best]
