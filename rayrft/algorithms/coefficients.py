"""Loss coefficients that are adapted from step to step towards a target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from rayrft.algorithms.algorithm import Algorithm


@dataclass(frozen=True)
class Coefficients:
    """The coefficients of KL and entropy between two steps; each stays as configured if the algorithm has no target.

    KL (Ziegler et al. 2019, arXiv:1909.08593): ``coef <- coef max(1 + clip(KL / target - 1, -0.2, 0.2) n / horizon,
    1/2)`` after n sequences. A KL of 20 % or more over the target raises it by e^0.2 within about ``kl_horizon``
    sequences. One step at most halves it; without this floor, which the paper lacks, steps of 5 horizons or more would
    make it 0 or negative.

    Entropy (Skywork-OR1, He et al. 2025, arXiv:2505.22312): after a step the coefficient grows by ``entropy_step`` if
    the mean entropy was below the goal, else it shrinks by it, never below 0. It is applied only while the entropy is
    at or below the goal.
    """

    initial: Algorithm
    kl: float
    entropy: float
    last_entropy: float = 0.0
    """Mean over tokens of usual rows in the previous step (nats); before the first step 0, below every goal."""

    @classmethod
    def of(cls, algorithm: Algorithm) -> Self:
        """Return the algorithm's initial coefficients."""
        return cls(algorithm, algorithm.kl_coef, algorithm.entropy_coef)

    @cached_property
    def applied(self) -> Algorithm:
        """The algorithm with the coefficients of the next step."""
        goal = self.initial.entropy_goal
        entropy = self.entropy if goal is None or self.last_entropy <= goal else 0.0
        return replace(self.initial, kl_coef=self.kl, entropy_coef=entropy)

    def update(self, *, kl: float, entropy: float, sequences: int) -> Self:
        """Return the state after a step over ``sequences`` rows, unchanged for 0: with this mean KL (nats per token, or
        per sequence if the target is) and mean entropy (nats per token)."""
        if not sequences:
            return self
        algorithm, kl_coef, entropy_coef = self.initial, self.kl, self.entropy
        if algorithm.kl_target is not None:
            error = min(max(kl / algorithm.kl_target - 1.0, -0.2), 0.2)
            kl_coef *= max(1.0 + error * sequences / algorithm.kl_horizon, 0.5)
        if algorithm.entropy_goal is not None:
            step = algorithm.entropy_step
            entropy_coef = max(0.0, entropy_coef + (step if entropy < algorithm.entropy_goal else -step))
        return replace(self, kl=kl_coef, entropy=entropy_coef, last_entropy=entropy)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        kl = {} if self.initial.kl_target is None else {"kl": self.kl}
        entropy = {"entropy": self.entropy, "last_entropy": self.last_entropy}
        return kl if self.initial.entropy_goal is None else kl | entropy

    def restored(self, state: dict[str, float]) -> Self:
        """Restore what `state` returned."""
        kept = {"kl": self.kl, "entropy": self.entropy} | {name: state[name] for name in self.state()}
        return type(self)(self.initial, **kept)
