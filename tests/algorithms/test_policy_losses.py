"""Policy losses, corrections for the gap between engine and trainer, and distillation, against values worked out by
hand and the true divergences."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rayrft.algorithms import Denominators, PolicyOutput, build, corrections, policy_losses
from rayrft.algorithms.clipped import gspo, gspo_token, importance_sequence
from rayrft.algorithms.corrections import divergence_mask, off_policy_mask, sequence_truncated, token_mask
from rayrft.algorithms.distillation import jsd, reverse_kl
from rayrft.algorithms.reinforce import kimi, rec
from tests.algorithms.flat import LOG2, Rows, gradient, leaf, make_batch, on_mask, output, tokens, usual

Found = list[float] | None
# Three answers of one token with advantages 1, 1 and -1, and ratios 1, 2 and 1/2; or other log-probs.
THREE: tuple[Rows, Rows] = ([[-1.0]] * 3, [[1.0], [1.0], [-1.0]])
RATIOS: Rows = [[-1.0], [-1.0 + LOG2], [-1.0 - LOG2]]
NOW: Rows = [[-1.0], [-0.5], [-2.0]]
# One answer with token ratios 4 and 1: the geometric mean is 2.
TWO, UP = [[-2.0, -1.0]], [[-2.0 + 2 * LOG2, -1.0]]
GONE = [[-1.0 - LOG2, -1.0 - LOG2]]
# Ratios 4, 2 and 1 with advantages -1, -1 and 1.
LIKELIER: tuple[Rows, Rows, Rows] = ([[-2.0]] * 3, [[-1.0], [-1.0], [1.0]], [[-2 + 2 * LOG2], [-2 + LOG2], [-2.0]])


@pytest.mark.parametrize(
    ("name", "options", "behaviour", "advantages", "now", "values", "slopes", "clipped"),
    [
        # Bounds 0.8 and 1.28. min(1, 1) = 1; min(2, 1.28) = 1.28; min(-0.5, -0.8) = -0.8.
        ("ppo", {"clip_high": 0.28}, *THREE, RATIOS, [-1.0, -1.28, 0.8], [-1.0, 0.0, 0.0], [0, 1, 1]),
        # Ratio 2: too far up for A = 1; for A = -1 still to be lowered, with d(-rho A) = rho = 2.
        ("ppo", {}, [[-1.0]] * 2, [[1.0], [-1.0]], [[-1.0 + LOG2]] * 2, None, [0.0, 2.0], [1, 0]),
        # Ratio 4 with A = -1: the loss 4 is held at 3, without gradient; at ratio 2 it is 2; A = 1 is not touched.
        ("ppo", {"dual_clip": 3.0}, *LIKELIER, [3.0, 2.0, -1.0], [0.0, 2.0, -1.0], [1, 0, 0]),
        # Weights 1, min(2, 1.28) and 0.5, or at least 0.8; gradient -weight A on every token, also a clipped one.
        ("cispo", {}, *THREE, RATIOS, [1.0, 1.28 * (1 - LOG2), -0.5 * (1 + LOG2)], [-1.0, -1.28, 0.5], [0, 1, 0]),
        ("cispo", {"clip_low": 0.2}, *THREE, RATIOS, None, [-1.0, -1.28, 0.8], [0, 1, 1]),
        # tau 1: at ratio 1 the gate is 4 sigmoid(0) = 2; at ratio 2, 4 sigmoid(1). tau 2 for A < 0: 2 sigmoid(-1).
        ("sapo", {"tau_negative": 2.0}, *THREE, RATIOS, [-2.0, -4 / (1 + 1 / math.e), 2 / (1 + math.e)], None, None),
        ("importance", {}, *THREE, RATIOS, [-1.0, -2.0, 0.5], [-1.0, -2.0, 0.5], None),
        # A = 1: min(2, 1.5) = 1.5 on either token. Different advantages have the mean -1; the answer's ratio is 4.
        ("gspo", {"clip_high": 0.5}, TWO, [[1.0, 1.0]], UP, [-1.5, -1.5], [0.0, 0.0], [1, 1]),
        ("gspo", {"clip_high": 5.0}, TWO, [[1.0, -3.0]], UP, [2.0, 2.0], None, [0, 0]),
        # Answers of one token are those of PPO.
        ("gspo", {"clip_low": 0.2, "clip_high": 0.28}, *THREE, RATIOS, [-1.0, -1.28, 0.8], [-1.0, 0.0, 0.0], [0, 1, 1]),
        ("gspo", {"clip_low": 0.2}, [[-1.0]] * 2, [[-1.0], [1.0]], RATIOS[1:], [2.0, -0.5], [2.0, -0.5], [0, 0]),
        ("importance_sequence", {}, TWO, [[1.0, -3.0]], UP, [4.0, 4.0], None, None),
        # Advantages 1 and -3 within wide bounds: each token has its own.
        ("gspo_token", {"clip_low": 0.9, "clip_high": 5.0}, TWO, [[1.0, -3.0]], UP, [-2.0, 6.0], [-2.0, 6.0], [0, 0]),
        ("reinforce", {}, *THREE, NOW, [1.0, 0.5, -2.0], [-1.0, -1.0, 1.0], None),
        ("raft", {}, [[-1.0]] * 3, [[0.3], [0.0], [-2.0]], NOW, [1.0, 0.0, 0.0], [-1.0, 0.0, 0.0], None),
        ("opmd", {"tau": 3.0}, *THREE, NOW, [0.25, 0.125, -0.5], [-0.25, -0.25, 0.25], None),
        # h = 2 log 2, A = 1: (1 - log 2)^2 on either token.
        ("kimi", {"tau": 0.5}, TWO, [[1.0, 1.0]], [[-2.0 + LOG2, -1.0 + LOG2]], [(1 - LOG2) ** 2] * 2, None, None),
        # The answer's ratio is 1/4. Good: weight 1. Bad: weight 1/4; a bad one grown likelier: weight 1.
        ("topr", {}, [[-1.0] * 2], [[1.0] * 2], GONE, [1 + LOG2] * 2, [-1.0] * 2, None),
        ("topr", {}, [[-1.0] * 2], [[-1.0] * 2], GONE, [-0.25 * (1 + LOG2)] * 2, [0.25] * 2, None),
        ("topr", {}, [[-1.0] * 2], [[-1.0] * 2], [[-0.5] * 2], [-0.5] * 2, [1.0] * 2, None),
        ("topr_token", {}, [[-1.0] * 2], [[-1.0] * 2], [[-1.0 - LOG2, -0.5]], None, [0.5, 1.0], None),
        # Bounds 1 / 1.3 and 1.3: log ratios 0, log 1.3 and -log 1.3.
        ("sppo", {}, *THREE, RATIOS, [0.0, -math.log(1.3), -math.log(1.3)], [-1.0, 0.0, 0.0], [0, 1, 1]),
        # exp(1 / 2) and exp(-1 / 2)
        ("red_weight", {"weight_tau": 2.0}, *THREE, NOW, None, [-math.exp(0.5)] * 2 + [math.exp(-0.5)], None),
    ],
)
def test_by_hand(
    name: str, options: Any, behaviour: Rows, advantages: Rows, now: Rows, values: Found, slopes: Found, clipped: Found
) -> None:
    batch, logprobs = usual(behaviour, advantages), leaf(now)
    found = policy_losses.get(name).bind(options)(logprobs, batch)
    assert values is None or on_mask(found.values, batch) == pytest.approx(values)
    assert slopes is None or gradient(found.values, logprobs, batch) == pytest.approx(slopes)
    assert (found.clipped is None) == (clipped is None)
    assert found.clipped is None or on_mask(found.clipped, batch) == clipped


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


def test_gspo_token_equals_gspo_where_the_advantages_of_a_row_are_equal() -> None:
    batch = usual([[-2.0, -1.0], [-0.5, -3.0]], [[-1.0, -1.0], [0.5, 0.5]])
    logprobs = leaf([[-1.9, -1.3], [-0.6, -2.9]])
    whole, each = (f(logprobs, batch, clip_low=0.2, clip_high=0.2).values for f in (gspo, gspo_token))
    assert on_mask(whole, batch) == pytest.approx(on_mask(each, batch))
    shares = [batch.mean(values).sum() for values in (whole, each)]
    torch.testing.assert_close(*(torch.autograd.grad(share, logprobs)[0] for share in shares))


# Ratios 1, 2, 4, 1/4 and 0.85 for A = 1, then for A = -1; bounds 0.9 and 1.2, ring at 0.4 and 3.
KEPT = {
    "all": [1, 1, 1, 1, 1] * 2,
    "one_side": [1, 0, 0, 1, 1, 1, 1, 1, 0, 0],
    "two_side": [1, 0, 0, 0, 0] * 2,
    "ring": [1, 0, 0, 1, 0, 1, 0, 1, 0, 0],
}


@pytest.mark.parametrize("keep_where", KEPT)
@pytest.mark.parametrize("weigh_by_ratio", [False, True])
def test_rec_by_hand(keep_where: str, weigh_by_ratio: bool) -> None:
    advantages, ratios = [1.0] * 5 + [-1.0] * 5, [1.0, 2.0, 4.0, 0.25, 0.85] * 2
    batch = usual([[-3.0]] * 10, [[a] for a in advantages])
    logprobs = leaf([[-3.0 + math.log(ratio)] for ratio in ratios])
    how: dict[str, Any] = {"keep_where": keep_where, "weigh_by_ratio": weigh_by_ratio, "clip_low": 0.1}
    found = rec(logprobs, batch, **how)
    weights = ratios if weigh_by_ratio else [1.0] * 10
    expected = [-kept * w * a for kept, w, a in zip(KEPT[keep_where], weights, advantages, strict=True)]
    assert gradient(found.values, logprobs, batch) == pytest.approx(expected)
    assert found.clipped is not None
    assert on_mask(found.clipped, batch) == [not kept for kept in KEPT[keep_where]]


def test_reverse_kl_by_hand() -> None:
    # The policy finds the first token twice as likely as the teacher, the second half as likely; ratio 1.
    batch = usual([[-1.0, -1.0]], teacher_logprobs=[[-1.0 - LOG2, -1.0 + LOG2]])
    logprobs = leaf([[-1.0, -1.0]])
    found = reverse_kl(output(logprobs), batch)
    assert on_mask(found, batch) == pytest.approx([LOG2, -LOG2])
    assert gradient(found, logprobs, batch) == pytest.approx([LOG2, -LOG2])


@pytest.mark.parametrize(("doublings", "cap", "weight"), [(1, 2.0, 2.0), (3, 2.0, 2.0), (3, 10.0, 8.0)])
def test_reverse_kl_weighs_by_a_truncated_ratio_to_the_sampler(doublings: int, cap: float, weight: float) -> None:
    # Ratio 2 or 8, whatever the proximal policy was; d = 1.
    batch = usual([[-1.0 - doublings * LOG2]], teacher_logprobs=[[-2.0]], proximal_logprobs=[[-1.0]])
    logprobs = leaf([[-1.0]])
    found = reverse_kl(output(logprobs), batch, ratio_cap=cap)
    assert on_mask(found, batch) == gradient(found, logprobs, batch) == pytest.approx([weight])


def test_reverse_kl_has_the_gradient_of_the_kl_as_its_mean() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    policy, teacher = logits.log_softmax(0), torch.randn(6, dtype=torch.float64).log_softmax(0)
    [true] = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    sampled = policy.detach()
    batch = usual([[each] for each in sampled.tolist()], teacher_logprobs=[[each] for each in teacher.tolist()])
    flat = torch.zeros(12, dtype=torch.float64).index_put((batch.mask.nonzero().squeeze(1),), policy)
    loss = (reverse_kl(output(flat), batch)[batch.mask] * sampled.exp()).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], true)


def candidates(*rows: list[float]) -> Tensor:
    """``[T, K]`` log-probs: a prompt token with garbage, then one token for each row of probabilities."""
    width = len(rows[0])
    return torch.tensor([[math.nan] * width, *rows], dtype=torch.float64).log()


def compare(teacher: list[float], policy: list[float], **share: float) -> float:
    batch = usual([[-1.0]], teacher_candidates=candidates(teacher))
    answer = PolicyOutput(leaf([[-1.0]]), torch.zeros(2), candidates(policy)).only(batch.mask)
    return on_mask(jsd(answer, batch, **share), batch)[0]


def test_jsd_by_hand() -> None:
    # Disjoint: log 2. Equal: 0. [1, 0] and [1/2, 1/2] with middle [3/4, 1/4], or for a share of 1/4 with [5/8, 3/8].
    assert compare([1.0, 0.0], [0.0, 1.0]) == pytest.approx(LOG2)
    assert compare([0.3, 0.7], [0.3, 0.7]) == pytest.approx(0.0)
    assert compare([1.0, 0.0], [0.5, 0.5]) == pytest.approx((math.log(4 / 3) + math.log(2 / 3) / 2 + LOG2 / 2) / 2)
    expected = math.log(8 / 5) / 4 + 0.75 * (math.log(4 / 5) / 2 + math.log(4 / 3) / 2)
    assert compare([1.0, 0.0], [0.5, 0.5], teacher_share=0.25) == pytest.approx(expected)


def test_what_the_candidates_leave_counts_as_one_token() -> None:
    assert compare([0.5], [0.25]) == pytest.approx(compare([0.5, 0.5], [0.25, 0.75]))
    whole = compare([0.5, 0.4, 0.1], [0.2, 0.1, 0.7])
    assert 0 < compare([0.5], [0.2]) < compare([0.5, 0.4], [0.2, 0.1]) <= whole + 1e-12


def test_jsd_has_a_finite_gradient_at_probability_0() -> None:
    batch = usual([[-1.0]], teacher_candidates=candidates([1.0, 0.0]))
    policy = torch.tensor([[0.0, 0.0], [-1e4, 0.0]], dtype=torch.float64, requires_grad=True)
    found = jsd(PolicyOutput(leaf([[-1.0]]), torch.zeros(2), policy).only(batch.mask), batch)
    [grad] = torch.autograd.grad(found[batch.mask].sum(), policy)
    assert torch.isfinite(grad).all() and (grad[0] == 0).all()


def test_distillation_is_a_mean_over_own_tokens_with_a_coefficient() -> None:
    batch = make_batch([[-1.0, -1.0]], teacher_logprobs=[[-1.0 - LOG2, -1.0]])
    algorithm = build("distill", {"distillation_coef": 3.0})
    parts = algorithm.loss(output(leaf([[-1.0, -1.0]])), batch, Denominators(2, 1))
    assert parts.distillation.item() == pytest.approx(LOG2 / 2)
    assert parts.loss.item() == pytest.approx(1.5 * LOG2)


@pytest.mark.parametrize(("name", "lacks"), [("distill", "teacher_logprobs"), ("jsd", "teacher_candidates")])
def test_what_a_batch_lacks_is_named(name: str, lacks: str) -> None:
    with pytest.raises(ValueError, match=f"needs {lacks}, which the batch does not hold"):
        build(name).loss(output(leaf([[-1.0]])), make_batch([[-1.0]]), Denominators(1, 1))
    with pytest.raises(ValueError, match="needs the"):
        reverse_kl(output(leaf([[-1.0]])), usual([[-1.0]]))
    with pytest.raises(ValueError, match="needs the"):
        jsd(output(leaf([[-1.0]])), usual([[-1.0]]))


# Two answers; ratios of the proximal policy to the behaviour policy 1 and 4, then 1/4.
GAP = usual([[-1.0, -3.0], [-1.0]], proximal_logprobs=[[-1.0, -3.0 + 2 * LOG2], [-1.0 - 2 * LOG2]])
PRESENT = tokens([[-9.0, -9.0], [-9.0]], prompt=0.0)  # the present policy has no part in it


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
def test_corrections_by_hand(name: str, coefficients: Any, expected: list[float]) -> None:
    assert on_mask(corrections.get(name).bind(coefficients)(PRESENT, GAP), GAP) == pytest.approx(expected)


def test_the_weight_of_a_long_answer_does_not_overflow() -> None:
    batch = usual([[-10.0] * 50], proximal_logprobs=[[0.0] * 50])
    assert on_mask(sequence_truncated(PRESENT, batch, sequence_cap=1e9), batch) == pytest.approx([math.exp(20)] * 50)


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
        kept = divergence_mask(PRESENT, GAP, divergence=divergence, divergence_of=over, divergence_cap=cap)
        assert on_mask(kept, GAP) == [float(value <= cap) for value in values]


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
    settings = {"correction": pieces, "weight_cap": 3.0, "sequence_high": 2.1}
    algorithm = build("rloo", {**settings, "policy_loss": "reinforce"})
    parts = algorithm.loss(output(leaf([[-1.0, -3.0], [-1.0]])), batch, over)
    assert parts.loss.item() == pytest.approx((1.0 * 1 + 3.0 * 3) / 3)
    assert parts.correction.item() == pytest.approx(4.0)
    assert algorithm.needs["proximal"] == "correction 'truncated'"
    assert "proximal" in build("rloo", {"correction": pieces[:1]}).needs and build("gspo", {"correction": pieces})


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
