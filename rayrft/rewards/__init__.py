"""Reward functions by name, and the workers that run them."""

from rayrft.rewards import math, text
from rayrft.rewards.base import Reward, RewardResult, build_reward, register_reward, rewards

__all__ = ["Reward", "RewardResult", "build_reward", "math", "register_reward", "rewards", "text"]
