"""Entropy terms, which keep the policy exploring. A term takes the entropy ``[T]`` (nats, with gradient) at action
tokens of usual rows and returns a loss per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from rayrft.algorithms.pieces import NonNegative, Pieces

EntropyTerm = Callable[[Tensor], Tensor]

entropies: Pieces[EntropyTerm] = Pieces("entropy")


@entropies.register("bonus")
def bonus(entropy: Tensor) -> Tensor:
    """``-H_t``: an unbounded bonus on every token (Mnih et al. 2016, arXiv:1602.01783)."""
    return -entropy


@entropies.register("target")
def target(entropy: Tensor, *, entropy_target: NonNegative = 0.2) -> Tensor:
    """``max(0, entropy_target - H_t)``: a bonus only for tokens below the target. Per token and not on the mean, so
    that the loss does not depend on the micro-batch split."""
    return (entropy_target - entropy).clamp(min=0)


@dataclass(frozen=True)
class EntropyController:
    """An entropy coefficient that holds the mean entropy at a target (Skywork-OR1, He et al. 2025, arXiv:2505.22312).

    After a step the coefficient grows by ``step`` if the mean entropy was below the target, else it shrinks by it,
    never below 0. It is applied only while the entropy is at or below the target.
    """

    coef: float
    target: float
    step: float = 0.005

    def __post_init__(self) -> None:
        if self.coef < 0 or self.target < 0 or self.step <= 0:
            raise ValueError(f"coefficient and target must not be negative, and the step above 0, got {self}")

    def applied(self, entropy: float) -> float:
        """Return the coefficient for a step at this mean entropy (nats per token)."""
        return self.coef if entropy <= self.target else 0.0

    def update(self, entropy: float) -> Self:
        """Return the controller after a step at this mean entropy."""
        change = self.step if entropy < self.target else -self.step
        return replace(self, coef=max(0.0, self.coef + change))
