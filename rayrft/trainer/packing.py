"""Sequence packing: several rows in one sequence, without attention between them.

The rows of a micro-batch are concatenated to a sequence of T tokens, so that linear layers see no padding. Only
attention needs the row boundaries: on a GPU the variable-length kernel takes them; elsewhere rows of nearly the same
length are batched for attention, which was the fastest way tried on CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ATTENTION = "rayrft_packed"
"""The name under which transformers knows this attention."""

_BUCKET_RATIO = 1.25
_BUCKET_SLACK = 8


@dataclass(frozen=True)
class Bucket:
    """Rows of nearly the same length, padded to W. ``gather`` ``[rows W]``: sequence index of every token, a row's last
    one repeated as padding; ``real`` ``[n]``: which of these are tokens."""

    rows: int
    gather: Tensor
    real: Tensor


@dataclass(frozen=True)
class Packing:
    """Row layout: ``positions`` ``[T]`` within rows, ``starts`` ``[N + 1]`` (int32) of rows and the end of the last."""

    positions: Tensor
    starts: Tensor
    longest: int
    buckets: tuple[Bucket, ...]
    index: Tensor
    """``[T]``: index of every token in the concatenated outputs of the buckets."""

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Packing:
        """Lay out rows of these lengths (at least 1)."""
        sizes = np.asarray(lengths)
        ends = np.cumsum(sizes)
        starts = ends - sizes
        positions = np.arange(ends[-1]) - np.repeat(starts, sizes)
        buckets, gathered = [], []
        for members in _length_buckets(sizes):
            width = np.arange(sizes[members].max())
            inside = width < sizes[members, None]
            gather = starts[members, None] + np.minimum(width, sizes[members, None] - 1)
            buckets.append(
                Bucket(
                    len(members),
                    torch.from_numpy(gather.ravel()).to(device),
                    torch.from_numpy(np.flatnonzero(inside)).to(device),
                )
            )
            gathered.append(gather[inside])
        return cls(
            torch.from_numpy(positions).to(device),
            torch.from_numpy(np.append(starts, ends[-1]).astype(np.int32)).to(device),
            int(sizes.max()),
            tuple(buckets),
            torch.from_numpy(np.argsort(np.concatenate(gathered))).to(device),
        )


def register() -> None:
    """Register the attention with transformers under the name `ATTENTION`. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within rows. query, key, value: ``[1, heads, T, D]``; returns ``[1, T, heads, D]``.

    Soft caps, sinks and biases are not supported: `Policy` compares log-probs before it packs. No attention dropout,
    which would distort probability ratios.
    """
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    if uses_kernel(query.device, query.dtype):
        out = _kernel(query, key, value, packing, scaling, sliding_window)
    else:
        out = torch.cat([_bucket(query, key, value, bucket, scaling, sliding_window) for bucket in packing.buckets])
        out = out[packing.index]
    return out[None], None


def uses_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether attention uses the variable-length kernel on this device in this precision."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        query,
        key,
        value,
        packing.starts,
        packing.starts,
        packing.longest,
        packing.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)  # a tuple only if auxiliary outputs are requested
    return out


def _bucket(
    query: Tensor, key: Tensor, value: Tensor, bucket: Bucket, scaling: float | None, window: int | None
) -> Tensor:
    """Compute the attention of a bucket's tokens, ``[n, heads, D]``."""
    queries, keys, values = (
        states[bucket.gather].view(bucket.rows, -1, *states.shape[1:]).transpose(1, 2) for states in (query, key, value)
    )
    width = queries.shape[2]
    near = None
    if window is not None and width > window:
        distance = torch.arange(width, device=query.device)[:, None] - torch.arange(width, device=query.device)
        near = (distance >= 0) & (distance < window)
    out = scaled_dot_product_attention(
        queries, keys, values, attn_mask=near, is_causal=near is None, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)[bucket.real]


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _length_buckets(sizes: np.ndarray) -> list[np.ndarray]:
    """Group rows of nearly equal length, so that little of a bucket is padding."""
    order = np.argsort(sizes, kind="stable")
    groups: list[list[int]] = []
    for row in order.tolist():
        if not groups or sizes[row] > _BUCKET_RATIO * sizes[groups[-1][0]] + _BUCKET_SLACK:
            groups.append([])
        groups[-1].append(row)
    return [np.asarray(group) for group in groups]
