"""Files of rows, in the Arrow IPC stream format: the schema, and message after message.

A segment is appended to until it has its target size, then the next one is started. The journal stores its committed
extent: rows, bytes and their checksum. Bytes after that are a torn tail, left by a crash.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection

import pyarrow as pa

from rayrft.buffer.events import Extent
from rayrft.buffer.log.storage import Storage
from rayrft.errors import StorageError
from rayrft.experience import SCHEMA, SCHEMA_VERSION

_NAME = re.compile(r"segment-(\d{8})\.arrow$")


def segment_name(number: int) -> str:
    return f"segment-{number:08d}.arrow"


def segment_sizes(storage: Storage) -> dict[int, int]:
    """Return the bytes of every segment by number, committed or not."""
    return {int(m[1]): size for name, size in storage.files().items() if (m := _NAME.match(name))}


def with_schema(message: pa.Buffer) -> pa.Buffer:
    """Return the beginning of a file whose first message this is."""
    return pa.py_buffer(SCHEMA.serialize().to_pybytes() + message.to_pybytes())


def read_log_rows(
    storage: Storage, name: str, extent: Extent, after: Extent | None = None, columns: Collection[str] = SCHEMA.names
) -> pa.RecordBatch:
    """Return these columns of the rows of a file as one batch, or of those appended ``after`` an earlier extent.

    Raises StorageError if the file is missing, damaged, or of another schema version.
    """
    where, known = str(storage.folder / name), after or Extent(extent.segment)
    try:
        data = storage.read(name)
        new = data[known.nbytes : extent.nbytes]
        intact = len(data) >= extent.nbytes and zlib.crc32(new, known.crc) == extent.crc
    except FileNotFoundError:
        raise StorageError("the file is gone", "restore it from a backup", field=where) from None
    if not intact:
        remedy = "corrupted by a disk fault or a manual edit: restore it from a backup; other files are readable"
        raise StorageError("the file was changed since it was written", remedy, field=where)
    read = [number for number, column in enumerate(SCHEMA.names) if column in columns]
    options = pa.ipc.IpcReadOptions(included_fields=read)
    with pa.ipc.open_stream(with_schema(new) if known.nbytes else new, options=options) as stream:
        if not stream.schema.equals(pa.schema([SCHEMA[at] for at in read], SCHEMA.metadata), check_metadata=True):
            version = (stream.schema.metadata or {}).get(b"rayrft.schema", b"none").decode()
            problem = f"the rows have schema version {version}; this rayrft reads {SCHEMA_VERSION}"
            remedy = "read it with the version of rayrft that wrote it, or with plain pyarrow"
            raise StorageError(problem, remedy, field=where)
        batches = list(stream)
    return pa.concat_batches(batches) if len(batches) != 1 else batches[0]
