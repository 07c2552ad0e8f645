"""Files of tasks that rayrft writes, with what was measured of each, and reads again as a source: ``source: tasks``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayrft.config.tasks import TaskSourceConfig
from rayrft.data.formats import broken_rows, is_json, json_field
from rayrft.data.tables import open_table, write_table
from rayrft.errors import DataError
from rayrft.experience import Task

_TEXTS = ("id", "source", "question", "answer", "system", "domain", "workflow")
TASK_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in _TEXTS),
        ("tries", pa.int64()),
        *((name, pa.float64()) for name in ("pass_rate", "difficulty", "priority")),
        ("images", pa.list_(pa.string())),
        ("other_answers", pa.list_(pa.string())),
        json_field("history"),
        json_field("metadata"),
    ]
)
"""``source`` is the name of the task's source, or its number; ``metadata`` and ``history`` are JSON."""
_BATCH_ROWS = 1000


def measured(task: Task, tries: int, passes: float) -> Task:
    """Return a task with its tries and pass rate; its difficulty, if it has none, is ``1 - pass_rate``."""
    if not tries:
        return replace(task, tries=0, pass_rate=None)
    rate = passes / tries
    difficulty = task.difficulty if task.difficulty is not None else 1 - rate
    return replace(task, tries=tries, pass_rate=rate, difficulty=difficulty)


def write_tasks(path: Path, tasks: Iterable[tuple[str, Task]]) -> int:
    """Write tasks, each with the name of its source, to JSONL or Parquet; return their number. Raises DataError."""
    rows = (task_row(task, source) for source, task in tasks)
    parts = iter(lambda: list(islice(rows, _BATCH_ROWS)), [])
    return write_table(path, TASK_SCHEMA, (pa.RecordBatch.from_pylist(part, schema=TASK_SCHEMA) for part in parts))


def read_tasks(config: TaskSourceConfig, field: str) -> list[Task]:
    """Read tasks as they were written, with their ids; ``system`` of the config replaces theirs.

    Raises DataError if the file is missing, broken, or not one of tasks.
    """
    assert config.path is not None  # checked by the config
    path, place = config.path, f"{field}.path"
    table = open_table(path, place)
    if table.broken:
        total = len(table.broken) + (table.rows or 0)
        raise broken_rows(table.broken, total, "write the file again", field=place, value=str(path))
    if missing := [name for name in TASK_SCHEMA.names if name not in table.schema.names]:
        problem = f"is not a file of tasks that rayrft wrote: it has no column {missing[0]!r}"
        raise DataError(problem, "read files of your own by source: file", field=place, value=str(path))
    for name in ("question", "answer", "system"):
        if (column := table.schema.field(name)).type != pa.string() or is_json(column):
            problem = f"column {name!r} holds values that are not texts"
            raise DataError(problem, "write them as texts", field=place, value=str(path))
    rows = (row for batch in table.batches(_BATCH_ROWS) for row in batch.select(TASK_SCHEMA.names).to_pylist())
    return [_to_task(row, config.system) for row in islice(rows, config.size)]


def task_row(task: Task, source: str) -> dict[str, Any]:
    """Return a task of a source as a row of `TASK_SCHEMA`."""
    texts = {name: json.dumps(getattr(task, name), ensure_ascii=False, default=str) for name in ("metadata", "history")}
    lists = {name: list(getattr(task, name)) for name in ("images", "other_answers")}
    return {**vars(task), "source": source, **lists, **texts}


def _to_task(row: dict[str, Any], system: str | None) -> Task:
    del row["source"]
    lists = {name: tuple(row[name] or ()) for name in ("images", "other_answers")}
    metadata, history = json.loads(row["metadata"] or "{}"), tuple(json.loads(row["history"] or "[]"))
    filled = {"tries": row["tries"] or 0, "system": system or row["system"], "metadata": metadata, "history": history}
    return Task(**row | lists | filled)
