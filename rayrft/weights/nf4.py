"""NF4: weights of 4 bits a number, in blocks with a scale (Dettmers et al. 2023, arXiv:2305.14314, appendix E)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK = 64
"""Numbers that share a scale."""

_VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of a normal distribution; exactly zero is one of them."""


def quantise(weight: Tensor) -> Tensor:
    """Return a weight ``[out, in]``, whose ``in`` is a multiple of `BLOCK`, in 4 bits: ``[out, less]`` of its dtype,
    which holds for each block the bytes of its codes, two in a byte, and its scale, the largest magnitude in it."""
    blocks = weight.reshape(len(weight), weight.shape[1] // BLOCK, BLOCK)
    scales = blocks.abs().amax(-1, keepdim=True)
    values = torch.tensor(_VALUES, dtype=torch.float32, device=weight.device)
    shares = (blocks.float() / scales.float()).nan_to_num()  # all of a block may be zero
    codes = torch.bucketize(shares, (values[1:] + values[:-1]) / 2, out_int32=True).to(torch.uint8)
    return torch.cat(((codes[..., ::2] << 4 | codes[..., 1::2]).view(weight.dtype), scales), -1).flatten(-2)


def dequantise(quantised: Tensor) -> Tensor:
    """Return the rounded weight ``[out, in]`` of one in 4 bits, in its dtype."""
    size = BLOCK // 2 // quantised.dtype.itemsize + 1
    blocks = quantised.reshape(len(quantised), quantised.shape[1] // size, size)
    codes, scales = blocks[..., :-1].contiguous().view(torch.uint8), blocks[..., -1:]
    return (_pairs(quantised.device)[codes.int()].flatten(-2) * scales.float()).to(quantised.dtype).flatten(-2)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte of codes, ``[256, 2]``. Once a device: a copy to a GPU waits for it."""
    values = torch.tensor(_VALUES, dtype=torch.float32, device=device)
    return torch.stack((values.repeat_interleave(len(values)), values.repeat(len(values))), -1)
