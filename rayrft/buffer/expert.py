"""Demonstrations: rows under a name, in a file of their own, drawn in whole epochs."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rayrft.buffer.book import Book
from rayrft.buffer.experience import SCHEMA
from rayrft.buffer.log.segments import Extent, read_rows
from rayrft.buffer.log.shard import Ref
from rayrft.buffer.log.storage import Storage


@dataclass(frozen=True)
class ExpertBlock:
    """Demonstrations in the object store, and the tokens of each row."""

    ref: Ref
    tokens: np.ndarray


class ExpertBlocks:
    """The demonstrations of a run; ``book`` says which there are."""

    def __init__(self, storage: Storage, book: Book) -> None:
        self._storage = storage
        self._book = book
        self._blocks: dict[str, ExpertBlock] = {}

    async def write(self, name: str, batch: pa.RecordBatch) -> Extent:
        """Write demonstrations to their file, in place of what was there."""
        data = SCHEMA.serialize().to_pybytes() + batch.serialize().to_pybytes()
        await asyncio.to_thread(self._storage.write, expert_file(name), data)
        self._blocks.pop(name, None)
        return Extent(0, batch.num_rows, len(data), zlib.crc32(data))

    async def get(self, name: str) -> ExpertBlock:
        """The demonstrations of that name, read from their file where they are not in the object store."""
        import ray

        if name not in self._blocks:
            extent = self._book.experts[name].extent
            batch = await asyncio.to_thread(read_rows, self._storage, expert_file(name), extent)
            tokens = batch.column("token_ids").value_lengths().to_numpy()
            self._blocks[name] = ExpertBlock(ray.put(batch.serialize()), tokens)
        return self._blocks[name]


def expert_file(name: str) -> str:
    return f"expert-{name}.arrow"
