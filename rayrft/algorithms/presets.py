"""Algorithms by name: which loss each row feeds, and what a batch must hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rayrft.algorithms.loss import Denominators, LossParts, TokenBatch, masked_sum
from rayrft.algorithms.policy_loss import clipped_policy_loss
from rayrft.algorithms.sft import sft_loss


@dataclass(frozen=True)
class Algorithm:
    """``loss = (1 - mu) * policy / policy_tokens + mu * sft / expert_tokens``.

    GRPO is ``mu = 0`` (own rows only), SFT is ``mu = 1`` (expert rows only), and MIX is what lies between: expert rows
    appear in the SFT term alone, own rows in the policy term alone (MIX as in Trinity-RFT, Pan et al. 2025,
    arXiv:2505.17826). A stream whose weight is 0 is left out altogether, so the ends are exact.
    """

    name: str
    mu: float
    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        if not 0.0 <= self.mu <= 1.0:
            raise ValueError(f"mu must lie in [0, 1], got {self.mu}")

    @property
    def needs_expert(self) -> bool:
        return self.mu > 0.0

    @property
    def needs_rollouts(self) -> bool:
        return self.mu < 1.0

    def loss(self, logprobs: Tensor, entropy: Tensor, batch: TokenBatch, over: Denominators) -> LossParts:
        """This micro-batch's share of the step's loss.

        logprobs ``[B, T]`` with gradient and entropy ``[B, T]`` without, both from `token_logprobs`. Parts of the
        micro-batches of all ranks add up to the loss of the step.
        """
        total = policy = sft = logprobs.sum() * 0.0
        sums: dict[str, Tensor] = {}
        if self.needs_rollouts:
            policy_sum, sums = clipped_policy_loss(logprobs, batch, clip_low=self.clip_low, clip_high=self.clip_high)
            sums["entropy"] = masked_sum(entropy, batch.policy_mask)
            policy = policy_sum / over.policy
            total = total + (1.0 - self.mu) * policy
        if self.needs_expert:
            sft = sft_loss(logprobs, batch) / over.expert
            total = total + self.mu * sft
        return LossParts(total, policy, sft, sums)


presets: dict[str, Callable[..., Algorithm]] = {
    "sft": lambda **pieces: Algorithm("sft", **{**pieces, "mu": 1.0}),
    "grpo": lambda **pieces: Algorithm("grpo", **{**pieces, "mu": 0.0}),
    "mix": lambda **pieces: Algorithm("mix", **{"mu": 0.1, **pieces}),
}
"""Preset name to constructor; keyword arguments override single pieces (``mu`` where the preset leaves it open)."""
