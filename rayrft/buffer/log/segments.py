"""Segments: append-only files of rows, in the Arrow IPC stream format.

A segment is appended to until it has its target size, then the next one is started. The journal stores its committed
extent: rows, bytes and their checksum. Bytes after that are a torn tail, left by a crash.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

import pyarrow as pa

from rayrft.buffer.log.storage import Appender, Storage
from rayrft.errors import StorageError
from rayrft.experience import SCHEMA, SCHEMA_VERSION

_NAME = re.compile(r"segment-(\d{8})\.arrow$")


@dataclass(frozen=True)
class Extent:
    """Committed extent of a segment; ``crc`` is the checksum (CRC-32) of these bytes."""

    segment: int
    rows: int = 0
    nbytes: int = 0
    crc: int = 0


class Segments:
    """The segments in a folder. Call ``open`` before appending."""

    def __init__(self, storage: Storage, segment_bytes: int) -> None:
        self._storage = storage
        self._target = segment_bytes
        self._number = 0
        self._file: Appender | None = None
        self._extent = Extent(0)

    def open(self, committed: list[Extent]) -> int:
        """Truncate uncommitted bytes and open the last segment for appending; return the number of bytes truncated.

        Raises StorageError if a segment is missing or shorter than its committed extent. No rows are read.
        """
        extents = {extent.segment: extent for extent in committed}
        found = {int(m[1]): size for name, size in self._storage.files().items() if (m := _NAME.match(name))}
        torn = 0
        for number, extent in extents.items():
            if found.get(number, 0) < extent.nbytes:
                raise StorageError(
                    f"{extent.nbytes} bytes were written and {found.get(number, 0)} are there",
                    field=segment_name(number),
                    remedy="the file was damaged, or the machine lost power with buffer.fsync 'never' or 'interval': "
                    "restore it from a backup",
                )
        for number, size in found.items():
            committed_bytes = extents[number].nbytes if number in extents else 0
            torn += size - committed_bytes
            if committed_bytes == 0:
                self._storage.delete(segment_name(number))
            elif committed_bytes < size:
                self._storage.cut(segment_name(number), committed_bytes)
        self._number = max(extents, default=-1) + 1
        if extents and self._storage.grows and extents[self._number - 1].nbytes < self._target:
            self._extent = extents[self._number - 1]
            self._file = self._storage.open(segment_name(self._extent.segment), self._extent.nbytes)
        return torn

    @property
    def growing(self) -> int | None:
        """The segment that rows are appended to."""
        return None if self._file is None else self._extent.segment

    def append(self, message: pa.Buffer, rows: int) -> Extent:
        """Append rows, packed as one message; return the new extent of their segment."""
        if self._file is None:
            self._file = self._storage.open(segment_name(self._number))
            self._extent = Extent(self._number)
            self._number += 1
        data = message
        if self._extent.nbytes == 0:
            data = pa.py_buffer(SCHEMA.serialize().to_pybytes() + message.to_pybytes())
        if self._storage.grows:
            self._file.append(data)
        else:
            self._storage.write(self._file.name, data)  # objects cannot grow: one segment per message
        self._extent = Extent(
            self._extent.segment,
            self._extent.rows + rows,
            self._extent.nbytes + len(data),
            zlib.crc32(data, self._extent.crc),
        )
        return self._extent

    @property
    def full(self) -> bool:
        """Whether the open segment has its target size."""
        return self._extent.nbytes >= self._target or not self._storage.grows

    def seal(self) -> None:
        """Sync and close the open segment; the next append starts another."""
        self.sync()
        self.close()

    def sync(self) -> None:
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        """Close the open segment without syncing it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self, extent: Extent) -> pa.RecordBatch:
        """Return the rows of a segment as one batch. Raises StorageError if they are damaged."""
        return read_rows(self._storage, segment_name(extent.segment), extent)

    def delete(self, segment: int) -> None:
        self._storage.delete(segment_name(segment))


def segment_name(number: int) -> str:
    return f"segment-{number:08d}.arrow"


def read_rows(storage: Storage, name: str, extent: Extent) -> pa.RecordBatch:
    """Return the rows of a file as one batch.

    Raises StorageError if the file is missing, damaged, or of another schema version.
    """
    where = f"{storage.location}/{name}"
    try:
        data = storage.read(name)
        intact = len(data) >= extent.nbytes and zlib.crc32(data[: extent.nbytes]) == extent.crc
    except FileNotFoundError:
        raise StorageError("the file is gone", field=where, remedy="restore it from a backup") from None
    if not intact:
        raise StorageError(
            "the file was changed since it was written",
            field=where,
            remedy="corrupted by a disk fault or a manual edit: restore it from a backup; other files are readable",
        )
    with pa.ipc.open_stream(data[: extent.nbytes]) as stream:
        if not stream.schema.equals(SCHEMA, check_metadata=True):
            version = (stream.schema.metadata or {}).get(b"rayrft.schema", b"none").decode()
            raise StorageError(
                f"the rows have schema version {version}; this rayrft reads {SCHEMA_VERSION}",
                field=where,
                remedy="read it with the version of rayrft that wrote it, or with plain pyarrow",
            )
        batches = list(stream)
    return pa.concat_batches(batches) if len(batches) != 1 else batches[0]
