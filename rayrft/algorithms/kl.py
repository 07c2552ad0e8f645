"""Terms that keep the policy near a reference, and exploring: estimates of its KL, and entropies.

Estimates of ``KL(pi || pi_ref)`` are from sampled tokens (Schulman 2020, "Approximating KL divergence").

With ``d_t = log pi(y_t) - log pi_ref(y_t)``, clamped to +-20, an estimate is ``[T]`` nats per token. As values, k1 and
k3 are unbiased if the policy sampled the tokens, and k2 nearly so if the policies are close. As losses their gradients
matter. That of k2 is unbiased. That of k1 is 0 on average: use it in the reward, or straight through. That of k3 is the
gradient of the other direction, ``KL(pi_ref || pi)``. Straight-through variants (``_st``) have the value of their name
and the gradient of k2. If another policy sampled the tokens, all are biased but `k3_unbiased`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rayrft.algorithms.pieces import AboveOne, NonNegative, Pieces
from rayrft.algorithms.ratios import log_ratio

K3_BOUND = 10.0
"""Nats at which the value of k3 is clamped, as in verl: reached when the policy finds a token e^2.6 times less likely
than the reference. Beyond that its gradient, ``1 - exp(-d)``, would let a single token dominate the step."""


KL = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From the log-probs of the policy (with gradient), the reference and the behaviour policy, which sampled the tokens,
``[T]`` each, to estimates ``[T]``."""

EntropyTerm = Callable[[Tensor], Tensor]
"""From the entropy ``[T]`` (nats, with gradient) at action tokens of usual rows to a loss per token. It keeps the
policy exploring."""

kls: Pieces[KL] = Pieces("kl")
entropies: Pieces[EntropyTerm] = Pieces("entropy")


@kls.register("k1", needs=["reference"], traits=["no_gradient"])
def k1(logprobs: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """``d``: unbiased, of high variance, often negative."""
    return log_ratio(logprobs, reference)


@kls.register("k2", needs=["reference"])
def k2(logprobs: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """``d^2 / 2``: never negative, biased by the third order of d; its gradient ``d grad log pi`` is unbiased."""
    return 0.5 * log_ratio(logprobs, reference).square()


@kls.register("k3", needs=["reference"])
def k3(logprobs: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """``exp(-d) - 1 + d``: unbiased and never negative; GRPO's (Shao et al. 2024, arXiv:2402.03300, eq. 4). Clamped at
    `K3_BOUND`, beyond which its gradient is 0; `k3_st` keeps one."""
    d = log_ratio(logprobs, reference)
    return ((-d).expm1() + d).clamp(max=K3_BOUND)


@kls.register("k1_st", needs=["reference"])
def k1_st(logprobs: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """The value of k1 with the gradient of k2."""
    return straight_through(k1(logprobs, reference, behaviour), k2(logprobs, reference, behaviour))


@kls.register("k3_st", needs=["reference"])
def k3_st(logprobs: Tensor, reference: Tensor, behaviour: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2 (verl's ``k3+``)."""
    return straight_through(k3(logprobs, reference, behaviour), k2(logprobs, reference, behaviour))


@kls.register("k3_unbiased", needs=["reference"])
def k3_unbiased(
    logprobs: Tensor, reference: Tensor, behaviour: Tensor, *, kl_ratio_cap: AboveOne | None = None
) -> Tensor:
    """``rho k3`` with ``rho = pi(y_t) / pi_behaviour(y_t)``, which carries a gradient too (DeepSeek-V3.2, DeepSeek-AI
    2025, arXiv:2512.02556, sec. 3.1; TRL's ``use_bias_correction_kl``).

    At every visited state both value and gradient are unbiased for ``KL(pi || pi_ref)``, also off-policy, while neither
    `K3_BOUND` nor ``kl_ratio_cap`` c binds: ``min(rho, c)`` bounds the variance, and is not in the paper.
    """
    rho = log_ratio(logprobs, behaviour).exp()
    rho = rho if kl_ratio_cap is None else rho.clamp(max=kl_ratio_cap)
    return rho * k3(logprobs, reference, behaviour)


def straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    """Combine the value of one tensor with the gradient of the other."""
    return value.detach() + gradient - gradient.detach()


@entropies.register("bonus")
def bonus(entropy: Tensor) -> Tensor:
    """``-H_t``: an unbounded bonus on every token (Mnih et al. 2016, arXiv:1602.01783)."""
    return -entropy


@entropies.register("target")
def target(entropy: Tensor, *, entropy_target: NonNegative = 0.2) -> Tensor:
    """``max(0, entropy_target - H_t)``: a bonus only for tokens below the target. Per token and not on the mean, so
    that the loss does not depend on the micro-batch split."""
    return (entropy_target - entropy).clamp(min=0)
