"""Entropy terms, which keep the policy exploring. A term takes the entropy ``[T]`` (nats, with gradient) at action
tokens of usual rows and returns a loss per token."""

from __future__ import annotations

from collections.abc import Callable

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
