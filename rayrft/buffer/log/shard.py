"""The rows of a shard: a log of segments on disk, and blocks of rows in the object store.

A block is one Arrow message of many rows, so that a lease gathers from few places. Rows that come in small messages
wait in memory until their segment is full or a lease asks for them, and become one block then. Blocks leave the object
store when nobody is going to train on their segment, or when it was used longest ago and memory is short; they come
back as one block from the segment's file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from rayrft.buffer.log.segments import Extent, Segments
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.scores import scores
from rayrft.buffer.validation import Fault, GroupNumbers, Limits, find_faults, group_numbers, group_starts
from rayrft.config.buffer import BufferConfig
from rayrft.errors import DataError
from rayrft.experience import unpack

Ref = Any
"""A reference to a packed block of rows in the object store (``ray.ObjectRef``)."""


_MOST_BLOCKS = 8
"""A full segment that has more is read again as one block before a lease gathers from it."""


@dataclass(frozen=True)
class RowSpan:
    """Rows ``row`` .. ``row + rows`` of a segment: those of a group."""

    segment: int
    row: int
    rows: int


@dataclass(frozen=True)
class Appended:
    """What became of a message. ``numbers`` and ``scores`` are those of the groups that were stored.

    ``groups`` says which of the message's groups these are; ``faults`` which rows of each were rejected.
    """

    extent: Extent
    row: int
    groups: list[int]
    numbers: GroupNumbers
    scores: np.ndarray
    nbytes: np.ndarray
    faults: dict[int, list[Fault]] = field(default_factory=dict)


@dataclass
class _Block:
    row: int
    """The first of its rows in the segment."""
    nbytes: int
    ref: Ref


@dataclass
class _Segment:
    extent: Extent
    blocks: list[_Block] = field(default_factory=list)
    sealed: bool = True
    used: int = 0


class NotOpen(Exception):
    """The shard was started again meanwhile, and does not know yet where the journal stands."""


class Shard:
    """One shard's rows. ``open`` before anything else. ``put`` brings a packed block into the object store."""

    def __init__(self, storage: Storage, config: BufferConfig, put: Callable[[pa.Buffer], Ref] | None = None) -> None:
        self._storage = storage
        self._config = config
        self._opened: Segments | None = None
        self._put = put or _ray_put
        self._score = scores.get(config.sampler.score, "buffer.sampler.score") if config.needs_scores else None
        self._rows: dict[int, _Segment] = {}
        self._pending: list[pa.Buffer] = []
        self._pending_row = 0
        self._pending_bytes = 0
        self._block_bytes = 0
        self._clock = 0

    def open(self, committed: list[Extent]) -> int:
        """Stand where the journal stands; gives the bytes of a torn tail that were cut. Reads no rows.

        A shard that outlived its Buffer is opened again, and forgets what the Buffer does not know of.
        """
        if self._opened is not None:
            self._opened.close()
        self._storage.create()
        self._rows = {extent.segment: _Segment(extent) for extent in committed}
        self._pending, self._pending_bytes, self._block_bytes = [], 0, 0
        self._opened = Segments(self._storage, self._config.segment_bytes)
        torn = self._opened.open(committed)
        if (growing := self._opened.growing) is not None:
            self._rows[growing].sealed = False
        return torn

    def take(
        self, message: pa.Buffer, wanted: list[int], whole: list[int], announced: int, limits: Limits, sync: bool
    ) -> Appended:
        """Write the groups at the places ``wanted`` of a message that was put, without the rows that must not be
        trained; of those at ``whole`` none where one must not.

        Raises DataError when the message does not hold as many groups as were ``announced``.
        """
        batch = unpack(message)
        starts = group_starts(batch)
        if len(starts) != announced:
            raise DataError(
                f"the message holds {len(starts)} groups and {announced} were announced",
                field="group_id",
                remedy="put a group by itself, with all its rows, and once",
            )
        of_row = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, batch.num_rows)))
        faults: dict[int, list[Fault]] = {}
        faulty = find_faults(batch, limits)
        for row, reason in sorted(faulty.items()):
            faults.setdefault(int(of_row[row]), []).append(Fault(batch.column("experience_id")[row].as_py(), reason))
        groups = [place for place in wanted if place not in faults or place not in whole]
        if faulty or len(groups) < len(starts):
            keep = np.isin(of_row, groups)
            keep[list(faulty)] = False
            batch, groups = batch.take(np.flatnonzero(keep)), np.unique(of_row[keep]).tolist()
            message = batch.serialize()
        if not groups:
            empty = np.zeros(0, dtype=np.int64)
            return Appended(Extent(-1), 0, [], GroupNumbers(empty, empty, empty, empty), empty, empty, faults)
        return replace(self._write(message, batch, sync), groups=groups, faults=faults)

    def append(self, message: pa.Buffer, *, sync: bool = False) -> Appended:
        """Write a message of groups that passed the door before."""
        return self._write(message, unpack(message), sync)

    def refs(self, spans: list[RowSpan]) -> list[tuple[Ref, int]]:
        """For each group its block, and the first of its rows there."""
        self._clock += 1
        found = []
        for span in spans:
            segment = self._segment(span.segment)
            segment.used = self._clock
            self._bring(segment, span.row)
            at = bisect_right(segment.blocks, span.row, key=lambda block: block.row) - 1
            block = segment.blocks[at]
            found.append((block.ref, span.row - block.row))
        self._spill()
        return found

    def read(self, spans: list[RowSpan]) -> pa.RecordBatch:
        """The rows themselves, from the disk; for the few that feedback or compaction touch."""
        batches = {s: self._segments.read(self._segment(s).extent) for s in {span.segment for span in spans}}
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

    def memory(self) -> int:
        """Bytes of row data in the object store and pending in this process."""
        return self._block_bytes + self._pending_bytes

    @property
    def _segments(self) -> Segments:
        if self._opened is None:
            raise NotOpen
        return self._opened

    def _segment(self, number: int) -> _Segment:
        if self._opened is None:
            raise NotOpen
        return self._rows[number]

    def _write(self, message: pa.Buffer, batch: pa.RecordBatch, sync: bool) -> Appended:
        starts = group_starts(batch)
        numbers = group_numbers(batch, starts)
        score = np.ones(len(starts)) if self._score is None else self._score(batch, starts)
        extent = self._segments.append(message, batch.num_rows)
        row = extent.rows - batch.num_rows
        segment = self._rows.setdefault(extent.segment, _Segment(extent, sealed=False))
        segment.extent = extent
        if not self._pending:
            self._pending_row = row
        self._pending.append(message)
        self._pending_bytes += len(message)
        if len(message) * _MOST_BLOCKS >= self._config.segment_bytes:
            self._gather(segment)  # large enough to be a block of its own, without a copy
        if sync:
            self._segments.sync()
        if self._segments.full:
            self._gather(segment)
            self._segments.seal()
            segment.sealed = True
            self._spill()
        nbytes = (len(message) * numbers.rows) // batch.num_rows
        return Appended(extent, row, list(range(len(starts))), numbers, score, nbytes)

    def _gather(self, segment: _Segment) -> None:
        """Make one block of the rows that are pending."""
        if self._pending:
            message = self._pending[0]
            if len(self._pending) > 1:
                message = pa.concat_batches([unpack(each) for each in self._pending]).serialize()
            segment.blocks.append(self._block(message, self._pending_row))
            self._pending, self._pending_bytes = [], 0

    def _bring(self, segment: _Segment, row: int) -> None:
        """Have a block with this row in the object store."""
        growing = not segment.sealed
        if growing and self._pending and row >= self._pending_row:
            self._gather(segment)
        elif not segment.blocks or segment.blocks[0].row or (segment.sealed and len(segment.blocks) > _MOST_BLOCKS):
            if growing:
                self._gather(segment)
            self._drop_blocks(segment)
            segment.blocks = [self._block(self._segments.read(segment.extent).serialize(), 0)]

    def _block(self, message: pa.Buffer, row: int) -> _Block:
        self._block_bytes += len(message)
        return _Block(row, len(message), self._put(message))

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
