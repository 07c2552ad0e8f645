"""Losses on pairs, against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rayrft.algorithms import Denominators, TokenBatch, build, count
from rayrft.algorithms.preference import dpo, ipo, margins
from tests.algorithms.flat import LOG2, leaf, make_batch, output


def pairs(
    chosen: list[bool], pair: list[int], lengths: list[int], reference: float = -1.0, **fields: Any
) -> TokenBatch:
    rows = [[0.0] * length for length in lengths]
    return make_batch(
        rows,
        pair=torch.tensor(pair),
        chosen=torch.tensor(chosen),
        reference_logprobs=[[reference] * length for length in lengths],
        **fields,
    )


def test_margins_by_hand() -> None:
    # Pair 0: rows 2 (chosen) and 0. h = 2 * 0.5 and 0.25: margin 0.75. Pair 1: rows 1 (chosen) and 3: -0.5 - 0 = -0.5.
    batch = pairs([False, True, True, False], [0, 1, 0, 1], [1, 1, 2, 1])
    logprobs = leaf([[-0.75], [-1.5], [-0.5, -0.5], [-1.0]])
    assert margins(logprobs, batch.only(batch.paired)).tolist() == pytest.approx([0.75, -0.5])


def test_dpo_by_hand() -> None:
    # beta m = log 3: sigmoid = 3/4 and 1/4.
    margin = torch.tensor([math.log(3) / 0.1], dtype=torch.float64)
    assert dpo(margin).tolist() == pytest.approx([-math.log(0.75)])
    assert dpo(-margin).tolist() == pytest.approx([-math.log(0.25)])
    assert dpo(margin, label_smoothing=0.2).item() == pytest.approx(-0.8 * math.log(0.75) - 0.2 * math.log(0.25))


def test_at_the_reference_dpo_is_log_2_and_its_slope_half_beta() -> None:
    margin = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    loss = dpo(margin, beta=0.4)
    assert loss.item() == pytest.approx(LOG2)
    assert torch.autograd.grad(loss.sum(), margin)[0].item() == pytest.approx(-0.2)


def test_smoothed_labels_are_satisfied_at_a_finite_margin() -> None:
    # log(0.8 / 0.2) / beta
    margin = torch.tensor([math.log(4) / 0.1], dtype=torch.float64, requires_grad=True)
    [slope] = torch.autograd.grad(dpo(margin, label_smoothing=0.2).sum(), margin)
    assert slope.item() == pytest.approx(0.0, abs=1e-12)


def test_with_labels_half_wrong_dpo_does_not_know_which_is_chosen() -> None:
    margin = torch.tensor([3.0], dtype=torch.float64)
    assert dpo(margin, label_smoothing=0.5).item() == pytest.approx(dpo(-margin, label_smoothing=0.5).item())


def test_ipo_by_hand() -> None:
    # beta 0.25: the goal is 2, and the loss the same on both sides of it.
    margin = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert ipo(margin, beta=0.25).tolist() == [4.0, 1.0, 0.0, 1.0]


def test_the_loss_is_a_mean_over_the_pairs_of_the_step() -> None:
    # Two pairs in this micro-batch, four in the step; at the reference each is log 2. An own row takes no part.
    batch = pairs([True, False, True, False, False], [0, 0, 1, 1, -1], [1, 2, 1, 1, 3])
    assert count([batch]).tolist() == [3.0, 1.0, 0.0, 0.0, 2.0]
    logprobs = leaf([[-1.0], [-1.0, -1.0], [-1.0], [-1.0], [-5.0] * 3])
    parts = build("dpo").loss(output(logprobs), batch, Denominators(pairs=4))
    assert parts.loss.item() == pytest.approx(LOG2 / 2)
    [grad] = torch.autograd.grad(parts.loss, logprobs)
    # -+ beta / 2 / 4 on the tokens of the chosen and the rejected
    slope = 0.1 / 2 / 4
    expected = [0.0, -slope, 0.0, slope, slope, 0.0, -slope, 0.0, slope, 0.0, 0.0, 0.0, 0.0]
    assert grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("chosen", "pair"), [([True, True], [0, 0]), ([True, False], [0, 1]), ([True, False], [1, 1])])
def test_a_pair_that_is_not_whole_is_refused(chosen: list[bool], pair: list[int]) -> None:
    with pytest.raises(ValueError, match="every pair must hold one chosen and one rejected row"):
        build("dpo").loss(output(leaf([[-1.0], [-1.0]])), pairs(chosen, pair, [1, 1]), Denominators(pairs=1))


def test_what_a_batch_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="preference 'ipo' needs pair"):
        build("ipo").loss(output(leaf([[-1.0]])), make_batch([[0.0]], reference_logprobs=[[0.0]]), Denominators())
    with pytest.raises(ValueError, match="needs pairs and the reference's log-probs"):
        margins(leaf([[-1.0]]), make_batch([[0.0]]))
