"""The language-model head without the logits: tokens x vocabulary never exists as a whole, in forward or backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def head_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, *, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy (nats) of the distribution it is drawn from, ``softmax(W h / T)``.

    hidden: ``[T, H]``, the states that predict; weight: ``[V, H]``; temperature: ``[T]``; targets: ``[T]``, or
    ``[T, M]`` for several tokens in every place. Returns log-probs of the shape of the targets and ``[T]`` entropies,
    float32 (float64 for such input), both with gradient. Logits are made for ``chunk`` tokens at a time and made again
    in the backward pass, which costs one more product and saves ``2 T V`` numbers.

    With p = softmax(z): ``d log p_y / dz = onehot(y) - p`` and ``dH / dz = -p (log p + H)``. A gradient of the entropy
    costs only where something depends on it.
    """
    each = targets if targets.dim() == 2 else targets[:, None]
    logprobs, entropy = _Head.apply(hidden, weight, each, temperature, chunk)  # type: ignore[no-untyped-call]
    return logprobs.view_as(targets), entropy


@torch.no_grad()
def head_likeliest(
    hidden: Tensor, weight: Tensor, temperature: Tensor, count: int, among: int, *, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """The ``count`` likeliest of the first ``among`` tokens of the vocabulary, from the likeliest on.

    hidden, weight, temperature: as `head_logprobs` takes them. Returns ``[T, count]`` each: log-probs under the whole
    distribution, and ids (int64).
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logprobs = torch.empty(len(hidden), count, dtype=dtype, device=hidden.device)
    ids = torch.empty(len(hidden), count, dtype=torch.int64, device=hidden.device)
    for part in _chunks(len(hidden), chunk):
        logp = _log_softmax(hidden[part], weight, temperature[part], dtype)
        logprobs[part], ids[part] = logp[:, :among].topk(count)
    return logprobs, ids


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(targets.shape, dtype=dtype, device=hidden.device)
        entropy = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        for part in _chunks(len(hidden), chunk):
            logp = _log_softmax(hidden[part], weight, temperature[part], dtype)
            logprobs[part] = logp.gather(-1, targets[part])
            entropy[part] = -(logp.exp() * logp).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, temperature, entropy)
        ctx.set_materialize_grads(False)
        ctx.chunk = chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = entropy.new_zeros(targets.shape)
        total = grad_logprobs.sum(-1, keepdim=True)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=entropy.dtype) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(hidden), ctx.chunk):
            logp = _log_softmax(hidden[part], weight, temperature[part], entropy.dtype)
            if grad_entropy is None:
                slope = logp.exp_().mul_(-total[part])
            else:
                p = logp.exp()
                slope = logp.add_(entropy[part, None]).mul_(-grad_entropy[part, None])
                slope = slope.sub_(total[part]).mul_(p)
            slope.scatter_add_(-1, targets[part], grad_logprobs[part])
            by_logits = slope.div_(temperature[part, None]).to(hidden.dtype)
            grad_hidden[part] = by_logits @ weight
            if grad_weight is not None:
                grad_weight += by_logits.T @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: Tensor, dtype: torch.dtype) -> Tensor:
    return (hidden @ weight.T).to(dtype).div_(temperature[:, None]).log_softmax(-1)


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]
