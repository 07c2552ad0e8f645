"""The folder of the log, local or mounted: atomic writes and appends, and a lock."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from rayrft.errors import StorageError
from rayrft.files import atomic_file, held, lock_file, storage_error, sync

_REMEDY = {
    errno.ENOSPC: "free disk space and start again: nothing that was acknowledged is lost",
    errno.EDQUOT: "raise the quota and start again: nothing that was acknowledged is lost",
    errno.EFBIG: "raise the limit on the size of files and start again: nothing that was acknowledged is lost",
    errno.EACCES: "make the folder writable for this user, or choose another buffer.storage",
    errno.EPERM: "make the folder writable for this user, or choose another buffer.storage",
    errno.EROFS: "the file system is read-only: choose another buffer.storage",
}


class Storage:
    """The log's folder. Every method raises StorageError with the file and a remedy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: int | None = None

    def create(self) -> None:
        """Create the folder if it does not exist."""
        with self._errors(""):
            os.makedirs(self.folder, exist_ok=True)

    def lock(self) -> None:
        """Lock the folder against other writers until this process ends."""
        with self._errors("lock"), contextlib.ExitStack() as closing:
            descriptor = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR, 0o644)
            closing.callback(os.close, descriptor)
            try:
                lock_file(descriptor, self.folder / "lock", wait=False)
            except BlockingIOError:
                remedy = "end the run that uses it, or choose another name or buffer.storage"
                raise StorageError("another process writes here", remedy, field=str(self.folder)) from None
            closing.pop_all()
        self._lock = descriptor

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def files(self) -> dict[str, int]:
        """Return the size of every file by name, sorted; empty if there is no folder."""
        found = {}
        with self._errors(""), contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size
        return found

    @held
    def write(self, name: str, data: bytes | pa.Buffer) -> None:
        """Write a file atomically: a crash leaves the previous file."""
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
        with self._errors(name):
            with atomic_file(self.folder / name) as partial, _opened(partial, flags) as descriptor:
                _write(descriptor, data)
            sync(self.folder)

    def read(self, name: str) -> pa.Buffer:
        """Return the bytes of a file, memory-mapped. Raises FileNotFoundError if there is none."""
        with self._errors(name, absent=True), pa.memory_map(str(self.folder / name)) as mapped:
            return mapped.read_buffer()

    def delete(self, name: str) -> None:
        with self._errors(name), contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder / name)

    def cut(self, name: str, size: int) -> None:
        """Truncate a file to ``size`` bytes."""
        with self._errors(name):
            os.truncate(self.folder / name, size)

    def overwrite(self, name: str, data: bytes) -> None:
        """Overwrite a small file in place without syncing it."""
        with self._errors(name), _opened(self.folder / name, os.O_CREAT | os.O_WRONLY) as descriptor:
            os.pwrite(descriptor, data, 0)

    @held
    def open(self, name: str, size: int = 0) -> Appender:
        """Open a file for appending: a new one, or one of this size."""
        with self._errors(name):
            descriptor = os.open(self.folder / name, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
            sync(self.folder)  # the name of a new file is as durable as its folder
            return Appender(self, name, descriptor, size)

    @contextlib.contextmanager
    def _errors(self, name: str, *, absent: bool = False) -> Iterator[None]:
        """Turn OSError into StorageError with the file; ``absent`` lets FileNotFoundError pass."""
        try:
            yield
        except OSError as error:
            if absent and isinstance(error, FileNotFoundError):
                raise
            remedy = _REMEDY.get(error.errno or 0, "check the storage")
            raise storage_error(error, self.folder / name, remedy, "cannot be written or read") from None


class Appender:
    """A file for atomic appends."""

    def __init__(self, storage: Storage, name: str, descriptor: int, size: int) -> None:
        self._storage = storage
        self._name = name
        self._descriptor = descriptor
        self._failed: StorageError | None = None
        self.size = size

    @held
    def append(self, data: bytes | pa.Buffer) -> None:
        """Append data. Raises StorageError; a failed write is truncated again, so that the file stays intact."""
        if self._failed is not None:
            raise self._failed
        try:
            with self._storage._errors(self._name):
                _write(self._descriptor, data)
        except StorageError as error:
            try:
                if os.fstat(self._descriptor).st_size > self.size:
                    os.ftruncate(self._descriptor, self.size)
            except OSError:  # a part of the data is left, which is truncated when the file is opened again
                self._failed = error
            raise
        self.size += len(data)

    def sync(self) -> None:
        """Sync appended data to disk. Raises StorageError, and from then on always: the kernel may have discarded the
        data that it could not write, and later appends would follow a hole."""
        if self._failed is not None:
            raise self._failed
        try:
            with self._storage._errors(self._name):
                os.fdatasync(self._descriptor)
        except StorageError as error:
            self._failed = error
            raise

    def close(self) -> None:
        os.close(self._descriptor)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o644)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(descriptor: int, data: bytes | pa.Buffer) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
