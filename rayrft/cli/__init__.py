"""The command line: what its commands share."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from rayrft.config import parse_override
from rayrft.files import local_path

Run = Annotated[str, typer.Argument(help="a run's folder, or its name in --storage")]
Storage = Annotated[Path, typer.Option(parser=local_path, help="the folder of run folders")]
ConfigFile = Annotated[str, typer.Argument(help="YAML file")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.sub=value …")]
RUNS = Path("runs")


def changes(overrides: list[str] | None) -> dict[str, Any]:
    """Return config values by the keys of ``key.sub=value`` arguments."""
    return dict(map(parse_override, overrides or []))


def say(text: str) -> None:
    """Print a line at once, unless the terminal was closed: the run does not depend on it."""
    with contextlib.suppress(OSError):
        print(text, flush=True)
