"""Merging LoRA factors A ``[r, in]`` and B ``[out, r]``, named as in peft: ``W + scale B A`` (Hu et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rayrft.weights.messages import Adapter
from rayrft.weights.nf4 import dequantise, quantise

A, B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the factors' names after the name of the linear layer."""


def merge(
    weights: Iterable[tuple[str, Tensor]], factors: dict[str, Tensor], adapter: Adapter
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights with the adapter merged, in the same order; weights without factors pass unchanged.

    A weight that the trainer holds in 4 bits is rounded as there. A sum is computed on the factors' device, in float32
    or better, and has the dtype of its weight. Raises ValueError at the end if factors are left without a weight.
    """
    left = dict(factors)
    for name, weight in weights:
        layer = name.removesuffix(".weight")
        if layer + A in left:
            a, b = left.pop(layer + A), left.pop(layer + B)
            dtype = torch.promote_types(torch.promote_types(weight.dtype, a.dtype), torch.float32)
            base = weight.to(a.device)
            if adapter.frozen == "nf4":
                base = dequantise(quantise(base))
            merged = torch.addmm(base.to(dtype), b.to(dtype), a.to(dtype), alpha=adapter.scale)
            yield name, merged.to(weight.dtype)
        else:
            yield name, weight
    if left:
        raise ValueError(f"no weight came for {next(iter(left))!r} and {len(left) - 1} other factors")
