"""File formats of rows (JSONL, CSV, Parquet, Arrow, saved data sets), and their values."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayrft.errors import DataError, first_line

ParsedRow = dict[str, Any] | str
"""A row, or the reason why it cannot be parsed."""


class CsvRow(dict[str, Any]):
    """A row of CSV or TSV, which has no types: a number in it is also the text as which it is written."""


@dataclass(frozen=True)
class SkippedRows:
    """Rows that are not trained, with the reason, by number from 1: lines of a JSONL file, rows of other sources."""

    excluded: dict[int, str] = field(default_factory=dict)
    """Valid rows that a rule excludes."""
    broken: dict[int, str] = field(default_factory=dict)
    """Invalid rows."""

    def __len__(self) -> int:
        return len(self.excluded) + len(self.broken)

    @property
    def counts(self) -> Counter[str]:
        """Number of rows by reason; the reason of broken rows lists the first ten of them."""
        counts = Counter(self.excluded.values())
        if self.broken:
            first = ", ".join(map(str, sorted(self.broken)[:10])) + (", …" if len(self.broken) > 10 else "")
            counts[f"broken (lines {first})"] = len(self.broken)
        return counts


def broken_rows(
    broken: Mapping[int, str], total: int, remedy: str, *, origin: str = "", field: str, value: object
) -> DataError:
    """Return the error of broken rows, by number, of so many: it has the problems of the first five."""
    first = "; ".join(f"line {number}: {problem}" for number, problem in sorted(broken.items())[:5])
    problem = f"{len(broken)} broken rows of {total}{origin and f' in {origin}'}: {first}"
    return DataError(problem, remedy, field=field, value=value)


_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
_TABLES = (".parquet", ".arrow")
ROW_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
"""How names of files of rows end, in a folder of them; those of text also before ``.gz`` and the like."""
_BATCH_ROWS = 65_536


def row_kind(path: Path) -> str:
    """Return the suffix of a file's name, of a compressed file that of its content."""
    return path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix


@dataclass(frozen=True)
class RowFiles:
    """Files of rows of one kind: text (JSONL, JSON, CSV, TSV), or tables of Arrow (Parquet, saved data sets).

    All that reads them raises DataError, which names ``field``, if one is unreadable.
    """

    path: Path
    field: str
    files: Sequence[Path]

    @property
    def are_tables(self) -> bool:
        """Whether they are tables, with a schema of their own."""
        return all(file.suffix in _TABLES for file in self.files)

    def rows(self) -> Generator[tuple[int, ParsedRow], None, None]:
        """Iterate over the numbered rows, from 1: lines of a JSONL file, rows of others, consecutive over files."""
        with self._reading():
            if self.are_tables:
                yield from enumerate((row for batch in self.batches(_BATCH_ROWS) for row in rows_of(batch)), 1)
            elif self.path.is_dir():
                yield from enumerate((row for file in self.files for _, row in _lines(file)), start=1)
            else:
                yield from _lines(self.path)

    def table(self) -> tuple[pa.Schema, int]:
        """Tables: return their columns and the number of their rows."""
        with self._reading():
            found = [_table(file) for file in self.files]
        for file, (schema, _) in zip(self.files, found, strict=True):
            if not schema.equals(found[0][0]):
                problem = f"{file.name} has other columns than {self.files[0].name}"
                raise DataError(problem, "give the files one by one", field=self.field, value=str(self.path))
        return found[0][0] if found else pa.schema([]), sum(rows for _, rows in found)

    def batches(self, rows: int) -> Iterator[pa.RecordBatch]:
        """Tables: iterate over their rows, in batches of at most so many."""
        with self._reading():
            for file in self.files:
                if file.suffix == ".parquet":
                    with pq.ParquetFile(file, pre_buffer=False) as parquet:  # else it holds what it has read
                        refuse_objects(parquet.schema_arrow, file)
                        yield from parquet.iter_batches(rows)
                    continue
                with _arrow(file) as (schema, batches):
                    refuse_objects(schema, file)
                    for batch in batches:
                        yield from (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"cannot be read: {first_line(error)}", field=self.field, value=str(self.path)) from None


def open_rows(path: Path, field: str) -> RowFiles:
    """Open a file of rows, a folder of files of one kind, in the order of their names, or a saved data set.

    A text file may be compressed, which its name shows (``.jsonl.gz``), and a JSON file may be one array. Values of CSV
    and TSV are texts, numbers where they are written like one, and none where they are empty. Raises DataError, which
    names ``field``, if there is nothing of the kind.
    """
    if path.is_file():
        return RowFiles(path, field, [path])
    if not path.exists():
        remedy = "give a JSONL, CSV or Parquet file, a folder of such files, or a saved Hugging Face data set"
        raise DataError("no such file", remedy, field=field, value=str(path))
    if (path / "state.json").is_file():
        return RowFiles(path, field, _saved_files(path, field))
    inside = sorted(path.iterdir())
    split = [each.name for each in inside if (each / "state.json").is_file()]
    for kind in ROW_SUFFIXES:
        if not split and (files := [file for file in inside if row_kind(file) == kind]):
            return RowFiles(path, field, files)
    problem = f"the folder holds the splits {split} of a data set" if split else "the folder holds no files of rows"
    remedy = f"give one of them: {path / split[0]}" if split else f"files end in {', '.join(ROW_SUFFIXES)}"
    raise DataError(problem, remedy, field=field, value=str(path))


def _table(file: Path) -> tuple[pa.Schema, int]:
    """Return the columns of a table's file, and the number of its rows."""
    if file.suffix == ".parquet":
        with pq.ParquetFile(file) as parquet:
            schema, rows = parquet.schema_arrow, parquet.metadata.num_rows
    else:
        with _arrow(file) as (schema, batches):
            rows = sum(batch.num_rows for batch in batches)
    refuse_objects(schema, file)
    return schema, rows


@contextlib.contextmanager
def _arrow(path: Path) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Open a file of Arrow, of its stream or its file format (Feather)."""
    with pa.memory_map(str(path)) as source:
        if source.read(6) == b"ARROW1":
            with pa.ipc.open_file(source) as file:
                yield file.schema, map(file.get_batch, range(file.num_record_batches))
        else:
            source.seek(0)
            with pa.ipc.open_stream(source) as stream:
                yield stream.schema, iter(stream)


def _lines(path: Path) -> Iterator[tuple[int, ParsedRow]]:
    with io.BufferedReader(pa.input_stream(str(path))) as file:
        first = file.peek(1024).removeprefix(codecs.BOM_UTF8).lstrip()
        if row_kind(path) in (".csv", ".tsv"):
            yield from _csv_rows(file, "\t" if row_kind(path) == ".tsv" else ",")
        elif first.startswith(b"["):
            yield from _json_array(file.read())
        elif re.match(rb'\{\s*\n\s*["}]', first):
            raise ValueError("it is one JSON object over several lines; give one array, or one object a line")
        else:
            yield from _json_lines(file)


def _csv_rows(file: io.BufferedReader, delimiter: str) -> Iterator[tuple[int, ParsedRow]]:
    # Bytes that are not UTF-8 become surrogates, which UTF-8 never has; a byte order mark is not part of a name.
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        names = next(reader, [])
        while True:
            number = reader.line_num  # a quoted value may have several lines
            try:
                values = next(reader, None)
            except csv.Error as error:
                yield number + 1, f"not CSV ({error})"
                continue
            if values is None:
                return
            if not values:
                continue
            if len(values) != len(names):
                yield number + 1, f"has {len(values)} values, and the header {len(names)}"
            elif any("\udc80" <= letter <= "\udcff" for value in values for letter in value):
                yield number + 1, "not UTF-8"
            else:
                yield number + 1, CsvRow(zip(names, map(_value, values), strict=True))


def _value(text: str) -> str | int | float | None:
    """Parse a value of CSV. It is a number if the number is written in the same way (007 is a text)."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            number = kind(text)
            if str(number) == text and finite(number) is not None:
                return number
    return text or None


def _json_array(text: bytes) -> Iterator[tuple[int, ParsedRow]]:
    try:
        rows = _parse_json(text)
    except ValueError:  # only its first line begins like an array
        return _json_lines(io.BytesIO(text))
    return enumerate(map(_json_row, rows), start=1)


def _json_lines(file: Iterable[bytes]) -> Iterator[tuple[int, ParsedRow]]:
    # As bytes: text mode also splits lines at characters that JSON allows within a string.
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                yield number, _json_row(_parse_json(line))
            except ValueError as error:
                yield number, str(error)


def _json_row(value: Any) -> ParsedRow:
    return value if isinstance(value, dict) else "not a JSON object"


def _parse_json(text: bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError with the problem if it is not JSON, an object has a key
    twice, or a text has half a surrogate pair, which no tokenizer and no table accepts."""
    try:
        value = json.loads(text, object_pairs_hook=_json_object)
        if b"\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeError as error:
        raise ValueError("not UTF-8" if isinstance(error, UnicodeDecodeError) else "not valid Unicode") from None
    except (ValueError, RecursionError) as error:  # also a number of too many digits; nested too deeply
        raise ValueError(f"not JSON ({getattr(error, 'msg', error)})") from None


def _json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"an object has the key {Counter(key for key, _ in pairs).most_common(1)[0][0]!r} twice")
    return found


_JSON = {b"rayrft.json": b"1"}
"""Metadata of a column whose texts are JSON, and are written to JSONL as the values that they stand for."""


def is_json(column: pa.Field) -> bool:
    """Return whether a column's texts are JSON."""
    return column.metadata is not None and column.metadata.get(b"rayrft.json") == b"1"


def json_field(name: str) -> pa.Field:
    """Return the field of a column whose texts are JSON."""
    return pa.field(name, pa.string(), metadata=_JSON)


def json_decoder(column: pa.Field) -> Callable[[Any], Any] | None:
    """Return the function that decodes the JSON in a column's values: of `json_field`, and of Arrow's type for JSON,
    also nested, which ``datasets`` gives values of several types. None if the column has no JSON.

    A number alone of Arrow's type is a text: ``datasets`` does not quote a text that is a number."""
    kind = column.type
    if is_json(column):
        return lambda text: text and json.loads(text)
    if isinstance(kind, pa.JsonType):
        return lambda text: text and (found if isinstance(found := json.loads(text), str | list | dict) else text)
    inner = [kind.field(number) for number in range(kind.num_fields)] if pa.types.is_nested(kind) else []
    found = {each.name: decode for each in inner if (decode := json_decoder(each))}
    if not found:
        return None
    if pa.types.is_struct(kind):
        return lambda value: value and {**value, **{name: decode(value[name]) for name, decode in found.items()}}
    [decode] = found.values()
    return lambda value: value and [decode(each) for each in value]


def rows_of(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Return a table's rows as values of Python, those of JSON as what they stand for. Raises DataError if a text of
    JSON cannot be parsed."""
    rows: list[dict[str, Any]] = table.to_pylist()
    for column in table.schema:
        if (decode := json_decoder(column)) is not None:
            try:
                for row in rows:
                    row[column.name] = decode(row[column.name])
            except ValueError as error:
                raise DataError(f"holds a text that is not JSON: {error}", field=f"columns.{column.name}") from None
    return rows


def refuse_objects(schema: pa.Schema, path: Path) -> None:
    """Raise DataError for a column of Python objects as Ray Data writes them: reading a pickle may run any code."""
    if found := [each.name for each in schema if "ray.data.arrow_pickled_object" in str(each.type)]:
        remedy = "write the column as texts, numbers or lists"
        raise DataError(f"{path.name} holds pickled objects", remedy, field=f"columns.{found[0]}", value=str(path))


def _saved_files(folder: Path, field: str) -> list[Path]:
    """Return the Arrow files of a data set saved with ``datasets.Dataset.save_to_disk``."""
    try:
        state = json.loads((folder / "state.json").read_text())
        return [folder / file["filename"] for file in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        problem = f"state.json is not that of a saved data set ({type(error).__name__}: {error})"
        raise DataError(problem, "save it again with Dataset.save_to_disk", field=field, value=str(folder)) from None


def value_at(row: Mapping[str, Any], name: str) -> Any:
    """Return a row's value by the name of its field, or the dotted path to a nested one; None if there is none."""
    first, _, rest = name.partition(".")
    if name in row or not rest:
        return row.get(name)
    return value_at(row[first], rest) if isinstance(row.get(first), dict) else None


def as_list(value: Any) -> list[Any]:
    """Return the values of a row's field: all of a list, or the only one; none for None."""
    return value if isinstance(value, list) else [] if value is None else [value]


def as_text(value: Any, name: str, key: str = "") -> str:
    """Return a row's value, if it is a text.

    Raises DataError, which names the row's field and the config ``key``, for a value of another type and a text that is
    not valid Unicode.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:  # no tokenizer accepts half a surrogate pair
            raise DataError(f"{name!r} is not valid Unicode", field=key) from None
        return value
    remedy = "name a field that holds a text, or write the value as the text that it stands for"
    if isinstance(value, dict) and value:
        remedy = f"name one of its fields, such as {name}.{next(iter(value))}"
    raise DataError(f"{name!r} is {_KINDS.get(type(value), type(value).__name__)}, not a text", remedy, field=key)


_KINDS = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}


def answer_text(value: Any, name: str, key: str = "") -> str:
    """Return the text of a right answer: a text as it is, a number, true or false as JSON writes it. Raises DataError
    as `as_text` does, also for a number that is not finite."""
    if isinstance(value, float | Decimal) and not math.isfinite(value):
        raise DataError(f"{name!r} is not a finite number", "fill it in, or remove the row", field=key)
    if isinstance(value, int | float):
        return json.dumps(value)
    return f"{value:f}" if isinstance(value, Decimal) else as_text(value, name, key)


def finite(value: Any) -> float | None:
    """Return a finite number as float, and None for anything else."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and abs(value) <= sys.float_info.max else None
