"""Rewards that are called at once."""

from __future__ import annotations

from rayrft.experience import Task
from rayrft.rewards import Reward, RewardResult, Transcript
from rayrft.rewards.base import invoke


def score(reward: Reward, task: Task, response: str) -> RewardResult:
    """Return the result of a reward that is no coroutine; what it raises is raised."""
    found = invoke(reward, task, Transcript.of(task, response))
    return found if isinstance(found, RewardResult) else RewardResult(float(found))  # type: ignore[arg-type]
