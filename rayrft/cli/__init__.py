"""The command line: what its commands share."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from rayrft.buffer.reader import Archive
from rayrft.config import parse_override
from rayrft.core.checkpoints import find_folder
from rayrft.files import local_path

Run = Annotated[str, typer.Argument(help="a run's folder, or its name in --storage")]
Storage = Annotated[Path, typer.Option(parser=local_path, help="the folder of run folders")]
ConfigFile = Annotated[str, typer.Argument(help="YAML file")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.sub=value …")]


def changes(overrides: list[str] | None) -> dict[str, Any]:
    """Return config values by the keys of ``key.sub=value`` arguments."""
    return dict(map(parse_override, overrides or []))


def say(text: str) -> None:
    """Print a line at once, unless the terminal was closed: the run does not depend on it."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def archive_of(run: str, storage: Path) -> Archive:
    """Return the experiences of a run, given as a folder or by its name in ``storage``. Raises RunNotFound."""
    return Archive.of_run(find_folder(run, storage))


def report_damage(archive: Archive) -> None:
    """Print which files of an archive were skipped."""
    for file, rows in archive.damaged.items():
        print(f"skipped {rows} rows of {file}, which cannot be read")
