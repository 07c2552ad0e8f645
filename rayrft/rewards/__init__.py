"""Reward functions by name, and the workers that run them."""

from rayrft.rewards import code, k12, math, text, vision
from rayrft.rewards.base import Reward, RewardResult, build_reward, inline, register_reward, rewards, runs_inline

__all__ = [
    "Reward",
    "RewardResult",
    "build_reward",
    "code",
    "inline",
    "k12",
    "math",
    "register_reward",
    "rewards",
    "runs_inline",
    "text",
    "vision",
]
