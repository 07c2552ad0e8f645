"""Rewards that are scored at once."""

from __future__ import annotations

from rayrft.experience import Task
from rayrft.rewards import Reward, RewardResult, Transcript, base


def score(reward: Reward, task: Task, response: str) -> RewardResult:
    """Return the result of a reward that is no coroutine, without an event loop."""
    scoring = base.score(reward, task, Transcript.of(task, response))
    try:
        scoring.send(None)
    except StopIteration as done:
        result: RewardResult = done.value
        return result
    raise AssertionError("the reward waits for something")
