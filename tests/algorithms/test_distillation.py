"""Learning from a teacher, against values worked out by hand and the true divergences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rayrft.algorithms import Denominators, PolicyOutput, build
from rayrft.algorithms.distillation import jsd, reverse_kl
from tests.algorithms.flat import LOG2, gradient, leaf, make_batch, on_mask, output, usual


def test_reverse_kl_by_hand() -> None:
    # The policy finds the first token twice as likely as the teacher, the second half as likely; ratio 1.
    batch = usual([[-1.0, -1.0]], teacher_logprobs=[[-1.0 - LOG2, -1.0 + LOG2]])
    logprobs = leaf([[-1.0, -1.0]])
    found = reverse_kl(output(logprobs), batch)
    assert on_mask(found, batch) == pytest.approx([LOG2, -LOG2])
    assert gradient(found, logprobs, batch) == pytest.approx([LOG2, -LOG2])


def test_reverse_kl_weighs_by_the_ratio_to_the_policy_that_sampled() -> None:
    batch = usual([[-1.0 - LOG2]], teacher_logprobs=[[-2.0]])
    logprobs = leaf([[-1.0]])
    assert gradient(reverse_kl(output(logprobs), batch), logprobs, batch) == pytest.approx([2.0])


def test_reverse_kl_is_truncated_where_the_policy_that_sampled_is_far() -> None:
    # Ratio 8 to the policy that sampled, whatever the proximal one was; d = 1.
    batch = usual([[-1.0 - 3 * LOG2]], teacher_logprobs=[[-2.0]], proximal_logprobs=[[-1.0]])
    logprobs = leaf([[-1.0]])
    for bound, expected in (({}, 2.0), ({"ratio_cap": 10.0}, 8.0)):
        found = reverse_kl(output(logprobs), batch, **bound)
        assert on_mask(found, batch) == gradient(found, logprobs, batch) == pytest.approx([expected])


def test_reverse_kl_has_the_gradient_of_the_kl_as_its_mean() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    policy, teacher = logits.log_softmax(0), torch.randn(6, dtype=torch.float64).log_softmax(0)
    [true] = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    tokens = policy.detach()
    batch = usual([[each] for each in tokens.tolist()], teacher_logprobs=[[each] for each in teacher.tolist()])
    flat = torch.zeros(12, dtype=torch.float64).index_put((batch.mask.nonzero().squeeze(1),), policy)
    loss = (reverse_kl(output(flat), batch)[batch.mask] * tokens.exp()).sum()
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
    # Disjoint: log 2. Equal: 0. [1, 0] and [1/2, 1/2] with middle [3/4, 1/4]:
    # (log(4/3) + 1/2 log(2/3) + 1/2 log 2) / 2
    assert compare([1.0, 0.0], [0.0, 1.0]) == pytest.approx(LOG2)
    assert compare([0.3, 0.7], [0.3, 0.7]) == pytest.approx(0.0)
    assert compare([1.0, 0.0], [0.5, 0.5]) == pytest.approx((math.log(4 / 3) + math.log(2 / 3) / 2 + LOG2 / 2) / 2)


def test_jsd_with_uneven_shares_by_hand() -> None:
    # teacher [1, 0], policy [1/2, 1/2], b = 1/4: middle [5/8, 3/8].
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
