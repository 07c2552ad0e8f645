"""Chunked language-model head: the tokens x vocabulary logits never exist as a whole, in forward or backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rayrft.algorithms.batch import MIN_LOGPROB

LOGITS = 3
"""Chunks of logits in float32 that exist at once: logits, their softmax, and a gradient."""

_SHARE = 1 / 40
"""Share of a GPU's memory for these. It is of all memory, not of what is free: that differs from step to step."""

_CHUNK_CPU = 256
_CHUNK_NUMBERS = 1 << 21
"""Logits of a chunk on CPUs, unless ``_CHUNK_CPU`` tokens need more. The allocator keeps blocks of up to 32 MiB; larger
ones return to the system and are zeroed page by page every time."""


def head_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None, *, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the targets' log-probabilities and the entropy (nats) under ``softmax(W h / T)``.

    hidden: ``[T, H]``, the states that predict; weight: ``[V, H]``; temperature: ``[T]``, or None for 1; targets:
    ``[T]``, or ``[T, M]`` for several tokens per position. Returns log-probs of the shape of the targets and ``[T]``
    entropies, float32 (float64 for such input), both with gradient. Logits are computed for ``chunk`` tokens at a time
    (by default as many as suit the device) and recomputed in the backward pass, which costs one more product and
    saves ``2 T V`` numbers.

    With p = softmax(z): ``d log p_y / dz = onehot(y) - p`` and ``dH / dz = -p (log p + H)``, computed only if needed.
    """
    columns = targets if targets.dim() == 2 else targets[:, None]
    chunk = chunk or _chunk(hidden, len(weight))
    logprobs, entropy = _Head.apply(hidden, weight, columns, temperature, chunk)  # type: ignore[no-untyped-call]
    return logprobs.view_as(targets), entropy


@torch.no_grad()
def head_top_logprobs(
    hidden: Tensor, weight: Tensor, temperature: Tensor | None, k: int, vocabulary: int, *, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` most likely of the first ``vocabulary`` tokens, most likely first.

    hidden, weight, temperature: as in `head_logprobs`. Returns ``[T, k]`` log-probs, of all tokens, and ids (int64).
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logprobs = torch.empty(len(hidden), k, dtype=dtype, device=hidden.device)
    ids = torch.empty(len(hidden), k, dtype=torch.int64, device=hidden.device)
    for part in _chunks(len(hidden), chunk or _chunk(hidden, len(weight))):
        logp = head_logits(hidden[part], weight, _part(temperature, part), dtype).log_softmax(-1, dtype=dtype)
        logprobs[part], ids[part] = logp[:, :vocabulary].topk(k)
    return logprobs, ids


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor | None, chunk: int
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(targets.shape, dtype=dtype, device=hidden.device)
        entropy = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        for part in _chunks(len(hidden), chunk):
            logp = head_logits(hidden[part], weight, _part(temperature, part), dtype).log_softmax(-1, dtype=dtype)
            logprobs[part] = logp.gather(-1, targets[part])
            # nansum: p log p = 0 where p = 0. Any other NaN also shows in the log-prob.
            entropy[part] = -logp.exp().mul_(logp).nansum(-1)
        ctx.save_for_backward(hidden, weight, targets, temperature, entropy)
        ctx.set_materialize_grads(False)
        ctx.chunk = chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperature, entropy = ctx.saved_tensors
        dtype = entropy.dtype
        if grad_logprobs is None:
            grad_logprobs = entropy.new_zeros(targets.shape)
        # Gradients by logits before the temperature. Logit-sized tensors are traversed as rarely as possible.
        by_logprobs = grad_logprobs if temperature is None else grad_logprobs / temperature[:, None]
        total = by_logprobs.sum(-1, keepdim=True)
        by_entropy = None if grad_entropy is None else grad_entropy[:, None]
        if by_entropy is not None and temperature is not None:
            by_entropy = by_entropy / temperature[:, None]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        for part in _chunks(len(hidden), ctx.chunk):
            logits = head_logits(hidden[part], weight, _part(temperature, part), dtype)
            if by_entropy is None:
                slope = logits.softmax(-1, dtype=dtype).mul_(-total[part])
            else:
                logp = logits.log_softmax(-1, dtype=dtype)
                p = logp.exp()
                slope = logp.clamp_(min=MIN_LOGPROB).add_(entropy[part, None]).mul_(-by_entropy[part])
                slope = slope.sub_(total[part]).mul_(p)
            slope = slope.scatter_add_(-1, targets[part], by_logprobs[part]).to(hidden.dtype)
            grad_hidden[part] = slope @ weight
            if grad_weight is None:
                continue
            if grad_weight.dtype == slope.dtype:
                grad_weight.addmm_(slope.T, hidden[part])
            else:
                grad_weight += slope.T @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def head_logits(hidden: Tensor, weight: Tensor, temperature: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute ``[T, V]`` logits. On a GPU half-precision products keep their float32 accumulators: rounded to bfloat16,
    a logit of 16 is off by up to 1/16 nat, which is most of the gap between engine and trainer."""
    rounds = hidden.is_cuda and hidden.dtype != dtype
    logits = torch.mm(hidden, weight.T, out_dtype=dtype) if rounds else hidden @ weight.T
    return logits if temperature is None else logits.to(dtype).div_(temperature[:, None])


def _part(temperature: Tensor | None, part: slice) -> Tensor | None:
    return None if temperature is None else temperature[part]


def chunk_tokens(vocabulary: int, gpu_bytes: float) -> int:
    """Return the tokens of a chunk on a GPU with so much memory: a multiple of 128, at most 8,192. On 80 GB they are
    1,024 for a vocabulary of 151,936."""
    fitting = int(gpu_bytes * _SHARE / (LOGITS * 4 * vocabulary))
    return min(max(fitting // 128, 1) * 128, 8192)


def _chunk(hidden: Tensor, vocabulary: int) -> int:
    if hidden.is_cuda:
        return chunk_tokens(vocabulary, torch.cuda.get_device_properties(hidden.device).total_memory)
    return max(_CHUNK_CPU, _CHUNK_NUMBERS // vocabulary)


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]
