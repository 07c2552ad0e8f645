"""The rows of the Buffer: segments on disk, and blocks of rows in the object store.

A block is one Arrow message of many rows, so that a lease gathers from few blocks. Rows of small messages are kept in
memory until their segment is full or a lease needs them, and are then merged into one block. Blocks are freed if their
segment will not be trained on, or is the least recently used when memory is short; they are read back as one block from
the segment's file.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from rayrft.buffer.events import Extent, StoredRows
from rayrft.buffer.log.segments import read_log_rows, segment_name, segment_sizes, with_schema
from rayrft.buffer.log.storage import Appender, Storage
from rayrft.buffer.scores import score_groups, scores
from rayrft.buffer.validation import Fault, Limits, find_faults, group_starts, is_masked, lengths_of, stored_rows
from rayrft.config.buffer import BufferConfig
from rayrft.errors import DataError, StorageError
from rayrft.experience import unpack
from rayrft.runtime.handle import put_object
from rayrft.runtime.ray_api import ray

RowRef = Any
"""A reference to a packed block of rows in the object store (``ray.ObjectRef``)."""


_MOST_BLOCKS = 8
"""A full segment with more blocks is read again as one block before a lease gathers from it."""


@dataclass(frozen=True)
class RowSpan:
    """Rows ``row`` .. ``row + rows`` of a segment, those of one group."""

    segment: int
    row: int
    rows: int


@dataclass(frozen=True)
class AppendResult:
    """Result of appending a message: the stored groups, from row ``row`` of the segment on, and their indices in the
    message. ``faults`` are the rejected rows by group index."""

    extent: Extent
    row: int
    groups: list[int]
    stored: list[StoredRows]
    faults: dict[int, list[Fault]] = field(default_factory=dict)


@dataclass
class _Block:
    row: int
    """Its first row in the segment."""
    nbytes: int
    ref: RowRef
    tokens: np.ndarray
    """Tokens by row, 0 for masked ones: int32."""


@dataclass
class _Segment:
    extent: Extent
    blocks: list[_Block] = field(default_factory=list)
    used: int = 0
    """Time of the last use, in calls of `RowLog.refs`."""

    def block(self, row: int) -> _Block:
        """Return the block in memory that has the row."""
        return self.blocks[bisect_right(self.blocks, row, key=lambda block: block.row) - 1]


class RowLog:
    """The rows in a folder. Opening it reads no rows, and truncates files to the ``committed`` extents of the journal.

    Its methods block, and are called one at a time. Raises StorageError if a committed part of a segment is missing.
    """

    def __init__(self, storage: Storage, config: BufferConfig, committed: list[Extent]) -> None:
        self._storage = storage
        self._config = config
        self._score = config.sampler.score if config.needs_scores else ""
        if self._score:
            scores.get(self._score, "buffer.sampler.score")  # raises for an unknown one
        self._segments = {extent.segment: _Segment(extent) for extent in committed}
        self._newest = max(self._segments, default=-1)
        self._file: Appender | None = None
        """File of the newest segment, while that is growing."""
        self._pending: list[tuple[int, pa.Buffer]] = []
        """The messages of the newest segment that are in no block yet, with their first rows."""
        self._block_bytes = 0
        self._clock = 0
        self.torn_bytes = self._truncate()
        """Bytes truncated when it was opened."""
        if committed and (extent := self._segments[self._newest].extent).nbytes < config.segment_bytes:
            self._file = storage.open(segment_name(self._newest), extent.nbytes)

    def take(
        self, message: pa.Buffer, wanted: list[int], whole: list[int], announced: int, limits: Limits
    ) -> AppendResult:
        """Write the groups at the indices ``wanted`` of a message, without invalid rows; a group in ``whole`` with an
        invalid row is not written at all.

        Raises DataError if the message does not hold ``announced`` groups.
        """
        batch = unpack(message)
        starts = group_starts(batch)
        if len(starts) != announced:
            problem = f"the message holds {len(starts)} groups and {announced} were announced"
            raise DataError(problem, "put every group once, with all its rows and no others", field="group_id")
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
            return AppendResult(Extent(-1), 0, [], [], faults)
        return replace(self.append(message, batch), groups=groups, faults=faults)

    def refs(self, spans: list[RowSpan]) -> list[tuple[RowRef, int, np.ndarray]]:
        """Return each group's block, the index of its first row in it, and the tokens of its rows (0 if masked)."""
        self._clock += 1
        found = []
        for span in spans:
            segment = self._segments[span.segment]
            segment.used = self._clock
            self._bring(segment, span.row)
            block = segment.block(span.row)
            first = span.row - block.row
            found.append((block.ref, first, block.tokens[first : first + span.rows]))
        self._spill()
        return found

    def read(self, spans: list[RowSpan]) -> pa.RecordBatch:
        """Read rows from disk, for compaction."""
        batches = {number: self._read(self._segments[number]) for number in {span.segment for span in spans}}
        return pa.concat_batches([batches[span.segment].slice(span.row, span.rows) for span in spans])

    def read_group(self, span: RowSpan) -> pa.RecordBatch:
        """Read one group, for feedback, from memory if it is there (a file may be large), and load no other rows."""
        segment = self._segments[span.segment]
        if self._is_pending(segment, span.row):
            row, message = self._pending[bisect_right(self._pending, span.row, key=itemgetter(0)) - 1]
        elif segment.blocks and not segment.blocks[0].row:
            block = segment.block(span.row)
            row, message = block.row, ray.get([block.ref])[0]
        else:  # freed, maybe but for what was written since
            return self.read([span])
        return unpack(message).slice(span.row - row, span.rows)

    def end_segment(self) -> None:
        """End the newest segment: the next rows begin another one, and this one may be deleted."""
        if self._file is not None:
            self._file.sync()
            self._file.close()
            self._file = None
            self._pending = []
            self._drop_blocks(self._segments[self._newest])

    def release(self, segments: list[int]) -> None:
        """Free the blocks of segments that will not be trained on."""
        for number in segments:
            if (segment := self._segments.get(number)) is not None and not self._grows(segment):
                self._drop_blocks(segment)

    def delete(self, segments: list[int]) -> None:
        """Delete segments from disk."""
        for number in segments:
            self._drop_blocks(self._segments.pop(number))
            self._storage.delete(segment_name(number))

    def sync(self) -> None:
        """Sync all rows to disk."""
        if self._file is not None:
            self._file.sync()

    def memory(self) -> int:
        """Return the bytes of row data in the object store and pending in this process."""
        return self._block_bytes + sum(len(message) for _, message in self._pending)

    def _truncate(self) -> int:
        """Truncate segments at their committed extents; return the number of bytes truncated."""
        found = segment_sizes(self._storage)
        committed = {number: segment.extent.nbytes for number, segment in self._segments.items()}
        for number, nbytes in committed.items():
            if found.get(number, 0) < nbytes:
                problem = f"{nbytes} bytes were written and {found.get(number, 0)} are there"
                remedy = (
                    "the file was damaged, or the machine lost power with buffer.fsync 'never' or 'interval': "
                    "restore it from a backup"
                )
                raise StorageError(problem, remedy, field=segment_name(number))
        for number, size in found.items():
            if number not in committed:
                self._storage.delete(segment_name(number))
            elif committed[number] < size:
                self._storage.cut(segment_name(number), committed[number])
        return sum(found.values()) - sum(committed.values())

    def _grows(self, segment: _Segment) -> bool:
        return self._file is not None and segment.extent.segment == self._newest

    def _is_pending(self, segment: _Segment, row: int) -> bool:
        return self._grows(segment) and bool(self._pending) and row >= self._pending[0][0]

    def append(self, message: pa.Buffer, batch: pa.RecordBatch | None = None) -> AppendResult:
        """Write a message of groups that were validated before; ``batch`` has its rows, if they are unpacked."""
        batch = unpack(message) if batch is None else batch
        starts = group_starts(batch)
        score = score_groups(self._score, batch, starts) if self._score else np.ones(len(starts))
        if self._file is None:
            self._file = self._storage.open(segment_name(self._newest + 1))
            self._newest += 1
            self._segments[self._newest] = _Segment(Extent(self._newest))
        segment = self._segments[self._newest]
        row, data = segment.extent.rows, message if segment.extent.nbytes else with_schema(message)
        self._file.append(data)
        segment.extent = segment.extent.grown(batch.num_rows, data)
        self._pending.append((row, message))
        if len(message) * _MOST_BLOCKS >= self._config.segment_bytes:
            self._gather(segment)  # large enough for a block, without a copy
        full = segment.extent.nbytes >= self._config.segment_bytes
        if full or self._config.fsync == "always":
            self._file.sync()
        if full:
            self._gather(segment)
            self._file.close()
            self._file = None
            self._spill()
        stored = stored_rows(batch, starts, score, row, len(message))
        return AppendResult(segment.extent, row, list(range(len(starts))), stored)

    def _read(self, segment: _Segment) -> pa.RecordBatch:
        return read_log_rows(self._storage, segment_name(segment.extent.segment), segment.extent)

    def _gather(self, segment: _Segment) -> None:
        """Merge the pending rows into one block."""
        if self._pending:
            row, message = self._pending[0]
            if len(self._pending) > 1:
                message = pa.concat_batches([unpack(pending) for _, pending in self._pending]).serialize()
            segment.blocks.append(self._block(message, row))
            self._pending = []

    def _bring(self, segment: _Segment, row: int) -> None:
        """Ensure that a block with this row is in the object store."""
        grows = self._grows(segment)
        if self._is_pending(segment, row):
            self._gather(segment)
        elif not segment.blocks or segment.blocks[0].row or (not grows and len(segment.blocks) > _MOST_BLOCKS):
            if grows:
                self._gather(segment)
            self._drop_blocks(segment)
            segment.blocks = [self._block(self._read(segment).serialize(), 0)]

    def _block(self, message: pa.Buffer, row: int) -> _Block:
        self._block_bytes += len(message)
        batch = unpack(message)
        tokens = np.where(is_masked(batch), 0, lengths_of(batch.column("token_ids")))
        return _Block(row, len(message), put_object(message), tokens)

    def _drop_blocks(self, segment: _Segment) -> None:
        self._block_bytes -= sum(block.nbytes for block in segment.blocks)
        segment.blocks = []

    def _spill(self) -> None:
        """Free blocks, least recently used first, until the rest fits in memory. They stay in their segments' files."""
        if self.memory() <= self._config.memory_bytes:
            return
        held = [segment for segment in self._segments.values() if segment.blocks and not self._grows(segment)]
        for segment in sorted(held, key=lambda segment: segment.used):
            if self.memory() <= self._config.memory_bytes:
                return
            self._drop_blocks(segment)
