"""Policy losses that descend on log-probs, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rayrft.algorithms.clipped import ppo
from rayrft.algorithms.reinforce import kimi, opmd, raft, rec, red_weight, reinforce, sppo, topr, topr_token
from tests.algorithms.flat import LOG2, gradient, leaf, on_mask, usual

# Ratios 1, 2 and 1/2 (three answers of one token) with advantages 1, 1 and -1.
THREE = usual([[-1.0]] * 3, [[1.0], [1.0], [-1.0]])
RATIOS = [[-1.0], [-1.0 + LOG2], [-1.0 - LOG2]]


def test_reinforce_by_hand() -> None:
    logprobs = leaf([[-1.0], [-0.5], [-2.0]])
    found = reinforce(logprobs, THREE).values
    assert on_mask(found, THREE) == [1.0, 0.5, -2.0]
    assert gradient(found, logprobs, THREE) == [-1.0, -1.0, 1.0]


def test_raft_learns_from_what_was_accepted_alone() -> None:
    batch, logprobs = usual([[-1.0]] * 3, [[0.3], [0.0], [-2.0]]), leaf([[-1.0], [-0.5], [-2.0]])
    found = raft(logprobs, batch).values
    assert on_mask(found, batch) == pytest.approx([1.0, 0.0, 0.0])
    assert gradient(found, logprobs, batch) == [-1.0, 0.0, 0.0]


def test_opmd_by_hand() -> None:
    logprobs = leaf([[-1.0], [-0.5], [-2.0]])
    assert on_mask(opmd(logprobs, THREE, tau=3.0).values, THREE) == [0.25, 0.125, -0.5]
    assert torch.equal(opmd(logprobs, THREE, tau=0.0).values, reinforce(logprobs, THREE).values)


def test_kimi_by_hand() -> None:
    # h = log 2 + log 2 = 2 log 2; A = 1, tau = 0.5: (1 - log 2)^2 / 1, on either token.
    batch, logprobs = usual([[-2.0, -1.0]], [[1.0, 1.0]]), leaf([[-2.0 + LOG2, -1.0 + LOG2]])
    found = kimi(logprobs, batch, tau=0.5).values
    assert on_mask(found, batch) == pytest.approx([(1 - LOG2) ** 2] * 2)
    # The mean over tokens has gradient -(A - tau h) on each token: -(1 - log 2).
    share = batch.spread(batch.mean(found)) / 2
    assert gradient(share, logprobs, batch) == pytest.approx([-(1 - LOG2)] * 2)


def test_kimi_starts_with_the_gradient_of_reinforce_and_pulls_back_to_the_old_policy() -> None:
    batch, logprobs = usual([[-1.0]], [[0.7]]), leaf([[-1.0]])
    assert gradient(kimi(logprobs, batch).values, logprobs, batch) == pytest.approx([-0.7])
    still, moved = usual([[-1.0]], [[0.0]]), leaf([[-0.5]])
    assert gradient(kimi(moved, still, tau=0.2).values, moved, still) == pytest.approx([0.2 * 0.5])


def test_topr_by_hand() -> None:
    # The answer's ratio is 1/2 * 1/2 = 1/4. Good: weight 1. Bad: weight 1/4; a bad one grown likelier: weight 1.
    behaviour, now = [[-1.0, -1.0]], [[-1.0 - LOG2, -1.0 - LOG2]]
    good, bad, logprobs = usual(behaviour, [[1.0, 1.0]]), usual(behaviour, [[-1.0, -1.0]]), leaf(now)
    assert gradient(topr(logprobs, good).values, logprobs, good) == [-1.0, -1.0]
    assert gradient(topr(logprobs, bad).values, logprobs, bad) == pytest.approx([0.25, 0.25])
    assert on_mask(topr(logprobs, bad).values, bad) == pytest.approx([0.25 * (-1 - LOG2)] * 2)
    likelier = leaf([[-0.5, -0.5]])
    assert gradient(topr(likelier, bad).values, likelier, bad) == [1.0, 1.0]


def test_topr_token_tapers_each_token_by_itself() -> None:
    batch, logprobs = usual([[-1.0, -1.0]], [[-1.0, -1.0]]), leaf([[-1.0 - LOG2, -0.5]])
    assert gradient(topr_token(logprobs, batch).values, logprobs, batch) == pytest.approx([0.5, 1.0])


def test_sppo_by_hand() -> None:
    # Bounds 1 / 1.3 and 1.3: log ratios 0, log 1.3 and -log 1.3.
    logprobs = leaf(RATIOS)
    found = sppo(logprobs, THREE)
    assert on_mask(found.values, THREE) == pytest.approx([0.0, -math.log(1.3), -math.log(1.3)])
    assert gradient(found.values, logprobs, THREE) == [-1.0, 0.0, 0.0]
    assert found.clipped is not None and on_mask(found.clipped, THREE) == [False, True, True]


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
    batch = usual([behaviour], [torch.randn(12).tolist()])
    logprobs = leaf([now])
    ours = rec(logprobs, batch, weigh_by_ratio=True, clip_low=0.2, clip_high=0.28).values
    theirs = ppo(logprobs, batch, clip_high=0.28).values
    assert gradient(ours, logprobs, batch) == pytest.approx(gradient(theirs, logprobs, batch))


def test_red_weight_by_hand() -> None:
    # exp(1 / 2) and exp(-1 / 2)
    batch, logprobs = usual([[-1.0], [-1.0]], [[1.0], [-1.0]]), leaf([[-1.0], [-2.0]])
    found = red_weight(logprobs, batch, weight_tau=2.0).values
    assert gradient(found, logprobs, batch) == pytest.approx([-math.exp(0.5), math.exp(-0.5)])
