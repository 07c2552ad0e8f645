"""Losses on pairs, against values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rayrft.algorithms import Denominators, TokenBatch, build, count
from rayrft.algorithms.preference import (
    Pairs,
    apo_down,
    apo_zero,
    cpo,
    dpo,
    dpo_by_length,
    dpo_robust,
    hinge,
    ipo,
    ipo_by_length,
    orpo,
    simpo,
)
from rayrft.errors import ConfigError
from tests.algorithms.flat import LOG2, leaf, make_batch, output
from tests.errors import about


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


def of(
    chosen: float, rejected: float, lengths: tuple[int, int] = (1, 1), reference: tuple[float, float] | None = None
) -> Pairs:
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


def test_dpo_by_hand() -> None:
    # beta m = log 3: sigmoid = 3/4 and 1/4.
    better, worse = margin(math.log(3) / 0.1), margin(-math.log(3) / 0.1)
    assert dpo(better).tolist() == pytest.approx([-math.log(0.75)])
    assert dpo(worse).tolist() == pytest.approx([-math.log(0.25)])
    assert dpo(better, label_smoothing=0.2).item() == pytest.approx(-0.8 * math.log(0.75) - 0.2 * math.log(0.25))


def test_at_the_reference_dpo_is_log_2_and_its_slope_half_beta() -> None:
    loss = dpo(even := margin(0.0), beta=0.4)
    assert loss.item() == pytest.approx(LOG2)
    assert slopes(loss, even) == pytest.approx([-0.2, 0.2])


def test_smoothed_labels_are_satisfied_at_a_finite_margin() -> None:
    # log(0.8 / 0.2) / beta
    goal = margin(math.log(4) / 0.1)
    assert slopes(dpo(goal, label_smoothing=0.2), goal) == pytest.approx([0.0, 0.0], abs=1e-12)


def test_with_labels_half_wrong_dpo_does_not_know_which_is_chosen() -> None:
    assert dpo(margin(3.0), label_smoothing=0.5).item() == pytest.approx(dpo(margin(-3.0), label_smoothing=0.5).item())


def test_robust_dpo_has_the_loss_of_right_labels_as_its_mean_over_wrong_ones() -> None:
    # beta m = log 3, a fifth of the labels wrong: (-0.8 log 3/4 + 0.2 log 1/4) / 0.6
    right, wrong = (dpo_robust(margin(sign * math.log(3) / 0.1), label_smoothing=0.2) for sign in (1, -1))
    assert right.item() == pytest.approx((-0.8 * math.log(0.75) + 0.2 * math.log(0.25)) / 0.6)
    assert (0.8 * right + 0.2 * wrong).item() == pytest.approx(-math.log(0.75))


def test_dpo_by_length_compares_gains_per_token() -> None:
    # h = 4 over 4 tokens and 3 over 1: -2 per token, times beta 0.5.
    pair = of(-1.0, -2.0, lengths=(4, 1), reference=(-5.0, -5.0))
    loss = dpo_by_length(pair, beta=0.5)
    sigmoid = 1 / (1 + math.e)
    assert loss.item() == pytest.approx(-math.log(sigmoid))
    assert slopes(loss, pair) == pytest.approx([-0.5 / 4 * (1 - sigmoid), 0.5 * (1 - sigmoid)])
    expected = -0.75 * math.log(sigmoid) - 0.25 * math.log(1 - sigmoid)
    assert dpo_by_length(pair, beta=0.5, label_smoothing=0.25).item() == pytest.approx(expected)


def test_ipo_by_hand() -> None:
    # beta 0.25: the goal is 2, and the loss the same on both sides of it.
    assert [ipo(margin(value), beta=0.25).item() for value in (0.0, 1.0, 2.0, 3.0)] == [4.0, 1.0, 0.0, 1.0]


def test_ipo_by_length_compares_gains_per_token() -> None:
    # As above: h is 1 and 3 per token, and the goal 2.
    pair = of(-1.0, -2.0, lengths=(4, 1), reference=(-5.0, -5.0))
    loss = ipo_by_length(pair, beta=0.25)
    assert loss.item() == pytest.approx(16.0) and slopes(loss, pair) == pytest.approx([-8.0 / 4, 8.0])


def test_hinge_by_hand() -> None:
    for value, loss, slope in ((-2.0, 2.0, -0.5), (0.0, 1.0, -0.5), (1.0, 0.5, -0.5), (3.0, 0.0, 0.0)):
        pair = margin(value)
        found = hinge(pair, beta=0.5)
        assert found.item() == loss and slopes(found, pair) == [slope, -slope]


def test_apo_by_hand() -> None:
    # beta h = log 3 and -log 3: sigmoids 3/4 and 1/4, of slope 3/16 each; beta m = log 9: 9/10, of slope 9/100.
    pair = of(-1.0, -1.0, reference=(-1.0 - 2 * math.log(3), -1.0 + 2 * math.log(3)))
    zero, down = apo_zero(pair, beta=0.5), apo_down(pair, beta=0.5)
    assert (zero.item(), down.item()) == pytest.approx((1 - 3 / 4 + 1 / 4, 3 / 4 + 1 - 9 / 10))
    assert slopes(zero, pair) == pytest.approx([-3 / 32, 3 / 32])
    assert slopes(apo_down(pair, beta=0.5), pair) == pytest.approx([3 / 32 - 9 / 200, 9 / 200])


def test_cpo_by_hand() -> None:
    # log pi differs by log 3 / beta, whatever the lengths.
    pair = of(-1.0, -1.0 - math.log(3) / 0.2, lengths=(2, 7))
    assert cpo(pair, beta=0.2).item() == pytest.approx(-math.log(0.75))
    smooth = -0.8 * math.log(0.75) - 0.2 * math.log(0.25)
    assert cpo(pair, beta=0.2, label_smoothing=0.2).item() == pytest.approx(smooth)


def test_simpo_by_hand() -> None:
    # Per token -0.5 and -1: 3 * 0.5 - 0.5 = 1.
    pair = of(-2.0, -2.0, lengths=(4, 2))
    loss = simpo(pair, beta=3.0, target_margin=0.5)
    sigmoid = 1 / (1 + math.exp(-1.0))
    assert loss.item() == pytest.approx(-math.log(sigmoid))
    assert slopes(loss, pair) == pytest.approx([-3 / 4 * (1 - sigmoid), 3 / 2 * (1 - sigmoid)])


def test_orpo_by_hand() -> None:
    # Geometric means 3/4 and 1/4: odds 3 and 1/3, ratio 9, sigmoid of its log 9/10.
    pair = of(2 * math.log(0.75), 3 * math.log(0.25), lengths=(2, 3))
    loss = orpo(pair, beta=0.5)
    assert loss.item() == pytest.approx(-0.5 * math.log(0.9))
    # d log odds / d log p = 1 / (1 - p), over the length.
    assert slopes(loss, pair) == pytest.approx([-0.5 * 0.1 * 4 / 2, 0.5 * 0.1 * (4 / 3) / 3])


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


@pytest.mark.parametrize(("chosen", "pair"), [([True, True], [0, 0]), ([True, False], [0, 1]), ([True, False], [1, 1])])
def test_a_pair_that_is_not_whole_is_refused(chosen: list[bool], pair: list[int]) -> None:
    with pytest.raises(ValueError, match="every pair must hold one chosen and one rejected row"):
        build("dpo").loss(output(leaf([[-1.0], [-1.0]])), pairs(chosen, pair, [1, 1]), Denominators(pairs=1))


def test_what_a_batch_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="preference 'ipo' needs pair"):
        build("ipo").loss(output(leaf([[-1.0]])), make_batch([[0.0]], reference_logprobs=[[0.0]]), Denominators())
    with pytest.raises(ValueError, match="needs pairs"):
        Pairs.of(leaf([[-1.0]]), make_batch([[0.0]]))
