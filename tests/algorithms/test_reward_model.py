"""The loss of a reward model, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rayrft.algorithms import reward_model_losses
from rayrft.algorithms.reward_model import bradley_terry


def scores(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def pair(chosen: tuple[float, ...], rejected: tuple[float, ...]) -> Tensor:
    return torch.stack([scores(*chosen), scores(*rejected)])


def test_bradley_terry_by_hand() -> None:
    # Differences log 3, 0 and -log 3: sigmoids 3/4, 1/2 and 1/4, slopes those less 1.
    chosen, rejected = scores(math.log(3), 2.0, 0.0), scores(0.0, 2.0, math.log(3))
    found = bradley_terry(torch.stack([chosen, rejected]))
    assert found.tolist() == pytest.approx([-math.log(0.75), math.log(2), -math.log(0.25)])
    slopes = torch.autograd.grad(found.sum(), (chosen, rejected))
    assert slopes[0].tolist() == pytest.approx([-0.25, -0.5, -0.75])
    assert slopes[1].tolist() == pytest.approx([0.25, 0.5, 0.75])


def test_a_margin_is_what_the_difference_has_to_reach() -> None:
    found = bradley_terry(pair((5.0, 5.0), (1.0, 1.0)), torch.tensor([4.0, 4.0 - math.log(3)]))
    assert found.tolist() == pytest.approx([math.log(2), -math.log(0.75)])


def test_centring_draws_the_scores_of_a_prompt_to_0() -> None:
    # 0.5 (2 + 1)^2 = 4.5, of slope 3 on either side.
    chosen, rejected = scores(2.0), scores(1.0)
    found = bradley_terry(torch.stack([chosen, rejected]), center=0.5) - bradley_terry(torch.stack([chosen, rejected]))
    assert found.item() == pytest.approx(4.5)
    assert [slope.item() for slope in torch.autograd.grad(found.sum(), (chosen, rejected))] == pytest.approx([3.0, 3.0])
    assert bradley_terry(pair((3.0,), (-3.0,)), center=9.0).item() == pytest.approx(math.log1p(math.exp(-6)))


def test_scores_far_apart_give_finite_losses_and_gradients() -> None:
    chosen, rejected = scores(-1e6, 1e6), scores(1e6, -1e6)
    found = bradley_terry(torch.stack([chosen, rejected]))
    assert found.tolist() == [2e6, 0.0]
    assert torch.autograd.grad(found.sum(), chosen)[0].tolist() == [-1.0, 0.0]


def test_it_is_a_piece_with_checked_coefficients() -> None:
    piece = reward_model_losses.get("bradley_terry")
    assert piece.coefficients == {"center": 0.0} and piece.fault("center", -1.0) == "must be at least 0"
    assert piece.bind({"center": 1.0})(pair((1.0,), (1.0,)), None).item() == pytest.approx(math.log(2) + 4)
