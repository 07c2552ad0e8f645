"""What is asked of stored rows: which columns, and which rows meet a condition."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrft.errors import DataError, nearest

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
    """Columns (all by default) and rows (all by default) of batches of ``schema``.

    ``where`` is a ``pyarrow.compute.Expression``. It may use columns that are not selected, but only plain ones: lists
    and maps cannot be compared. Raises DataError for a column that there is not, and for a condition that is none.
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
        """The selected columns of those of ``rows`` (ascending; all by default) that meet the condition."""
        if self.filters:
            rows = np.arange(batch.num_rows) if rows is None else rows
            plain = pa.Table.from_batches([batch.select(self._plain)]).take(pa.array(rows))
            met = plain.append_column(_PLACE, pa.array(np.arange(len(rows)))).filter(self._where).column(_PLACE)
            # The filter runs on several threads and does not promise an order.
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
            raise DataError(f"not a condition on rows: {problem}", field="where", value=str(self._where)) from None


def plain_columns(schema: pa.Schema) -> list[str]:
    """Names of the columns that hold one value a row, which conditions are about."""
    return [field.name for field in schema if not pa.types.is_nested(field.type)]


def parse_condition(text: str, schema: pa.Schema) -> Any:
    """``COLUMN OP VALUE`` as a ``pyarrow.compute.Expression``, with OP one of = != < <= > >= and contains.

    The value is read as the column's type; text may stand in quotes. Raises DataError, which shows the text.
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
            raise DataError(f"column {name!r} holds no text", field="where", value=text, remedy="use = != < <= > >=")
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
