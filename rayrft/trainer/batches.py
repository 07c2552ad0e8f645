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
    """What the losses need of an experience; arrays of shape ``[T]``. ``weight`` is its importance weight."""

    token_ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    expert: bool
    weight: float = 1.0


@dataclass(frozen=True)
class MicroBatch:
    """Rows as the forward pass takes them, and their tokens as the losses do.

    ``token_ids`` ``[B, W]`` are right-padded rows, and ``present`` ``[B, W]`` is True on their T real tokens, which
    ``tokens`` holds flat, row after row.
    """

    token_ids: Tensor
    present: Tensor
    tokens: TokenBatch


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
    """The rows of these indices with their importance weights; expert rows have no advantages and get zeros."""
    tokens, masks, logprobs, advantages = (
        list_column(batch.column(name), indices) for name in ("token_ids", "action_mask", "logprobs", "advantages")
    )
    sources = batch.column("source").take(pa.array(indices)).to_pylist()
    rows = []
    for place, weight in enumerate(weights):
        token_ids, mask, behaviour = tokens[place], masks[place], logprobs[place]
        assert token_ids is not None and mask is not None and behaviour is not None  # not nullable in the schema
        advantage = advantages[place]
        advantage = np.zeros(len(token_ids), dtype=np.float32) if advantage is None else advantage
        rows.append(TrainRow(token_ids, mask, behaviour, advantage, sources[place] == "expert", float(weight)))
    return rows


def micro_batches(rows: list[TrainRow], max_tokens: int, device: torch.device) -> list[MicroBatch]:
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


def empty_batch(device: torch.device) -> MicroBatch:
    """A micro-batch of nothing, for a rank that has fewer than the others: collectives need every rank."""
    zeros = np.zeros(2, dtype=np.float32)
    return _pad([TrainRow(zeros.astype(np.int32), zeros, zeros, zeros, expert=False)], device)


def _pad(rows: list[TrainRow], device: torch.device) -> MicroBatch:
    lengths = torch.tensor([len(row.token_ids) for row in rows])
    present = torch.arange(int(lengths.max())) < lengths[:, None]
    token_ids = torch.zeros(present.shape, dtype=torch.int64)
    token_ids[present] = _flat([row.token_ids for row in rows]).to(torch.int64)
    tokens = TokenBatch(
        mask=_flat([row.mask for row in rows]).bool().to(device),
        sequence=torch.arange(len(rows)).repeat_interleave(lengths).to(device),
        behaviour_logprobs=_flat([row.logprobs for row in rows]).float().to(device),
        advantages=_flat([row.advantages for row in rows]).float().to(device),
        expert=torch.tensor([row.expert for row in rows], device=device),
        weight=torch.tensor([row.weight for row in rows], dtype=torch.float32, device=device),
    )
    return MicroBatch(token_ids.to(device), present.to(device), tokens)


def _flat(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))
