"""Rewards by text comparison, and the verifiers of procedural tasks."""

from __future__ import annotations

from rayrft.experience import Task
from rayrft.rewards.base import Reward, inline, register_reward


@register_reward("exact")
@inline
def exact() -> Reward:
    """1 if the response equals the answer, ignoring surrounding white space, else 0."""

    def score(task: Task, response: str) -> float:
        return float(response.strip() == task.answer.strip())

    return score


@register_reward("reasoning_gym")
def reasoning_gym_verifier() -> Reward:
    """The verifier of the task's reasoning-gym data set, in [0, 1]; some give partial credit."""
    import reasoning_gym

    def score(task: Task, response: str) -> float:
        verify = reasoning_gym.get_score_answer_fn(task.metadata["source_dataset"])
        return float(verify(response, {"question": task.question, "answer": task.answer, "metadata": task.metadata}))

    return score
