"""Local paths, atomic writing of files and folders, locks, errors of files, and waits for room on a disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import ClassVar, ParamSpec, TypeVar

from rayrft.errors import ConfigError, NoLocks, NoRoom, StorageError

P = ParamSpec("P")
R = TypeVar("R")

_REMEDY = "free disk space or fix the storage, then: rayrft resume RUN"


class Room:
    """Waits of this process for room on a disk, or in the object store: see `held`."""

    poll_s = 5.0
    """Pause before a write is tried again: there is no event for room on a disk."""
    limit_s = 0.0
    """Longest wait, which a process of a run sets: half of ``monitor.stall_s``, after which others give up."""
    waits: ClassVar[dict[str, tuple[float, str]]] = {}
    """By file: since when it waits, and why."""


def held(write: Callable[P, R]) -> Callable[P, R]:
    """Let a write that raises NoRoom, and then has changed nothing, wait until there is room. It blocks."""

    @wraps(write)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        began, waited, file = time.monotonic(), 0.0, ""
        try:
            while True:
                try:
                    return write(*args, **kwargs)
                except NoRoom as error:
                    if waited >= Room.limit_s:  # not by the clock: ranks that write together give up together
                        raise
                    Room.waits[file := error.field] = began, error.problem
                    time.sleep(Room.poll_s)
                    waited += Room.poll_s
        finally:
            Room.waits.pop(file, None)

    return call


def local_path(path: str | Path, field: str = "path") -> Path:
    """Return a path. Raises ConfigError for a name that is too long, and for an address such as s3://bucket/x."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", str(path)):
        problem = "must be a path, not an address: object stores have no appends, renames and locks of files"
        remedy = "give a path that is local or mounted on every node, such as /mnt/runs, and copy from or to the store"
        raise ConfigError(problem, remedy, field=field, value=str(path))
    if any(len(os.fsencode(name)) > 255 for name in Path(path).parts):
        raise ConfigError("has a name of more than 255 bytes", "shorten it", field=field, value=str(path))
    return Path(path)


def read_text(path: Path, field: str) -> str:
    """Return the text of a user's file. Raises ConfigError if it cannot be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else "is not text"
        raise ConfigError(problem, "give a text file in UTF-8", field=field, value=str(path)) from None


def lock_file(descriptor: int, path: Path, *, wait: bool = True) -> None:
    """Lock an open file against other processes until it is closed. Raises NoLocks, and BlockingIOError if another
    process has the lock and it is not to ``wait``."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        remedy = "the file system has no file locks (Lustre: mount it with flock): choose a folder on another one"
        raise NoLocks(f"cannot be locked: {error.strerror}", remedy, field=str(path)) from None


@contextlib.contextmanager
def storage_errors(path: Path, remedy: str = _REMEDY, what: str = "cannot be written") -> Iterator[None]:
    """Raise an OSError inside a ``with`` as a StorageError about ``path``."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path, remedy, what) from None


def storage_error(error: OSError, path: Path, remedy: str, what: str = "cannot be written") -> StorageError:
    """Return an OSError about a path as a StorageError; as NoRoom if the disk is full or read-only."""
    problem = f"{what}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
        return NoRoom(f"{problem} ({free_mb(path)})", remedy, field=str(path))
    return StorageError(problem, remedy, field=str(path))


def free_mb(path: Path) -> str:
    """Return how much is free on the disk of a path, as far as it is known."""
    for folder in path.parents:
        with contextlib.suppress(OSError):
            return f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB free"
    return "its disk is gone"


@contextlib.contextmanager
def atomic_file(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield the path of a temporary file that becomes ``path`` atomically, synced to disk, if the block succeeds, and
    is deleted otherwise. ``shared`` allows several writers at the same time. Raises OSError."""
    writer = f".{secrets.token_hex(4)}" if shared else ""
    partial = path.with_name(f".{path.name}{writer}.partial")
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder`` atomically if the block succeeds. Raises OSError."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    replace_folder(partial, folder)


def replace_folder(partial: Path, folder: Path) -> None:
    """Sync ``partial`` to disk and rename it to ``folder``, in the same parent folder. Raises OSError. An existing
    ``folder`` is deleted after the rename: a crash in between leaves one of the two complete, the old one possibly as
    ``.<name>.old``."""
    for path in (*partial.rglob("*"), partial):
        sync(path)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Fsync a file, or the entries of a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
