"""Reward models by name, and what they are made of."""

from rayrft.rewards import code, functions, judge, k12, math, models, simple, vision  # noqa: F401 - they register theirs
from rayrft.rewards.base import (
    Reward,
    RewardResult,
    StepReward,
    Transcript,
    build_reward,
    imports,
    inline,
    register_reward,
    rewards,
    where,
)

__all__ = ["Reward", "RewardResult", "StepReward", "Transcript", "build_reward", "imports", "inline"]
__all__ += ["register_reward", "rewards", "where"]
