"""Accuracy on held-out tasks, with its uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Evaluation:
    """``right`` of ``count`` tasks were answered with full reward; ``unknown`` could not be scored and do not count."""

    temperature: float
    right: int
    count: int
    mean_reward: float
    unknown: int = 0

    @property
    def accuracy(self) -> float:
        return self.right / self.count if self.count else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.right, self.count)


def wilson_interval(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Compute the Wilson score interval of a proportion (Wilson 1927); ``z`` 1.96 gives 95 %."""
    if count == 0:
        return 0.0, 1.0
    share, square = right / count, z * z / count
    centre = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    # Rounding must not push an end past the proportion itself.
    return min(max(0.0, centre - half), share), max(min(1.0, centre + half), share)
