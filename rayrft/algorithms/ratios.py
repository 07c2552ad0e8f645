"""Probability ratios of sampled tokens between the present and the old policy, and the registry of policy losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rayrft.algorithms.batch import TokenBatch
from rayrft.algorithms.pieces import Pieces

LOG_BOUND = 20.0
"""Log-ratios are clamped to +-20, as in verl: exp(20) = 5e8 does not overflow. Beyond, losses that differentiate the
ratio have no gradient; those that use it as a weight (`cispo`, `topr`, corrections) keep theirs."""


@dataclass(frozen=True)
class TokenLoss:
    """The result of a policy loss: ``values`` ``[T]``, and for the metrics the tokens (``[T]`` bool) with bound ratio.

    A loss of whole answers repeats its value on every action token of its row, and is registered with the trait
    ``whole_answers``: its aggregation ``sequence_mean_token_mean`` makes it the mean over answers.
    """

    values: Tensor
    clipped: Tensor | None = None


PolicyLoss = Callable[[Tensor, TokenBatch], TokenLoss]
"""From ``logprobs`` ``[T]`` with gradient and a batch's usual rows, zero off the mask, to token losses."""

policy_losses: Pieces[PolicyLoss] = Pieces("policy_loss")


def bounded(exponent: Tensor) -> Tensor:
    """Clamp to +-`LOG_BOUND`."""
    return exponent.clamp(-LOG_BOUND, LOG_BOUND)


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """Compute ``log pi_new(y_t) - log pi_old(y_t)``, ``[T]``, clamped to +-`LOG_BOUND`."""
    return bounded(new - old)


def token_ratio(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """Compute ``rho_t = pi(y_t | x, y_<t) / pi_old(y_t | x, y_<t)``, ``[T]``.

    The old policy is the proximal one if the batch has its log-probs, else the behaviour policy of the token's version.
    """
    return log_ratio(logprobs, batch.old_logprobs).exp()


def sequence_log_ratio(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """Compute ``log pi(y) - log pi_old(y)``, ``[N]``, the sum over a row's action tokens."""
    return batch.sum(log_ratio(logprobs, batch.old_logprobs))
