"""Losses on pairs, and on single answers that are labelled, against values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rayrft.algorithms import Denominators, TokenBatch, build, count, rows_by_pair, sum_gains
from rayrft.algorithms.preference import Pairs, bradley_terry, orpo, preferences, reward_model_losses
from rayrft.algorithms.unpaired import Labelled, apo_zero_unpaired, kto
from rayrft.errors import ConfigError
from tests.algorithms.flat import LOG2, Rows, leaf, make_batch, output
from tests.errors import about

Two = tuple[float, float]


def pairs(chosen: list[bool], pair: list[int], lengths: list[int], reference: float = -1.0, **more: Any) -> TokenBatch:
    index = rows_by_pair([None if number < 0 else number for number in pair], chosen)
    sides = {"pairs": index, "chosen": torch.tensor(chosen)}
    references = [[reference] * length for length in lengths]
    return make_batch([[0.0] * length for length in lengths], reference_logprobs=references, **sides, **more)


def of(chosen: float, rejected: float, lengths: tuple[int, int] = (1, 1), reference: Two | None = None) -> Pairs:
    """One pair of these log-probs."""
    logprobs = torch.tensor([[chosen], [rejected]], dtype=torch.float64, requires_grad=True)
    ratios = None if reference is None else logprobs - torch.tensor(reference, dtype=torch.float64)[:, None]
    return Pairs(logprobs, torch.tensor(lengths, dtype=torch.float64)[:, None], ratios)


def slopes(loss: Tensor, pairs: Pairs) -> list[float]:
    """Of the chosen and of the rejected log-prob."""
    return torch.autograd.grad(loss.sum(), pairs.logprobs)[0].flatten().tolist()


def margin(value: float) -> Pairs:
    return of(value - 1.0, -3.0, reference=(-1.0, -3.0))


def test_pairs_by_hand() -> None:
    # Pair 0: rows 2 (chosen) and 0. h = 2 * 0.5 and 0.25: margin 0.75. Pair 1: rows 1 (chosen) and 3: -0.5 - 0 = -0.5.
    batch = pairs([False, True, True, False], [0, 1, 0, 1], [1, 1, 2, 1])
    logprobs = leaf([[-0.75], [-1.5], [-0.5, -0.5], [-1.0]])
    found = Pairs.of(logprobs, batch.only(batch.paired))
    assert found.margin.tolist() == pytest.approx([0.75, -0.5])
    assert found.gains.tolist() == [pytest.approx([1.0, -0.5]), pytest.approx([0.25, 0.0])]
    assert found.logprobs.tolist() == [pytest.approx([-1.0, -1.5]), pytest.approx([-0.75, -1.0])]
    assert found.lengths.tolist() == [[2.0, 1.0], [1.0, 1.0]]
    assert found.nll.tolist() == pytest.approx([0.5, 1.5])
    with pytest.raises(ValueError, match="needs the reference's log-probs"):
        assert of(-1.0, -1.0).margin


LOG3, E = math.log(3), 1 / (1 + math.e)
LENGTHS: Any = {"lengths": (4, 1), "reference": (-5.0, -5.0)}  # h = 4 over 4 tokens and 3 over 1: -2 per token
APART: Any = {"reference": (-1.0 - 2 * LOG3, -1.0 + 2 * LOG3)}  # beta h = log 3 and -log 3 for a beta of 1/2
RIGHT, WRONG = math.log(0.75), math.log(0.25)
SMOOTH = -0.8 * RIGHT - 0.2 * WRONG
SMOOTH_BY_LENGTH = -0.75 * math.log(E) - 0.25 * math.log(1 - E)
LOGPS = 2 * math.log(0.75), 3 * math.log(0.25)  # geometric means 3/4 and 1/4, for these lengths


@pytest.mark.parametrize(
    ("name", "coefficients", "pair", "loss", "slope"),
    [
        # beta m = log 3: sigmoid = 3/4 and 1/4. At the reference log 2, and the slope half of beta.
        ("dpo", {}, margin(10 * LOG3), -math.log(0.75), (-0.025, 0.025)),
        ("dpo", {}, margin(-10 * LOG3), -math.log(0.25), (-0.075, 0.075)),
        ("dpo", {"beta": 0.4}, margin(0.0), LOG2, (-0.2, 0.2)),
        ("dpo", {"label_smoothing": 0.2}, margin(10 * LOG3), SMOOTH, None),
        # Smoothed labels are satisfied at a finite margin, log(0.8 / 0.2) / beta.
        ("dpo", {"label_smoothing": 0.2}, margin(10 * math.log(4)), None, (0.0, 0.0)),
        # The mean over right and wrong labels, a fifth of them, is the loss of right ones.
        ("dpo_robust", {"label_smoothing": 0.2}, margin(10 * LOG3), (-0.8 * RIGHT + 0.2 * WRONG) / 0.6, None),
        ("dpo_robust", {"label_smoothing": 0.2}, margin(-10 * LOG3), (-0.8 * WRONG + 0.2 * RIGHT) / 0.6, None),
        ("dpo_by_length", {"beta": 0.5}, of(-1.0, -2.0, **LENGTHS), -math.log(E), (-0.125 * (1 - E), 0.5 * (1 - E))),
        ("dpo_by_length", {"beta": 0.5, "label_smoothing": 0.25}, of(-1.0, -2.0, **LENGTHS), SMOOTH_BY_LENGTH, None),
        # beta 0.25: the goal is 2, and the loss the same on both sides of it.
        ("ipo", {"beta": 0.25}, margin(1.0), 1.0, (-2.0, 2.0)),
        ("ipo", {"beta": 0.25}, margin(3.0), 1.0, (2.0, -2.0)),
        ("ipo_by_length", {"beta": 0.25}, of(-1.0, -2.0, **LENGTHS), 16.0, (-2.0, 8.0)),
        ("hinge", {"beta": 0.5}, margin(-2.0), 2.0, (-0.5, 0.5)),
        ("hinge", {"beta": 0.5}, margin(3.0), 0.0, (0.0, 0.0)),
        # Sigmoids 3/4 and 1/4, of slope 3/16 each; beta m = log 9: 9/10, of slope 9/100.
        ("apo_zero", {"beta": 0.5}, of(-1.0, -1.0, **APART), 0.5, (-3 / 32, 3 / 32)),
        ("apo_down", {"beta": 0.5}, of(-1.0, -1.0, **APART), 0.85, (3 / 32 - 9 / 200, 9 / 200)),
        # log pi differs by log 3 / beta, whatever the lengths.
        ("cpo", {"beta": 0.2}, of(-1.0, -1.0 - 5 * LOG3, lengths=(2, 7)), -math.log(0.75), (-0.05, 0.05)),
        ("cpo", {"beta": 0.2, "label_smoothing": 0.2}, of(-1.0, -1.0 - 5 * LOG3, lengths=(2, 7)), SMOOTH, None),
        # Per token -0.5 and -1: 3 * 0.5 - 0.5 = 1.
        ("simpo", {"beta": 3.0, "target_margin": 0.5}, of(-2.0, -2.0, (4, 2)), -math.log(1 - E), (-0.75 * E, 1.5 * E)),
        # Odds 3 and 1/3, ratio 9, sigmoid of its log 9/10; d log odds / d log p is 1 / (1 - p), over the length.
        ("orpo", {"beta": 0.5}, of(*LOGPS, (2, 3)), -0.5 * math.log(0.9), (-0.05 * 4 / 2, 0.05 * (4 / 3) / 3)),
    ],
)
def test_by_hand(name: str, coefficients: Any, pair: Pairs, loss: float | None, slope: Two | None) -> None:
    found = preferences.get(name).bind(coefficients)(pair)
    assert loss is None or found.item() == pytest.approx(loss)
    assert slope is None or slopes(found, pair) == pytest.approx(slope, abs=1e-12)


def test_an_answer_that_is_certain_has_finite_odds() -> None:
    for pair in (of(0.0, 0.0), of(0.0, -1e4), of(-1e4, 0.0)):
        loss = orpo(pair)
        assert math.isfinite(loss.item()) and all(map(math.isfinite, slopes(loss, pair)))


@pytest.mark.parametrize("name", ["cpo", "simpo", "orpo"])
def test_without_a_reference_none_is_asked_for(name: str) -> None:
    assert build(name).needs.keys() == {"pairs"}
    batch = replace(pairs([True, False], [0, 0], [1, 1]), reference_logprobs=None)
    assert build(name).loss(output(leaf([[-1.0], [-2.0]])), batch, Denominators(pairs=1)).preference.item() > 0


def test_the_likelihood_of_chosen_answers_is_added_by_its_coefficient() -> None:
    # Two pairs in the step, one here: 0.5 per token of the chosen answer, whatever the rejected one's.
    batch, logprobs = pairs([False, True], [0, 0], [1, 2]), leaf([[-9.0], [-0.25, -0.75]])
    parts = build("dpo", {"chosen_coef": 3.0}).loss(output(logprobs), batch, Denominators(pairs=2))
    assert parts.sft.item() == pytest.approx(0.25)
    assert parts.loss.item() == pytest.approx(parts.preference.item() + 0.75)
    plain = build("dpo").loss(output(logprobs), batch, Denominators(pairs=2))
    assert (plain.preference.item(), plain.sft.item()) == (parts.preference.item(), 0.0)
    assert (build("orpo").chosen_coef, build("cpo").chosen_coef, build("simpo").chosen_coef) == (1.0, 1.0, 0.0)
    with pytest.raises(ConfigError, check=about("algorithm.chosen_coef")):
        build("grpo", {"chosen_coef": 1.0})


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


@pytest.mark.parametrize(
    ("chosen", "pair"), [([True, True], [0, 0]), ([True, False], [0, 1]), ([True, False, False], [0, 0, 0])]
)
def test_a_pair_that_is_not_whole_is_refused(chosen: list[bool], pair: list[int]) -> None:
    with pytest.raises(ValueError, match="every pair must hold one chosen and one rejected row"):
        rows_by_pair(pair, chosen)


def test_what_a_batch_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="preference 'ipo' needs pair"):
        build("ipo").loss(output(leaf([[-1.0]])), make_batch([[0.0]], reference_logprobs=[[0.0]]), Denominators())
    with pytest.raises(ValueError, match="needs pairs"):
        Pairs.of(leaf([[-1.0]]), make_batch([[0.0]]))


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin", "center", "loss", "slope"),
    [
        # Differences log 3 and -log 3: sigmoids 3/4 and 1/4, slopes those less 1.
        (LOG3, 0.0, None, 0.0, -math.log(0.75), (-0.25, 0.25)),
        (0.0, LOG3, None, 0.0, -math.log(0.25), (-0.75, 0.75)),
        # A margin is what the difference has to reach.
        (5.0, 1.0, 4.0, 0.0, LOG2, (-0.5, 0.5)),
        (5.0, 1.0, 4.0 - LOG3, 0.0, -math.log(0.75), (-0.25, 0.25)),
        # Centring draws the scores of a prompt to 0: 0.5 (2 + 2)^2 = 8, of slope 4 on either side.
        (2.0, 2.0, None, 0.5, LOG2 + 8, (3.5, 4.5)),
        (3.0, -3.0, None, 9.0, math.log1p(math.exp(-6)), None),
        # Scores far apart.
        (-1e6, 1e6, None, 0.0, 2e6, (-1.0, 1.0)),
        (1e6, -1e6, None, 0.0, 0.0, (0.0, 0.0)),
    ],
)
def test_bradley_terry_by_hand(
    chosen: float, rejected: float, margin: float | None, center: float, loss: float, slope: Any
) -> None:
    scores = torch.tensor([[chosen], [rejected]], dtype=torch.float64, requires_grad=True)
    found = bradley_terry(scores, None if margin is None else torch.tensor([margin]).double(), center=center)
    assert found.item() == pytest.approx(loss)
    found.sum().backward()
    assert scores.grad is not None and (slope is None or scores.grad.flatten().tolist() == pytest.approx(slope))
    piece = reward_model_losses.get("bradley_terry")
    assert piece.coefficients == {"center": 0.0} and piece.fault("center", -1.0) == "must be at least 0"


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
    parts = build("kto", {"beta": 1.0}).loss(output(leaf(rows)), batch, Denominators(*count([batch]).tolist()))
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
    parts = build("kto", {"beta": 1.0}).loss(output(leaf(rows)), batch, Denominators(*count([batch]).tolist()))
    assert parts.loss.item() == pytest.approx(1 / (1 + math.exp(0.5))), "that of the first row alone"
    assert sum_gains([batch]).tolist() == pytest.approx([1.0, 1.0])
