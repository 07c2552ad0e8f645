"""KL estimators, entropy terms and their coefficients, against values worked out by hand and the true divergence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rayrft.algorithms import Coefficients, Denominators, build, chosen_logprobs, kls
from rayrft.algorithms.kl import KL, bonus, k1, k1_st, k2, k3, k3_st, k3_unbiased, target
from tests.algorithms.flat import LOG2, leaf, make_batch, output, token_logprobs

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


def distributions() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    logits = torch.randn(2, 6, dtype=torch.float64)
    return logits[0].clone().requires_grad_(), logits[1].log_softmax(0)


@pytest.mark.parametrize(
    ("estimate", "value", "slope"),
    [(k1, 1, 0), (k2, 0, 1), (k3, 1, 0), (k1_st, 1, 1), (k3_st, 1, 1), (k3_unbiased, 1, 1)],
)
def test_which_estimators_have_the_kl_or_its_gradient_as_their_mean(estimate: KL, value: int, slope: int) -> None:
    logits, reference = distributions()
    policy, other = logits.log_softmax(0), torch.randn(6, dtype=torch.float64).log_softmax(0)
    true = (policy.exp() * (policy - reference)).sum()
    [true_slope] = torch.autograd.grad(true, logits, retain_graph=True)
    for behaviour in (policy.detach(), other):
        found = (behaviour.exp() * estimate(policy, reference, behaviour)).sum()
        [found_slope] = torch.autograd.grad(found, logits, retain_graph=True)
        right = torch.allclose(found, true), torch.allclose(found_slope, true_slope)
        # If another policy sampled, it takes the ratio to that one.
        assert right == ((value, slope) if behaviour is not other else (estimate is k3_unbiased,) * 2)


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


def test_entropy_terms_by_hand() -> None:
    entropy = torch.tensor([0.1, 0.5], requires_grad=True)
    assert bonus(entropy).tolist() == pytest.approx([-0.1, -0.5])
    found = target(entropy, entropy_target=0.3)
    assert found.tolist() == pytest.approx([0.2, 0.0])
    assert torch.autograd.grad(found.sum(), entropy)[0].tolist() == [-1.0, 0.0]


def test_token_logprobs_divide_by_temperature_and_shift_by_one() -> None:
    logits = torch.tensor([[[0.0, 2 * LOG2], [0.0, 0.0]]])
    chosen, entropy = token_logprobs(logits, torch.tensor([[0, 1]]), temperature=2.0)
    # softmax([0, log 2]) = [1/3, 2/3]
    assert chosen[0].tolist() == pytest.approx([0.0, math.log(2 / 3)])
    assert entropy[0, 1].item() == pytest.approx(-(math.log(1 / 3) / 3 + 2 * math.log(2 / 3) / 3))


def test_a_token_that_cannot_be_drawn_counts_0_in_the_entropy_and_has_no_gradient() -> None:
    # Probabilities 1/4, 3/4 and 0.
    logits = torch.tensor([0.0, math.log(3.0), -math.inf], dtype=torch.float64, requires_grad=True)
    assert not chosen_logprobs(logits, torch.tensor(1))[1].requires_grad, "it costs nothing where it is not asked for"
    logprob, entropy = chosen_logprobs(logits, torch.tensor(1), entropy_gradient=True)
    assert logprob.item() == pytest.approx(math.log(0.75))
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert entropy.item() == pytest.approx(expected)
    [grad] = torch.autograd.grad(entropy, logits)  # -p (log p + H)
    slopes = [-p * (math.log(p) + expected) for p in (0.25, 0.75)]
    assert grad.tolist() == pytest.approx([*slopes, 0.0])


TARGETS = {"kl": "k3", "kl_coef": 0.1, "kl_target": 0.02, "kl_horizon": 100.0, "entropy": "bonus"}
ALGORITHM = build("grpo", {**TARGETS, "entropy_coef": 0.01, "entropy_goal": 0.5, "entropy_step": 0.004})


@pytest.mark.parametrize(
    ("kl", "sequences", "factor"),
    # 10 % over the target: 1 + 0.1 * 10 / 100. The error is cut at 20 %, and a step at most halves the coefficient.
    [(0.022, 10, 1.01), (0.2, 10, 1.02), (0.0, 10, 0.98), (0.0, 240, 0.52), (0.0, 250, 0.5), (0.0, 10_000, 0.5)],
)
def test_the_coefficients_follow_what_was_measured_by_hand(kl: float, sequences: int, factor: float) -> None:
    found = Coefficients.of(ALGORITHM).update(kl=kl, entropy=0.4, sequences=sequences).applied
    assert (found.kl_coef, found.entropy_coef) == (pytest.approx(0.1 * factor), pytest.approx(0.014))
    assert replace(found, kl_coef=0.1, entropy_coef=0.01) == ALGORITHM, "nothing else moves"


def test_the_entropy_counts_only_while_it_is_at_or_below_its_goal() -> None:
    state = Coefficients.of(ALGORITHM)
    # It shrinks by 0.004 at each step over the goal, not below 0, and grows again below it.
    for entropy, coef in ((0.6, 0.0), (0.5, 0.002), (0.6, 0.0), (0.6, 0.0), (0.3, 0.004)):
        state = state.update(kl=0.02, entropy=entropy, sequences=10)
        assert state.applied.entropy_coef == pytest.approx(coef)
        assert ("entropy" in state.applied.terms) == (coef > 0)


def test_coefficients_begin_as_configured_and_a_step_without_own_rows_says_nothing() -> None:
    start = Coefficients.of(ALGORITHM)
    assert start.applied == ALGORITHM and start.update(kl=0.0, entropy=0.0, sequences=0) == start


def test_fixed_coefficients_stay() -> None:
    fixed = build("grpo", {"kl": "k3", "entropy": "bonus"})
    assert Coefficients.of(fixed).update(kl=9.0, entropy=9.0, sequences=99).applied == fixed


@pytest.mark.parametrize("algorithm", [ALGORITHM, build("grpo", TARGETS), build("grpo")])
def test_what_a_checkpoint_keeps_is_all_there_is(algorithm: object) -> None:
    start = Coefficients.of(algorithm)  # type: ignore[arg-type]
    now = start.update(kl=0.5, entropy=0.7, sequences=10)
    restored = start.restored(now.state())
    assert restored.applied == now.applied
    follow = {"kl": 0.001, "entropy": 0.1, "sequences": 4}
    assert restored.update(**follow).applied == now.update(**follow).applied  # type: ignore[arg-type]
