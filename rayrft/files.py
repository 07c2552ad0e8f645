"""Atomic writing of files and folders."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that becomes ``path`` atomically, synced to disk, if the block succeeds, and
    is deleted otherwise. Raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
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
    """Sync ``partial`` to disk and rename it to ``folder``, in the same parent folder. Raises OSError.

    An existing ``folder`` is deleted after the rename: a crash in between leaves one of the two complete, the old one
    possibly as ``.<name>.old``.
    """
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
