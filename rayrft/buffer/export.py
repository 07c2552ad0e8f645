"""Rows that leave the Buffer and come back: at a glance, as JSONL and Parquet files, as tables of any origin."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from itertools import compress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayrft.data.formats import open_rows
from rayrft.data.selection import Selection
from rayrft.data.tables import check_suffix, open_table, write_table
from rayrft.errors import DataError, first_line
from rayrft.experience import SCHEMA, Experience, pack

GLANCE = ["id", "reward", "question", "answer", "labels", "versions"]
_WHOLE = "give what `rayrft data export` wrote, with all columns"
_ROLES = ("user", "assistant")
_OWNERS = ["experience_id", "group_id", "labels", "finished_at"]
"""Columns that tell whose rows they are."""
_ROWS = 4096
"""Rows of a file that are read at a time."""
_MAPS = [field.name for field in SCHEMA if pa.types.is_map(field.type)]


def glance(row: Experience) -> dict[str, Any]:
    """Summarise a row for display; ``versions`` are the weight versions of its tokens, ascending."""
    contents = {role: [turn.get("content") for turn in row.turns if turn.get("role") == role] for role in _ROLES}
    question = contents["user"][0] if contents["user"] else None
    answer = contents["assistant"][-1] if contents["assistant"] else None
    versions = sorted({span.version for span in row.weight_versions})
    return dict(zip(GLANCE, (row.experience_id, row.reward, question, answer, row.labels, versions), strict=True))


def read_file(path: Path, where: str | None = None) -> pa.Table:
    """Read experiences from a JSONL or Parquet file of `write_table`; only those that meet ``where``: see `Selection`.

    Raises DataError if the condition is invalid, there is no such file, a line is broken, the rows are not experiences,
    or none meets the condition.
    """
    chosen = Selection(SCHEMA, where=where)
    check_suffix(path)
    rows = _read_parquet(path) if path.suffix == ".parquet" else _read_json_lines(path)
    met = pa.Table.from_batches(map(chosen.apply, rows.to_batches()), SCHEMA)
    if chosen.filters and not len(met):
        raise DataError(f"no row of {path} meets the condition", "widen it", field="where", value=where)
    return met


def forget_rows(path: Path, ids: Collection[str], before: float) -> int:
    """Write a file of `rayrft data export` again without the rows that `Buffer.forget` erases; return their number.

    Raises DataError if there is no such file, or it lacks a column that tells whose rows they are.
    """
    source = open_table(path)
    if missing := [name for name in _OWNERS if name not in source.schema.names]:
        raise DataError(f"the rows have no column {missing[0]!r}", _WHOLE, field="file", value=str(path))
    gone = set[str]()
    for batch in source.batches(_ROWS):
        gone.update(compress(batch["group_id"].to_pylist(), are_personal(batch, ids, before)))
    if not gone:
        return 0
    groups = pa.array(gone, pa.string())
    kept = (batch.filter(pc.invert(pc.is_in(batch["group_id"], groups))) for batch in source.batches(_ROWS))
    return (source.rows or 0) - write_table(path, source.schema, kept)


def are_personal(batch: pa.RecordBatch, ids: Collection[str], before: float) -> Iterator[bool]:
    """Yield whether rows have one of these experience, session or response ids, or a session that ended before."""
    columns = [batch.column(name).to_pylist() for name in ("experience_id", "labels", "finished_at")]
    for name, pairs, finished in zip(*columns, strict=True):
        labels = json.loads(pairs) if isinstance(pairs, str) else dict(pairs or ())  # JSON: from a file of JSON lines
        names = {name, labels.get("session_id"), *labels.get("response_ids", "").split()}
        yield not names.isdisjoint(ids) or ("session_id" in labels and (finished or 0.0) < before)


def conform(table: pa.Table, field: str) -> pa.Table:
    """Convert rows to a table of ``experience.SCHEMA``, without other columns.

    Raises DataError, with ``field``, if a column is missing or has values of a wrong type.
    """
    _check_columns(set(table.schema.names), field)
    table = table.select(SCHEMA.names)
    try:
        made = table.cast(SCHEMA)
    except (pa.ArrowException, ValueError):
        # Ray Data's functions on single rows return maps as lists of pairs, and Python objects for other types.
        return _from_python(table.to_pylist(), field)
    return _checked(made, field)


def expert_message(table: pa.Table) -> pa.Buffer:
    """Pack rows of ``experience.SCHEMA`` from any source into one message of demonstrations."""
    changes = {
        "source": pa.repeat(pa.scalar("expert"), len(table)),
        "uses": pa.repeat(pa.scalar(0, pa.int32()), len(table)),
        "status": pa.repeat(pa.scalar("finished"), len(table)),
        "greedy_reward": pa.nulls(len(table), SCHEMA.field("greedy_reward").type),
    }
    columns = [changes.get(name, table.column(name)) for name in SCHEMA.names]
    return pack(pa.Table.from_arrays(columns, schema=SCHEMA).combine_chunks().to_batches()[0])


def _from_python(rows: list[dict[str, Any]], field: str) -> pa.Table:
    for row in rows:
        row.update({name: _pairs(row.get(name)) for name in _MAPS})
        row["turns"] = None if row.get("turns") is None else [_pairs(turn) for turn in row["turns"]]
    try:
        made = pa.Table.from_pylist(rows, schema=SCHEMA)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"rows are not experiences: {first_line(error)}", _WHOLE, field=field) from None
    return _checked(made, field)


def _pairs(value: Any) -> Any:
    """Convert a map for Arrow: pairs become tuples, or objects with key and value."""
    if value is None or isinstance(value, dict):
        return value
    return [pair if isinstance(pair, dict) else tuple(pair) for pair in value]


def _check_columns(names: set[str], field: str) -> None:
    if missing := [name for name in SCHEMA.names if name not in names]:
        remedy = (
            "give rows with every column of experience.SCHEMA, such as those of run.dataset() and data export; "
            "chats and pairs become such rows by rayrft.data.demonstrations.from_dataset()"
        )
        raise DataError(f"rows have no column {missing[0]!r}", remedy, field=field, value=sorted(names))


def _checked(table: pa.Table, field: str) -> pa.Table:
    for place, column_field in enumerate(SCHEMA):
        column, kind = table.column(place), column_field.type
        if pa.types.is_floating(kind):
            # Numpy and pandas, in which Ray Data passes rows, represent missing numbers as NaN.
            table = table.set_column(place, column_field, pc.if_else(pc.is_nan(column), pa.scalar(None, kind), column))
        within = pa.types.is_list(kind) and pc.list_flatten(column).null_count
        if within or (not column_field.nullable and column.null_count):
            raise DataError(f"column {column_field.name!r} has missing values", _WHOLE, field=field)
    return table


def _read_parquet(path: Path) -> pa.Table:
    try:
        return conform(pq.read_table(path), str(path))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot be read: {first_line(error)}", _WHOLE, field="file", value=str(path)) from None


def _read_json_lines(path: Path) -> pa.Table:
    rows = []
    for number, row in open_rows(path, "file").rows():
        if isinstance(row, str):
            raise DataError(f"line {number}: {row}", field="file", value=str(path))
        rows.append(row)
    _check_columns(set(rows[0]) if rows else set(), str(path))
    return _from_python(rows, str(path))
