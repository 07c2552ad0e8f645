"""Entropy terms, which keep the policy exploring. A term takes the entropy ``[T]`` (nats, with gradient) of the
distributions that own tokens were drawn from, and gives a loss per token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, Self

from torch import Tensor

from rayrft.algorithms.pieces import NonNegative, Pieces


class EntropyTerm(Protocol):
    def __call__(self, entropy: Tensor, /) -> Tensor: ...


entropies: Pieces[EntropyTerm] = Pieces("entropy")


@entropies.register("bonus")
def bonus(entropy: Tensor) -> Tensor:
    """``-H_t``: more is better, everywhere and without end (Mnih et al. 2016, arXiv:1602.01783)."""
    return -entropy


@entropies.register("target")
def target(entropy: Tensor, *, entropy_target: NonNegative = 0.2) -> Tensor:
    """``max(0, entropy_target - H_t)``: a bonus only for tokens below the target. Token by token, and not on the mean,
    so that it does not matter which tokens share a micro-batch."""
    return (entropy_target - entropy).clamp(min=0)


@dataclass(frozen=True)
class EntropyController:
    """An entropy coefficient that holds the mean entropy at a target (Skywork-OR1, He et al. 2025, arXiv:2505.22312).

    After each step the coefficient grows by ``step`` where the mean entropy was below the target and shrinks by it
    elsewhere, never below 0. It is applied only while the entropy is at or below the target.
    """

    coef: float
    target: float
    step: float = 0.005

    def __post_init__(self) -> None:
        if self.coef < 0 or self.target < 0 or self.step <= 0:
            raise ValueError(f"coefficient and target must not be negative, and the step above 0, got {self}")

    def applied(self, entropy: float) -> float:
        """The coefficient for a step at this mean entropy (nats per token)."""
        return self.coef if entropy <= self.target else 0.0

    def update(self, entropy: float) -> Self:
        """The controller after a step at this mean entropy."""
        change = self.step if entropy < self.target else -self.step
        return replace(self, coef=max(0.0, self.coef + change))
