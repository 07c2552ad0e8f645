"""How much likelier the policy makes what was sampled than the policy before it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rayrft.algorithms.batch import TokenBatch
from rayrft.algorithms.pieces import Pieces

LOG_BOUND = 20.0
"""Log-ratios are cut to +-20, as in verl: exp(20) = 5e8 does not overflow. Where the cut binds, losses that have the
ratio's gradient have none; those that have the ratio as a weight (`cispo`, `topr`, corrections) keep theirs."""


@dataclass(frozen=True)
class TokenLoss:
    """A policy loss: ``values`` ``[T]``, and on which tokens (``[T]`` bool) it binds the ratio, for the metrics.

    A loss of whole answers stands on every action token of its row, and is registered with the trait of this name: its
    aggregation is ``sequence_mean_token_mean``, which makes it the mean over answers.
    """

    values: Tensor
    clipped: Tensor | None = None


class PolicyLoss(Protocol):
    """``logprobs`` ``[T]`` with gradient and the own rows of a batch, both zero off the mask, to a loss per token."""

    def __call__(self, logprobs: Tensor, batch: TokenBatch, /) -> TokenLoss: ...


policy_losses: Pieces[PolicyLoss] = Pieces("policy_loss")


def bounded(exponent: Tensor) -> Tensor:
    """Cut to +-`LOG_BOUND`."""
    return exponent.clamp(-LOG_BOUND, LOG_BOUND)


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """``[T]``: ``log pi_new(y_t) - log pi_old(y_t)``, cut to +-`LOG_BOUND`."""
    return bounded(new - old)


def token_ratio(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """``[T]``: ``rho_t = pi(y_t | x, y_<t) / pi_old(y_t | x, y_<t)``.

    The old policy is the one that sampled the token, however many versions ago, unless the batch carries log-probs of
    a proximal one.
    """
    return log_ratio(logprobs, batch.old_logprobs).exp()


def sequence_log_ratio(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """``[N]``: ``log pi(y) - log pi_old(y)``, the sum over a row's action tokens."""
    return batch.sum(log_ratio(logprobs, batch.old_logprobs))
