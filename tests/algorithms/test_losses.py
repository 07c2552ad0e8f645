"""Losses against values worked out by hand, and the invariants of their denominators."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rayrft.algorithms import Denominators, TokenBatch, group_relative_advantages, presets, token_logprobs

LOG2 = math.log(2.0)


def batch(expert: list[bool], advantages: list[float], behaviour: list[float]) -> TokenBatch:
    """Rows of two tokens: a prompt token and one action token."""
    rows = len(expert)
    mask = torch.tensor([[0.0, 1.0]] * rows, dtype=torch.float64)
    return TokenBatch(
        token_ids=torch.zeros(rows, 2, dtype=torch.int64),
        mask=mask,
        behaviour_logprobs=torch.tensor([[0.0, b] for b in behaviour], dtype=torch.float64),
        advantages=torch.tensor([[0.0, a] for a in advantages], dtype=torch.float64),
        expert=torch.tensor(expert),
    )


def logprobs(values: list[float]) -> Tensor:
    return torch.tensor([[0.0, v] for v in values], dtype=torch.float64, requires_grad=True)


def test_advantages_by_hand() -> None:
    # mean 0.25; unbiased variance (0.5625 + 3 * 0.0625) / 3 = 0.25, deviation 0.5
    result = group_relative_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64), epsilon=0.0)
    assert result.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])


@pytest.mark.parametrize("rewards", [[1.0], [0.5, 0.5, 0.5], [0.1] * 7])
def test_advantages_are_zero_without_a_preference(rewards: list[float]) -> None:
    assert group_relative_advantages(torch.tensor(rewards)).tolist() == [0.0] * len(rewards)


def test_grpo_by_hand() -> None:
    # Ratios 1, 2 and 1/2 with advantages 1, 1 and -1; bounds 0.8 and 1.28.
    # min(1, 1) = 1; min(2, 1.28) = 1.28; min(-0.5, -0.8) = -0.8. Loss = -(1 + 1.28 - 0.8) / 3.
    data = batch([False] * 3, [1.0, 1.0, -1.0], [-1.0, -1.0, -1.0])
    parts = presets["grpo"]().loss(
        logprobs([-1.0, -1.0 + LOG2, -1.0 - LOG2]), torch.zeros(3, 2, dtype=torch.float64), data, Denominators(3, 0)
    )
    assert parts.loss.item() == pytest.approx(-(1 + 1.28 - 0.8) / 3)
    assert parts.policy.item() == pytest.approx(parts.loss.item())
    assert parts.sft.item() == 0.0
    assert parts.sums["clipped"].item() == 2
    assert parts.sums["ratio"].item() == pytest.approx(3.5)
    assert parts.sums["logprob_gap"].item() == pytest.approx(2 * LOG2)


def test_clipping_stops_the_gradient_only_where_it_binds() -> None:
    data = batch([False] * 2, [1.0, -1.0], [-1.0, -1.0])
    values = logprobs([-1.0 + LOG2, -1.0 + LOG2])  # ratio 2: too far for A > 0, still to be lowered for A < 0
    loss = presets["grpo"]().loss(values, torch.zeros(2, 2), data, Denominators(2, 0)).loss
    loss.backward()
    assert values.grad is not None
    assert values.grad[0, 1].item() == 0.0
    assert values.grad[1, 1].item() == pytest.approx(2.0 / 2)  # rho / tokens


def test_sft_by_hand() -> None:
    data = batch([True, True], [0.0, 0.0], [0.0, 0.0])
    parts = presets["sft"]().loss(logprobs([-0.5, -1.5]), torch.zeros(2, 2), data, Denominators(0, 2))
    assert parts.loss.item() == pytest.approx(1.0)
    assert parts.policy.item() == 0.0


def test_mix_weighs_two_streams_each_over_its_own_denominator() -> None:
    data = batch([False, True, True], [2.0, 0.0, 0.0], [-1.0, 0.0, 0.0])
    parts = presets["mix"](mu=0.25).loss(logprobs([-1.0, -0.5, -1.5]), torch.zeros(3, 2), data, Denominators(1, 2))
    assert parts.policy.item() == pytest.approx(-2.0)
    assert parts.sft.item() == pytest.approx(1.0)
    assert parts.loss.item() == pytest.approx(0.75 * -2.0 + 0.25 * 1.0)


def test_expert_rows_never_feed_the_policy_term_and_own_rows_never_the_sft_term() -> None:
    data = batch([False, True], [1.0, 5.0], [-1.0, -3.0])
    values = logprobs([-1.2, -0.7])
    presets["grpo"]().loss(values, torch.zeros(2, 2), data, Denominators(1, 1)).loss.backward()
    assert values.grad is not None and values.grad[1].abs().sum().item() == 0.0
    values = logprobs([-1.2, -0.7])
    presets["sft"]().loss(values, torch.zeros(2, 2), data, Denominators(1, 1)).loss.backward()
    assert values.grad is not None and values.grad[0].abs().sum().item() == 0.0


@pytest.mark.parametrize(("mu", "same"), [(0.0, "grpo"), (1.0, "sft")])
def test_the_ends_of_mix_are_grpo_and_sft_exactly(mu: float, same: str) -> None:
    data = batch([False, True, False], [1.0, 0.0, -0.7], [-1.1, 0.0, -0.4])
    results = []
    for algorithm in (presets["mix"](mu=mu), presets[same]()):
        values = logprobs([-1.0, -0.3, -0.9])
        loss = algorithm.loss(values, torch.zeros(3, 2), data, Denominators(2, 1)).loss
        loss.backward()
        results.append((loss.item(), values.grad))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_masked_entries_may_hold_anything() -> None:
    data = batch([False], [1.0], [-1.0])
    values = torch.tensor([[-math.inf, -1.0]], dtype=torch.float64, requires_grad=True)
    presets["grpo"]().loss(values, torch.zeros(1, 2), data, Denominators(1, 0)).loss.backward()
    assert values.grad is not None and torch.isfinite(values.grad).all()


def test_mu_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mu must lie in \[0, 1\]"):
        presets["mix"](mu=1.5)


def test_token_logprobs_divide_by_temperature_and_shift_by_one() -> None:
    logits = torch.tensor([[[0.0, 2 * LOG2], [0.0, 0.0]]])
    chosen, entropy = token_logprobs(logits, torch.tensor([[0, 1]]), temperature=2.0)
    # softmax([0, log 2]) = [1/3, 2/3]
    assert chosen[0].tolist() == pytest.approx([0.0, math.log(2 / 3)])
    assert entropy[0, 1].item() == pytest.approx(-(math.log(1 / 3) / 3 + 2 * math.log(2 / 3) / 3))
