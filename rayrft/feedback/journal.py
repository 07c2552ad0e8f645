"""The file that keeps what people said: one JSON line per entry, with its checksum, on disk before it is acknowledged.

It has one writer at a time, who holds a lock on it that ends with the process.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rayrft.errors import StorageError
from rayrft.feedback.judgements import Entry, entries
from rayrft.files import sync

FILE = "journal.jsonl"


def feedback_folder(run: Path) -> Path:
    """Return the folder, in a run's, of what people said."""
    return run / "feedback"


def read_journal(path: Path) -> list[Entry]:
    """Return the entries of a journal, which somebody may be writing; none if there is no file. Raises StorageError if
    it is damaged."""
    if not path.exists():
        return []
    data = path.read_bytes()
    return [entry for entry, _ in _parsed(path, data)]


class FeedbackJournal:
    """Writes the journal in a folder. Entries that are written at once share one sync."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._descriptor = -1
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._flusher: asyncio.Task[None] | None = None
        self._whole = 0
        """Bytes of whole entries; what a failed write left after them is cut off by the next one."""

    def open(self, *, wait: bool = True) -> list[Entry]:
        """Take the lock, cut off what a crash left unfinished, and return all entries.

        Waits for the lock until its holder has ended; without ``wait``, raises StorageError if somebody holds it, as if
        the file cannot be used or is damaged.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            data = self.path.read_bytes()
            found = list(_parsed(self.path, data))
            self._whole = found[-1][1] if found else 0
            os.ftruncate(self._descriptor, self._whole)
            os.fsync(self._descriptor)
            sync(self.path.parent)
        except BlockingIOError:
            self.close()
            raise StorageError(
                "is being written by the run's feedback page", "end the page, and try again", field=str(self.path)
            ) from None
        except OSError as error:
            self.close()
            raise _failed(self.path, error) from None
        except StorageError:  # the lock is free again for who opens it once it is mended
            self.close()
            raise
        return [entry for entry, _ in found]

    async def write(self, *added: Entry) -> None:
        """Write entries; return when they are on disk. Raises StorageError; then none of them is in the journal."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((b"".join(map(_line, added)), done))
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())
        await asyncio.shield(done)

    def append(self, *added: Entry) -> None:
        """Write entries, outside of event loops. Raises StorageError."""
        self._append(b"".join(map(_line, added)))

    def close(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    async def _flush(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            failure: StorageError | None = None
            try:
                await asyncio.to_thread(self._append, b"".join(lines for lines, _ in batch))
            except StorageError as error:
                failure = error
            for _, done in batch:
                if failure is None:
                    done.set_result(None)
                else:
                    done.set_exception(failure)

    def _append(self, data: bytes) -> None:
        try:
            os.ftruncate(self._descriptor, self._whole)
            left = memoryview(data)
            while left:
                left = left[os.write(self._descriptor, left) :]
            os.fsync(self._descriptor)
            self._whole += len(data)
        except OSError as error:
            raise _failed(self.path, error) from None


def _line(entry: Entry) -> bytes:
    text = json.dumps(entries.dump_python(entry, mode="json", exclude_defaults=False), separators=(",", ":"))
    return f'{{"crc":{zlib.crc32(text.encode())},"entry":{text}}}\n'.encode()


def _parsed(path: Path, data: bytes) -> Iterator[tuple[Entry, int]]:
    """Iterate over the entries, each with the offset of its line's end. An invalid last line was cut by a crash."""
    start = 0
    while (end := data.find(b"\n", start)) >= 0:
        end += 1
        entry = _entry(data[start:end])
        if entry is None:
            if b"\n" in data[end:] or end < len(data):
                raise StorageError(
                    f"is damaged in the line at byte {start}",
                    "restore it from a copy, or delete that line",
                    field=str(path),
                )
            return
        yield entry, end
        start = end


def _entry(line: bytes) -> Entry | None:
    try:
        row: Any = json.loads(line)
        text = json.dumps(row["entry"], separators=(",", ":"))
        return entries.validate_python(row["entry"]) if zlib.crc32(text.encode()) == row["crc"] else None
    except (ValueError, KeyError, TypeError, ValidationError):
        return None


def _failed(path: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot be written: {error.strerror}", "free space, and try again", field=str(path))
