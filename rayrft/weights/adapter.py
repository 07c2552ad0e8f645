"""Merging LoRA factors A ``[r, in]`` and B ``[out, r]``, named as in peft: ``W + scale B A`` (Hu et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the factors' names after the name of the linear layer."""


def merge(
    weights: Iterable[tuple[str, Tensor]], factors: dict[str, Tensor], scale: float
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights with the adapter merged, in the same order; weights without factors pass unchanged.

    A sum is computed on the factors' device, in float32 or better, and has the dtype of its weight. Raises ValueError
    at the end if factors are left without a weight.
    """
    left = dict(factors)
    for name, weight in weights:
        layer = name.removesuffix(".weight")
        if layer + A in left:
            a, b = left.pop(layer + A), left.pop(layer + B)
            dtype = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
            merged = torch.addmm(weight.to(a.device, dtype), b.to(dtype), a.to(dtype), alpha=scale)
            yield name, merged.to(weight.dtype)
        else:
            yield name, weight
    if left:
        raise ValueError(f"no weight came for {next(iter(left))!r} and {len(left) - 1} other factors")
