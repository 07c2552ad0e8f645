"""Where runs lie."""

from __future__ import annotations

from pathlib import Path

from rayrft.errors import RunNotFound, nearest

STORAGE = Path("runs")


def find_folder(run: str, storage: Path = STORAGE) -> Path:
    """The folder of a run: the one given, or that of its name. Raises RunNotFound."""
    for folder in (Path(run), storage / run):
        if (folder / "config.yaml").is_file():
            return folder
    known = sorted(path.parent.name for path in storage.glob("*/config.yaml"))
    remedy = nearest(run, known) if known else f"there are none in {storage}: give a run folder"
    raise RunNotFound("no such run folder", field="run", value=run, remedy=remedy)
