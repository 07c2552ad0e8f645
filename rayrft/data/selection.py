"""Selection of columns by name, and of rows by a condition in SQL that DuckDB evaluates on Arrow memory."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rayrft.errors import DataError, nearest
from rayrft.registry import Lazy

if TYPE_CHECKING:
    import duckdb
else:
    duckdb = Lazy("duckdb")

_CANDIDATES = "Candidate bindings: "


class Selection:
    """A selection of columns (all by default) and rows (all by default) from batches of ``schema``.

    ``where`` is a condition in DuckDB's SQL over any columns of ``schema``, selected or not, such as
    ``reward > 0.5 and labels['quality'] = 'good'``; it can neither read nor write files. Rows for which it is null are
    not selected. Raises DataError for an unknown column, and for an invalid condition.
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[str] | None = None, where: str | None = None) -> None:
        names = schema.names if columns is None else list(columns)
        for name in names:
            if name not in schema.names:
                raise DataError("no such column", nearest(name, schema.names), field="columns", value=name)
        self.schema = pa.schema([schema.field(name) for name in names], schema.metadata)
        self._where = where
        if where is not None:
            # One row, because without any DuckDB would not convert the constants.
            one = pa.RecordBatch.from_arrays([pa.nulls(1, field.type) for field in schema], schema.names)
            _met(where, one, check=True)

    @property
    def filters(self) -> bool:
        """Whether there is a condition."""
        return self._where is not None

    def met(self, batch: pa.RecordBatch) -> np.ndarray:
        """Return whether each row meets the condition, as booleans of shape ``[rows]``. Raises DataError as `apply`."""
        if self._where is None:
            return np.ones(batch.num_rows, bool)
        return _met(self._where, batch)

    def apply(self, batch: pa.RecordBatch, rows: np.ndarray | None = None) -> pa.RecordBatch:
        """Return the selected columns of those ``rows`` (ascending; all by default) that meet the condition.

        Raises DataError if the condition fails on a value, such as a text that is cast to a number.
        """
        if self._where is not None:
            met = self.met(batch)
            rows = np.flatnonzero(met) if rows is None else rows[met[rows]]
        selected = batch.select(self.schema.names)
        return selected if rows is None or len(rows) == batch.num_rows else selected.take(pa.array(rows))


def _met(where: str, batch: pa.RecordBatch, *, check: bool = False) -> np.ndarray:
    """Return whether each row meets the condition, as booleans of shape ``[rows]``; null counts as not met. ``check``:
    the condition has not been used before."""
    try:
        with _database().cursor() as connection:
            condition = duckdb.SQLExpression(where)
            rows = connection.from_arrow(batch)
            if check:
                rows.filter(condition)  # refuses aggregates and window functions, which a select would take
            met = rows.select(condition)
            if met.types != [duckdb.sqltypes.BOOLEAN]:
                raise invalid_condition(where, f"its values are {met.types[0]}, not BOOLEAN")
            return met.to_arrow_table().column(0).fill_null(False).to_numpy()
    except duckdb.Error as error:
        raise invalid_condition(where, str(error)) from None


@functools.cache
def _database() -> duckdb.DuckDBPyConnection:
    """Open this process's empty database. Every thread needs a cursor of its own."""
    atexit.register(_database.cache_clear)  # else DuckDB's binding prints it as leaked when the interpreter ends
    # No access to files, extensions and Python's variables. One thread, because a fork would lose a pool of them.
    return duckdb.connect(config={"enable_external_access": False, "threads": 1, "lock_configuration": True})


def invalid_condition(where: str, problem: str) -> DataError:
    """Return the error of a condition that DuckDB refuses, or that fails on a value."""
    first, *others = problem.splitlines()
    near = [line.removeprefix(_CANDIDATES) for line in others if line.startswith(_CANDIDATES)]
    remedy = f"columns of a like name: {near[0]}; text stands in single quotes" if near else ""
    remedy = remedy or "write DuckDB's SQL, such as reward > 0.5 and stop_reason = 'stop'"
    return DataError(f"not a valid condition: {first}", remedy, field="where", value=where)
