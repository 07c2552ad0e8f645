"""Policy losses that bound the ratio, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rayrft.algorithms.clipped import cispo, gspo, gspo_token, importance, importance_sequence, ppo, sapo
from tests.algorithms.flat import LOG2, gradient, leaf, on_mask, usual

# Ratios 1, 2 and 1/2 (three answers of one token) with advantages 1, 1 and -1.
THREE = usual([[-1.0]] * 3, [[1.0], [1.0], [-1.0]])
RATIOS = [[-1.0], [-1.0 + LOG2], [-1.0 - LOG2]]


def test_ppo_by_hand() -> None:
    # Bounds 0.8 and 1.28. min(1, 1) = 1; min(2, 1.28) = 1.28; min(-0.5, -0.8) = -0.8.
    found = ppo(leaf(RATIOS), THREE, clip_high=0.28)
    assert on_mask(found.values, THREE) == pytest.approx([-1.0, -1.28, 0.8])
    assert found.clipped is not None and on_mask(found.clipped, THREE) == [False, True, True]


def test_ppo_stops_the_gradient_only_where_the_clip_binds() -> None:
    # Ratio 2: too far up for A = 1; for A = -1 still to be lowered, with d(-rho A) = rho = 2.
    batch, logprobs = usual([[-1.0], [-1.0]], [[1.0], [-1.0]]), leaf([[-1.0 + LOG2]] * 2)
    assert gradient(ppo(logprobs, batch).values, logprobs, batch) == pytest.approx([0.0, 2.0])


def test_ppo_takes_its_ratio_to_the_proximal_policy_where_there_is_one() -> None:
    batch = usual([[-5.0]], [[1.0]], proximal_logprobs=[[-1.0]])
    assert on_mask(ppo(leaf([[-1.0 + LOG2]]), batch, clip_high=5.0).values, batch) == pytest.approx([-2.0])


def test_dual_clip_by_hand() -> None:
    # Ratio 4: with A = -1 the loss 4 is held at 3, without gradient; at ratio 2 it is 2; A = 1 is not touched.
    batch = usual([[-2.0], [-2.0], [-2.0]], [[-1.0], [-1.0], [1.0]])
    logprobs = leaf([[-2.0 + 2 * LOG2], [-2.0 + LOG2], [-2.0]])
    found = ppo(logprobs, batch, dual_clip=3.0)
    assert on_mask(found.values, batch) == pytest.approx([3.0, 2.0, -1.0])
    assert found.clipped is not None and on_mask(found.clipped, batch) == [True, False, False]
    assert gradient(found.values, logprobs, batch) == pytest.approx([0.0, 2.0, -1.0])


def test_gspo_by_hand() -> None:
    # Token ratios 4 and 1: s = 2 by the geometric mean. A = 1: min(2, 1.5) = 1.5 on either token.
    batch, logprobs = usual([[-2.0, -1.0]], [[1.0, 1.0]]), leaf([[-2.0 + 2 * LOG2, -1.0]])
    assert on_mask(gspo(logprobs, batch, clip_high=0.5).values, batch) == pytest.approx([-1.5, -1.5])
    # Not clipped at A = -1: the mean over tokens is s = 2, whose gradient is s / |y| = 1 on each.
    down = usual([[-2.0, -1.0]], [[-1.0, -1.0]])
    found = gspo(logprobs, down, clip_high=0.5).values
    assert gradient(down.spread(down.mean(found)) / 2, logprobs, down) == pytest.approx([1.0, 1.0])


def test_losses_of_whole_answers_take_the_mean_of_different_advantages() -> None:
    # Token ratios 4 and 1: s = 2, the answer's ratio 4; advantages 1 and -3 have the mean -1.
    batch, logprobs = usual([[-2.0, -1.0]], [[1.0, -3.0]]), leaf([[-2.0 + 2 * LOG2, -1.0]])
    assert on_mask(gspo(logprobs, batch, clip_high=5.0).values, batch) == pytest.approx([2.0, 2.0])
    assert on_mask(importance_sequence(logprobs, batch).values, batch) == pytest.approx([4.0, 4.0])


def test_gspo_is_ppo_for_answers_of_one_token() -> None:
    for advantage in (1.0, -1.0):
        batch, logprobs = usual([[-1.0]] * 3, [[advantage]] * 3), leaf(RATIOS)
        ours, theirs = (f(logprobs, batch, clip_low=0.2, clip_high=0.28).values for f in (gspo, ppo))
        assert on_mask(ours, batch) == pytest.approx(on_mask(theirs, batch))
        assert gradient(ours, logprobs, batch) == pytest.approx(gradient(theirs, logprobs, batch))


def test_gspo_token_equals_gspo_where_the_advantages_of_a_row_are_equal() -> None:
    batch = usual([[-2.0, -1.0], [-0.5, -3.0]], [[-1.0, -1.0], [0.5, 0.5]])
    logprobs = leaf([[-1.9, -1.3], [-0.6, -2.9]])
    whole, each = (f(logprobs, batch, clip_low=0.2, clip_high=0.2).values for f in (gspo, gspo_token))
    assert on_mask(whole, batch) == pytest.approx(on_mask(each, batch))
    shares = [batch.mean(values).sum() for values in (whole, each)]
    torch.testing.assert_close(*(torch.autograd.grad(share, logprobs)[0] for share in shares))


def test_gspo_token_has_an_advantage_for_each_token() -> None:
    # s = 2 again; advantages 1 and -3 within wide bounds: values -2 and 6, gradients -2 and 6.
    batch, logprobs = usual([[-2.0, -1.0]], [[1.0, -3.0]]), leaf([[-2.0 + 2 * LOG2, -1.0]])
    found = gspo_token(logprobs, batch, clip_low=0.9, clip_high=5.0).values
    assert on_mask(found, batch) == pytest.approx([-2.0, 6.0])
    assert gradient(found, logprobs, batch) == pytest.approx([-2.0, 6.0])


def test_cispo_by_hand() -> None:
    # Weights 1, min(2, 1.28) and 0.5; gradient -weight A on every token, also where the weight is clipped.
    logprobs = leaf(RATIOS)
    found = cispo(logprobs, THREE)
    assert gradient(found.values, logprobs, THREE) == pytest.approx([-1.0, -1.28, 0.5])
    assert on_mask(found.values, THREE) == pytest.approx([1.0, 1.28 * (1 - LOG2), 0.5 * (-1 - LOG2)])
    assert found.clipped is not None and on_mask(found.clipped, THREE) == [False, True, False]


def test_cispo_has_a_lower_bound_where_one_is_given() -> None:
    # Weights 1, 1.28 and, in place of 0.5, 0.8.
    logprobs = leaf(RATIOS)
    found = cispo(logprobs, THREE, clip_low=0.2)
    assert gradient(found.values, logprobs, THREE) == pytest.approx([-1.0, -1.28, 0.8])
    assert found.clipped is not None and on_mask(found.clipped, THREE) == [False, True, True]


def test_sapo_by_hand() -> None:
    # tau 1: at ratio 1 the gate is 4 sigmoid(0) = 2; at ratio 2, 4 sigmoid(1) = 2.9242. tau 2 for A < 0, ratio 1/2:
    # 2 sigmoid(-1) = 0.5379.
    logprobs = leaf(RATIOS)
    found = sapo(logprobs, THREE, tau_negative=2.0)
    expected = [-2.0, -4 / (1 + math.exp(-1)), 2 / (1 + math.exp(1))]
    assert on_mask(found.values, THREE) == pytest.approx(expected)


@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_sapo_starts_with_the_gradient_of_reinforce(advantage: float) -> None:
    batch, logprobs = usual([[-1.0]], [[advantage]]), leaf([[-1.0]])
    assert gradient(sapo(logprobs, batch).values, logprobs, batch) == pytest.approx([-advantage])


def test_importance_sampling_by_hand() -> None:
    logprobs = leaf(RATIOS)
    assert on_mask(importance(logprobs, THREE).values, THREE) == pytest.approx([-1.0, -2.0, 0.5])
    # Ratios 2 and 2: the answer's is 4, on either token.
    batch, logprobs = usual([[-2.0, -1.0]], [[0.5, 0.5]]), leaf([[-2.0 + LOG2, -1.0 + LOG2]])
    found = importance_sequence(logprobs, batch).values
    assert on_mask(found, batch) == pytest.approx([-2.0, -2.0])
    assert gradient(batch.spread(batch.mean(found)) / 2, logprobs, batch) == pytest.approx([-2.0, -2.0])
