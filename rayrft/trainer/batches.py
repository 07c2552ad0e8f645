"""From leased rows to the micro-batches of one optimiser step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rayrft.algorithms import TokenBatch
from rayrft.buffer.experience import list_column, unpack
from rayrft.buffer.lease import BatchShare


@dataclass(frozen=True)
class TrainRow:
    """What the losses need of an experience; arrays of shape ``[T]``."""

    token_ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    expert: bool


def fetch_rows(share: BatchShare) -> list[TrainRow]:
    """Read a rank's share out of the object store, without copying what shared memory holds."""
    import ray

    messages: list[pa.Buffer] = ray.get([part.ref for part in share.parts])
    return [
        row
        for message, part in zip(messages, share.parts, strict=True)
        for row in read_rows(unpack(message), part.rows, part.weights)
    ]


def read_rows(batch: pa.RecordBatch, indices: np.ndarray, weights: np.ndarray) -> list[TrainRow]:
    """The rows of these indices; expert rows have no advantages and get zeros.

    A row's importance weight goes into its advantages: every policy loss is homogeneous in them.
    """
    tokens, masks, logprobs, advantages = (
        list_column(batch.column(name), indices) for name in ("token_ids", "action_mask", "logprobs", "advantages")
    )
    sources = batch.column("source").take(pa.array(indices)).to_pylist()
    rows = []
    for place, weight in enumerate(weights):
        token_ids, mask, behaviour = tokens[place], masks[place], logprobs[place]
        assert token_ids is not None and mask is not None and behaviour is not None  # not nullable in the schema
        advantage = advantages[place]
        advantage = np.zeros(len(token_ids), dtype=np.float32) if advantage is None else advantage * weight
        rows.append(TrainRow(token_ids, mask, behaviour, advantage, sources[place] == "expert"))
    return rows


def micro_batches(rows: list[TrainRow], max_tokens: int, device: torch.device) -> list[TokenBatch]:
    """Right-padded micro-batches of at most ``max_tokens`` tokens, padding included; a longer row stands alone.

    Rows of similar length go together, so that little is padding; the result does not depend on their order.
    """
    rows = sorted(rows, key=lambda row: len(row.token_ids))
    groups: list[list[TrainRow]] = []
    for row in rows:
        if not groups or (len(groups[-1]) + 1) * len(row.token_ids) > max_tokens:
            groups.append([])
        groups[-1].append(row)
    return [_pad(group, device) for group in groups]


def empty_batch(device: torch.device) -> TokenBatch:
    """A micro-batch of nothing, for a rank that has fewer than the others: collectives need every rank."""
    zeros = np.zeros(2, dtype=np.float32)
    return _pad([TrainRow(zeros.astype(np.int32), zeros, zeros, zeros, expert=False)], device)


def _pad(rows: list[TrainRow], device: torch.device) -> TokenBatch:
    width = max(len(row.token_ids) for row in rows)

    def stack(name: str, dtype: torch.dtype) -> Tensor:
        padded = torch.zeros(len(rows), width, dtype=dtype)
        for index, row in enumerate(rows):
            values = getattr(row, name)
            padded[index, : len(values)] = torch.from_numpy(np.array(values)).to(dtype)
        return padded.to(device)

    return TokenBatch(
        token_ids=stack("token_ids", torch.int64),
        mask=stack("mask", torch.float32),
        behaviour_logprobs=stack("logprobs", torch.float32),
        advantages=stack("advantages", torch.float32),
        expert=torch.tensor([row.expert for row in rows], device=device),
    )
