"""Tables of any columns and size, read from files and written to them as Arrow batches; and quiet, ordered Ray Data."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from rayrft.data.formats import RowFiles, answer_text, is_json, json_decoder, json_field, open_rows, rows_of
from rayrft.errors import DataError, first_line
from rayrft.experience import SCHEMA
from rayrft.files import atomic_file

if TYPE_CHECKING:
    import ray.data

_SUFFIXES = (".jsonl", ".parquet")
_GROUP_BYTES = 32 << 20
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class RowSource:
    """Rows of one schema, which can be read again and again. ``batches`` takes the most rows of a batch."""

    name: str
    schema: pa.Schema
    batches: Callable[[int], Iterator[pa.RecordBatch]]
    rows: int | None = None
    """How many can be read, if it is known."""
    broken: Mapping[int, str] = field(default_factory=dict)
    """The problems of rows that cannot be read, by number, from 1."""
    convert: Callable[[Mapping[str, str]], RowSource] | None = None
    """Text: open the source again with values of these columns `converted`; a row with one that cannot be is broken."""


def open_table(path: Path, field: str = "file") -> RowSource:
    """Open what `open_rows` opens as a table; text is read through once for its columns and its broken rows.

    Columns of text are texts, numbers, booleans and lists of one of these. One with other values (objects, or values
    of several kinds) is a column of JSON texts, which `TableWriter` writes as they were; so is one with Arrow's type
    for JSON. Where a row lacks a key, its value is null. Raises DataError, which names ``field``, if there is no such
    file, or no row that can be read.
    """
    files = open_rows(path, field)
    if not files.are_tables:
        return _open_text(files, {})
    schema, rows = files.table()
    return _with_rows(with_json_texts(RowSource(str(path), schema, files.batches, rows)), field)


def with_json_texts(source: RowSource) -> RowSource:
    """Return a source whose columns with Arrow's type for JSON, also nested, are columns of JSON texts."""
    names = [column.name for column in source.schema if json_decoder(column) and not is_json(column)]
    if not names:
        return source
    schema = pa.schema([json_field(column.name) if column.name in names else column for column in source.schema])

    def batches(most: int) -> Iterator[pa.RecordBatch]:
        for batch in source.batches(most):
            rows = rows_of(batch.select(names))
            columns = [_column(rows, each) if each.name in names else batch.column(each.name) for each in schema]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    return replace(source, schema=schema, batches=batches)


def _with_rows(source: RowSource, field: str, remedy: str = "") -> RowSource:
    """Return a source. Raises DataError if it has no rows."""
    if source.rows:
        return source
    first = next((f": row {number} is {problem}" for number, problem in source.broken.items()), "")
    raise DataError(f"no row can be read{first}", f"give a file with rows{remedy}", field=field, value=source.name)


def converted(value: Any, kind: str) -> Any:
    """Convert a value of JSON to text, number, integer or boolean: a number's text is that of JSON. Raises ValueError
    or DataError if this would lose or guess something, as it would for lists and objects."""
    if kind == "text":
        return answer_text(value, "the value")
    if kind == "boolean" and (isinstance(value, bool) or value in ("true", "false")):
        return value in (True, "true")
    number = json.loads(value) if isinstance(value, str) and len(value) < 300 else value
    if kind == "number" and type(number) in (int, float) and abs(number) < 1e308:
        return float(number)
    if kind == "integer" and type(number) in (int, float) and number // 1 == number and -(1 << 63) <= number < 1 << 63:
        return int(number)
    raise ValueError(f"not a {kind}")


def _convert(row: dict[str, Any], kinds: Mapping[str, str]) -> str | None:
    """Convert values of a row in place; return the problem of one that cannot be converted."""
    for name, kind in kinds.items():
        try:
            row[name] = None if row.get(name) is None else converted(row[name], kind)
        except (ValueError, DataError):
            return f"not usable: {name} holds {json.dumps(row[name])[:80]}, which is not a {kind}"
    return None


class TableWriter:
    """Writes batches of a schema to a JSONL or Parquet file, which appears when the block ends, if it succeeds.

    In JSONL maps are objects, ``turns`` are chat messages, and times and the like are texts. So the file can also be
    used as demonstrations, with ``demonstrations.<name>: {path: …, messages: turns}`` in a config, which tokenises them
    again. Raises DataError if the file cannot be written, or JSONL has no form for the values of a column.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        check_suffix(path)
        for column in schema:
            if path.suffix == ".jsonl" and _holds_bytes(column.type):
                problem, remedy = f"holds {column.type}, which JSONL cannot", "write a Parquet file, or leave it out"
                raise DataError(problem, remedy, field=f"column {column.name}", value=str(path))
        self.rows = 0
        self._path, self._schema = path, schema
        self._json = [column.name for column in schema if is_json(column)]
        self._stack = ExitStack()
        self._lines: IO[str] | None = None
        self._parquet: pq.ParquetWriter | None = None
        self._group: list[pa.RecordBatch] = []
        """Rows of a Parquet file that are not written yet, up to a row group: `pyarrow` would hold a million."""
        self._group_bytes = 0

    def __enter__(self) -> Self:
        with self._writing(), ExitStack() as stack:
            partial = stack.enter_context(atomic_file(self._path))
            if self._path.suffix == ".parquet":
                self._parquet = stack.enter_context(pq.ParquetWriter(partial, self._schema))
                stack.push(self._write_last)
            else:
                self._lines = stack.enter_context(partial.open("w", encoding="utf-8"))
            self._stack = stack.pop_all()
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows."""
        with self._writing():
            if self._parquet is not None:
                self._group.append(batch)
                self._group_bytes += batch.nbytes
                if self._group_bytes >= _GROUP_BYTES:
                    self._write_group()
            else:
                self._write_lines(batch)
        self.rows += batch.num_rows

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._writing(error):
            self._stack.__exit__(kind, error, trace)

    @contextmanager
    def _writing(self, raised: BaseException | None = None) -> Iterator[None]:
        """Raise DataError for an OSError inside other than the one that was ``raised`` before."""
        try:
            yield
        except OSError as error:
            if error is raised:
                raise
            problem = f"cannot be written: {error.strerror or error}"
            remedy = "choose another folder, or free disk space"
            raise DataError(problem, remedy, field="file", value=str(self._path)) from None

    def _write_group(self) -> None:
        assert self._parquet is not None
        if self._group:
            table = pa.Table.from_batches(self._group, self._schema)
            self._parquet.write_table(table, row_group_size=max(1, table.num_rows))
        self._group, self._group_bytes = [], 0

    def _write_last(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._write_group()

    def _write_lines(self, batch: pa.RecordBatch) -> None:
        assert self._lines is not None
        for row in batch.to_pylist(maps_as_pydicts="lossy"):
            for name in self._json:
                row[name] = None if row[name] is None else json.loads(row[name])
            line = json.dumps(row, ensure_ascii=False, default=str)
            if "NaN" in line or "Infinity" in line:  # maybe as numbers, which JSON does not have
                line = json.dumps(json.loads(line, parse_constant=lambda _: None), ensure_ascii=False)
            self._lines.write(line + "\n")


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_holds_bytes(kind.field(number).type) for number in range(kind.num_fields))
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def write_table(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    """Write rows to a file, as `TableWriter` does; return their number."""
    with TableWriter(path, schema) as writer:
        for batch in batches:
            writer.write(batch)
    return writer.rows


def check_suffix(path: Path) -> None:
    """Raise DataError unless the file's name is that of JSONL or Parquet."""
    if path.suffix not in _SUFFIXES:
        remedy = f"give a name that ends in {' or '.join(_SUFFIXES)}"
        raise DataError("unsupported file type", remedy, field="file", value=str(path))


def _open_text(files: RowFiles, kinds: Mapping[str, str]) -> RowSource:
    found: dict[str, set[Any]] = {}
    broken, rows = dict[int, str](), 0
    for number, row in files.rows():
        if problem := row if isinstance(row, str) else _convert(row, kinds) if row else "an empty object":
            broken[number] = problem
            continue
        assert isinstance(row, dict)
        rows += 1
        for name, value in row.items():
            found.setdefault(name, set()).add(_kind(value))
    known = SCHEMA if set(SCHEMA.names) <= found.keys() else pa.schema([])  # of rows that `rayrft data export` wrote
    schema = pa.schema([*known, *(_field(name, each) for name, each in found.items() if name not in known.names)])

    def batches(most: int) -> Iterator[pa.RecordBatch]:
        whole = (row for number, row in files.rows() if number not in broken and isinstance(row, dict))
        while part := list(islice(whole, most)):
            for row in part:
                _convert(row, kinds)
            yield pa.RecordBatch.from_arrays([_column(part, column) for column in schema], schema=schema)

    remedy = ", or convert the column with operator columns" if kinds else ""
    source = RowSource(str(files.path), schema, batches, rows, broken, partial(_open_text, files))
    return _with_rows(source, files.field, remedy)


def _kind(value: Any) -> Any:
    if isinstance(value, list):
        return (list, *sorted({_kind(each) if not isinstance(each, list) else dict for each in value}, key=str))
    return dict if type(value) is int and value not in _INT64 else type(value)


_SCALARS: dict[frozenset[Any], pa.DataType] = {
    frozenset(): pa.string(),
    frozenset([str]): pa.string(),
    frozenset([bool]): pa.bool_(),
    frozenset([int]): pa.int64(),
    frozenset([float]): pa.float64(),
    frozenset([int, float]): pa.float64(),
}


def _field(name: str, kinds: set[Any]) -> pa.Field:
    """Return the field of a column of JSON values of these kinds."""
    kinds = kinds - {type(None)}
    if kinds and all(isinstance(kind, tuple) for kind in kinds):
        inner = frozenset(each for kind in kinds for each in kind[1:] if each is not type(None))
        if inner in _SCALARS:
            return pa.field(name, pa.list_(_SCALARS[inner]))
    kind = _SCALARS.get(frozenset(kinds))
    return json_field(name) if kind is None else pa.field(name, kind)


def _column(rows: list[dict[str, Any]], column: pa.Field) -> pa.Array:
    values = [row.get(column.name) for row in rows]
    if is_json(column):
        values = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    elif pa.types.is_map(column.type):
        values = [None if value is None else list(value.items()) for value in values]
    elif column.name == "turns" and pa.types.is_list(column.type):
        values = [None if value is None else [list(turn.items()) for turn in value] for value in values]
    try:
        return pa.array(values, column.type)
    except (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError) as error:
        problem = f"values are not {column.type}: {first_line(error)}"
        raise DataError(problem, "give a file that `rayrft data export` wrote", field=f"column {column.name}") from None


def ordered_blocks(dataset: ray.data.Dataset) -> list[Any]:
    """Return references to a dataset's blocks as Arrow tables, in its order, which Ray Data does not keep by itself."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        return dataset.to_arrow_refs()
    finally:
        options.preserve_order = before


@contextmanager
def quiet_ray_data() -> Iterator[None]:
    """Make datasets that are created inside keep the order of their rows, and Ray Data log errors alone."""
    import ray.data

    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    # The newer reader stalls for seconds on small files.
    context.use_datasource_v2 = False
    context.execution_options.preserve_order = True
    logger = logging.getLogger("ray.data")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with ray.data.DataContext.current(context):
            yield
    finally:
        logger.setLevel(before)
