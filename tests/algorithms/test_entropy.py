"""Entropy terms and the controller of their coefficient."""

from __future__ import annotations

import math

import pytest
import torch

from rayrft.algorithms import Denominators, build, chosen_logprobs
from rayrft.algorithms.entropy import bonus, target
from tests.algorithms.flat import LOG2, leaf, make_batch, output, token_logprobs, tokens


def test_entropy_terms_by_hand() -> None:
    entropy = torch.tensor([0.1, 0.5], requires_grad=True)
    assert bonus(entropy).tolist() == pytest.approx([-0.1, -0.5])
    found = target(entropy, entropy_target=0.3)
    assert found.tolist() == pytest.approx([0.2, 0.0])
    assert torch.autograd.grad(found.sum(), entropy)[0].tolist() == [-1.0, 0.0]


def test_the_bonus_is_added_with_its_coefficient_over_own_tokens() -> None:
    batch = make_batch([[-1.0, -1.0], [0.0]], expert=[False, True])
    algorithm = build("grpo", {"entropy": "bonus", "entropy_coef": 0.5})
    entropy = tokens([[1.0, 2.0], [7.0]]).requires_grad_()
    over = Denominators(policy_tokens=2, policy_sequences=1)
    parts = algorithm.loss(output(leaf([[-1.0, -1.0], [-1.0]]), entropy), batch, over)
    assert parts.loss.item() == pytest.approx(-0.5 * 1.5)
    assert parts.entropy.item() == pytest.approx(3.0)
    [grad] = torch.autograd.grad(parts.loss, entropy)
    assert grad.tolist() == [0.0, -0.25, -0.25, 0.0, 0.0]


def test_token_logprobs_divide_by_temperature_and_shift_by_one() -> None:
    logits = torch.tensor([[[0.0, 2 * LOG2], [0.0, 0.0]]])
    chosen, entropy = token_logprobs(logits, torch.tensor([[0, 1]]), temperature=2.0)
    # softmax([0, log 2]) = [1/3, 2/3]
    assert chosen[0].tolist() == pytest.approx([0.0, math.log(2 / 3)])
    assert entropy[0, 1].item() == pytest.approx(-(math.log(1 / 3) / 3 + 2 * math.log(2 / 3) / 3))


def test_the_entropy_has_a_gradient_only_where_it_is_asked_for() -> None:
    # dH/dz_i = -p_i (log p_i + H); at [1/3, 2/3] the first: -1/3 (log 1/3 + H)
    logits = torch.tensor([[[0.0, LOG2], [0.0, 0.0]]], dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 1]])
    assert not token_logprobs(logits, ids)[1].requires_grad
    entropy = token_logprobs(logits, ids, entropy_gradient=True)[1].sum()
    [grad] = torch.autograd.grad(entropy, logits)
    assert grad[0, 0, 0].item() == pytest.approx(-(math.log(1 / 3) + entropy.item()) / 3)


def test_a_token_that_cannot_be_drawn_counts_0_in_the_entropy_and_has_no_gradient() -> None:
    # Probabilities 1/4, 3/4 and 0.
    logits = torch.tensor([0.0, math.log(3.0), -math.inf], dtype=torch.float64, requires_grad=True)
    logprob, entropy = chosen_logprobs(logits, torch.tensor(1), entropy_gradient=True)
    assert logprob.item() == pytest.approx(math.log(0.75))
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert entropy.item() == pytest.approx(expected)
    [grad] = torch.autograd.grad(entropy, logits)  # -p (log p + H)
    assert grad.tolist() == pytest.approx(
        [-0.25 * (math.log(0.25) + expected), -0.75 * (math.log(0.75) + expected), 0.0]
    )
