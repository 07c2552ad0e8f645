"""Log-probabilities of given tokens under a model's logits."""

from __future__ import annotations

import torch
from torch import Tensor

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
