"""Atomic writing of files and folders, and the error of files that cannot be written."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from rayrft.errors import StorageError

_REMEDY = "free disk space or fix the storage, then: rayrft resume RUN"


@contextlib.contextmanager
def storage_errors(path: Path, remedy: str = _REMEDY) -> Iterator[None]:
    """Raise an OSError inside a ``with`` as a StorageError about ``path``."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"cannot be written: {error.strerror}", remedy, field=str(path)) from None


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
