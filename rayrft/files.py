"""The one way to write what appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A place to write what then appears as ``folder``, or not at all. Raises OSError."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    put_in_place(partial, folder)


def put_in_place(partial: Path, folder: Path) -> None:
    """Bring all of ``partial`` to the disk, then give it the name ``folder``; both lie side by side. Raises OSError.

    A folder that had the name is deleted once the new one has it: whoever is killed in between leaves one of the two
    whole, the old one perhaps as ``.<name>.old``.
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
    """Returns when the file, or the entries of the folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
