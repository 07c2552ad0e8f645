"""What goes into a loss and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch of right-padded rows; every field but ``expert`` has shape ``[B, T]``.

    ``mask`` is 1 on tokens that the policy (or the expert) produced and 0 on prompts, observations and padding.
    ``expert``, ``[B]`` of bool, sends a row to the SFT stream; the other rows form the RL stream.
    ``behaviour_logprobs`` are those of the policy that sampled the tokens; expert rows hold zeros there.
    """

    token_ids: Tensor
    mask: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    expert: Tensor

    @property
    def policy_mask(self) -> Tensor:
        """``[B, T]``: action tokens of the RL stream."""
        return self.mask * (~self.expert)[:, None]

    @property
    def expert_mask(self) -> Tensor:
        """``[B, T]``: demonstrated tokens of the SFT stream."""
        return self.mask * self.expert[:, None]


@dataclass(frozen=True)
class Denominators:
    """Action tokens of each stream over all ranks and micro-batches of one optimiser step, counted before the first
    backward pass. A stream without tokens contributes nothing, so its denominator is taken as 1.
    """

    policy_tokens: float
    expert_tokens: float

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) < 0:
                raise ValueError(f"{each.name} must not be negative, got {getattr(self, each.name)}")

    @property
    def policy(self) -> float:
        return self.policy_tokens or 1.0

    @property
    def expert(self) -> float:
        return self.expert_tokens or 1.0


@dataclass
class LossParts:
    """A micro-batch's share of the step's loss, and the sums that the step's metrics are made of.

    ``loss`` carries the gradient; ``policy`` and ``sft`` are the unweighted streams (each already over its own global
    denominator); ``sums`` are masked sums over RL tokens, to be divided by ``Denominators.policy`` once added up.
    """

    loss: Tensor
    policy: Tensor
    sft: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)

    def detached(self) -> Self:
        parts = {name: value.detach() for name, value in self.sums.items()}
        return type(self)(self.loss.detach(), self.policy.detach(), self.sft.detach(), parts)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of ``values`` where ``mask`` is 1; masked-out entries may be anything, even infinite."""
    return torch.where(mask.bool(), values, torch.zeros_like(values)).sum()
