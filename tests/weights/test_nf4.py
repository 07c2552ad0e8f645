"""Weights in 4 bits: the values that they are rounded to, and what they keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rayrft.weights.nf4 import BLOCK, dequantise, quantise

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def drawn(rows: int, blocks: int, dtype: torch.dtype) -> Tensor:
    chance = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, blocks * BLOCK, generator=chance) * torch.logspace(-3, 1, rows)[:, None]
    weight[0, :BLOCK] = 0
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_number_becomes_the_nearest_quantile_of_a_normal_distribution_times_the_largest_of_its_block(
    dtype: torch.dtype,
) -> None:
    weight = drawn(40, 3, dtype)
    found = dequantise(quantise(weight))
    # The paper's: each half has quantiles at equal steps of probability, 8 above zero and 7 below.
    above, below = (
        torch.special.ndtri(torch.linspace(0.9677083, 0.5, count, dtype=torch.float64))[:-1] for count in (9, 8)
    )
    values = torch.cat((-below, torch.zeros(1), above)) / above[0]
    scales = weight.double().view(-1, BLOCK).abs().amax(-1, keepdim=True)
    candidates = values * scales[..., None]
    nearest = (weight.double().view(-1, BLOCK, 1) - candidates).abs().argmin(-1, keepdim=True)
    expected = candidates.expand(-1, BLOCK, -1).gather(-1, nearest).view(weight.shape)
    torch.testing.assert_close(found, expected.to(dtype), rtol=max(1e-6, torch.finfo(dtype).eps), atol=0)
    assert not found[0, :BLOCK].any() and found.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_takes_4_bits_a_number_and_a_scale_a_block_and_loses_nothing_the_second_time(
    dtype: torch.dtype,
) -> None:
    quantised = quantise(drawn(7, 5, dtype))
    assert quantised.dtype == dtype and quantised.nbytes == 7 * 5 * (BLOCK // 2 + dtype.itemsize)
    again = quantise(dequantise(quantised))
    assert again.view(torch.uint8).equal(quantised.view(torch.uint8))
    assert quantise(drawn(7, 5, dtype)[3:3]).shape == quantised[:0].shape
    assert quantise(torch.empty(7, 5 * BLOCK, dtype=dtype, device="meta")).shape == quantised.shape


def test_values_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="an optional package")
    weight = drawn(40, 3, torch.float32)
    theirs = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    assert torch.equal(functional.dequantize_4bit(*theirs), dequantise(quantise(weight)))
