"""Weights for the gap between engine and trainer, against values worked out by hand."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayrft.algorithms import Denominators, build, corrections
from rayrft.algorithms.corrections import (
    divergence_mask,
    off_policy_mask,
    sequence_mask,
    sequence_truncated,
    token_mask,
)
from tests.algorithms.flat import LOG2, leaf, make_batch, on_mask, output, tokens, usual

# Two answers; ratios of the proximal policy to the behaviour policy 1 and 4, then 1/4.
GAP = usual([[-1.0, -3.0], [-1.0]], proximal_logprobs=[[-1.0, -3.0 + 2 * LOG2], [-1.0 - 2 * LOG2]])
NOW = tokens([[-9.0, -9.0], [-9.0]], prompt=0.0)  # the present policy has no part in it


@pytest.mark.parametrize(
    ("name", "coefficients", "expected"),
    [
        ("decoupled", {}, [1.0, 4.0, 0.25]),
        ("truncated", {}, [1.0, 2.0, 0.25]),
        ("truncated", {"weight_cap": 3.0}, [1.0, 3.0, 0.25]),
        ("masked", {}, [1.0, 4.0, 0.0]),
        ("masked", {"weight_low": 0.1, "weight_high": 3.0}, [1.0, 0.0, 0.25]),
        ("token_mask", {}, [1.0, 0.0, 0.0]),
        # Geometric means: sqrt(1 * 4) = 2, kept whole up to rounding of the bound; 1/4, left out whole.
        ("sequence_mask", {"sequence_high": 2.001}, [1.0, 1.0, 0.0]),
        ("sequence_mask", {"sequence_high": 1.9}, [0.0, 0.0, 0.0]),
        # Products 1 * 4 and 1/4.
        ("sequence_truncated", {}, [2.0, 2.0, 0.25]),
        ("sequence_truncated", {"sequence_cap": 5.0}, [4.0, 4.0, 0.25]),
        ("sequence_truncated", {"sequence_cap": 3.0, "sequence_ratio": "geometric"}, [2.0, 2.0, 0.25]),
        ("sequence_masked", {}, [0.0, 0.0, 0.25]),
        ("sequence_masked", {"sequence_cap": 5.0}, [4.0, 4.0, 0.25]),
        ("sequence_masked", {"sequence_cap": 3.0, "sequence_ratio": "geometric"}, [2.0, 2.0, 0.25]),
    ],
)
def test_by_hand(name: str, coefficients: Any, expected: list[float]) -> None:
    assert on_mask(corrections.get(name).bind(coefficients)(NOW, GAP), GAP) == pytest.approx(expected)


def test_by_default_an_answer_is_masked_that_is_off_by_two_per_cent_a_token() -> None:
    # Tokens of all three are off by half; so are those of the last on the whole.
    batch = usual([[0.0] * 2] * 3, proximal_logprobs=[[0.5, -0.5], [0.5, -0.499], [0.5, -0.46]])
    assert on_mask(sequence_mask(NOW, batch), batch) == [1.0] * 4 + [0.0] * 2


def test_the_weight_of_a_long_answer_does_not_overflow() -> None:
    batch = usual([[-10.0] * 50], proximal_logprobs=[[0.0] * 50])
    assert on_mask(sequence_truncated(NOW, batch, sequence_cap=1e9), batch) == pytest.approx([math.exp(20)] * 50)


@pytest.mark.parametrize(
    ("divergence", "over", "values"),
    [
        # Gaps 0 and log 4 in one answer, -log 4 in the other: k2 (log 4)^2 / 2 for both.
        ("k2", "token", [0.0, 2 * LOG2**2, 2 * LOG2**2]),
        ("k2", "mean", [LOG2**2, LOG2**2, 2 * LOG2**2]),
        ("k2", "sum", [2 * LOG2**2] * 3),
        # k3: 4 - 1 - log 4 = 1.614 and 1/4 - 1 + log 4 = 0.636.
        ("k3", "token", [0.0, 3 - 2 * LOG2, 2 * LOG2 - 0.75]),
        ("k3", "mean", [1.5 - LOG2, 1.5 - LOG2, 2 * LOG2 - 0.75]),
        ("k3", "max", [3 - 2 * LOG2, 3 - 2 * LOG2, 2 * LOG2 - 0.75]),
    ],
)
def test_divergence_mask_by_hand(divergence: Any, over: Any, values: list[float]) -> None:
    for cap in (value + sign * 1e-6 for value in values for sign in (-1, 1) if value + sign * 1e-6 > 0):
        kept = divergence_mask(NOW, GAP, divergence=divergence, divergence_of=over, divergence_cap=cap)
        assert on_mask(kept, GAP) == [float(value <= cap) for value in values]


def test_gaps_of_opposite_sign_cancel_in_the_ratio_of_an_answer_and_not_in_its_divergence() -> None:
    batch = usual([[-1.0, -1.0]], proximal_logprobs=[[-0.5, -1.5]])
    assert on_mask(sequence_mask(NOW, batch), batch) == [1.0, 1.0]
    assert on_mask(divergence_mask(NOW, batch), batch) == [0.0, 0.0]


def test_what_the_policy_left_behind_is_not_pushed_further_down() -> None:
    # Means of log behaviour / now: (0 + 1.2) / 2 = 0.6, 0.6, 0.4, -0.6. The proximal policy has no part in it.
    behaviour = [[-1.0, -1.0], [-1.0], [-1.0], [-1.0]]
    advantages = [[-1.0, 0.5], [1.0], [-1.0], [-1.0]]
    batch = usual(behaviour, advantages, proximal_logprobs=[[-9.0, -9.0], [-9.0], [-9.0], [-9.0]])
    now = leaf([[-1.0, -2.2], [-1.6], [-1.4], [-0.4]])
    kept = off_policy_mask(now, batch)
    assert on_mask(kept, batch) == [0.0, 1.0, 1.0, 1.0, 1.0] and not kept.requires_grad
    assert on_mask(off_policy_mask(now, batch, off_policy_cap=0.3), batch) == [0.0, 1.0, 1.0, 0.0, 1.0]
    assert on_mask(off_policy_mask(now, batch, off_policy_cap=0.7), batch) == [1.0] * 5
    even = replace(batch, advantages=torch.zeros_like(batch.advantages))
    assert on_mask(off_policy_mask(now, even), batch) == [1.0] * 5


def test_several_corrections_multiply_and_what_is_left_out_stays_in_the_denominator() -> None:
    # One answer with token ratios 1 and 4, capped at 2 and 3; the other's is 1/4, which the mask leaves out.
    batch = make_batch([[-1.0, -3.0], [-1.0]], [[1.0, 1.0], [1.0]], proximal_logprobs=[[-1.0, -3.0 + 2 * LOG2], [-2.4]])
    over, pieces = Denominators(3, 2), ["truncated", "sequence_mask"]
    algorithm = build(
        "rloo", {"correction": pieces, "weight_cap": 3.0, "sequence_high": 2.1, "policy_loss": "reinforce"}
    )
    parts = algorithm.loss(output(leaf([[-1.0, -3.0], [-1.0]])), batch, over)
    assert parts.loss.item() == pytest.approx((1.0 * 1 + 3.0 * 3) / 3)
    assert parts.correction.item() == pytest.approx(4.0)
    assert algorithm.needs["proximal"] == "correction 'truncated'"
    assert "proximal" in build("rloo", {"correction": pieces[:1]}).needs and build("gspo", {"correction": pieces})
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm


def test_without_a_proximal_policy_masks_look_at_the_present_one() -> None:
    batch = usual([[-1.0], [-1.0]])
    assert on_mask(token_mask(tokens([[-1.0], [-1.0 + 2 * LOG2]], prompt=0.0), batch), batch) == [1.0, 0.0]


@pytest.mark.parametrize("name", corrections)
def test_where_the_policies_agree_every_weight_is_1_and_carries_no_gradient(name: str) -> None:
    batch, logprobs = usual([[-1.0, -2.0]], proximal_logprobs=[[-1.0, -2.0]]), leaf([[-1.0, -2.0]])
    weights = corrections.get(name).bind({})(logprobs, batch)
    assert on_mask(weights, batch) == [1.0, 1.0]
    assert not weights.requires_grad


def test_decoupled_ppo_by_hand() -> None:
    # Behaviour 1/4, proximal 1/2, now 3/4: ratio to the proximal policy 1.5, clipped to 1.28; weight 2, and the
    # row's own is 3. Loss -7.68.
    fields = {"proximal_logprobs": [[math.log(0.5)]], "weight": torch.tensor([3.0])}
    batch = make_batch([[math.log(0.25)]], [[1.0]], **fields)
    algorithm = build("grpo", {"correction": "decoupled"})
    over = Denominators(policy_tokens=1, policy_sequences=1)
    parts = algorithm.loss(output(leaf([[math.log(0.75)]])), batch, over)
    assert parts.loss.item() == pytest.approx(-7.68)
    assert parts.correction.item() == pytest.approx(2.0)
    assert parts.ratio.item() == pytest.approx(1.5)


@pytest.mark.parametrize("name", ["decoupled", "truncated", "masked"])
def test_without_proximal_log_probs_the_present_policy_is_the_proximal_one(name: str) -> None:
    # Behaviour 1/4, now 3/8: weight 1.5, and the ratio to the proximal policy is 1 with the gradient of log pi.
    algorithm, over = build("grpo", {"correction": name}), Denominators(1, 1)
    found = []
    for proximal in ({}, {"proximal_logprobs": [[math.log(0.375)]]}):
        logprobs = leaf([[math.log(0.375)]])
        batch = make_batch([[math.log(0.25)]], [[2.0]], **proximal)
        parts = algorithm.loss(output(logprobs), batch, over)
        [slope] = torch.autograd.grad(parts.loss, logprobs)
        found.append((parts.loss.item(), parts.ratio.item(), parts.correction.item(), slope[-1].item()))
    assert found[0] == pytest.approx((-3.0, 1.0, 1.5, -3.0))
    assert found[0] == found[1]
