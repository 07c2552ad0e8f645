"""Rows of a batch: their ids, texts and numbers, and what made rows were made of."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrft.data.formats import is_json
from rayrft.errors import DataError
from rayrft.pipelines.operator import values_of, with_column, with_column_values

PARENTS, MADE_BY = "parents", "made_by"
"""Columns of a made row, or entries of its ``labels``, if it has these: ids it was made of, operator and version."""


def id_column(schema: pa.Schema) -> str:
    """Return the name of the column with the rows' ids."""
    return "experience_id" if "experience_id" in schema.names else "id"


class Ids:
    """Gives rows ids, no two of them the same. A row keeps its id; without one it gets a digest of what it holds,
    whatever columns are null in it. From the second row of an id on, a number follows."""

    def __init__(self) -> None:
        self._seen: Counter[bytes] = Counter()
        """Digests of ids, which are smaller."""

    def add(self, rows: pa.RecordBatch, name: str | None = None) -> pa.RecordBatch:
        """Return rows with a column of ids, the first one unless it is there; ``name`` is that of rows beside them."""
        name = name or id_column(rows.schema)
        own = name in rows.schema.names
        there = _plain(rows, name) if own else pa.nulls(rows.num_rows, pa.string())
        if there.null_count:
            held = ({name: value for name, value in row.items() if value is not None} for row in rows.to_pylist())
            made = [_digest(sorted(row.items())) for row in held]
            there = pc.coalesce(there, pa.array(made, pa.string()))
        ids = pa.array([self._unique(each) for each in there.to_pylist()], pa.string())
        if own:
            return rows.set_column(rows.schema.get_field_index(name), pa.field(name, pa.string()), ids)
        return rows.add_column(0, pa.field(name, pa.string()), ids)

    def _unique(self, name: str) -> str:
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self._seen[digest] += 1
        return name if self._seen[digest] == 1 else self._unique(f"{name}-{self._seen[digest]}")


def _plain(rows: pa.RecordBatch, name: str) -> pa.Array:
    """Return a column as texts, those of JSON without quotes."""
    column = rows.column(name).cast(pa.string())
    if not is_json(rows.schema.field(name)):
        return column
    values = zip(column.to_pylist(), values_of(rows, name), strict=True)
    return pa.array([value if isinstance(value, str) else text for text, value in values], pa.string())


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def fit_columns(rows: pa.RecordBatch, schema: pa.Schema, blank: Collection[str] = ()) -> pa.RecordBatch:
    """Return rows with the columns of a schema in its order; missing columns and ``blank`` ones are null."""
    columns = []
    for column in schema:
        there = column.name in rows.schema.names and column.name not in blank
        values = rows.column(column.name) if there else pa.nulls(rows.num_rows, column.type)
        columns.append(values if values.type == column.type else values.cast(column.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def texts(rows: pa.RecordBatch, column: str) -> list[str]:
    """Return the texts of a column, empty where there is none."""
    return [text or "" for text in rows.column(column).to_pylist()]


def gone(reason: str, kept: np.ndarray) -> list[str | None]:
    """Return the reasons of rows, of which those ``kept`` (booleans, ``[rows]``) have none."""
    return [None if each else reason for each in kept.tolist()]


def numbers(rows: pa.RecordBatch, column: str) -> np.ndarray:
    """Return the numbers of a column as float64 ``[rows]``, NaN where there is none."""
    values: np.ndarray = pc.cast(rows.column(column), pa.float64()).to_numpy(zero_copy_only=False)
    return values


def with_numbers(rows: pa.RecordBatch, name: str, values: np.ndarray, kind: pa.DataType) -> pa.RecordBatch:
    """Return rows with a column of numbers, null where they are NaN."""
    return with_column(rows, name, pa.array(values, mask=np.isnan(values)).cast(kind))


def grouped(names: Iterable[Any]) -> list[list[int]]:
    """Return each group's rows, by index, in order of appearance; a row whose group is None is one of its own."""
    found: dict[Any, list[int]] = {}
    for index, name in enumerate(names):
        found.setdefault(object() if name is None else name, []).append(index)
    return list(found.values())


def of_groups(rows: pa.RecordBatch, by: str, column: str, compute: Callable[[np.ndarray], float]) -> np.ndarray:
    """Return for each row what is computed from the known numbers ``column`` of its group; NaN if there are none."""
    values, found = numbers(rows, column), np.full(rows.num_rows, np.nan)
    for indices in grouped(rows.column(by).to_pylist()):
        known = values[indices][~np.isnan(values[indices])]
        if len(known):
            found[indices] = compute(known)
    return found


def last_answer(turns: Iterable[Mapping[str, Any]] | None) -> str | None:
    """Return the last message of the assistant, if there is one."""
    answers = [turn["content"] for turn in turns or () if turn.get("role") == "assistant"]
    return answers[-1] if answers else None


def share_of(share: float, count: int) -> int:
    """Return a share of a number of rows, rounded up: 0.07 of 100 is 7, and not 8, as in binary fractions."""
    return math.ceil(Fraction(str(share)) * count)


def seeded(name: str, seed: int = 0) -> random.Random:
    """Return a generator for one row, by its id."""
    return random.Random(f"{seed} {name}")


@dataclass(frozen=True)
class Lineage:
    """What a row was made of, and by what: ``made_by`` is None for one that was not made."""

    parents: tuple[str, ...] = ()
    made_by: str | None = None


def lineage(row: dict[str, Any]) -> Lineage:
    """Read a row's lineage."""
    labels = row.get("labels")
    if isinstance(labels, dict | list):
        labels = dict(labels)
        return Lineage(tuple(str(labels.get(PARENTS) or "").split()), labels.get(MADE_BY))
    return Lineage(tuple(row.get(PARENTS) or ()), row.get(MADE_BY))


def with_lineage(schema: pa.Schema) -> pa.Schema:
    """Return the columns of rows of this schema once there are made ones among them."""
    if _in_labels(schema):
        return schema
    for name, kind in _LINEAGE.items():
        column = pa.field(name, kind)
        there = schema.get_field_index(name)
        schema = schema.append(column) if there < 0 else schema.set(there, column)
    return schema


def _in_labels(schema: pa.Schema) -> bool:
    return "labels" in schema.names and pa.types.is_map(schema.field("labels").type)


DERIVED = "replaced by a derived row"
"""Why a row is left out of which others were made."""
FORMULA = r"\$[^$]*\$|\\\[(?:(?!\\\[).)*?\\\]|\\\((?:(?!\\\().)*?\\\)|\\[A-Za-z]+"
"""Pattern of LaTeX's formulas and commands, with re.DOTALL; it takes linear time, even if formulas are never closed."""
_LINEAGE = {PARENTS: pa.list_(pa.string()), MADE_BY: pa.string()}


def typed_lineage(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows whose columns of the lineage, if they are there, are as `with_lineage` says: where a file has null
    alone, it does not tell of what. Raises DataError if they hold something else."""
    for name, kind in () if _in_labels(rows.schema) else _LINEAGE.items():
        if name in rows.schema.names and rows.schema.field(name).type != kind:
            column = rows.column(name)
            empty = column.null_count == rows.num_rows
            try:
                rows = with_column(rows, name, pa.nulls(rows.num_rows, kind) if empty else column.cast(kind))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                problem = f"holds {column.type}, and made rows have their lineage there, as {kind}"
                raise DataError(problem, "rename the column", field=f"column {name}") from None
    return rows


def mark_made(made: pa.RecordBatch, parents: Sequence[tuple[str, ...]], operator: str, maker: str) -> pa.RecordBatch:
    """Return made rows, whose columns are those of `with_lineage`, with their parents and their own ids: a digest of
    parents, operator and place among the parents' rows; an experience's stay within its group. ``maker`` tells the
    operator from others of its name."""
    column = id_column(made.schema)
    count = Counter[tuple[str, ...]]()
    names = list[str]()
    for ids in parents:
        names.append(_digest((operator, maker, ids, count[ids])))
        count[ids] += 1
    if column == "experience_id":
        names = [f"{group}/{name}" for group, name in zip(made.column("group_id").to_pylist(), names, strict=True)]
    made = with_column_values(made, column, names)
    if PARENTS in made.schema.names:
        made = with_column_values(made, PARENTS, map(list, parents))
        return with_column_values(made, MADE_BY, [operator] * made.num_rows)
    pairs = zip(made.column("labels").to_pylist(), parents, strict=True)
    labels = [list({**dict(old or ()), PARENTS: " ".join(ids), MADE_BY: operator}.items()) for old, ids in pairs]
    return with_column_values(made, "labels", labels)
