"""The file of judgements and their delivery: one JSON line per entry, with checksum, on disk when it is acknowledged.

It has one writer at a time, which holds a lock on it that ends with the process.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from pathlib import Path

from rayrft.feedback.judgements import Entry, entries
from rayrft.files import atomic_file
from rayrft.json_lines import JsonLines, open_lines, read_lines

FILE = "journal.jsonl"


def feedback_folder(run: Path) -> Path:
    return run / "feedback"


def read_journal(path: Path) -> list[Entry]:
    """Return the entries of a journal, even one in use; none without a file. Raises StorageError if it is damaged."""
    return [entry for _, entry in read_lines(path, _entry)]


def open_journal(folder: Path, *, wait: bool = True) -> tuple[JsonLines, list[Entry]]:
    """Open the journal in a folder, cut off a torn line, and return it with its entries; `entry_line` is a line of it.

    Waits for the lock until its holder has ended. Raises StorageError if the file cannot be used or is damaged and,
    without ``wait``, if another process holds the lock.
    """
    return open_lines(folder / FILE, _entry, locked=True, wait=wait)


def forget_judgements(folder: Path, rows: set[str]) -> int:
    """Write the journal in a folder again without what people said of these rows; return the number of entries erased.

    Raises StorageError while the page is open, since it writes the file.
    """
    journal, found = open_journal(folder, wait=False)
    with contextlib.closing(journal):
        about = {entry.judgement.id for entry in found if entry.kind == "judged" and rows & {*entry.judgement.rows}}
        kept = [entry for entry in found if _subject(entry) not in (rows if entry.kind == "sent" else about)]
        if len(kept) < len(found):
            with atomic_file(journal.path) as draft:
                draft.write_bytes(b"".join(map(entry_line, kept)))
                draft.chmod(0o600)
    return len(found) - len(kept)


def _subject(entry: Entry) -> str:
    """Return the id of the judgement, or of the row, that an entry is about."""
    if entry.kind == "judged":
        return entry.judgement.id
    return entry.experience_id if entry.kind == "sent" else entry.id


def entry_line(entry: Entry) -> bytes:
    """Return an entry as a line of the journal."""
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
