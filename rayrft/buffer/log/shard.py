"""The rows of a shard: a log of segments on disk, and blocks of rows in the object store.

A block is one Arrow message of many rows, so that a lease gathers from few places. Rows that come in small messages
wait in memory until their segment is full or a lease asks for them, and become one block then. Blocks leave the object
store when nobody is going to train on their segment, or when it was used longest ago and memory is short; they come
back as one block from the segment's file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from rayrft.buffer.experience import unpack
from rayrft.buffer.log.segments import Extent, Segments
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.scores import scores
from rayrft.buffer.validation import GroupNumbers, find_faults, group_numbers, group_starts
from rayrft.config.buffer import BufferConfig

Ref = Any
"""A reference to a packed block of rows in the object store (``ray.ObjectRef``)."""


@dataclass(frozen=True)
class RowSpan:
    """Rows ``row`` .. ``row + rows`` of a segment: those of a group."""

    segment: int
    row: int
    rows: int


@dataclass(frozen=True)
class Appended:
    """What became of a message. ``numbers`` and ``scores`` are those of the groups that were stored.

    ``groups`` says which of the message's groups these are; ``faults`` counts the rejected rows of each, by reason.
    """

    extent: Extent
    row: int
    groups: list[int]
    numbers: GroupNumbers
    scores: np.ndarray
    nbytes: np.ndarray
    faults: dict[int, dict[str, int]]


@dataclass
class _Block:
    row: int
    rows: int
    nbytes: int
    ref: Ref


@dataclass
class _Segment:
    extent: Extent
    blocks: list[_Block] = field(default_factory=list)
    sealed: bool = True
    used: int = 0


class Shard:
    """One shard's rows. ``open`` before anything else. ``put`` brings a packed block into the object store."""

    def __init__(self, location: str, config: BufferConfig, put: Callable[[pa.Buffer], Ref] | None = None) -> None:
        self._storage = Storage(location)
        self._config = config
        self._segments = Segments(self._storage, config.segment_bytes)
        self._put = put or _ray_put
        self._score = scores.get(config.sampler.score, "buffer.sampler.score")
        self._rows: dict[int, _Segment] = {}
        self._pending: list[pa.RecordBatch] = []
        self._pending_row = 0
        self._pending_bytes = 0
        self._block_bytes = 0
        self._clock = 0

    def open(self, committed: list[Extent]) -> int:
        """Stand where the journal stands; gives the bytes of a torn tail that were cut. Reads no rows."""
        self._storage.create()
        self._rows = {extent.segment: _Segment(extent) for extent in committed}
        return self._segments.open(committed)

    def append(self, message: pa.Buffer, wanted: list[int] | None = None, *, sync: bool = False) -> Appended:
        """Write the groups of a message (those at the places ``wanted``), without the rows that must not be trained."""
        batch = unpack(message)
        starts = group_starts(batch)
        faults = find_faults(batch)
        groups = list(range(len(starts))) if wanted is None else wanted
        of_row = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, batch.num_rows)))
        rejected: dict[int, dict[str, int]] = {}
        for row, reason in faults.items():
            counts = rejected.setdefault(int(of_row[row]), {})
            counts[f"rejected: {reason}"] = counts.get(f"rejected: {reason}", 0) + 1
        if faults or len(groups) < len(starts):
            keep = np.isin(of_row, groups)
            keep[list(faults)] = False
            batch, of_row = batch.take(np.flatnonzero(keep)), of_row[keep]
            groups = np.unique(of_row).tolist()
            message, starts = batch.serialize(), group_starts(batch)
        if not groups:
            empty = np.zeros(0, dtype=np.int64)
            return Appended(Extent(-1), 0, [], GroupNumbers(empty, empty, empty, empty), empty, empty, rejected)
        numbers, score = group_numbers(batch, starts), self._score(batch, starts)
        extent = self._segments.append(message, batch.num_rows)
        if sync:
            self._segments.sync()
        row = extent.rows - batch.num_rows
        segment = self._rows.setdefault(extent.segment, _Segment(extent, sealed=False))
        segment.extent = extent
        if not self._pending:
            self._pending_row = row
        self._pending.append(batch)
        self._pending_bytes += len(message)
        if self._segments.full:
            self._gather(segment)
            self._segments.seal()
            segment.sealed = True
            self._spill()
        nbytes = (len(message) * numbers.rows) // batch.num_rows
        return Appended(extent, row, groups, numbers, score, nbytes, rejected)

    def refs(self, spans: list[RowSpan]) -> list[tuple[Ref, int]]:
        """For each group its block, and the first of its rows there."""
        self._clock += 1
        found = []
        for span in spans:
            segment = self._rows[span.segment]
            segment.used = self._clock
            if segment.sealed and len(segment.blocks) != 1:
                self._load(segment)
            elif not segment.sealed and self._pending and span.row >= self._pending_row:
                self._gather(segment)
            at = bisect_right(segment.blocks, span.row, key=lambda block: block.row) - 1
            block = segment.blocks[at]
            found.append((block.ref, span.row - block.row))
        self._spill()
        return found

    def read(self, spans: list[RowSpan]) -> pa.RecordBatch:
        """The rows themselves, from the disk; for the few that feedback or compaction touch."""
        batches = {s: self._segments.read(self._rows[s].extent) for s in {span.segment for span in spans}}
        return pa.concat_batches([batches[span.segment].slice(span.row, span.rows) for span in spans])

    def rewrite(self, spans: list[RowSpan], *, sync: bool = False) -> tuple[Extent, int]:
        """Write groups again, behind all others; gives their new extent and first row."""
        done = self.append(self.read(spans).serialize(), sync=sync)
        return done.extent, done.row

    def release(self, segments: list[int]) -> None:
        """Nobody is going to train on these: their blocks leave the object store."""
        for number in segments:
            if (segment := self._rows.get(number)) is not None and segment.sealed:
                self._drop_blocks(segment)

    def delete(self, segments: list[int]) -> None:
        """These segments leave the disk."""
        for number in segments:
            if (segment := self._rows.pop(number, None)) is not None:
                self._drop_blocks(segment)
            self._segments.delete(number)

    def sync(self) -> None:
        """Returns when everything is on the disk."""
        self._segments.sync()

    def seal(self) -> None:
        """Close the segment that grows."""
        for segment in self._rows.values():
            if not segment.sealed:
                self._gather(segment)
                segment.sealed = True
        self._segments.seal()

    def memory(self) -> int:
        """Bytes of row data in the object store and pending in this process."""
        return self._block_bytes + self._pending_bytes

    def _gather(self, segment: _Segment) -> None:
        """Make one block of the rows that are pending."""
        if self._pending:
            batch = pa.concat_batches(self._pending) if len(self._pending) > 1 else self._pending[0]
            segment.blocks.append(self._block(batch, self._pending_row))
            self._pending, self._pending_bytes = [], 0

    def _load(self, segment: _Segment) -> None:
        self._drop_blocks(segment)
        segment.blocks = [self._block(self._segments.read(segment.extent), 0)]

    def _block(self, batch: pa.RecordBatch, row: int) -> _Block:
        message = batch.serialize()
        self._block_bytes += len(message)
        return _Block(row, batch.num_rows, len(message), self._put(message))

    def _drop_blocks(self, segment: _Segment) -> None:
        self._block_bytes -= sum(block.nbytes for block in segment.blocks)
        segment.blocks = []

    def _spill(self) -> None:
        """Let blocks go, those used longest ago first, until the rest has room. They are in their segments' files."""
        if self.memory() <= self._config.memory_bytes:
            return
        held = [segment for segment in self._rows.values() if segment.sealed and segment.blocks]
        for segment in sorted(held, key=lambda segment: segment.used):
            if self.memory() <= self._config.memory_bytes:
                return
            self._drop_blocks(segment)


def _ray_put(message: pa.Buffer) -> Ref:
    import ray

    return ray.put(message)
