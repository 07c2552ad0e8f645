"""The file of people's judgements and their delivery: one JSON line per entry, with its checksum, on disk before it is
acknowledged.

It has one writer at a time, which holds a lock on it that ends with the process.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from rayrft.feedback.judgements import Entry, entries
from rayrft.json_lines import JsonLines, open_lines, read_lines

FILE = "journal.jsonl"


def feedback_folder(run: Path) -> Path:
    """Return the folder of feedback in a run's folder."""
    return run / "feedback"


def read_journal(path: Path) -> list[Entry]:
    """Return the entries of a journal, which may be in use; none if there is no file. Raises StorageError if it is
    damaged."""
    return [entry for _, entry in read_lines(path, _entry)]


class FeedbackJournal:
    """The writer of a journal: see `open_journal`."""

    def __init__(self, file: JsonLines) -> None:
        self._file = file

    async def write(self, *added: Entry) -> None:
        """Write entries; return when they are on disk. Raises StorageError; then the journal has none of them."""
        await self._file.append_durably(*map(_line, added))

    def append(self, *added: Entry) -> None:
        """Write entries, outside of event loops. Raises StorageError."""
        self._file.append(*map(_line, added), durable=True)

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


def open_journal(folder: Path, *, wait: bool = True) -> tuple[FeedbackJournal, list[Entry]]:
    """Open the journal in a folder, cut off a torn line, and return it with its entries.

    Waits for the lock until its holder has ended. Raises StorageError if the file cannot be used or is damaged and,
    without ``wait``, if another process holds the lock.
    """
    file, found = open_lines(folder / FILE, _entry, locked=True, wait=wait)
    return FeedbackJournal(file), found


def _line(entry: Entry) -> bytes:
    text = json.dumps(entries.dump_python(entry, mode="json"), separators=(",", ":"))
    return f'{{"crc":{zlib.crc32(text.encode())},"entry":{text}}}\n'.encode()


def _entry(line: bytes) -> Entry:
    try:
        row = json.loads(line)
        text = json.dumps(row["entry"], separators=(",", ":"))
        intact = zlib.crc32(text.encode()) == row["crc"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an entry: {error}") from None
    if not intact:
        raise ValueError("wrong checksum")
    return entries.validate_python(row["entry"])
