"""The language-model head without the logits: tokens x vocabulary never exists as a whole, in forward or backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_CUDA = 1024
_CHUNK_CPU = 256
_CHUNK_NUMBERS = 1 << 21
"""Logits of a chunk on CPUs, where ``_CHUNK_CPU`` tokens do not need more. Blocks of up to 32 MiB the allocator keeps;
greater ones go back to the system and are cleared page by page every time."""


def head_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, *, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy (nats) of the distribution it is drawn from, ``softmax(W h / T)``.

    hidden: ``[T, H]``, the states that predict; weight: ``[V, H]``; targets and temperature: ``[T]``. Returns two
    ``[T]`` tensors, float32 (float64 for such input), both with gradient. Logits are made for ``chunk`` tokens at a
    time (by default as many as are quick on the device) and made again in the backward pass, which costs one more
    product and saves ``2 T V`` numbers.

    With p = softmax(z): ``d log p_y / dz = onehot(y) - p`` and ``dH / dz = -p (log p + H)``. A gradient of the entropy
    costs only where something depends on it.
    """
    chunk = chunk or _chunk(hidden, len(weight))
    logprobs, entropy = _Head.apply(hidden, weight, targets, temperature, chunk)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy = (torch.empty(len(hidden), dtype=dtype, device=hidden.device) for _ in range(2))
        ctx.scaled = bool((temperature != 1).any())
        for part in _chunks(len(hidden), chunk):
            logp = _logits(ctx, hidden[part], weight, temperature[part], dtype).log_softmax(-1, dtype=dtype)
            logprobs[part] = logp.gather(-1, targets[part, None]).squeeze(-1)
            entropy[part] = -logp.exp().mul_(logp).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, temperature, entropy)
        ctx.set_materialize_grads(False)
        ctx.chunk = chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, entropy = ctx.saved_tensors
        dtype = entropy.dtype
        # By logits before the temperature. What has the shape of the logits is gone through as rarely as can be.
        by_logprobs = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs / temperature
        by_entropy = None if grad_entropy is None else grad_entropy / temperature
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(hidden), ctx.chunk):
            logits = _logits(ctx, hidden[part], weight, temperature[part], dtype)
            if by_entropy is None:
                slope = logits.softmax(-1, dtype=dtype).mul_(-by_logprobs[part, None])
            else:
                logp = logits.log_softmax(-1, dtype=dtype)
                p = logp.exp()
                slope = logp.add_(entropy[part, None]).mul_(-by_entropy[part, None])
                slope = slope.sub_(by_logprobs[part, None]).mul_(p)
            slope = slope.scatter_add_(-1, targets[part, None], by_logprobs[part, None]).to(hidden.dtype)
            grad_hidden[part] = slope @ weight
            if grad_weight is None:
                continue
            if grad_weight.dtype == slope.dtype:
                grad_weight.addmm_(slope.T, hidden[part])
            else:
                grad_weight += slope.T @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _logits(ctx: Any, hidden: Tensor, weight: Tensor, temperature: Tensor, dtype: torch.dtype) -> Tensor:
    logits = hidden @ weight.T
    return logits.to(dtype).div_(temperature[:, None]) if ctx.scaled else logits


def _chunk(hidden: Tensor, vocabulary: int) -> int:
    return _CHUNK_CUDA if hidden.is_cuda else max(_CHUNK_CPU, _CHUNK_NUMBERS // vocabulary)


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]
