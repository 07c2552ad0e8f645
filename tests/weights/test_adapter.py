"""Factors and weights: the sum, and what must not pass unseen."""

from __future__ import annotations

import pytest
import torch

from rayrft.weights.adapter import merge
from rayrft.weights.messages import Adapter
from rayrft.weights.nf4 import dequantise, quantise


def factors(layer: str, rank: int = 2, width: int = 5, height: int = 3) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    return {
        f"{layer}.lora_A.weight": torch.randn(rank, width, generator=chance),
        f"{layer}.lora_B.weight": torch.randn(height, rank, generator=chance),
    }


def test_a_layer_with_factors_gets_their_product_and_the_rest_passes_untouched() -> None:
    weight, bias, other = torch.randn(3, 5), torch.randn(3), torch.randn(3, 5)
    adapter = factors("h.0.up")
    found = dict(
        merge(
            [("h.0.up.weight", weight), ("h.0.up.bias", bias), ("g.0.up.weight", other)], adapter, Adapter("base", 0.5)
        )
    )
    expected = weight + 0.5 * adapter["h.0.up.lora_B.weight"] @ adapter["h.0.up.lora_A.weight"]
    torch.testing.assert_close(found["h.0.up.weight"], expected)
    assert found["h.0.up.bias"] is bias and found["g.0.up.weight"] is other


def test_the_sum_is_taken_in_float32_whatever_the_weight_is_held_in() -> None:
    weight = torch.full((3, 5), 256.0, dtype=torch.bfloat16)
    # 1 is half of what bfloat16 can tell apart at 256: eight of them one by one would leave no trace.
    adapter = {"up.lora_A.weight": torch.ones(8, 5), "up.lora_B.weight": torch.ones(3, 8)}
    [(_, found)] = merge([("up.weight", weight)], adapter, Adapter("base", 1.0))
    assert found.dtype == torch.bfloat16 and torch.equal(found.float(), torch.full((3, 5), 264.0))


def test_a_weight_that_the_trainer_holds_in_4_bits_is_rounded_before_the_sum() -> None:
    weight, other, adapter = torch.randn(3, 64).bfloat16(), torch.randn(3, 64), factors("up", width=64)
    found = dict(merge([("up.weight", weight), ("down.weight", other)], adapter, Adapter("base", 0.5, "nf4")))
    product = 0.5 * adapter["up.lora_B.weight"] @ adapter["up.lora_A.weight"]
    torch.testing.assert_close(found["up.weight"], (dequantise(quantise(weight)).float() + product).bfloat16())
    assert found["down.weight"] is other


def test_factors_without_a_weight_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"no weight came for 'down\.lora_A\.weight'"):
        list(merge([("up.weight", torch.zeros(3, 5))], {**factors("up"), **factors("down")}, Adapter("base", 1.0)))
