"""Log-probabilities of given tokens under a model's logits."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = -1000.0
"""A log-prob whose probability is 0 in every precision: below it, entropies need not tell how far."""


def token_logprobs(
    logits: Tensor, token_ids: Tensor, *, temperature: float = 1.0, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token given those before it, and the entropy it was drawn with.

    logits: ``[B, T, V]``; token_ids: ``[B, T]``. Returns two ``[B, T]`` tensors: entry t belongs to token t, which
    logits t - 1 predict; entry 0 is 0, for nothing predicts the first token. For the rest see `chosen_logprobs`.
    """
    chosen, entropy = chosen_logprobs(
        logits[:, :-1], token_ids[:, 1:], temperature=temperature, entropy_gradient=entropy_gradient
    )
    first = chosen.new_zeros(chosen.shape[0], 1)
    return torch.cat([first, chosen], 1), torch.cat([first, entropy], 1)


def chosen_logprobs(
    logits: Tensor, targets: Tensor, *, temperature: float | Tensor = 1.0, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under its logits, and the entropy (nats) of the distribution it is drawn from.

    logits: ``[..., V]``; targets: ``[...]``, or ``[..., M]`` for several tokens in every place. Returns log-probs of
    the shape of the targets and ``[...]`` entropies, float32 or, for such logits, float64. The entropy carries a
    gradient only where it is asked for. ``temperature`` (a number, or one for each token: ``[..., 1]``) divides the
    logits, as the sampler did.
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logprobs = scaled.log_softmax(-1)
    each = targets if targets.dim() == logits.dim() else targets[..., None]
    chosen = logprobs.gather(-1, each).view(targets.shape)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # p log p = 0 where p = 0: of a logit of -inf, too, and with gradient 0.
        entropy = -(logprobs.exp() * logprobs.clamp(min=LEAST)).sum(-1)
    return chosen, entropy
