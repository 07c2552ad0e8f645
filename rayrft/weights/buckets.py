"""Wire format of weights.

Both sides split the same list of tensors into the same buckets, so a bucket is sent as bare bytes: one flat buffer with
tensors at 16-byte boundaries. Both sides digest the buffers; equal digests show that every byte arrived in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from rayrft.weights.messages import TensorMeta

_LINE, _LINES = 1 << 10, 1 << 9
"""Words of a line, which the first caches hold with their factors, and lines that are digested at a time."""


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


def allocate(buckets: list[list[TensorMeta]], device: torch.device | str, count: int = 2) -> tuple[Tensor, ...]:
    """Allocate memory for any ``count`` of the buckets: while one is filled, the others travel."""
    size = max(map(bucket_bytes, buckets), default=0)
    if torch.device(device).type == "cpu":  # NumPy asks for huge pages, which cost fewer page faults
        return tuple(torch.from_numpy(np.empty((count, size), np.uint8)))
    return tuple(torch.empty(count, size, dtype=torch.uint8, device=device))


class Digest:
    """A 64-bit digest of a stream of bytes, computed on their device (CPU or GPU), in bounded memory.

    The polynomial sum of its 64-bit words with position-dependent odd factors, modulo 2**64: a changed, lost or moved
    word changes it. The factor is that of the word's line times that of its place in the line. It detects faults, not
    forgery. Only `value` waits for the device.
    """

    def __init__(self) -> None:
        self._state = self._sum = torch.zeros((), dtype=torch.int64)
        self._place = 0
        """Words since the state was updated, whose sum is kept."""
        self._factors: Tensor | None = None

    def update(self, buffer: Tensor) -> None:
        """Add a buffer of bytes, whose length is a multiple of 8. How a stream is cut into buffers does not matter."""
        words = buffer.view(torch.int64)
        if self._factors is None or self._factors.device != buffer.device:
            places, lines = (torch.arange(count, dtype=torch.int64, device=buffer.device) for count in (_LINE, _LINES))
            self._of_lines = lines * 0x85EBCA6B * 2 + 1
            self._factors = (self._of_lines[:, None] * (places * 0x9E3779B1 * 2 + 1)).flatten()
            self._state, self._sum = self._state.to(buffer.device), self._sum.to(buffer.device)
        while count := self._count_together(words):
            part, words = words[:count], words[count:]
            self._sum = self._sum + self._weighted(part, self._factors)
            self._place += count
            if self._place == len(self._factors):
                self._state, self._sum, self._place = self._total, torch.zeros_like(self._sum), 0

    def _count_together(self, words: Tensor) -> int:
        """Return how many of the next words are summed at a time: on CPUs whole lines, or what is less than one."""
        count, within = min(words.numel(), _LINES * _LINE - self._place), self._place % _LINE
        if words.device.type != "cpu":
            return count
        return min(count, _LINE - within) if within else count - count % _LINE or count

    def _weighted(self, words: Tensor, factors: Tensor) -> Tensor:
        """Return the sum of the next words times their factors."""
        own = factors[self._place : self._place + len(words)]
        if words.device.type != "cpu":
            return (words * own).sum()
        if len(words) % _LINE:
            return torch.dot(words, own)
        line = self._place // _LINE
        sums = torch.mv(words.view(-1, _LINE), factors[:_LINE])  # the factor of the first line is 1
        return torch.dot(sums, self._of_lines[line : line + len(sums)])

    @property
    def value(self) -> str:
        return f"{int(self._total) % (1 << 64):016x}"

    @property
    def _total(self) -> Tensor:
        return self._state * 1_000_003 + self._sum + self._place  # int64 wraps


def fill_bucket(
    buffer: Tensor, metas: list[TensorMeta], tensors: Iterable[Tensor], digest: Digest | None = None
) -> None:
    """Copy tensors into the buffer, cast to their wire dtype, and add them to the digest, each while a cache holds it.

    Raises ValueError if a shape differs from its meta.
    """
    for (entry, view), meta, tensor in zip(_entries(buffer, metas), metas, tensors, strict=True):
        if tuple(tensor.shape) != meta.shape:
            raise ValueError(f"{meta.name} has shape {tuple(tensor.shape)}, announced as {meta.shape}")
        view.copy_(tensor)
        if digest is not None:
            digest.update(entry)


def read_bucket(buffer: Tensor, metas: list[TensorMeta], digest: Digest) -> Iterator[tuple[str, Tensor]]:
    """Iterate over names and tensors of the entries, which are added to the digest; the tensors are views."""
    for (entry, view), meta in zip(_entries(buffer, metas), metas, strict=True):
        digest.update(entry)
        yield meta.name, view


def _entries(buffer: Tensor, metas: list[TensorMeta]) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over the bytes of tensors with their padding, and the tensors; both are views of the buffer."""
    offset = 0
    for meta in metas:
        entry = buffer[offset : offset + meta.padded]
        yield entry, entry[: meta.nbytes].view(getattr(torch, meta.dtype)).view(meta.shape)
        offset += meta.padded
