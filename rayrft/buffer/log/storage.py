"""Folder of the log, on a local disk or any file system that `pyarrow.fs` supports.

Local files can be appended to; object stores have only whole objects. There, every append becomes a numbered object
``<file>.<number>``, and a reader concatenates them.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs

from rayrft.config.buffer import join
from rayrft.errors import StorageError

_REMEDY = {
    errno.ENOSPC: "free disk space and start again: nothing that was acknowledged is lost",
    errno.EDQUOT: "raise the quota and start again: nothing that was acknowledged is lost",
    errno.EFBIG: "raise the limit on the size of files and start again: nothing that was acknowledged is lost",
    errno.EACCES: "make the folder writable for this user, or choose another buffer.storage",
    errno.EPERM: "make the folder writable for this user, or choose another buffer.storage",
    errno.EROFS: "the file system is read-only: choose another buffer.storage",
}


class Storage:
    """The folder at a path or URI; ``filesystem`` is for one without a URI.

    Every method raises StorageError with the file and a remedy.
    """

    def __init__(self, location: str, filesystem: pafs.FileSystem | None = None) -> None:
        self.location = location
        try:
            if filesystem is None and "://" in location:
                filesystem, location = pafs.FileSystem.from_uri(location)
            self._fs = filesystem or pafs.LocalFileSystem()
        except (pa.ArrowInvalid, OSError) as error:
            raise StorageError(
                f"no such file system: {error}",
                field="buffer.storage",
                value=location,
                remedy="give a folder, or a URI that pyarrow.fs supports, such as s3://bucket/path",
            ) from None
        self.grows = isinstance(self._fs, pafs.LocalFileSystem)
        """Whether files can be appended to."""
        self._root = str(Path(location).expanduser().absolute()) if self.grows else location.rstrip("/")
        self._lock: int | None = None

    def folder(self, name: str) -> Storage:
        """Return a subfolder."""
        inner = copy.copy(self)
        inner.location, inner._root, inner._lock = join(self.location, name), self._path(name), None
        return inner

    def create(self) -> None:
        """Create the folder if it does not exist."""
        with self._errors(""):
            self._fs.create_dir(self._root, recursive=True)

    def lock(self) -> None:
        """Lock the folder against other writers until this process ends. Object stores have no locks."""
        if not self.grows:
            return
        with self._errors("lock"):
            descriptor = os.open(self._path("lock"), os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise StorageError(
                "another process writes here",
                field=self.location,
                remedy="end the run that uses it, or choose another name or buffer.storage",
            ) from None
        self._lock = descriptor

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def files(self) -> dict[str, int]:
        """Return the size of every file by name, sorted; empty if there is no folder."""
        with self._errors(""):
            found = self._fs.get_file_info(pafs.FileSelector(self._root, allow_not_found=True))
        return {info.base_name: info.size for info in sorted(found, key=lambda info: info.path) if info.is_file}

    def write(self, name: str, data: bytes | pa.Buffer) -> None:
        """Write a file atomically: a crash leaves the previous file."""
        with self._errors(name):
            if not self.grows:
                with self._fs.open_output_stream(self._path(name)) as stream:
                    stream.write(data)
                return
            partial = self._path(f".{name}.partial")
            try:
                descriptor = os.open(partial, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
                try:
                    _write(descriptor, data)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                os.replace(partial, self._path(name))
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(partial)  # on a full disk every byte counts
                raise
            self._sync_folder()

    def read(self, name: str) -> pa.Buffer:
        """Return the bytes of a file, memory-mapped if it is local. Raises FileNotFoundError if there is none."""
        with self._errors(name, absent=True):
            if self.grows:
                with pa.memory_map(self._path(name)) as mapped:
                    return mapped.read_buffer()
            with self._fs.open_input_file(self._path(name)) as file:
                return file.read_buffer()

    def delete(self, name: str) -> None:
        with self._errors(name), contextlib.suppress(FileNotFoundError):
            self._fs.delete_file(self._path(name))

    def cut(self, name: str, size: int) -> None:
        """Truncate a file to ``size`` bytes."""
        if not self.grows:
            return self.write(name, self.read(name)[:size])
        with self._errors(name):
            os.truncate(self._path(name), size)

    def overwrite(self, name: str, data: bytes) -> None:
        """Overwrite a small file in place without syncing it; does nothing on object stores."""
        if not self.grows:
            return
        with self._errors(name):
            descriptor = os.open(self._path(name), os.O_CREAT | os.O_WRONLY, 0o644)
            try:
                os.pwrite(descriptor, data, 0)
            finally:
                os.close(descriptor)

    def open(self, name: str, size: int = 0, parts: int = 0) -> Appender:
        """Open a file for appending: a new one, or one of this size and, on an object store, number of parts."""
        with self._errors(name):
            if not self.grows:
                return Appender(self, name, None, size, parts)
            descriptor = os.open(self._path(name), os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
            self._sync_folder()
            return Appender(self, name, descriptor, size)

    def _sync_folder(self) -> None:
        # The name of a new file is as durable as its folder.
        descriptor = os.open(self._root, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _errors(self, name: str, *, absent: bool = False) -> Iterator[None]:
        """Turn OSError into StorageError with the file; ``absent`` lets FileNotFoundError pass."""
        try:
            yield
        except OSError as error:
            if absent and isinstance(error, FileNotFoundError):
                raise
            raise StorageError(
                f"cannot be written or read: {error.strerror or error}",
                field=join(self.location, name) if name else self.location,
                remedy=_REMEDY.get(error.errno or 0, "check the storage"),
            ) from None


class Appender:
    """A file for atomic appends; on an object store, a sequence of objects ``<name>.<number>``."""

    def __init__(self, storage: Storage, name: str, descriptor: int | None, size: int, parts: int = 0) -> None:
        self._storage = storage
        self.name = name
        self._descriptor = descriptor
        self._parts = parts
        self._failed: StorageError | None = None
        self.size = size

    def append(self, data: bytes | pa.Buffer) -> None:
        """Append data. Raises StorageError; a failed write is truncated again, so that the file stays intact."""
        if self._failed is not None:
            raise self._failed
        if self._descriptor is None:
            self._storage.write(f"{self.name}.{self._parts:08d}", data)
            self._parts += 1
        else:
            try:
                with self._storage._errors(self.name):
                    _write(self._descriptor, data)
            except StorageError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self.size)
                raise
        self.size += len(data)

    def sync(self) -> None:
        """Sync appended data to disk. Raises StorageError, and from then on always: the kernel may have discarded the
        data that it could not write, and later appends would follow a hole."""
        if self._failed is not None:
            raise self._failed
        if self._descriptor is not None:
            try:
                with self._storage._errors(self.name):
                    os.fdatasync(self._descriptor)
            except StorageError as error:
                self._failed = error
                raise

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _write(descriptor: int, data: bytes | pa.Buffer) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
