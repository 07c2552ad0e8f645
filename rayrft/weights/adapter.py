"""A low-rank adapter on the wire: factors A ``[r, in]`` and B ``[out, r]`` of weights ``W + scale B A`` (LoRA, Hu et
al. 2021), under the names that peft gives them in its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

A, B = ".lora_A.weight", ".lora_B.weight"
"""What follows the name of a linear layer in those of its factors."""


def merge(
    weights: Iterable[tuple[str, Tensor]], factors: dict[str, Tensor], scale: float
) -> Iterator[tuple[str, Tensor]]:
    """The weights with the adapter in them, in the order they come; those without factors pass as they are.

    A sum is taken where the factors lie, in float32 or better, and has the dtype of its weight. Raises ValueError at
    the end when there are factors for which no weight came.
    """
    left = dict(factors)
    for name, weight in weights:
        layer = name.removesuffix(".weight")
        if layer + A in left:
            a, b = left.pop(layer + A), left.pop(layer + B)
            dtype = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
            whole = torch.addmm(weight.to(a.device, dtype), b.to(dtype), a.to(dtype), alpha=scale)
            yield name, whole.to(weight.dtype)
        else:
            yield name, weight
    if left:
        raise ValueError(f"no weight came for {next(iter(left))!r} and {len(left) - 1} other factors")
