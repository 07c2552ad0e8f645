"""The chunked head against the plain one: same numbers, same gradients, less memory."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayrft.trainer.head import _logits, head_logprobs, head_top_logprobs


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logp = (hidden @ weight.T / temperature[:, None]).log_softmax(-1)
    columns = targets if targets.dim() == 2 else targets[:, None]
    return logp.gather(-1, columns).view_as(targets), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("shape", [(7,), (7, 4)], ids=["one token in a place", "several"])
@pytest.mark.parametrize("entropic", [True, False])
def test_values_and_gradients_are_those_of_the_plain_head(chunk: int, shape: tuple[int, ...], entropic: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    temperature, targets = torch.rand(7, dtype=torch.float64) + 0.5, torch.randint(11, shape)
    targets.view(7, -1)[:, -1] = targets.view(7, -1)[:, 0]  # the sampled token may be among the candidates
    mix, results = torch.randn(shape, dtype=torch.float64), []
    for function in (plain, functools.partial(head_logprobs, chunk=chunk)):
        logprobs, entropy = function(hidden, weight, targets, temperature)
        loss = (logprobs * mix).sum() + (entropy.square().sum() if entropic else 0.0)
        results.append((logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunk", [2, 100])
def test_the_likeliest_tokens_are_those_of_the_plain_head_that_may_be_had(chunk: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 3, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    temperature = torch.rand(5, dtype=torch.float64) + 0.5
    whole = (hidden @ weight.T / temperature[:, None]).log_softmax(-1)
    logprobs, ids = head_top_logprobs(hidden, weight, temperature, 4, 9, chunk=chunk)
    torch.testing.assert_close(logprobs, whole[:, :9].sort(descending=True).values[:, :4])
    torch.testing.assert_close(whole.gather(-1, ids), logprobs)
    assert whole[:, 9:].max() > logprobs.min() and ids.max() < 9


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("chunk", [2, None])
def test_the_gradient_of_log_probs_alone_is_right_in_every_precision(
    dtype: torch.dtype, tolerance: float, chunk: int | None
) -> None:
    torch.manual_seed(0)
    exact = [torch.randn(5, 4), torch.randn(9, 4)]
    temperature, targets, mix = torch.tensor([1.0, 0.7, 1.3, 1.0, 0.5]), torch.randint(9, (5,)), torch.randn(5)
    hidden, weight = (each.to(dtype).requires_grad_() for each in exact)
    logprobs, _ = head_logprobs(hidden, weight, targets, temperature, chunk=chunk)
    found = torch.autograd.grad((logprobs * mix).sum(), (hidden, weight))
    hidden, weight = (each.detach().double().requires_grad_() for each in (hidden, weight))
    loss = (plain(hidden, weight, targets, temperature)[0] * mix).sum()
    for ours, theirs in zip(found, torch.autograd.grad(loss, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return made


@pytest.mark.parametrize("entropic", [True, False])
def test_neither_pass_ever_holds_tokens_times_vocabulary(entropic: bool) -> None:
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)

    def backward(logprobs: torch.Tensor, entropy: torch.Tensor) -> None:
        (logprobs.sum() + (entropy.sum() if entropic else 0.0)).backward()

    with Largest() as chunked:
        backward(*head_logprobs(hidden, weight, torch.zeros(64, dtype=torch.int64), torch.ones(64), chunk=8))
    assert chunked.numel == 8 * 1000, "logits of a chunk"
    with Largest() as whole:
        backward(*plain(hidden, weight, torch.zeros(64, dtype=torch.int64), torch.ones(64)))
    assert whole.numel == 64 * 1000


def test_a_frozen_head_gets_no_gradient_and_costs_none() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4)
    logprobs, _ = head_logprobs(hidden, weight, torch.tensor([0, 1, 2]), torch.ones(3))
    logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_a_logit_of_minus_infinity_counts_0_in_the_entropy_and_has_no_gradient() -> None:
    # Logits 1, 2 and, beyond the range of the format, -inf.
    hidden = torch.tensor([[1e30, 1.0]], requires_grad=True)
    weight = torch.tensor([[0.0, 1.0], [0.0, 2.0], [-1e30, 0.0]])
    logprobs, entropy = head_logprobs(hidden, weight, torch.tensor([1]), torch.ones(1))
    alone = torch.tensor([[1.0]], requires_grad=True)
    expected = head_logprobs(alone, weight[:2, 1:], torch.tensor([1]), torch.ones(1))
    assert (logprobs.item(), entropy.item()) == pytest.approx((expected[0].item(), expected[1].item()))
    [found] = torch.autograd.grad((logprobs + 3 * entropy).sum(), hidden)
    [slope] = torch.autograd.grad((expected[0] + 3 * expected[1]).sum(), alone)
    assert found.tolist() == [[0.0, pytest.approx(slope.item())]]


def test_on_a_gpu_logits_of_half_precision_are_not_rounded() -> None:
    with FakeTensorMode(), torch.no_grad():
        hidden, weight = (torch.empty(size, 4, dtype=torch.bfloat16, device="cuda") for size in (8, 16))
        assert _logits(hidden, weight, None, torch.float32).dtype == torch.float32


def test_hidden_states_that_are_no_numbers_are_not_passed_over() -> None:
    hidden = torch.tensor([[float("nan"), 1.0]])
    assert head_logprobs(hidden, torch.ones(3, 2), torch.tensor([1]), torch.ones(1))[0].isnan().all()
