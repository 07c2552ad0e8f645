"""Selection of columns and rows, and import and export of rows as JSONL and Parquet files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayrft.data.formats import read_rows
from rayrft.errors import DataError, nearest
from rayrft.experience import SCHEMA, Experience, pack

_PLACE = "rayrft.place"
_CONDITION = re.compile(r"\s*(\w+)\s*(!=|<=|>=|=|<|>|\bcontains\b)\s*(\S.*?)\s*")
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": lambda column, value: column == value,
    "!=": lambda column, value: column != value,
    "<": lambda column, value: column < value,
    "<=": lambda column, value: column <= value,
    ">": lambda column, value: column > value,
    ">=": lambda column, value: column >= value,
}


class Selection:
    """A selection of columns (all by default) and rows (all by default) from batches of ``schema``.

    ``where`` is a ``pyarrow.compute.Expression``. It may use columns that are not selected, but only scalar ones, not
    lists or maps. Raises DataError for an unknown column, and for an invalid condition.
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[str] | None = None, where: Any = None) -> None:
        names = schema.names if columns is None else list(columns)
        for name in names:
            if name not in schema.names:
                raise DataError("no such column", field="columns", value=name, remedy=nearest(name, schema.names))
        self.schema = pa.schema([schema.field(name) for name in names], schema.metadata)
        self._where = where
        self._plain = plain_columns(schema)
        if where is not None:
            self._check(pa.schema([schema.field(name) for name in self._plain]))

    @property
    def filters(self) -> bool:
        """Whether there is a condition."""
        return self._where is not None

    def apply(self, batch: pa.RecordBatch, rows: np.ndarray | None = None) -> pa.RecordBatch:
        """Return the selected columns of those ``rows`` (ascending; all by default) that meet the condition."""
        if self.filters:
            rows = np.arange(batch.num_rows) if rows is None else rows
            plain = pa.Table.from_batches([batch.select(self._plain)]).take(pa.array(rows))
            met = plain.append_column(_PLACE, pa.array(np.arange(len(rows)))).filter(self._where).column(_PLACE)
            # The multi-threaded filter does not guarantee an order.
            rows = rows[np.sort(met.to_numpy())]
        selected = batch.select(self.schema.names)
        return selected if rows is None or len(rows) == batch.num_rows else selected.take(pa.array(rows))

    def _check(self, plain: pa.Schema) -> None:
        try:
            plain.empty_table().filter(self._where)
        except pa.ArrowException as error:
            problem = str(error).splitlines()[0]
            if unknown := re.match(r"No match for FieldRef\.Name\((.*?)\)", problem):
                name = unknown[1]
                raise DataError(
                    "no such column to filter by", field="where", value=name, remedy=nearest(name, self._plain)
                ) from None
            raise DataError(f"not a valid condition: {problem}", field="where", value=str(self._where)) from None


def plain_columns(schema: pa.Schema) -> list[str]:
    """Return the names of the scalar columns, which conditions may use."""
    return [field.name for field in schema if not pa.types.is_nested(field.type)]


def parse_condition(text: str, schema: pa.Schema) -> Any:
    """Parse ``COLUMN OP VALUE`` into a ``pyarrow.compute.Expression``, with OP one of = != < <= > >= and contains.

    The value is cast to the column's type; text may be quoted. Raises DataError with the text.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise DataError(
            "a condition is written COLUMN OP VALUE, with OP one of = != < <= > >= contains", field="where", value=text
        )
    name, operator, value = match.groups()
    plain = plain_columns(schema)
    if name not in plain:
        raise DataError(f"no column {name!r} to filter by", field="where", value=text, remedy=nearest(name, plain))
    kind = schema.field(name).type
    if operator == "contains":
        if not pa.types.is_string(kind):
            raise DataError(f"column {name!r} is not text", field="where", value=text, remedy="use = != < <= > >=")
        return pc.match_substring(pc.field(name), _unquoted(value))
    try:
        scalar = pa.scalar(_unquoted(value), pa.string()).cast(kind)
    except pa.ArrowInvalid:
        raise DataError(
            f"column {name!r} holds {kind}",
            field="where",
            value=text,
            remedy="give a value of that type",
        ) from None
    return _COMPARE[operator](pc.field(name), scalar)


def _unquoted(value: str) -> str:
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if quoted else value


_SUFFIXES = (".jsonl", ".parquet")
GLANCE = ["id", "reward", "question", "answer", "labels", "versions"]
_WHOLE = "give what `rayrft data export` wrote, with all columns"
_ROLES = ("user", "assistant")
_MAPS = [field.name for field in SCHEMA if pa.types.is_map(field.type)]


def glance(row: Experience) -> dict[str, Any]:
    """Summarise a row for display; ``versions`` are the weight versions of its tokens, ascending."""
    contents = {role: [turn.get("content") for turn in row.turns if turn.get("role") == role] for role in _ROLES}
    question = contents["user"][0] if contents["user"] else None
    answer = contents["assistant"][-1] if contents["assistant"] else None
    versions = sorted({span.version for span in row.weight_versions})
    return dict(zip(GLANCE, (row.experience_id, row.reward, question, answer, row.labels, versions), strict=True))


def check_path(path: Path, field: str) -> None:
    """Raise DataError unless the file name has a supported suffix."""
    if path.suffix not in _SUFFIXES:
        raise DataError(
            "unsupported file type",
            field=field,
            value=str(path),
            remedy=f"give a name that ends in {' or '.join(_SUFFIXES)}",
        )


def write_file(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    """Write rows to a JSONL or Parquet file atomically; return their number.

    In JSONL maps are objects and ``turns`` are chat messages, so the file can also be used as demonstrations, with
    ``demonstrations.<name>: {path: …, messages: turns}`` in a config, which tokenises them again.
    """
    check_path(path, "file")
    partial = path.with_name(f".{path.name}.partial")
    write = _write_parquet if path.suffix == ".parquet" else _write_json_lines
    try:
        rows = write(partial, schema, batches)
        os.replace(partial, path)
    except OSError as error:
        raise DataError(
            f"cannot be written: {error.strerror or error}",
            field="file",
            value=str(path),
            remedy="choose another folder, or free disk space",
        ) from None
    finally:
        partial.unlink(missing_ok=True)
    return rows


def read_file(path: Path, where: Any = None) -> pa.Table:
    """Read a JSONL or Parquet file of :func:`write_file`, with ``experience.SCHEMA``; only the rows that meet the
    condition ``where``, a ``pyarrow.compute.Expression``.

    Raises DataError if there is no such file, a line is broken, the rows are not experiences, or none meets it.
    """
    rows, chosen = _read_file(path), Selection(SCHEMA, where=where)
    if not chosen.filters:
        return rows
    met = pa.Table.from_batches(map(chosen.apply, rows.to_batches()), SCHEMA)
    if not len(met):
        raise DataError(f"no row of {path} meets the condition", field="where", value=str(where), remedy="widen it")
    return met


def _read_file(path: Path) -> pa.Table:
    check_path(path, "file")
    if path.suffix == ".jsonl":
        rows = []
        for number, row in read_rows(path, "file"):
            if isinstance(row, str):
                raise DataError(f"line {number}: {row}", field="file", value=str(path))
            rows.append(row)
        _check_columns(set(rows[0]) if rows else set(), str(path))
        return _from_python(rows, str(path))
    try:
        return conform(pq.read_table(path), str(path))
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"cannot be read: {str(error).splitlines()[0]}",
            field="file",
            value=str(path),
            remedy=_WHOLE,
        ) from None


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
        raise DataError(
            f"rows are not experiences: {str(error).splitlines()[0]}",
            field=field,
            remedy=_WHOLE,
        ) from None
    return _checked(made, field)


def _pairs(value: Any) -> Any:
    """Convert a map for Arrow: pairs become tuples, or objects with key and value."""
    if value is None or isinstance(value, dict):
        return value
    return [pair if isinstance(pair, dict) else tuple(pair) for pair in value]


def _check_columns(names: set[str], field: str) -> None:
    if missing := [name for name in SCHEMA.names if name not in names]:
        raise DataError(
            f"rows have no column {missing[0]!r}",
            field=field,
            value=sorted(names),
            remedy="give rows with every column of experience.SCHEMA, such as those of run.dataset() and data export; "
            "chats and pairs become such rows by demonstrations.rows.from_dataset()",
        )


def _checked(table: pa.Table, field: str) -> pa.Table:
    for place, column_field in enumerate(SCHEMA):
        column, kind = table.column(place), column_field.type
        if pa.types.is_floating(kind):
            # Numpy and pandas, in which Ray Data passes rows, represent missing numbers as NaN.
            table = table.set_column(place, column_field, pc.if_else(pc.is_nan(column), pa.scalar(None, kind), column))
        within = pa.types.is_list(kind) and pc.list_flatten(column).null_count
        if within or (not column_field.nullable and column.null_count):
            raise DataError(
                f"column {column_field.name!r} has missing values",
                field=field,
                remedy=_WHOLE,
            )
    return table


def _write_parquet(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    rows = 0
    with pq.ParquetWriter(path, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def _write_json_lines(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    rows = 0
    with path.open("w", encoding="utf-8") as file:
        for batch in batches:
            for row in batch.to_pylist(maps_as_pydicts="lossy"):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            rows += batch.num_rows
    return rows
