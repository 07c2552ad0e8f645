"""Versions of weights in a folder: their writer, and what a reader finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rayrft.weights.files import Ref, VersionFolder, Versions, VersionWriter
from tests.weights.ends import buckets, parcel, weights

EVERY = 4


def stepped(tensors: dict[str, Tensor], seed: int, share: float = 0.02) -> dict[str, Tensor]:
    """The weights after a step, which changes that share of their values."""
    chance = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=chance) < share, tensor + 1, tensor)
        for name, tensor in tensors.items()
    }


class Written:
    """A writer, and what a reader finds."""

    def __init__(self, folder: Path) -> None:
        self.folder = VersionFolder(str(folder))
        self.writer = VersionWriter(self.folder, EVERY)
        self.tensors, self.version = weights(0), 0

    def step(self, seed: int = 0, count: int = 1) -> Ref:
        for number in range(count):
            self.tensors = stepped(self.tensors, seed + number)
            self.version += 1
            sent = replace(parcel(self.tensors), version=self.version)
            ref, _ = self.writer.write(sent, buckets(self.tensors))
            self.writer.remove_old()
        return ref

    def read_by(self, reader: Versions) -> bool:
        """Whether the newest version, for a reader, has the weights."""
        newest = self.folder.newest()
        assert newest is not None
        reader.read(newest)
        return all(torch.equal(a, b) for a, b in zip(reader.buckets, buckets(self.tensors), strict=True))
