"""Workflows that choose their next turn by the reward of an answer."""

from __future__ import annotations

import asyncio
import math
import re

from rayrft.data.reasoning import split_reasoning
from rayrft.experience import Task, reaches
from rayrft.explorer.environments import EnvironmentClient
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.workflows.base import register_workflow
from rayrft.rewards import RewardResult


@register_workflow("reflect_and_retry")
class ReflectAndRetry:
    """Answers again after ``hint`` while the reward is below ``enough``, at most ``attempts`` times in all.

    The reward is that of the last answer; a positive one is multiplied by ``discount`` for every retry. An unknown
    reward ends the attempt.
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
