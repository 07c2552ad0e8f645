"""The journal: every change of the Buffer's state in order, one JSON line per event.

The journal is the commit point of the log. Rows are in the Buffer once their line is written; incomplete lines, and row
data without a line, are left by a crash and truncated. Every line contains its checksum, and a snapshot has it in its
name. A snapshot of the whole state starts a new journal, which bounds the recovery time:

    snapshot-00000003-1a2b3c4d.arrow    the state at the start of journal 3
    journal-00000003.jsonl              the events since
    synced                              the position up to which it was synced to disk

Up to that position the journal survives any crash. A journal that ends before it is damaged, not torn: it has lost
acknowledged groups, and steps that a checkpoint covers.
"""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
from pydantic import ValidationError

from rayrft.buffer.events import Event, check_version
from rayrft.buffer.log.storage import Appender, Storage
from rayrft.buffer.transitions import decode, encode
from rayrft.buffer.transitions.contents import Began
from rayrft.errors import StorageError

SNAPSHOT_BYTES = 8 << 20
SNAPSHOT_RATIO = 2
"""A journal above `SNAPSHOT_BYTES`, and above this multiple of the last snapshot, is replaced by a snapshot."""

_SNAPSHOT = re.compile(r"snapshot-(\d{8})-[0-9a-f]{8}\.arrow$")
_JOURNAL = "journal-{:08d}.jsonl"
_SYNCED = "synced"
_DAMAGED = (
    "the file was corrupted by a disk fault or a manual edit: restore it from a backup; the segments beside it are "
    "plain Arrow files"
)


@dataclass(frozen=True, order=True)
class Position:
    """A position in the log: a byte offset in the journal of that number."""

    number: int = 0
    nbytes: int = 0

    def __str__(self) -> str:
        return f"byte {self.nbytes} of journal {self.number}"


@dataclass(frozen=True)
class Recovery:
    """Contents of the journal: the latest snapshot, if any, the events since, and the bytes of its torn tail."""

    snapshot: pa.Buffer | None
    events: list[Event]
    ends: list[int]
    """End offset of every event."""
    torn_bytes: int
    start: int = 0
    """Offset of the first event. Unless it is 0, the snapshot and the events before it were not read."""


class EventJournal:
    """The journal in a folder. Call ``open`` before writing."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._file: Appender | None = None
        self._snapshot_bytes = 0
        self.position = Position()
        """End of the journal."""

    def open(self, survived: Callable[[Event], bool] = lambda event: True, least: Position = Position()) -> Recovery:
        """Read the journal, truncate its torn tail, and open it for appending.

        The tail starts after the last intact line, or before the first event that did not survive and was not synced.
        Raises StorageError, and changes no file, if anything before the tail is damaged. Raises it also if the tail
        starts before the synced position, or before ``least``, the position of the checkpoint that the run resumes
        from.
        """
        found, synced, number = self.read(), self._synced(), self.position.number
        bounds = {"synced position": synced, "position of the checkpoint that the run resumes from": least}
        for what, known in bounds.items():
            if self.position < known:
                remedy = (
                    "the end of the file was lost: restore it and its snapshot from a backup; no file was changed, "
                    "and the segments with the rows are plain Arrow files"
                )
                problem = f"the journal ends at {self.position}, before the {what}: {known}"
                path = str(self._storage.folder / _JOURNAL.format(number))
                raise StorageError(problem, remedy, field=path, value=self.position.nbytes)
        forced = max(synced, least)
        kept = end = 0
        for event, after in zip(found.events, found.ends, strict=True):
            if Position(number, after) > forced and not survived(event):
                break
            kept, end = kept + 1, after
        torn = found.torn_bytes + self.position.nbytes - end
        if torn:
            self._storage.cut(_JOURNAL.format(number), end)
        self.position = Position(number, end)
        self._file = self._storage.open(_JOURNAL.format(number), end)
        return Recovery(found.snapshot, found.events[:kept], found.ends[:kept], torn)

    def read(self, after: Position = Position()) -> Recovery:
        """Read the journal without its torn tail; change no file. If it is the one of ``after``, a position in it that
        is not its start, read the events from there on, without the snapshot."""
        names = self._storage.files()
        snapshots = {int(m[1]): name for name in names if (m := _SNAPSHOT.match(name))}
        number = max(snapshots, default=0)
        name = _JOURNAL.format(number)
        start = after.nbytes if after.number == number and after.nbytes <= names.get(name, 0) else 0
        snapshot = self._storage.read(snapshots[number]) if snapshots and not start else None
        if snapshot is not None and not snapshots[number].endswith(f"-{zlib.crc32(snapshot):08x}.arrow"):
            raise StorageError("the snapshot was changed since it was written", _DAMAGED, field=snapshots[number])
        data = self._storage.read(name)[start:].to_pybytes() if name in names else b""
        events, ends = _parse(data, name)
        self.position = Position(number, start + (ends[-1] if ends else 0))
        torn = start + len(data) - self.position.nbytes
        return Recovery(snapshot, events, [start + end for end in ends], torn, start)

    @property
    def is_long(self) -> bool:
        """Whether a snapshot should replace the journal."""
        return self.position.nbytes > max(SNAPSHOT_BYTES, SNAPSHOT_RATIO * self._snapshot_bytes)

    def append(self, events: list[Event]) -> None:
        """Append events atomically. Raises StorageError; then none of them is in the journal."""
        assert self._file is not None  # open() comes first
        self._file.append(b"".join(map(_line, events)))
        self.position = Position(self.position.number, self._file.size)

    def sync(self, position: Position) -> None:
        """Sync all appended events to disk; the rows of those up to ``position`` are there."""
        assert self._file is not None
        self._file.sync()
        self._note_synced(max(position, Position(self.position.number)))

    def begin(self, snapshot: pa.Buffer) -> None:
        """Start a new journal with a snapshot of the state, then delete the old one."""
        old = [name for name in self._storage.files() if name.startswith(("snapshot-", "journal-"))]
        number = self.position.number + 1
        self._storage.write(f"snapshot-{number:08d}-{zlib.crc32(snapshot):08x}.arrow", snapshot)
        file = self._storage.open(_JOURNAL.format(number))
        self.close()
        self._file = file
        self.position = Position(number)
        self._snapshot_bytes = len(snapshot)
        self._note_synced(self.position)
        for name in old:
            self._storage.delete(name)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _synced(self) -> Position:
        with contextlib.suppress(FileNotFoundError, ValueError):  # not synced itself: a power failure may lose the file
            number, nbytes, crc = self._storage.read(_SYNCED).to_pybytes().split()
            if int(crc, 16) == zlib.crc32(b"%s %s" % (number, nbytes)):
                return Position(int(number), int(nbytes))
        return Position()

    def _note_synced(self, position: Position) -> None:
        text = b"%08d %020d" % (position.number, position.nbytes)
        self._storage.overwrite(_SYNCED, b"%s %08x\n" % (text, zlib.crc32(text)))


def _parse(data: bytes, name: str) -> tuple[list[Event], list[int]]:
    """Return the events before the torn tail, and their end offsets. Raises StorageError, which names the line."""
    lines = data.split(b"\n")[:-1]
    bodies = [_body(line) for line in lines]
    while bodies and bodies[-1] is None:
        bodies.pop()  # the torn tail
    events: list[Event] = []
    ends: list[int] = []
    for number, (line, body) in enumerate(zip(lines, bodies, strict=False), start=1):
        where = f"{name}, line {number}"
        if body is None:
            raise StorageError("the line was changed since it was written", _DAMAGED, field=where)
        try:
            events.append(decode(body))
        except ValidationError as error:
            first = error.errors()[0]
            what = f"unknown event {first['ctx']['tag']!r}" if first["type"] == "union_tag_invalid" else first["msg"]
            problem = f"this version of rayrft cannot read the line: {what}"
            raise StorageError(problem, "continue with the version of rayrft that wrote it", field=where) from None
        if isinstance(events[-1], Began):
            check_version(events[-1].schema, where)
        ends.append((ends[-1] if ends else 0) + len(line) + 1)
    return events, ends


def _line(event: Event) -> bytes:
    body = encode(event)
    return b'%s,"crc":%d}\n' % (body[:-1], zlib.crc32(body))


def _body(line: bytes) -> bytes | None:
    """Return the JSON of a line without its checksum; None if the checksum is wrong."""
    body, _, rest = line.rpartition(b',"crc":')
    body += b"}"
    try:
        return body if zlib.crc32(body) == json.loads(rest.removesuffix(b"}")) else None
    except ValueError:
        return None
