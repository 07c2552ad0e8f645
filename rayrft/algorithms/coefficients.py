"""Loss coefficients that are adapted from step to step towards a target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from rayrft.algorithms.algorithm import Algorithm
from rayrft.algorithms.entropy import EntropyController
from rayrft.algorithms.kl import AdaptiveCoefficient


@dataclass(frozen=True)
class Coefficients:
    """The state of an algorithm's coefficient controllers between two steps; None for a fixed coefficient."""

    kl: AdaptiveCoefficient | None
    entropy: EntropyController | None
    last_entropy: float = 0.0
    """Mean over tokens of usual rows in the previous step (nats); before the first step 0, below every goal."""

    @classmethod
    def of(cls, algorithm: Algorithm) -> Self:
        """Return the algorithm's initial controllers."""
        kl = entropy = None
        if algorithm.kl_target is not None:
            kl = AdaptiveCoefficient(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)
        if algorithm.entropy_goal is not None:
            entropy = EntropyController(algorithm.entropy_coef, algorithm.entropy_goal, algorithm.entropy_step)
        return cls(kl, entropy)

    def applied(self, algorithm: Algorithm) -> Algorithm:
        """Return the algorithm with the coefficients of the next step."""
        if self.kl is not None:
            algorithm = replace(algorithm, kl_coef=self.kl.coef)
        if self.entropy is not None:
            algorithm = replace(algorithm, entropy_coef=self.entropy.applied(self.last_entropy))
        return algorithm

    def update(self, *, kl: float, entropy: float, sequences: int) -> Self:
        """Return the state after a step with this mean KL and entropy over ``sequences`` rows; unchanged for 0."""
        if not sequences:
            return self
        return replace(
            self,
            kl=self.kl and self.kl.update(kl, sequences),
            entropy=self.entropy and self.entropy.update(entropy),
            last_entropy=entropy,
        )

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        kl = {} if self.kl is None else {"kl": self.kl.coef}
        entropy = {} if self.entropy is None else {"entropy": self.entropy.coef, "last_entropy": self.last_entropy}
        return {**kl, **entropy}

    def restored(self, state: dict[str, float]) -> Self:
        """Restore what `state` returned."""
        return replace(
            self,
            kl=self.kl and replace(self.kl, coef=state["kl"]),
            entropy=self.entropy and replace(self.entropy, coef=state["entropy"]),
            last_entropy=state.get("last_entropy", 0.0),
        )
