"""Flat batches for worked examples. Every row begins with a prompt token, on which all fields hold garbage."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rayrft.algorithms import PolicyOutput, TokenBatch, chosen_logprobs

LOG2 = math.log(2.0)
Rows = list[list[float]]


def tokens(rows: Rows, prompt: float = math.nan) -> Tensor:
    """``[T]`` float64: each row's action tokens after its prompt token."""
    return torch.tensor([value for row in rows for value in (prompt, *row)], dtype=torch.float64)


def make_batch(
    behaviour: Rows, advantages: Rows | None = None, *, expert: list[bool] | None = None, **fields: Any
) -> Any:
    """A `TokenBatch` of these rows; further fields as lists of rows, or as tensors."""
    mask = torch.tensor([place > 0 for row in behaviour for place in range(len(row) + 1)])
    lengths = torch.tensor([len(row) + 1 for row in behaviour])
    return TokenBatch(
        mask=mask,
        sequence=torch.arange(len(behaviour)).repeat_interleave(lengths),
        behaviour_logprobs=tokens(behaviour),
        advantages=tokens(advantages if advantages is not None else [[0.0] * len(row) for row in behaviour]),
        expert=torch.tensor(expert if expert is not None else [False] * len(behaviour)),
        **{name: tokens(value) if isinstance(value, list) else value for name, value in fields.items()},
    )


def usual(behaviour: Rows, advantages: Rows | None = None, **fields: Any) -> TokenBatch:
    """Own rows as a piece sees them: zeros off the mask."""
    return make_batch(behaviour, advantages, **fields).usual()


def leaf(rows: Rows) -> Tensor:
    """Log-probs of the action tokens, 0 on prompts, that gather a gradient."""
    return tokens(rows, prompt=0.0).requires_grad_()


def output(logprobs: Tensor, entropy: Tensor | None = None, candidates: Tensor | None = None) -> PolicyOutput:
    return PolicyOutput(logprobs, torch.zeros_like(logprobs) if entropy is None else entropy, candidates)


def on_mask(values: Tensor, batch: TokenBatch) -> list[float]:
    """The values on action tokens, row after row."""
    return values[batch.mask].tolist()


def gradient(values: Tensor, logprobs: Tensor, batch: TokenBatch) -> list[float]:
    """Of the sum over action tokens, on each of them."""
    [found] = torch.autograd.grad(values[batch.mask].sum(), logprobs)
    assert (found[~batch.mask] == 0).all()
    return on_mask(found, batch)


def token_logprobs(logits: Tensor, token_ids: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    """Log-probs of tokens ``[B, T]`` given those before them, and entropies, by logits ``[B, T, V]``; first 0."""
    found = chosen_logprobs(logits[:, :-1], token_ids[:, 1:], **how)
    chosen, entropy = (torch.nn.functional.pad(each, (1, 0)) for each in found)
    return chosen, entropy
