"""Sequence packing: several rows in one sequence, without attention between them, and equal prefixes only once.

The rows of a micro-batch are concatenated to one sequence, so that linear layers see no padding. Tokens before the
first in which two rows differ, such as the prompt of a group, have the same states in both. They are computed for one
row, and the other attends to these. Only attention needs the row boundaries: on a GPU the variable-length kernel takes
them; elsewhere rows of nearly the same length are batched for attention, which was the fastest way tried on CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rayrft.errors import ModelError, first_line

ATTENTION = "rayrft_packed"
"""The name under which transformers knows this attention."""

_HOPPER = 9
"""Major compute capability of the GPUs that FlashAttention 3 is for."""

_BUCKET_RATIO = 1.25
_BUCKET_SLACK = 8


@dataclass(frozen=True)
class Bucket:
    """Rows of nearly the same length, padded to W. ``gather`` ``[rows W]``: the state of every token, a row's last one
    repeated as padding; ``real`` ``[n]``: which of these are tokens."""

    rows: int
    gather: Tensor
    real: Tensor


@dataclass(frozen=True)
class Packing:
    """Layout of N rows with T tokens in all, of which the model computes C states.

    Rows that are equal to another, or to its beginning, have no state of their own; attention has the K others.
    """

    positions: Tensor
    """``[T]``: positions within rows."""
    longest: int
    """Number of tokens of the longest row."""
    computed: Tensor
    """``[C]``: the tokens that are computed; those of a row follow each other."""
    states: Tensor
    """``[T]``: which of the computed states is that of a token."""
    query_starts: Tensor
    """``[K + 1]`` (int32): first computed state of each row, and C."""
    key_starts: Tensor
    """``[K + 1]`` (int32): first key of each row, and their number."""
    keys: Tensor | None
    """The states of all tokens of the K rows; None if they are the computed ones, in their order."""
    buckets: tuple[Bucket, ...]
    index: Tensor
    """``[C]``: index of every computed state in the concatenated outputs of the buckets."""

    @classmethod
    def of(cls, rows: list[np.ndarray]) -> Packing:
        """Lay out rows of token ids, each of at least one, on the CPU."""

        def tensor(array: Any, dtype: Any = np.int64) -> Tensor:
            return torch.from_numpy(np.asarray(array, dtype))

        sizes = np.array([len(row) for row in rows])
        ends = np.cumsum(sizes)
        starts = ends - sizes
        states = np.empty(ends[-1], np.int64)
        computed = list[np.ndarray]()
        count, order, own = 0, list[int](), list[int]()
        for row, before, shared in shared_prefixes(rows):
            first, end = starts[row], ends[row]
            states[first : first + shared] = states[starts[before] : starts[before] + shared]
            states[first + shared : end] = np.arange(count, count + sizes[row] - shared)
            if shared < sizes[row]:
                computed.append(np.arange(first + shared, end))
                order.append(row)
                own.append(sizes[row] - shared)
                count += own[-1]
        attending = np.array(order)
        buckets, gathered = [], []
        for members in _length_buckets(sizes[attending]):
            of, width = attending[members], np.arange(sizes[attending[members]].max())
            inside = width < sizes[of, None]
            gather = starts[of, None] + np.minimum(width, sizes[of, None] - 1)
            buckets.append(Bucket(len(members), tensor(states[gather.ravel()]), tensor(np.flatnonzero(inside))))
            gathered.append(gather[inside])
        places = np.empty(ends[-1], np.int64)
        outputs = np.concatenate(gathered)
        places[outputs] = np.arange(len(outputs))
        chosen = np.concatenate(computed)
        keys = [states[starts[row] : ends[row]] for row in order] if count < len(outputs) else None
        return cls(
            positions=tensor(np.arange(ends[-1]) - np.repeat(starts, sizes)),
            longest=int(sizes.max()),
            computed=tensor(chosen),
            states=tensor(states),
            query_starts=tensor([0, *np.cumsum(own)], np.int32),
            key_starts=tensor([0, *np.cumsum(sizes[attending])], np.int32),
            keys=None if keys is None else tensor(np.concatenate(keys)),
            buckets=tuple(buckets),
            index=tensor(places[chosen]),
        )


def on_device(value: Any, device: torch.device) -> Any:
    """Return a tensor, or the dataclass or tuple of some, on the device. The host does not wait for a GPU."""
    if isinstance(value, Tensor):
        pinned = value.pin_memory() if device.type == "cuda" else value  # else the copy is not asynchronous
        return pinned.to(device, non_blocking=True)
    if isinstance(value, tuple):
        return tuple(on_device(each, device) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: on_device(getattr(value, each.name), device) for each in fields(value)})
    return value


def shared_prefixes(rows: list[np.ndarray]) -> list[tuple[int, int, int]]:
    """Return for every row an earlier one of the list returned, and how many tokens they share at the beginning: no
    other earlier row shares more (0 for the first, with itself)."""
    # Of an order by tokens the neighbours share the most; which order that is does not matter.
    order = sorted(range(len(rows)), key=lambda row: rows[row].tobytes())
    found = [(row, before, common_prefix(rows[before], rows[row])) for before, row in pairwise(order)]
    return [(order[0], order[0], 0), *found]


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of tokens up to the first in which the rows differ."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def register() -> None:
    """Register the attention with transformers under the name `ATTENTION`. Idempotent.

    It has no function for masks, so that transformers makes none; else it reads the positions from the GPU first. On
    Hopper the kernels are those of FlashAttention 3 if its package ``flash_attn_interface`` is there, by which
    transformers knows it, too; else torch's own, FlashAttention 2. Raises ModelError if the package cannot be used.
    """
    from torch.nn import attention
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, packed_attention)
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == _HOPPER
    if hopper and find_spec("flash_attn_interface") and attention.current_flash_attention_impl() is None:
        try:
            attention.activate_flash_attention_impl("FA3")
        except (ImportError, OSError, RuntimeError) as error:
            problem = f"FlashAttention 3 is installed, but has no kernels for this torch: {first_line(error)}"
            remedy = "build it for this torch, or uninstall flash_attn_interface, which leaves FlashAttention 2"
            raise ModelError(problem, remedy, field="trainer.pack") from None


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
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within rows. query, key, value: ``[1, heads, C, D]``; returns ``[1, C, heads, D]``.

    Soft caps, sinks and biases are not supported: `Policy` compares log-probs before it packs. No attention dropout,
    which would distort probability ratios. Raises NotImplementedError for those that a model names.
    """
    if named := [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]:
        raise NotImplementedError(f"its attention has {named[0]}, which packed attention lacks")
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    if uses_kernel(query.device, query.dtype):
        out = attention_by_kernel(query, key, value, packing, scaling, sliding_window)
    else:
        out = attention_by_buckets(query, key, value, packing, scaling, sliding_window)
    return out[None], None


def uses_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether attention uses the variable-length kernel on this device in this precision. The device ``meta``
    stands for a GPU, of which the memory is counted."""
    return device.type in ("cuda", "meta") and dtype in (torch.float16, torch.bfloat16)


def attention_by_kernel(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if packing.keys is not None:
        key, value = key[packing.keys], value[packing.keys]
    # Where a row has fewer queries than keys, the last query is that of the last key.
    rows = packing.query_starts, packing.key_starts, packing.longest, packing.longest
    near, grouped = (-1 if window is None else window - 1, 0), query.shape[1] != key.shape[1]
    out = varlen_attn(query, key, value, *rows, scale=scaling, window_size=near, enable_gqa=grouped)
    assert isinstance(out, Tensor)  # a tuple only if auxiliary outputs are requested
    return out


@torch.compiler.disable  # else a layer would be compiled again for every number of buckets
def attention_by_buckets(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None, window: int | None
) -> Tensor:
    """Compute the attention of the computed tokens, ``[C, heads, D]``."""
    out = [_bucket(query, key, value, bucket, scaling, window) for bucket in packing.buckets]
    return torch.cat(out)[packing.index]


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


def _length_buckets(sizes: np.ndarray) -> list[np.ndarray]:
    """Group rows of nearly equal length, so that little of a bucket is padding."""
    order = np.argsort(sizes, kind="stable")
    groups: list[list[int]] = []
    for row in order.tolist():
        if not groups or sizes[row] > _BUCKET_RATIO * sizes[groups[-1][0]] + _BUCKET_SLACK:
            groups.append([])
        groups[-1].append(row)
    return [np.asarray(group) for group in groups]
