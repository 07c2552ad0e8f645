"""Rewards that are scored at once."""

from __future__ import annotations

from rayrft.experience import Task
from rayrft.rewards import Reward, RewardResult, Transcript
from rayrft.rewards.base import score_inline


def score(reward: Reward, task: Task, response: str) -> RewardResult:
    """Return the result of a reward that is no coroutine."""
    return score_inline(reward, task, Transcript.of(task, response))
