"""Losses on demonstrations and the schedules of their weight, against values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rayrft.algorithms import Denominators, build
from rayrft.algorithms.sft import SFTLoss, chord_phi, constant_mu, cosine_mu, nll, nll_by_probability
from tests.algorithms.flat import gradient, leaf, make_batch, on_mask, output

BATCH = make_batch([[0.0, 0.0]], expert=[True]).demonstrated()
QUARTER = [math.log(0.5), math.log(0.25)]


@pytest.mark.parametrize(
    ("loss", "logprobs", "values", "slopes"),
    [
        (nll, [-0.5, -1.5], [0.5, 1.5], [-1.0, -1.0]),
        # Weights 0.5 * 0.5 and 0.25 * 0.75, without gradient of their own; none where the policy is sure either way.
        (chord_phi, QUARTER, [0.25 * math.log(2), 0.1875 * math.log(4)], [-0.25, -0.1875]),
        (chord_phi, [-1e-9, -50.0], [0.0, 0.0], [0.0, 0.0]),
        (nll_by_probability, QUARTER, [0.5 * math.log(2), 0.25 * math.log(4)], [-0.5, -0.25]),
    ],
)
def test_losses_by_hand(loss: SFTLoss, logprobs: list[float], values: list[float], slopes: list[float]) -> None:
    now = leaf([logprobs])
    found = loss(now, BATCH)
    assert on_mask(found, BATCH) == pytest.approx(values, abs=1e-8)
    assert gradient(found, now, BATCH) == pytest.approx(slopes, abs=1e-8)


@pytest.mark.parametrize(
    ("step", "mu"),
    [(0, 0.0), (5, 0.45), (10, 0.9), (60, 0.5), (110, 0.1), (500, 0.1)],  # half way down: (0.9 + 0.1) / 2
)
def test_the_cosine_schedule_by_hand(step: int, mu: float) -> None:
    found = cosine_mu(step, mu_peak=0.9, mu_valley=0.1, mu_warmup_steps=10, mu_decay_steps=100)
    assert found == pytest.approx(mu)


def test_a_schedule_without_decay_stands_at_its_valley() -> None:
    assert cosine_mu(0, mu_decay_steps=0) == 0.05
    assert constant_mu(7, mu=0.3) == 0.3


def test_the_schedule_follows_the_steps_of_the_stage() -> None:
    batch = make_batch([[-1.0], [0.0]], [[2.0], [0.0]], expert=[False, True])
    algorithm = build("chord_mu", {"mu_peak": 0.5, "mu_valley": 0.1, "mu_decay_steps": 10})
    over = Denominators(1, 1, 1, 1)
    for step, mu in ((0, 0.5), (5, 0.3), (10, 0.1)):
        loss = algorithm.loss(output(leaf([[-1.0], [-0.5]])), batch, over, step=step).loss
        assert loss.item() == pytest.approx((1 - mu) * -2.0 + mu * 0.5)


def test_a_row_counts_by_its_weight_and_the_number_of_tokens_stays_what_it_is() -> None:
    batch = replace(make_batch([[0.0, 0.0], [0.0]], expert=[True, True]), weight=torch.tensor([0.5, 2.0]))
    loss = build("sft").loss(output(leaf([[-1.0, -3.0], [-2.0]])), batch, Denominators(0, 0, 3, 2)).loss
    assert loss.item() == pytest.approx((0.5 * 4.0 + 2.0 * 2.0) / 3)
