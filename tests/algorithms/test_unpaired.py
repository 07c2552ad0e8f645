"""Losses of labelled answers, against values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rayrft.algorithms import Denominators, PolicyOutput, TokenBatch, build, count, sum_gains
from rayrft.algorithms.unpaired import Labelled, apo_zero_unpaired, kto
from rayrft.errors import ConfigError
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


def batch_of(logprobs: Tensor, good: list[bool]) -> TokenBatch:
    """Rows of two tokens, after a prompt of one."""
    n = len(good)
    mask = torch.tensor([False, True, True]).repeat(n)
    return TokenBatch(
        mask=mask,
        sequence=torch.arange(n).repeat_interleave(3),
        behaviour_logprobs=torch.zeros(3 * n, dtype=torch.float64),
        advantages=torch.zeros(3 * n, dtype=torch.float64),
        expert=torch.ones(n, dtype=torch.bool),
        chosen=torch.tensor(good),
        reference_logprobs=torch.full((3 * n,), -1.0, dtype=torch.float64),
        proximal_logprobs=logprobs.detach(),
        reference_kl=torch.full((n,), 0.5, dtype=torch.float64),
    )


def test_the_loss_of_a_step_is_the_mean_over_labelled_rows() -> None:
    logprobs = torch.tensor([9.0, -0.5, -0.5, 9.0, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    batch = batch_of(logprobs, [True, False])
    algorithm = build("kto", {"beta": 1.0})
    over = Denominators.of(count([batch]))
    parts = algorithm.loss(PolicyOutput(logprobs, torch.zeros_like(logprobs)), batch, over)
    # h is 1 and -1, beside z0 = 0.5.
    expected = (1 / (1 + math.exp(0.5)) + 1 / (1 + math.exp(1.5))) / 2
    assert parts.loss.item() == parts.preference.item() == pytest.approx(expected)
    found = {name: getattr(parts, name).item() for name in ("good_rows", "good_score", "bad_score", "reference_kl")}
    assert found == {"good_rows": 1.0, "good_score": 1.0, "bad_score": -1.0, "reference_kl": 1.0}
    assert (parts.good_logprob.item(), parts.bad_logprob.item()) == (-1.0, -3.0)
    assert sum_gains([batch]).tolist() == pytest.approx([0.0, 2.0])
    assert sum_gains([batch_of(logprobs, [True, False]), batch_of(logprobs, [True, True])]).tolist() == [0.0, 4.0]


def test_a_labelled_row_without_an_action_token_has_no_loss_and_no_part_in_the_kl() -> None:
    logprobs = torch.tensor([9.0, -0.5, -0.5, 9.0, 9.0, 9.0], dtype=torch.float64, requires_grad=True)
    batch = batch_of(logprobs, [True, False])
    batch = replace(batch, mask=batch.mask & (batch.sequence == 0))
    parts = build("kto", {"beta": 1.0}).loss(
        PolicyOutput(logprobs, torch.zeros_like(logprobs)), batch, Denominators.of(count([batch]))
    )
    assert parts.loss.item() == pytest.approx(1 / (1 + math.exp(0.5))), "that of the first row alone"
    assert sum_gains([batch]).tolist() == pytest.approx([1.0, 1.0])


def test_it_takes_rows_of_its_own_kind() -> None:
    found = build("kto")
    assert (
        "labels" in found.needs
        and "reference" in found.needs
        and "reference_kl" in found.needs
        and "expert" in found.needs
    )
    assert not {"pairs", "rollouts"} & found.needs.keys() and not found.mixes
    for pieces, field in (
        ({"sft": "nll"}, "sft"),
        ({"preference": "dpo"}, "unpaired"),
        ({"desirable_weight": -1.0}, "desirable_weight"),
    ):
        with pytest.raises(ConfigError, check=about(f"algorithm.{field}")):
            build("kto", pieces)
