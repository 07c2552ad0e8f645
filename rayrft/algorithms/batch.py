"""Inputs of losses: the tokens of one micro-batch, flat, and their log-probs under a model's logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """T tokens of N whole rows. Per-token fields have shape ``[T]``, per-row fields ``[N]``.

    ``sequence`` is the row of every token, 0 to N - 1; tokens of a row are in order. The layout is the same for padded
    and packed forward passes. ``mask`` is True on the tokens that the policy or the expert produced; elsewhere
    (prompts, observations, padding) the other per-token fields are undefined.

    ``expert`` puts a row into the SFT stream, and ``pairs`` puts it into the preference stream; all others are usual
    rows, sampled by the policy. Log-probs are in nats. Fields that the algorithm does not need are None.

    No loss waits for a GPU: shapes of results never depend on values.
    """

    mask: Tensor
    sequence: Tensor
    behaviour_logprobs: Tensor
    """Log-probs under the policy that sampled the token, as reported by the sampler; zeros in expert rows."""
    advantages: Tensor
    expert: Tensor

    weight: Tensor | None = None
    """``[N]``: weight of a row, such as the importance weight of one that was not drawn uniformly; it multiplies every
    loss of usual rows, also the critic's, and that of demonstrated tokens."""
    reward: Tensor | None = None
    """``[N]``"""
    turn_rewards: Tensor | None = None
    """Rewards of turns, and of steps inside them, each on the last token of its turn or step, besides the row's own."""
    truncated: Tensor | None = None
    """``[N]`` bool: answers that were cut for their length."""
    pairs: Tensor | None = None
    """``[2, P]`` int64: the chosen and the rejected row of every preference pair; see `preference.rows_by_pair`."""
    chosen: Tensor | None = None
    """``[N]`` bool: the preferred row of its pair; of labelled rows, the good ones."""
    margin: Tensor | None = None
    """``[N]``: by how much the chosen row of a pair is the better one, for reward models; 0 if that is not known."""

    proximal_logprobs: Tensor | None = None
    """Log-probs under the trainer's policy before the first update on this batch ("old" log-probs)."""
    reference_logprobs: Tensor | None = None
    reference_kl: Tensor | None = None
    """``[N]``, all equal: the policy's mean KL from the reference in this update, at least 0; see `unpaired.kto`."""
    teacher_logprobs: Tensor | None = None
    teacher_candidates: Tensor | None = None
    """``[T, K]``: the teacher's log-probs of its K most likely tokens, or of the whole vocabulary."""
    values: Tensor | None = None
    """The critic's values, before the first update on this batch, of the state before the token."""
    final_values: Tensor | None = None
    """``[N]``: the critic's values of the states in which truncated answers were cut; 0 for others."""
    returns: Tensor | None = None

    @property
    def rows(self) -> int:
        """N"""
        return self.expert.shape[0]

    @property
    def old_logprobs(self) -> Tensor:
        """Denominator of ratios: the proximal policy if the batch has it, else the behaviour policy."""
        return self.behaviour_logprobs if self.proximal_logprobs is None else self.proximal_logprobs

    @property
    def paired(self) -> Tensor:
        """``[N]`` bool: rows of the preference stream."""
        none = torch.zeros_like(self.expert)
        return none if self.pairs is None else none.index_fill(0, self.pairs.flatten(), True)

    @property
    def lengths(self) -> Tensor:
        """``[N]``: number of masked-in tokens by row."""
        return self.sum(torch.ones_like(self.advantages))

    def usual(self) -> Self:
        """Return the RL stream: rows that are neither demonstrations nor in a pair."""
        return self.only(~self.expert & ~self.paired)

    def demonstrated(self) -> Self:
        """Return the SFT stream: demonstrations."""
        return self.only(self.expert & ~self.paired)

    def only(self, rows: Tensor) -> Self:
        """Return the batch with only the tokens of ``rows`` (``[N]`` bool) masked in, and zeros in per-token fields
        elsewhere, so that undefined values reach no loss or gradient."""
        mask = self.mask & rows[self.sequence]
        fields = {name: getattr(self, name) for name in PER_TOKEN}
        return replace(
            self, mask=mask, **{name: keep(value, mask) for name, value in fields.items() if value is not None}
        )

    def sum(self, values: Tensor) -> Tensor:
        """Sum ``[T]`` over the masked-in tokens of a row, to ``[N]``."""
        return values.new_zeros(self.rows).index_add(0, self.sequence, keep(values, self.mask))

    def mean(self, values: Tensor) -> Tensor:
        """Average ``[T]`` over the masked-in tokens of a row, to ``[N]``; 0 for a row without any."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """Repeat the values of rows, ``[N]``, on their tokens, ``[T]``."""
        return values[self.sequence]

    def weighted(self, values: Tensor) -> Tensor:
        """Multiply per-token losses ``[T]`` by the weights of their rows."""
        return values if self.weight is None else values * self.spread(self.weight)


PER_TOKEN = (
    "behaviour_logprobs", "advantages", "turn_rewards", "proximal_logprobs", "reference_logprobs", "teacher_logprobs",
    "teacher_candidates", "values", "returns",
)  # fmt: skip
"""Fields of a `TokenBatch` of shape ``[T]`` or ``[T, K]`` that are undefined off the mask."""


@dataclass(frozen=True)
class PolicyOutput:
    """The policy's forward pass on the T tokens of a batch.

    ``logprobs`` ``[T]`` carries the gradient; ``entropy`` ``[T]`` (nats) does if the algorithm has an entropy term.
    ``candidates`` ``[T, K]``, with gradient, are log-probs of the teacher's candidate tokens, if it compares them.
    """

    logprobs: Tensor
    entropy: Tensor
    candidates: Tensor | None = None
    balance: Tensor | None = None
    """The loss that balances the load of experts, if it has a weight."""

    def only(self, mask: Tensor) -> Self:
        """Set values and gradients outside the mask to zero."""
        candidates = None if self.candidates is None else keep(self.candidates, mask)
        return type(self)(keep(self.logprobs, mask), keep(self.entropy, mask), candidates, self.balance)


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` (``[T]`` or ``[T, K]``) where the mask is True, else 0. Not a product with the mask, because
    infinity times 0 is NaN."""
    mask = mask if values.dim() == mask.dim() else mask[:, None]
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


MIN_LOGPROB = -1000.0
"""A log-prob whose probability is 0 in every precision: entropies clamp to it, so that -inf does not give NaN."""


def chosen_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float | Tensor = 1.0, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities of targets under their logits, and the entropy (nats) of the distributions.

    logits: ``[..., V]``; targets: ``[...]``, or ``[..., M]`` for several tokens per position. Returns log-probs of the
    shape of the targets and ``[...]`` entropies, float32 (float64 for such logits). The entropy has a gradient only
    with ``entropy_gradient``. ``temperature`` (a number, or per token ``[..., 1]``) divides the logits, as in the
    sampler.
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logprobs = scaled.log_softmax(-1)
    columns = targets if targets.dim() == logits.dim() else targets[..., None]
    chosen = logprobs.gather(-1, columns).view(targets.shape)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # p log p = 0 where p = 0, with gradient 0, also for a logit of -inf.
        entropy = -(logprobs.exp() * logprobs.clamp(min=MIN_LOGPROB)).sum(-1)
    return chosen, entropy
