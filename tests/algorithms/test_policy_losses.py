"""Policy losses, against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rayrft.algorithms import policy_losses
from rayrft.algorithms.clipped import gspo, gspo_token, importance_sequence, ppo, sapo
from rayrft.algorithms.reinforce import kimi, opmd, rec, reinforce
from tests.algorithms.flat import LOG2, Rows, gradient, leaf, on_mask, usual

# Three answers of one token with advantages 1, 1 and -1, and ratios 1, 2 and 1/2; or other log-probs.
THREE: tuple[Rows, Rows] = ([[-1.0]] * 3, [[1.0], [1.0], [-1.0]])
RATIOS: Rows = [[-1.0], [-1.0 + LOG2], [-1.0 - LOG2]]
NOW: Rows = [[-1.0], [-0.5], [-2.0]]
# One answer with token ratios 4 and 1: the geometric mean is 2.
TWO, UP = [[-2.0, -1.0]], [[-2.0 + 2 * LOG2, -1.0]]
GONE = [[-1.0 - LOG2, -1.0 - LOG2]]


@pytest.mark.parametrize(
    ("name", "coefficients", "behaviour", "advantages", "now", "values", "slopes", "clipped"),
    [
        # Bounds 0.8 and 1.28. min(1, 1) = 1; min(2, 1.28) = 1.28; min(-0.5, -0.8) = -0.8.
        ("ppo", {"clip_high": 0.28}, *THREE, RATIOS, [-1.0, -1.28, 0.8], [-1.0, 0.0, 0.0], [0, 1, 1]),
        # Ratio 2: too far up for A = 1; for A = -1 still to be lowered, with d(-rho A) = rho = 2.
        ("ppo", {}, [[-1.0]] * 2, [[1.0], [-1.0]], [[-1.0 + LOG2]] * 2, None, [0.0, 2.0], [1, 0]),
        # Ratio 4 with A = -1: the loss 4 is held at 3, without gradient; at ratio 2 it is 2; A = 1 is not touched.
        (
            "ppo",
            {"dual_clip": 3.0},
            [[-2.0]] * 3,
            [[-1.0], [-1.0], [1.0]],
            [[-2.0 + 2 * LOG2], [-2.0 + LOG2], [-2.0]],
            [3.0, 2.0, -1.0],
            [0.0, 2.0, -1.0],
            [1, 0, 0],
        ),
        # Weights 1, min(2, 1.28) and 0.5, or at least 0.8; gradient -weight A on every token, also a clipped one.
        ("cispo", {}, *THREE, RATIOS, [1.0, 1.28 * (1 - LOG2), -0.5 * (1 + LOG2)], [-1.0, -1.28, 0.5], [0, 1, 0]),
        ("cispo", {"clip_low": 0.2}, *THREE, RATIOS, None, [-1.0, -1.28, 0.8], [0, 1, 1]),
        # tau 1: at ratio 1 the gate is 4 sigmoid(0) = 2; at ratio 2, 4 sigmoid(1). tau 2 for A < 0: 2 sigmoid(-1).
        (
            "sapo",
            {"tau_negative": 2.0},
            *(*THREE, RATIOS),
            [-2.0, -4 / (1 + math.exp(-1)), 2 / (1 + math.exp(1))],
            *(None, None),
        ),
        ("importance", {}, *THREE, RATIOS, [-1.0, -2.0, 0.5], [-1.0, -2.0, 0.5], None),
        # A = 1: min(2, 1.5) = 1.5 on either token. Different advantages have the mean -1; the answer's ratio is 4.
        ("gspo", {"clip_high": 0.5}, TWO, [[1.0, 1.0]], UP, [-1.5, -1.5], [0.0, 0.0], [1, 1]),
        ("gspo", {"clip_high": 5.0}, TWO, [[1.0, -3.0]], UP, [2.0, 2.0], None, [0, 0]),
        ("importance_sequence", {}, TWO, [[1.0, -3.0]], UP, [4.0, 4.0], None, None),
        # Advantages 1 and -3 within wide bounds: each token has its own.
        ("gspo_token", {"clip_low": 0.9, "clip_high": 5.0}, TWO, [[1.0, -3.0]], UP, [-2.0, 6.0], [-2.0, 6.0], [0, 0]),
        ("reinforce", {}, *THREE, NOW, [1.0, 0.5, -2.0], [-1.0, -1.0, 1.0], None),
        ("raft", {}, [[-1.0]] * 3, [[0.3], [0.0], [-2.0]], NOW, [1.0, 0.0, 0.0], [-1.0, 0.0, 0.0], None),
        ("opmd", {"tau": 3.0}, *THREE, NOW, [0.25, 0.125, -0.5], [-0.25, -0.25, 0.25], None),
        # h = 2 log 2, A = 1: (1 - log 2)^2 on either token.
        (
            "kimi",
            {"tau": 0.5},
            *(TWO, [[1.0, 1.0]], [[-2.0 + LOG2, -1.0 + LOG2]]),
            [(1 - LOG2) ** 2] * 2,
            *(None, None),
        ),
        # The answer's ratio is 1/4. Good: weight 1. Bad: weight 1/4; a bad one grown likelier: weight 1.
        ("topr", {}, [[-1.0] * 2], [[1.0] * 2], GONE, [1 + LOG2] * 2, [-1.0] * 2, None),
        ("topr", {}, [[-1.0] * 2], [[-1.0] * 2], GONE, [-0.25 * (1 + LOG2)] * 2, [0.25] * 2, None),
        ("topr", {}, [[-1.0] * 2], [[-1.0] * 2], [[-0.5] * 2], [-0.5] * 2, [1.0] * 2, None),
        ("topr_token", {}, [[-1.0] * 2], [[-1.0] * 2], [[-1.0 - LOG2, -0.5]], None, [0.5, 1.0], None),
        # Bounds 1 / 1.3 and 1.3: log ratios 0, log 1.3 and -log 1.3.
        ("sppo", {}, *THREE, RATIOS, [0.0, -math.log(1.3), -math.log(1.3)], [-1.0, 0.0, 0.0], [0, 1, 1]),
        # exp(1 / 2) and exp(-1 / 2)
        (
            "red_weight",
            {"weight_tau": 2.0},
            *([[-1.0]] * 2, [[1.0], [-1.0]], [[-1.0], [-2.0]]),
            None,
            [-math.exp(0.5), math.exp(-0.5)],
            None,
        ),
    ],
)
def test_by_hand(
    name: str,
    coefficients: Any,
    behaviour: Rows,
    advantages: Rows,
    now: Rows,
    values: list[float] | None,
    slopes: list[float] | None,
    clipped: list[int] | None,
) -> None:
    batch, logprobs = usual(behaviour, advantages), leaf(now)
    found = policy_losses.get(name).bind(coefficients)(logprobs, batch)
    assert values is None or on_mask(found.values, batch) == pytest.approx(values)
    assert slopes is None or gradient(found.values, logprobs, batch) == pytest.approx(slopes)
    assert (found.clipped is None) == (clipped is None)
    assert found.clipped is None or on_mask(found.clipped, batch) == clipped


def test_ppo_takes_its_ratio_to_the_proximal_policy_where_there_is_one() -> None:
    batch = usual([[-5.0]], [[1.0]], proximal_logprobs=[[-1.0]])
    assert on_mask(ppo(leaf([[-1.0 + LOG2]]), batch, clip_high=5.0).values, batch) == pytest.approx([-2.0])


@pytest.mark.parametrize(
    ("loss", "advantage", "slope"),
    [
        (lambda *given: gspo(*given, clip_high=0.5), -1.0, 1.0),  # not clipped: s / |y| = 1 on each token
        (importance_sequence, -1.0, 4.0),
        (lambda *given: kimi(*given, tau=0.5), 1.0, -(1 - LOG2)),  # -(A - tau h)
    ],
)
def test_the_gradient_of_a_loss_of_whole_answers_by_hand(loss: Any, advantage: float, slope: float) -> None:
    batch, logprobs = usual(TWO, [[advantage] * 2]), leaf(UP)
    share = batch.spread(batch.mean(loss(logprobs, batch).values)) / 2
    assert gradient(share, logprobs, batch) == pytest.approx([slope] * 2)


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


@pytest.mark.parametrize("loss", [sapo, kimi])
@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_at_the_old_policy_the_gradient_is_that_of_reinforce(loss: Any, advantage: float) -> None:
    batch, logprobs = usual([[-1.0]], [[advantage]]), leaf([[-1.0]])
    assert gradient(loss(logprobs, batch).values, logprobs, batch) == pytest.approx([-advantage])


def test_kimi_pulls_back_to_the_old_policy_and_opmd_without_tau_is_reinforce() -> None:
    still, moved = usual([[-1.0]], [[0.0]]), leaf([[-0.5]])
    assert gradient(kimi(moved, still, tau=0.2).values, moved, still) == pytest.approx([0.2 * 0.5])
    batch, logprobs = usual(*THREE), leaf(NOW)
    assert torch.equal(opmd(logprobs, batch, tau=0.0).values, reinforce(logprobs, batch).values)


# Ratios 1, 2, 4 and 1/4 for A = 1, then for A = -1; bounds 0.8 and 1.2, ring at 0.4 and 3.
KEPT = {
    "all": [1, 1, 1, 1, 1, 1, 1, 1],
    "one_side": [1, 0, 0, 1, 1, 1, 1, 0],
    "two_side": [1, 0, 0, 0, 1, 0, 0, 0],
    "ring": [1, 0, 0, 1, 1, 0, 1, 0],
}


@pytest.mark.parametrize("keep_where", KEPT)
@pytest.mark.parametrize("weigh_by_ratio", [False, True])
def test_rec_by_hand(keep_where: str, weigh_by_ratio: bool) -> None:
    advantages, ratios = [1.0] * 4 + [-1.0] * 4, [1.0, 2.0, 4.0, 0.25] * 2
    batch = usual([[-3.0]] * 8, [[a] for a in advantages])
    logprobs = leaf([[-3.0 + math.log(ratio)] for ratio in ratios])
    found = rec(logprobs, batch, keep_where=keep_where, weigh_by_ratio=weigh_by_ratio)  # type: ignore[arg-type]
    weights = ratios if weigh_by_ratio else [1.0] * 8
    expected = [-kept * w * a for kept, w, a in zip(KEPT[keep_where], weights, advantages, strict=True)]
    assert gradient(found.values, logprobs, batch) == pytest.approx(expected)
    assert found.clipped is not None
    assert on_mask(found.clipped, batch) == [not kept for kept in KEPT[keep_where]]


def test_rec_one_sided_and_weighted_has_the_gradient_of_ppo() -> None:
    torch.manual_seed(0)
    behaviour, now = (torch.randn(12).sub(2).mul(0.5).tolist() for _ in range(2))
    batch, logprobs = usual([behaviour], [torch.randn(12).tolist()]), leaf([now])
    ours = rec(logprobs, batch, weigh_by_ratio=True, clip_low=0.2, clip_high=0.28).values
    theirs = ppo(logprobs, batch, clip_high=0.28).values
    assert gradient(ours, logprobs, batch) == pytest.approx(gradient(theirs, logprobs, batch))
