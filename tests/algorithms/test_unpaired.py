"""Losses of labelled answers, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rayrft.algorithms import Denominators, TokenBatch, build, count, sum_gains
from rayrft.algorithms.unpaired import Labelled, apo_zero_unpaired, kto
from rayrft.errors import ConfigError
from tests.algorithms.flat import Rows, leaf, make_batch, output
from tests.errors import about


def rows(gains: list[float], good: list[bool], point: float | None = 0.0) -> Labelled:
    n = len(gains)
    z0 = None if point is None else torch.full((n,), point, dtype=torch.float64)
    values = torch.tensor(gains, dtype=torch.float64, requires_grad=True)
    return Labelled(values, torch.tensor(good), torch.ones(n, dtype=torch.bool), z0)


def test_kto_by_hand() -> None:
    # beta 1/2 and z0 = 2: h - z0 is 2 log 3, so that the sigmoid of half of it is 3/4.
    far = 2.0 + 2 * math.log(3)
    found = rows([far, far, 2.0], [True, False, True], point=2.0)
    losses = kto(found, beta=0.5, desirable_weight=1.0, undesirable_weight=1.5)
    assert losses.tolist() == pytest.approx([0.25, 1.5 * 0.75, 0.5])
    [slopes] = torch.autograd.grad(losses.sum(), found.gains)
    # beta times s (1 - s), down for good answers and up for bad ones.
    assert slopes.tolist() == pytest.approx([-0.5 * 3 / 16, 1.5 * 0.5 * 3 / 16, -0.5 / 4])


def test_without_a_kl_it_is_apo_zero() -> None:
    found = rows([1.0, -2.0, 3.0], [True, False, False])
    expected = [1 - 1 / (1 + math.exp(-0.1)), 1 / (1 + math.exp(0.2)), 1 / (1 + math.exp(-0.3))]
    assert apo_zero_unpaired(found).tolist() == pytest.approx(expected)
    assert torch.equal(apo_zero_unpaired(found), kto(found))
    assert "reference_kl" not in build("kto", {"unpaired": "apo_zero_unpaired"}).needs
    with pytest.raises(ValueError, match="mean KL"):
        kto(rows([1.0], [True], point=None))


def batch_of(good: list[bool], rows: Rows) -> TokenBatch:
    """Rows of these log-probs of the policy; those of the reference are -1."""
    return make_batch(
        [[0.0] * len(row) for row in rows],
        expert=[True] * len(rows),
        chosen=torch.tensor(good),
        reference_logprobs=[[-1.0] * len(row) for row in rows],
        proximal_logprobs=rows,
        reference_kl=torch.full((len(rows),), 0.5, dtype=torch.float64),
    )


def test_the_loss_of_a_step_is_the_mean_over_labelled_rows() -> None:
    rows = [[-0.5, -0.5], [-2.0, -1.0]]
    batch = batch_of([True, False], rows)
    parts = build("kto", {"beta": 1.0}).loss(output(leaf(rows)), batch, Denominators.of(count([batch])))
    # h is 1 and -1, beside z0 = 0.5.
    expected = (1 / (1 + math.exp(0.5)) + 1 / (1 + math.exp(1.5))) / 2
    assert parts.loss.item() == parts.preference.item() == pytest.approx(expected)
    found = {name: getattr(parts, name).item() for name in ("good_rows", "good_score", "bad_score", "reference_kl")}
    assert found == {"good_rows": 1.0, "good_score": 1.0, "bad_score": -1.0, "reference_kl": 1.0}
    assert (parts.good_logprob.item(), parts.bad_logprob.item()) == (-1.0, -3.0)
    assert sum_gains([batch]).tolist() == pytest.approx([0.0, 2.0])
    assert sum_gains([batch, batch_of([True, True], rows)]).tolist() == [0.0, 4.0]


def test_a_labelled_row_without_an_action_token_has_no_loss_and_no_part_in_the_kl() -> None:
    rows: Rows = [[-0.5, -0.5], []]
    batch = batch_of([True, False], rows)
    parts = build("kto", {"beta": 1.0}).loss(output(leaf(rows)), batch, Denominators.of(count([batch])))
    assert parts.loss.item() == pytest.approx(1 / (1 + math.exp(0.5))), "that of the first row alone"
    assert sum_gains([batch]).tolist() == pytest.approx([1.0, 1.0])


def test_it_takes_rows_of_its_own_kind() -> None:
    found = build("kto")
    assert {"labels", "reference", "reference_kl", "expert"} <= found.needs.keys()
    assert not {"pairs", "rollouts"} & found.needs.keys() and not found.mixes
    for pieces, field in (
        ({"sft": "nll"}, "sft"),
        ({"preference": "dpo"}, "unpaired"),
        ({"desirable_weight": -1.0}, "desirable_weight"),
    ):
        with pytest.raises(ConfigError, check=about(f"algorithm.{field}")):
            build("kto", pieces)
