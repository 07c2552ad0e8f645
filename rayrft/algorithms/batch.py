"""What goes into a loss: the tokens of one micro-batch, flat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """T tokens of N whole rows. Per-token fields have shape ``[T]``, per-row fields ``[N]``.

    ``sequence`` is the row of each token, 0 to N - 1; the tokens of a row stand in their order, and whether rows were
    padded or packed for the forward pass leaves no trace here. ``mask`` is True on the tokens that the policy or the
    expert produced; elsewhere (prompts, observations, padding) every other per-token field may hold anything.

    ``expert`` sends a row to the SFT stream, and ``pair`` >= 0 (with its partner in the same micro-batch) to the
    preference stream; the others are own rows. Log-probs are in nats. What is None was not asked for by the algorithm.
    """

    mask: Tensor
    sequence: Tensor
    behaviour_logprobs: Tensor
    """Of the policy that sampled the token, as the sampler gave it; expert rows hold zeros."""
    advantages: Tensor
    expert: Tensor

    weight: Tensor | None = None
    """``[N]``: importance weight of a row that was not drawn uniformly; it multiplies every loss of own rows, the
    critic's too."""
    reward: Tensor | None = None
    """``[N]``"""
    pair: Tensor | None = None
    """``[N]`` int64: number of the preference pair, 0 to P - 1; -1 for a row in none."""
    chosen: Tensor | None = None
    """``[N]`` bool: the preferred row of its pair."""

    proximal_logprobs: Tensor | None = None
    """Of the trainer's own policy before the first update on this batch ("old" log-probs)."""
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    teacher_candidates: Tensor | None = None
    """``[T, K]``: the teacher's log-probs of its K likeliest tokens, or of the whole vocabulary."""
    values: Tensor | None = None
    """The critic's values before the first update on this batch: of the state in which each token was chosen."""
    returns: Tensor | None = None

    @property
    def rows(self) -> int:
        """N"""
        return self.expert.shape[0]

    @property
    def old_logprobs(self) -> Tensor:
        """What ratios are taken to: the proximal policy where there is one, else the behaviour policy."""
        return self.behaviour_logprobs if self.proximal_logprobs is None else self.proximal_logprobs

    @property
    def paired(self) -> Tensor:
        """``[N]`` bool: rows of the preference stream."""
        return torch.zeros_like(self.expert) if self.pair is None else self.pair >= 0

    @property
    def lengths(self) -> Tensor:
        """``[N]``: masked-in tokens of each row."""
        return self.sum(torch.ones_like(self.advantages))

    def own(self) -> Self:
        """The RL stream: rows that are neither an expert's nor in a pair."""
        return self.only(~self.expert & ~self.paired)

    def demonstrated(self) -> Self:
        """The SFT stream."""
        return self.only(self.expert & ~self.paired)

    def only(self, rows: Tensor) -> Self:
        """This batch with no token but those of ``rows`` (``[N]`` bool) masked in, and zeros in every per-token field
        elsewhere: pieces see no garbage, and none can reach a loss or a gradient."""
        mask = self.mask & rows[self.sequence]
        fields = {name: getattr(self, name) for name in _PER_TOKEN}
        return replace(
            self, mask=mask, **{name: keep(value, mask) for name, value in fields.items() if value is not None}
        )

    def sum(self, values: Tensor) -> Tensor:
        """``[T]`` to ``[N]``: the sum over each row's masked-in tokens."""
        return values.new_zeros(self.rows).index_add(0, self.sequence, keep(values, self.mask))

    def mean(self, values: Tensor) -> Tensor:
        """``[T]`` to ``[N]``: the mean over each row's masked-in tokens; 0 for a row without any."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """``[N]`` to ``[T]``: each token gets its row's value."""
        return values[self.sequence]

    def weighed(self, values: Tensor) -> Tensor:
        """``[T]``: losses of tokens, times the importance weights of their rows."""
        return values if self.weight is None else values * self.spread(self.weight)


_PER_TOKEN = (
    "behaviour_logprobs",
    "advantages",
    "proximal_logprobs",
    "reference_logprobs",
    "teacher_logprobs",
    "teacher_candidates",
    "values",
    "returns",
)


@dataclass(frozen=True)
class PolicyOutput:
    """What the policy's forward pass says of the T tokens of a batch.

    ``logprobs`` ``[T]`` carries the gradient; ``entropy`` ``[T]`` (nats) does where the algorithm has an entropy term.
    ``candidates`` ``[T, K]``, with gradient, are log-probs of the teacher's candidate tokens, where it compares them.
    """

    logprobs: Tensor
    entropy: Tensor
    candidates: Tensor | None = None

    def only(self, mask: Tensor) -> Self:
        """Zeros outside the mask, and no gradient there."""
        candidates = None if self.candidates is None else keep(self.candidates, mask)
        return type(self)(keep(self.logprobs, mask), keep(self.entropy, mask), candidates)


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` (``[T]`` or ``[T, K]``) where the mask is True and 0 elsewhere, whatever stood there: no product with
    the mask, for infinity times 0 is not a number."""
    mask = mask if values.dim() == mask.dim() else mask[:, None]
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))
