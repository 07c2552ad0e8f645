"""Files of JSON lines: an appended line survives every crash of its writer, and a line torn by a crash is cut off."""

from __future__ import annotations

import asyncio
import contextlib
import os
from array import array
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import TypeVar

from rayrft.errors import StorageError
from rayrft.files import lock_file, storage_errors, sync

T = TypeVar("T")


def read_lines(path: Path, parse: Callable[[bytes], T], start: int = 0) -> Iterator[tuple[int, T]]:
    """Iterate over the parsed lines of a file from the offset ``start`` of a line, each with the offset of its end; the
    file may be missing or in use. The last line is left out if it is torn, or if ``parse`` raises ValueError. Raises
    StorageError if ``parse`` raises it for any other line."""
    if not path.exists():
        return
    end, damaged = start, False
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if damaged:
                problem = f"is damaged in the line at byte {end}"
                raise StorageError(problem, "restore the file from a copy, or delete that line", field=str(path))
            if not line.endswith(b"\n"):
                return
            try:
                value = parse(line)
            except ValueError:
                damaged = True
            else:
                end += len(line)
                yield end, value


class JsonLines:
    """A file with one writer, which appends lines unbuffered and reads them by number: see `open_lines`."""

    def __init__(self, path: Path, file: FileIO, remedy: str, ends: list[int]) -> None:
        self.path, self._file, self._remedy = path, file, remedy
        self._ends = array("Q", ends)
        """The start of the file, and the offsets of the ends of the lines."""
        self._torn = False
        """Whether the file ends with a part of an append that failed."""
        self._waiting: list[bytes] = []
        """Lines that the next flush appends."""
        self._flushing: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._ends) - 1

    def lines(self, first: int = 0, end: int | None = None) -> Iterator[bytes]:
        """Iterate over the lines from number ``first`` to before ``end``, by default to the latest."""
        for number in range(first, min(len(self), len(self) if end is None else end)):
            start, stop = self._ends[number : number + 2]
            yield os.pread(self._file.fileno(), stop - start, start)

    def append(self, *lines: bytes, durable: bool = False) -> None:
        """Append lines with their newlines, to disk if ``durable``: all or, if it raises StorageError, none of them."""
        with storage_errors(self.path, self._remedy):
            if self._torn:
                self._cut()
            try:
                left = memoryview(b"".join(lines))
                while left:  # a nearly full disk may accept only a part
                    left = left[os.write(self._file.fileno(), left) :]
                if durable:
                    os.fsync(self._file.fileno())
            except OSError:
                self._torn = True
                self._cut()
                raise
        for line in lines:
            self._ends.append(self._ends[-1] + len(line))

    async def append_durably(self, *lines: bytes) -> None:
        """Append lines, on disk, in a thread; concurrent calls share a sync. Raises StorageError like `append`."""
        if not self._waiting or self._flushing is None:
            self._flushing = asyncio.ensure_future(self._flush(self._flushing))
        self._waiting += lines
        await asyncio.shield(self._flushing)

    def close(self) -> None:
        """Close the file, which releases the lock."""
        self._file.close()

    def _cut(self) -> None:
        self._file.truncate(self._ends[-1])
        self._torn = False

    async def _flush(self, before: asyncio.Future[None] | None) -> None:
        """Append the lines that wait once those before them are written."""
        if before is not None:
            await asyncio.wait([before])
        lines, self._waiting = self._waiting, []
        await asyncio.to_thread(self.append, *lines, durable=True)


def open_lines(
    path: Path,
    parse: Callable[[bytes], T],
    remedy: str = "free disk space or fix the storage, and try again",
    *,
    locked: bool = False,
    wait: bool = True,
) -> tuple[JsonLines, list[T]]:
    """Open a file for appending, cut off a torn line, and return the file with its parsed lines; see `read_lines`. If
    ``locked``, it is created for its owner alone, and this process holds a lock on it until it is closed; with
    ``wait``, waits for the lock. ``remedy`` is for a file that cannot be written. Raises StorageError."""
    mode = 0o600 if locked else 0o666
    with storage_errors(path, remedy), contextlib.ExitStack() as closing:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = closing.enter_context(FileIO(path, "a+", opener=lambda name, flags: os.open(name, flags, mode)))
        if locked:
            try:
                lock_file(file.fileno(), path, wait=wait)
            except BlockingIOError:
                problem, end = "another process is writing the file", "end that process, and try again"
                raise StorageError(problem, end, field=str(path)) from None
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):  # replaced meanwhile
                return open_lines(path, parse, remedy, locked=True, wait=wait)
        found = list(read_lines(path, parse))
        opened = JsonLines(path, file, remedy, [0, *(end for end, _ in found)])
        file.truncate(opened._ends[-1])
        sync(path.parent)
        closing.pop_all()
    return opened, [value for _, value in found]
