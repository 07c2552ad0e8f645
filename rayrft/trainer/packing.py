"""Several rows in one sequence, without attention between them.

The rows of a micro-batch lie one after the other in a sequence of T tokens, so that linear layers see no padding. Only
attention needs to know where rows begin: on a GPU it is the variable-length kernel; elsewhere rows of nearly the same
length are laid side by side for it, which was the fastest of what was tried on CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ATTENTION = "rayrft_packed"
"""What transformers calls this attention."""

_BUCKET_RATIO = 1.25
_BUCKET_SLACK = 8


@dataclass(frozen=True)
class Bucket:
    """Rows of nearly W tokens. ``gather`` ``[rows W]``: the place of each token in the sequence, and of a row's last
    one again after its end; ``real`` ``[n]``: which of these are tokens."""

    rows: int
    gather: Tensor
    real: Tensor


@dataclass(frozen=True)
class Packing:
    """Where rows lie: ``positions`` ``[T]`` within their rows, ``starts`` ``[N + 1]`` (int32) of rows, the end last."""

    positions: Tensor
    starts: Tensor
    longest: int
    buckets: tuple[Bucket, ...]
    place: Tensor
    """``[T]``: where each token stands in the buckets' outputs, one after the other."""

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Packing:
        """For rows of these lengths, each at least 1."""
        sizes = np.asarray(lengths)
        ends = np.cumsum(sizes)
        starts = ends - sizes
        positions = np.arange(ends[-1]) - np.repeat(starts, sizes)
        buckets, places = [], []
        for members in _alike(sizes):
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
            places.append(gather[inside])
        return cls(
            torch.from_numpy(positions).to(device),
            torch.from_numpy(np.append(starts, ends[-1]).astype(np.int32)).to(device),
            int(sizes.max()),
            tuple(buckets),
            torch.from_numpy(np.argsort(np.concatenate(places))).to(device),
        )


def register() -> None:
    """Make the attention known to transformers, under the name `ATTENTION`. Safe to call again."""
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
    """Causal attention within rows. query, key, value: ``[1, heads, T, D]``; gives ``[1, T, heads, D]``.

    Models that ask for more (soft caps, sinks, biases) differ from their own attention here: `Policy` compares before
    it packs. Attention dropout is not applied, as it must not be where ratios of probabilities are taken.
    """
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    if uses_kernel(query.device, query.dtype):
        out = _kernel(query, key, value, packing, scaling, sliding_window)
    else:
        out = torch.cat([_bucket(query, key, value, each, scaling, sliding_window) for each in packing.buckets])
        out = out[packing.place]
    return out[None], None


def uses_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention in this precision is the variable-length kernel's there."""
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
    assert isinstance(out, Tensor)  # a tuple only where more was asked for
    return out


def _bucket(
    query: Tensor, key: Tensor, value: Tensor, bucket: Bucket, scaling: float | None, window: int | None
) -> Tensor:
    """``[n, heads, D]``: attention of a bucket's tokens."""
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


def _alike(sizes: np.ndarray) -> list[np.ndarray]:
    """Rows by nearly equal length: little of a bucket is padding."""
    order = np.argsort(sizes, kind="stable")
    groups: list[list[int]] = []
    for row in order.tolist():
        if not groups or sizes[row] > _BUCKET_RATIO * sizes[groups[-1][0]] + _BUCKET_SLACK:
            groups.append([])
        groups[-1].append(row)
    return [np.asarray(group) for group in groups]
