"""Files of rows: JSONL, Parquet, and what the Hugging Face library `datasets` saves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayrft.errors import DataError

Row = dict[str, Any] | str
"""A row, or why it is none."""


def read_rows(path: Path, field: str) -> Iterator[tuple[int, Row]]:
    """The rows of a file or folder with their numbers, from 1: lines of a JSONL file, rows of any other.

    Rows of several files are numbered through, in the order of the files' names (of a saved data set: in its order).
    Raises DataError, which names ``field``, when there is no such file or it cannot be read at all.
    """
    if not path.exists():
        raise DataError(
            "no such file",
            field=field,
            value=str(path),
            remedy="give a JSONL or Parquet file, a folder of Parquet files, or a saved Hugging Face data set",
        )
    try:
        if path.is_dir() or path.suffix == ".parquet":
            yield from enumerate(_table_rows(path, field), start=1)
        else:
            yield from _json_lines(path)
    except (pa.ArrowException, OSError) as error:
        problem = f"cannot be read: {str(error).splitlines()[0]}"
        raise DataError(problem, field=field, value=str(path)) from None


def _json_lines(path: Path) -> Iterator[tuple[int, Row]]:
    # As bytes, for text mode also ends lines at characters that JSON may hold within a string.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                yield number, f"not JSON ({error.msg})"
            except UnicodeDecodeError:
                yield number, "not UTF-8"
            else:
                yield number, row if isinstance(row, dict) else "not a JSON object"


def _table_rows(path: Path, field: str) -> Iterator[dict[str, Any]]:
    if (path / "state.json").is_file():
        for file in _saved_files(path, field):
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as batches:
                for batch in batches:
                    yield from batch.to_pylist()
        return
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        split = sorted(state.parent.name for state in path.glob("*/state.json"))
        raise DataError(
            f"the folder holds the splits {split} of a data set" if split else "the folder holds no Parquet files",
            field=field,
            value=str(path),
            remedy=f"give one of them: {path / split[0]}" if split else "give a folder with files that end in .parquet",
        )
    for file in files:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches():
                yield from batch.to_pylist()


def _saved_files(folder: Path, field: str) -> list[Path]:
    """The Arrow files of a data set saved with ``datasets.Dataset.save_to_disk``."""
    try:
        state = json.loads((folder / "state.json").read_text())
        return [folder / each["filename"] for each in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"state.json is not that of a saved data set ({type(error).__name__}: {error})",
            field=field,
            value=str(folder),
            remedy="save it again with Dataset.save_to_disk",
        ) from None
