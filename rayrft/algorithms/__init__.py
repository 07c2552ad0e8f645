"""Losses, advantages and presets in pure torch: no Ray, no vLLM, no I/O.

Shapes: ``[B, T]`` is one micro-batch of B right-padded sequences of T tokens. Every loss is a *sum* over the
micro-batch divided by a denominator that is global to the optimiser step (all ranks, all micro-batches), so that
adding the parts up gives the same loss and gradient however the batch was split.
"""

from rayrft.algorithms.advantages import group_relative_advantages
from rayrft.algorithms.logprobs import token_logprobs
from rayrft.algorithms.loss import Denominators, LossParts, TokenBatch
from rayrft.algorithms.presets import Algorithm, presets

__all__ = [
    "Algorithm",
    "Denominators",
    "LossParts",
    "TokenBatch",
    "group_relative_advantages",
    "presets",
    "token_logprobs",
]
