"""Operators in their order: checked against the columns that reach each, and applied to a batch one by one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pyarrow as pa

from rayrft.config.pipelines import OperatorConfig
from rayrft.data.formats import is_json
from rayrft.errors import ConfigError, OperatorFailed, nearest
from rayrft.pipelines.operator import Applied, Context, Operator, Wants, build_operator, is_list, is_text
from rayrft.pipelines.rows import MADE_BY, PARENTS, fit_columns, id_column, mark_made, typed_lineage, with_lineage

_SHOWN = 160
"""Characters of a value that are shown."""


@dataclass(frozen=True)
class Change:
    """A value of a row before and after an operator, shortened, around the first difference."""

    row: str
    column: str
    before: str
    after: str


@dataclass(frozen=True)
class LeftOut:
    """A row that an operator left out, with all its values."""

    row: str
    reason: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What an operator did with one batch. ``left_out`` has all rows, the other lists a few."""

    taken: int
    given: int
    changed: int
    made: int
    seconds: float
    left_out: list[LeftOut] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    made_rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """All of them."""


@dataclass(frozen=True)
class ChainLink:
    """An operator in its place: ``field`` names it in errors, and ``options`` are as they were given."""

    name: str
    field: str
    options: str
    operator: Operator[Any]
    takes: pa.Schema
    gives: pa.Schema


def build_chain(
    configs: Sequence[OperatorConfig], schema: pa.Schema, *, field: str, origin: str, context: Context
) -> list[ChainLink]:
    """Build operators for rows of this schema, which come from ``origin`` and have ids (`rows.Ids`).

    Raises ConfigError, below ``field``, for an unknown operator, a wrong option, or a column that is missing or unfit.
    """
    links: list[ChainLink] = []
    before = origin
    for number, config in enumerate(configs):
        place = f"{field}.{number}"
        operator = build_operator(config, place, context)
        named = f"{place}.{config.name}"
        for option, name in operator.asks.items():
            if name not in context.models:
                remedy = nearest(name, context.models) if context.models else "add it to models or endpoints"
                raise ConfigError("no such model can be asked here", remedy, field=f"{place}.{option}", value=name)
        if operator.scores and not context.scores:
            remedy = "add 'reward', or give the config of a run (--config)"
            raise ConfigError("it checks answers, and there is no reward to do so", remedy, field=place)
        _check_columns(operator, schema, named, before)
        try:
            operator.check(schema)
        except ConfigError as error:
            at = f"{place}.{error.field}".strip(".")
            raise ConfigError(error.problem, error.remedy, field=at, value=error.value) from None
        gives = operator.schema_after(schema)
        if operator.kind == "synthesise":
            gives = with_lineage(gives)
        for column in schema if field != "operators" else ():  # a run reads them afterwards
            if column.name not in gives.names or is_text(column.type) != is_text(gives.field(column.name).type):
                problem, remedy = "would take a column that a run needs", "use it with `rayrft data process`"
                raise ConfigError(problem, remedy, field=named, value=column.name)
        options = json.dumps(config.options, sort_keys=True, default=str)
        links.append(ChainLink(config.name, named, options, operator, schema, gives))
        schema, before = gives, f"{config.name} (operator {number})"
    return links


def apply_link(link: ChainLink, rows: pa.RecordBatch, samples: int) -> tuple[pa.RecordBatch, Outcome]:
    """Apply an operator to a batch and check its result; return the rows that stay, then the made ones.

    Raises OperatorFailed if rows or columns are not those that it was to return; what it raises itself passes through.
    """
    if link.operator.kind == "synthesise":
        rows = typed_lineage(rows)
    start = time.perf_counter()
    applied = link.operator.apply(rows)
    seconds = time.perf_counter() - start
    _check_applied(link, rows, applied)
    after, changed, changes = rows, 0, list[Change]()
    if applied.rows is not rows or not link.takes.equals(link.gives):
        after = fit_columns(applied.rows, link.gives)
        changed, changes = _changes(link, rows, after, samples)
    names = rows.column(id_column(rows.schema)).to_pylist()
    left_out: list[LeftOut] = []
    if gone := [(index, reason) for index, reason in enumerate(applied.reasons) if reason is not None]:
        values = rows.take(pa.array([index for index, _ in gone])).to_pylist(maps_as_pydicts="lossy")
        left_out = [LeftOut(names[index], reason, row) for (index, reason), row in zip(gone, values, strict=True)]
        after = after.filter(pa.array([reason is None for reason in applied.reasons]))
    made_rows: list[dict[str, Any]] = []
    if applied.made is not None and applied.parents:
        parents = [tuple(names[index] for index in indices) for indices in applied.parents]
        added = fit_columns(applied.made, link.gives, (PARENTS, MADE_BY))
        added = mark_made(added, parents, f"{link.name}/{link.operator.version}", f"{link.field} {link.options}")
        made_rows = added.slice(0, samples).to_pylist(maps_as_pydicts="lossy")
        after = pa.concat_batches([after, added])
    counts = rows.num_rows, after.num_rows, changed, len(applied.parents)
    return after, Outcome(*counts, seconds, left_out, changes, made_rows, list(applied.notes))


def apply_each(link: ChainLink, rows: pa.RecordBatch, samples: int) -> tuple[pa.RecordBatch, Outcome]:
    """Apply an operator that looks at single rows to each row by itself, and leave out those on which it raises.

    Raises OperatorFailed, as `apply_link` does.
    """
    parts, outcomes = list[pa.RecordBatch](), [Outcome(0, 0, 0, 0, 0.0)]
    for index in range(rows.num_rows):
        row = rows.slice(index, 1)
        try:
            after, outcome = apply_link(link, row, samples)
        except OperatorFailed:
            raise
        except Exception as error:  # an operator may raise anything; it becomes a reason
            [values] = row.to_pylist(maps_as_pydicts="lossy")
            reason = f"raised {type(error).__name__}: {error}"
            outcome = Outcome(1, 0, 0, 0, 0.0, [LeftOut(values[id_column(row.schema)], reason, values)])
        else:
            parts.append(after)
        outcomes.append(outcome)
    fields = zip(*(vars(each).values() for each in outcomes), strict=True)
    whole: list[Any] = [list(chain(*each)) if isinstance(each[0], list) else sum(each) for each in fields]
    return pa.concat_batches(parts) if parts else fit_columns(rows.slice(0, 0), link.gives), Outcome(*whole)


def _check_columns(operator: Operator[Any], schema: pa.Schema, field: str, before: str) -> None:
    reads: dict[str, Wants] = dict(operator.reads)
    if operator.scope == "group":
        reads.setdefault(operator.group_by, "any")
    for name, wants in reads.items():
        if name not in schema.names:
            problem = f"it needs a column that {before} does not give, which gives {', '.join(schema.names)}"
            remedy = f"name another column, or put an operator before it; {nearest(name, schema.names)}"
            raise ConfigError(problem, remedy, field=field, value=name)
        column = schema.field(name)
        wanted, holds = _WANTED[wants]
        if not holds(column):
            kind = "values of JSON of several kinds" if is_json(column) else str(column.type)
            problem = f"it needs a column of {wanted}, and {before} gives {kind}"
            remedy = f"name another column, or put {{name: columns, cast: {{{name}: …}}}} before it"
            raise ConfigError(problem, remedy, field=field, value=name)


_NUMBERS = pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean
_WANTED: dict[Wants, tuple[str, Callable[[pa.Field], bool]]] = {
    "any": ("values", lambda column: True),
    "text": ("texts", lambda column: is_text(column.type) and not is_json(column)),
    "number": ("numbers", lambda column: any(holds(column.type) for holds in _NUMBERS)),
    "list": ("lists", lambda column: is_list(column.type)),
    "map": ("maps", lambda column: pa.types.is_map(column.type)),
}
"""The name of the values of a column, and whether it holds them."""


def _check_applied(link: ChainLink, rows: pa.RecordBatch, applied: Applied) -> None:
    if not isinstance(applied, Applied):
        raise _wrong(link, f"it returned {type(applied).__name__}, and not Applied")
    if applied.rows.num_rows != rows.num_rows:
        raise _wrong(link, f"it returned {applied.rows.num_rows} rows for {rows.num_rows}; reasons leave rows out")
    if len(applied.reasons) not in (0, rows.num_rows):
        raise _wrong(link, f"it returned {len(applied.reasons)} reasons for {rows.num_rows} rows")
    given = (reason for reason in applied.reasons if reason is not None)
    if wrong := [reason for reason in (*given, *applied.notes) if not isinstance(reason, str)]:
        raise _wrong(link, f"it gave {wrong[0]!r} as a reason or note, which is not a text")
    for what, batch in (("rows", applied.rows), ("made rows", applied.made)):
        if batch is None or batch is rows:
            continue
        if missing := sorted(set(link.operator.schema_after(link.takes).names) - set(batch.schema.names)):
            raise _wrong(link, f"its {what} lack the column {missing[0]!r}")
        if extra := sorted(set(batch.schema.names) - set(link.gives.names)):
            raise _wrong(link, f"its {what} have the column {extra[0]!r}, which it does not say that it writes")
        for column in batch.schema:
            if column.type != (said := link.gives.field(column.name).type):
                raise _wrong(link, f"its {what} have a column {column.name!r} of {column.type}, and not {said}")
            json_texts = batch.column(column.name).to_pylist() if is_json(link.gives.field(column.name)) else ()
            for row, text in enumerate(json_texts):
                try:
                    json.loads(text or "null")
                except ValueError:
                    at = f"row {batch.column(id_column(batch.schema))[row]}, column {column.name!r}"
                    raise _wrong(link, f"{at}: it wrote {text[:_SHOWN]!r}, where texts are JSON") from None
    made = applied.made.num_rows if applied.made is not None else 0
    if made and link.operator.kind != "synthesise":
        raise _wrong(link, f"it made {made} rows, and its kind is {link.operator.kind!r}")
    if len(applied.parents) != made:
        raise _wrong(link, f"it named the parents of {len(applied.parents)} rows, and made {made}")


def _wrong(link: ChainLink, problem: str) -> OperatorFailed:
    return OperatorFailed(problem, "correct the operator", field=link.field)


def _changes(link: ChainLink, before: pa.RecordBatch, after: pa.RecordBatch, samples: int) -> tuple[int, list[Change]]:
    """Return how many rows have other values than before, and a few of the changes."""
    changed, shown = set[int](), list[Change]()
    ids, there = before.column(id_column(before.schema)), set(before.schema.names)
    for name in (each for each in link.gives.names if each in there):
        old, new = before.column(name), after.column(name)
        different = differences(old, new)
        changed.update(different)
        for index in different[: samples - len(shown)]:
            shown.append(Change(ids[index].as_py(), name, *around(old[index].as_py(), new[index].as_py())))
    return len(changed), shown


def differences(old: pa.Array, new: pa.Array) -> list[int]:
    """Return the indices at which two columns differ; NaN is NaN."""
    if old.equals(new):
        return []
    pairs = enumerate(zip(old.to_pylist(), new.to_pylist(), strict=True))
    return [index for index, (one, other) in pairs if one != other and repr(one) != repr(other)]


def around(before: Any, after: Any) -> tuple[str, str]:
    """Return two values as texts, shortened to what is around their first difference."""
    one, other = str(before), str(after)
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, same - _SHOWN // 4)
    return tuple(  # type: ignore[return-value]
        ("…" if start else "") + text[start : start + _SHOWN] + ("…" if len(text) > start + _SHOWN else "")
        for text in (one, other)
    )
