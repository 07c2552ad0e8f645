"""KL estimators against values worked out by hand, and against the true divergence."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rayrft.algorithms import Denominators, build, kls
from rayrft.algorithms.kl import k1, k1_st, k2, k3, k3_st, k3_unbiased
from tests.algorithms.flat import LOG2, leaf, make_batch, output

REFERENCE = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
LOGPROBS = REFERENCE + torch.tensor([0.0, LOG2, -LOG2], dtype=torch.float64)


@pytest.mark.parametrize(
    ("estimate", "expected", "slope"),
    [
        (k1, [0.0, LOG2, -LOG2], [1.0, 1.0, 1.0]),
        (k2, [0.0, LOG2**2 / 2, LOG2**2 / 2], [0.0, LOG2, -LOG2]),
        (k3, [0.0, 0.5 - 1 + LOG2, 2 - 1 - LOG2], [0.0, 0.5, -1.0]),  # slope 1 - exp(-d)
        (k1_st, [0.0, LOG2, -LOG2], [0.0, LOG2, -LOG2]),
        (k3_st, [0.0, 0.5 - 1 + LOG2, 2 - 1 - LOG2], [0.0, LOG2, -LOG2]),
    ],
)
def test_estimators_and_their_gradients_by_hand(estimate, expected: list[float], slope: list[float]) -> None:  # type: ignore[no-untyped-def]
    logprobs = LOGPROBS.clone().requires_grad_()
    found = estimate(logprobs, REFERENCE, REFERENCE)
    assert found.tolist() == pytest.approx(expected)
    assert torch.autograd.grad(found.sum(), logprobs)[0].tolist() == pytest.approx(slope)


def test_k3_is_cut_where_one_token_would_own_the_step() -> None:
    # d = -2: e^2 - 3, slope 1 - e^2. d = -15: cut at 10; straight through, its slope is that of k2.
    logprobs = torch.tensor([-2.0, -15.0], dtype=torch.float64, requires_grad=True)
    for estimate, slope in ((k3, [1 - math.exp(2), 0.0]), (k3_st, [-2.0, -15.0])):
        found = estimate(logprobs, torch.zeros(2, dtype=torch.float64), logprobs)
        assert found.tolist() == pytest.approx([math.exp(2) - 3, 10.0])
        assert torch.autograd.grad(found.sum(), logprobs)[0].tolist() == pytest.approx(slope)


def test_k2_and_k3_are_never_negative() -> None:
    torch.manual_seed(0)
    d = torch.randn(1000, dtype=torch.float64) * 3
    assert all((estimate(d, torch.zeros_like(d), d) >= 0).all() for estimate in (k2, k3, k3_unbiased))


def distributions() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    logits = torch.randn(2, 6, dtype=torch.float64)
    return logits[0].clone().requires_grad_(), logits[1].log_softmax(0)


@pytest.mark.parametrize("estimate", [k1, k3])
def test_k1_and_k3_have_the_kl_as_their_mean(estimate) -> None:  # type: ignore[no-untyped-def]
    logits, reference = distributions()
    policy = logits.log_softmax(0)
    true = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * estimate(policy, reference, policy.detach())).sum(), true)


@pytest.mark.parametrize("estimate", [k2, k1_st, k3_st])
def test_the_gradient_of_k2_has_the_gradient_of_the_kl_as_its_mean(estimate) -> None:  # type: ignore[no-untyped-def]
    logits, reference = distributions()
    policy = logits.log_softmax(0)
    [true] = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    [found] = torch.autograd.grad((policy.detach().exp() * estimate(policy, reference, policy.detach())).sum(), logits)
    torch.testing.assert_close(found, true)


@pytest.mark.parametrize("name", kls)
def test_equal_policies_have_no_kl(name: str) -> None:
    assert kls.get(name).function(REFERENCE, REFERENCE, LOGPROBS).tolist() == [0.0] * 3


def test_k3_with_the_ratio_to_the_behaviour_policy_by_hand() -> None:
    # Twice as likely as the reference (k3 = log 2 - 1/2) and three times as likely as the behaviour policy; slope
    # rho (k3 + 1 - 1/2). With a cap of 2 the slope of the ratio is gone.
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    for cap, value, slope in ((None, 3 * (LOG2 - 0.5), 3 * LOG2), (2.0, 2 * (LOG2 - 0.5), 2 * 0.5)):
        found = k3_unbiased(logprobs, logprobs.detach() - LOG2, logprobs.detach() - math.log(3), kl_ratio_cap=cap)
        assert found.item() == pytest.approx(value)
        assert torch.autograd.grad(found, logprobs)[0].item() == pytest.approx(slope)


def test_off_policy_only_k3_with_the_ratio_has_kl_and_gradient_as_its_mean() -> None:
    logits, reference = distributions()
    policy, behaviour = logits.log_softmax(0), torch.randn(6, dtype=torch.float64).log_softmax(0)
    true = (policy.exp() * (policy - reference)).sum()
    [slope] = torch.autograd.grad(true, logits, retain_graph=True)
    for estimate in (k2, k3, k3_st, k3_unbiased):
        found = (behaviour.exp() * estimate(policy, reference, behaviour)).sum()
        [found_slope] = torch.autograd.grad(found, logits, retain_graph=True)
        right = torch.allclose(found, true), torch.allclose(found_slope, slope)
        assert right == ((True, True) if estimate is k3_unbiased else (False, False))


@pytest.mark.parametrize(("kl_in", "expected"), [("loss", 3 * (LOG2 - 0.5)), ("reward", 1.5 * (3 * LOG2 - 7 / 8))])
def test_the_ratio_of_a_kl_is_to_the_policy_that_sampled(kl_in: str, expected: float) -> None:
    # Behaviour 1/12, proximal 1/8, now 1/4. In the loss 3 k3(log 2); in the reward, which is the proximal policy's,
    # with a reference of 1/64, 1.5 k3(log 8).
    fields = {"proximal_logprobs": [[math.log(1 / 8)]]}
    reference = 1 / 8 if kl_in == "loss" else 1 / 64
    batch = make_batch([[math.log(1 / 12)]], [[0.0]], reference_logprobs=[[math.log(reference)]], **fields)
    algorithm = build("rloo", {"kl": "k3_unbiased", "kl_coef": 1.0, "kl_in": kl_in, "correction": "decoupled"})
    if kl_in == "loss":
        found = algorithm.loss(output(leaf([[math.log(1 / 4)]])), batch, Denominators(1, 1)).kl.item()
    else:
        found = -algorithm.token_advantages(batch).advantages[-1].item()
    assert found == pytest.approx(expected)


def test_the_kl_is_added_with_its_coefficient_over_own_tokens() -> None:
    # Two own tokens, k2 of log 2 on each, coefficient 0.5; the expert's reference is not looked at.
    batch = make_batch([[-1.0, -1.0], [0.0]], expert=[False, True], reference_logprobs=[[-1.0 - LOG2] * 2, [math.nan]])
    algorithm = build("grpo", {"kl": "k2", "kl_coef": 0.5})
    over = Denominators(policy_tokens=2, policy_sequences=1, expert_tokens=1, expert_sequences=1)
    parts = algorithm.loss(output(leaf([[-1.0, -1.0], [-1.0]])), batch, over)
    assert parts.kl.item() == pytest.approx(LOG2**2 / 2)
    assert parts.loss.item() == pytest.approx(0.5 * LOG2**2 / 2)
