"""Wire format of weights.

Both sides split the same list of tensors into the same buckets, so a bucket is sent as bare bytes: one flat buffer with
tensors at 16-byte boundaries. Both sides digest the buffers; equal digests show that every byte arrived in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rayrft.weights.messages import TensorMeta

_CHUNK = 1 << 19
"""Words that are digested at a time."""


def plan_buckets(metas: list[TensorMeta], limit: int) -> list[list[TensorMeta]]:
    """Group consecutive tensors into buckets of at most ``limit`` bytes; a larger tensor gets its own bucket."""
    buckets: list[list[TensorMeta]] = []
    room = 0
    for meta in metas:
        if meta.padded > room or not buckets:
            buckets.append([])
            room = limit
        buckets[-1].append(meta)
        room -= meta.padded
    return buckets


def bucket_bytes(metas: list[TensorMeta]) -> int:
    """Return the size of a bucket's buffer."""
    return sum(meta.padded for meta in metas)


def empty_bucket(metas: list[TensorMeta], memory: Tensor) -> Tensor:
    """Return the front of ``memory`` (bytes) as the buffer of a bucket. Its padding is zero: the digest includes it."""
    end = 0
    for meta in metas:
        end += meta.padded
        memory[end - meta.padded + meta.nbytes : end] = 0
    return memory[:end]


def two_buffers(buckets: list[list[TensorMeta]], device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Allocate memory for any two of the buckets: one travels while the next is filled."""
    size = max(map(bucket_bytes, buckets), default=0)
    first, second = torch.empty(2, size, dtype=torch.uint8, device=device)
    return first, second


def fill_bucket(buffer: Tensor, metas: list[TensorMeta], tensors: Iterable[Tensor]) -> None:
    """Copy tensors into the buffer, cast to their wire dtype. Raises ValueError if a shape differs from its meta."""
    for view, meta, tensor in zip(_views(buffer, metas), metas, tensors, strict=True):
        if tuple(tensor.shape) != meta.shape:
            raise ValueError(f"{meta.name} has shape {tuple(tensor.shape)}, announced as {meta.shape}")
        view.copy_(tensor)


def read_bucket(buffer: Tensor, metas: list[TensorMeta]) -> Iterator[tuple[str, Tensor]]:
    """Iterate over names and tensors of the entries; the tensors are views of the buffer."""
    for view, meta in zip(_views(buffer, metas), metas, strict=True):
        yield meta.name, view


def _views(buffer: Tensor, metas: list[TensorMeta]) -> Iterator[Tensor]:
    offset = 0
    for meta in metas:
        yield buffer[offset : offset + meta.nbytes].view(getattr(torch, meta.dtype)).view(meta.shape)
        offset += meta.padded


class Digest:
    """A 64-bit digest of a sequence of buffers, computed on their device (CPU or GPU), in bounded memory.

    The polynomial sum of their 64-bit words with position-dependent odd factors, modulo 2**64: a changed, lost or moved
    word changes it. It detects faults, not forgery. Only `value` waits for the device.
    """

    def __init__(self) -> None:
        self._state = torch.zeros((), dtype=torch.int64)
        self._factors: Tensor | None = None

    def update(self, buffer: Tensor) -> None:
        """Add a buffer of bytes, whose length is a multiple of 8."""
        words = buffer.view(torch.int64)
        if self._factors is None or self._factors.device != buffer.device:
            self._factors = torch.arange(_CHUNK, dtype=torch.int64, device=buffer.device) * 0x9E3779B1 * 2 + 1
            self._state = self._state.to(buffer.device)
        for start in range(0, words.numel(), _CHUNK):
            part = words[start : start + _CHUNK]
            factors = self._factors[: part.numel()]
            total = torch.dot(part, factors) if part.device.type == "cpu" else (part * factors).sum()
            self._state = self._state * 1_000_003 + total + part.numel()  # int64 wraps

    @property
    def value(self) -> str:
        return f"{int(self._state) % (1 << 64):016x}"
