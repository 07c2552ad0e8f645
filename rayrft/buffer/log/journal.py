"""The journal: every change of the Buffer's state, one JSON line each, in the order in which they happened.

The journal is the commit point of the log. Rows are in the Buffer once the line that says so is written; a line that is
not whole, and row data that no line speaks of, are what a crash left behind, and are cut off. Every line carries its
checksum. A snapshot of the whole state begins a new journal, so that recovery reads little:

    snapshot-00000003.arrow     the state when journal 3 began
    journal-00000003.jsonl      what happened since
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass

import pyarrow as pa

from rayrft.buffer.log.events import Event, decode, encode
from rayrft.buffer.log.storage import Appender, Storage
from rayrft.errors import StorageError

_NAME = re.compile(r"(snapshot|journal)-(\d{8})\.(arrow|jsonl)(\.\d{8})?$")


@dataclass(frozen=True)
class Recovered:
    """What lay on the disk: a snapshot, where there is one, the events since, and the bytes of a torn tail cut off."""

    snapshot: pa.Buffer | None
    events: list[Event]
    torn_bytes: int


class Journal:
    """The journal in a folder. ``open`` before anything else."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._number = 0
        self._file: Appender | None = None

    def open(self) -> Recovered:
        """Read what is there and go on behind it. Raises StorageError, and leaves the files, when a line is corrupt."""
        recovered = self.read(cut=True)
        # Object stores go on in a journal of the same number: parts count on behind those that lie there.
        self._file = self._storage.open(self._journal)
        self._file.size = sum(size for name, size in self._storage.files().items() if name.startswith(self._journal))
        self._file.parts = sum(name.startswith(self._journal + ".") for name in self._storage.files())
        return recovered

    def read(self, *, cut: bool = False) -> Recovered:
        """Read what is there; with ``cut``, a torn tail is removed from the file."""
        found = [match for name in self._storage.files() if (match := _NAME.match(name))]
        self._number = max((int(m[2]) for m in found if m[1] == "snapshot"), default=0)
        snapshot = self._storage.read(self._snapshot) if self._number else None
        events: list[Event] = []
        torn = 0
        for name in sorted(n for n in self._storage.files() if n.startswith(self._journal)):
            data = self._storage.read(name).to_pybytes()
            whole = data.rfind(b"\n") + 1
            events += [_parse(line, f"{name}, line {i}") for i, line in enumerate(data[:whole].splitlines(), start=1)]
            if whole < len(data):
                torn += len(data) - whole
                if cut:
                    self._storage.cut(name, whole)
        return Recovered(snapshot, events, torn)

    def append(self, events: list[Event]) -> None:
        """Write events, as one piece. Raises StorageError; then none of them is in the journal."""
        assert self._file is not None  # open() comes first
        self._file.append(b"".join(map(_line, events)))

    def sync(self) -> None:
        """Returns when what was appended is on the disk."""
        assert self._file is not None
        self._file.sync()

    @property
    def size(self) -> int:
        """Bytes since the last snapshot."""
        return self._file.size if self._file is not None else 0

    def begin(self, snapshot: pa.Buffer) -> None:
        """Start a new journal with a snapshot of the state; the one before is deleted once the new one stands."""
        old = [name for name in self._storage.files() if _NAME.match(name)]
        self._number += 1
        self._storage.write(self._snapshot, snapshot)
        self.close()
        self._file = self._storage.open(self._journal)
        for name in old:
            self._storage.delete(name)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _journal(self) -> str:
        return f"journal-{self._number:08d}.jsonl"

    @property
    def _snapshot(self) -> str:
        return f"snapshot-{self._number:08d}.arrow"


def _line(event: Event) -> bytes:
    body = encode(event)
    return b'%s,"crc":%d}\n' % (body[:-1], zlib.crc32(body))


def _parse(line: bytes, where: str) -> Event:
    body, _, rest = line.rpartition(b',"crc":')
    body += b"}"
    try:
        intact = zlib.crc32(body) == json.loads(rest.removesuffix(b"}"))
    except ValueError:
        intact = False
    if not intact:
        raise StorageError(
            "the line was changed since it was written",
            field=where,
            remedy="the disk or a hand damaged it: restore it from a copy; rayrft data export still reads the segments",
        )
    return decode(body)
