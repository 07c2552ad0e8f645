"""The interface of operators: a small class over Arrow batches, or a plain function of a row, under a name.

The result of an operator depends on the rows and its options alone, in any batches and processes: random numbers are
drawn by the row's id (`rows.seeded`).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args, get_type_hints

import numpy as np
import pyarrow as pa
from pydantic import ValidationError, create_model

from rayrft.config.base import Section
from rayrft.config.load import explain
from rayrft.config.model import TemplateConfig
from rayrft.config.pipelines import OperatorConfig
from rayrft.data.formats import is_json
from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.registry import Registry

Kind = Literal["clean", "filter", "prioritise", "synthesise"]
Scope = Literal["row", "group", "all"]
"""What an operator must see at once to decide on a row: the row, its whole group, or all rows."""
Wants = Literal["text", "number", "list", "map", "any"]
"""What a column must hold."""
O = TypeVar("O", bound=Section)  # noqa: E741
M = TypeVar("M")


@dataclass(frozen=True)
class Reads:
    """Mark of an option that names one or several columns: the operator reads them, and they must hold this."""

    wants: Wants


@dataclass(frozen=True)
class Asks:
    """Mark of an option that names a model: the operator asks it."""


TextColumn = Annotated[str, Reads("text")]
TextColumns = Annotated[tuple[str, ...], Reads("text")]
NumberColumn = Annotated[str, Reads("number")]
AnyColumn = Annotated[str, Reads("any")]
ModelName = Annotated[str, Asks()]


@dataclass(frozen=True)
class Context:
    """What operators may need besides their options: the tasks of the evaluation sets, the path of the run's model, the
    names of models that they may ask, and whether there is a reward to check answers by
    (`rayrft.pipelines.run.models`). Of the run's model they use embeddings, and the tokenizer with the run's
    ``template``."""

    evaluation: Sequence[Task] = ()
    tokenizer: str | None = None
    models: Collection[str] = ()
    scores: bool = False
    template: TemplateConfig | None = None


@dataclass(frozen=True)
class Applied:
    """What an operator made of a batch of R rows.

    ``rows`` are the R rows in their order, changed or not. ``reasons`` has R entries: None for a row that stays, else
    why it is left out; the text after the first ": " is a detail that rows are not counted by. ``made`` are rows of
    the same columns that are added, and ``parents`` has the indices of those that each of them was made of.
    """

    rows: pa.RecordBatch
    reasons: Sequence[str | None] = ()
    made: pa.RecordBatch | None = None
    parents: Sequence[tuple[int, ...]] = ()
    notes: Sequence[str] = ()
    """What did not succeed, such as a row that none was made of: counted likewise, without its detail."""


class Operator(Generic[O]):
    """The base of operators. A subclass of ``Operator[Options]`` sets ``kind``, and implements `apply`.

    Constructing it is cheap and raises ConfigError if the options do not fit each other; `prepare` loads what is heavy,
    in the process that applies it.
    """

    kind: ClassVar[Kind]
    version: ClassVar[str] = "1"
    """Another one whenever the operator gives other rows than before for the same ones."""
    scope: ClassVar[Scope] = "row"
    columns: ClassVar[Mapping[str, Wants]] = {}
    """Columns that it reads whatever its options."""
    scores: ClassVar[bool] = False
    """Whether it checks answers by the reward."""
    Options: ClassVar[type[Section]] = Section
    """The type of the options, which the subclass names in brackets."""
    _next_row = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for base in cls.__dict__.get("__orig_bases__", ()):
            for options in get_args(base):
                if inspect.isclass(options) and issubclass(options, Section):
                    cls.Options = options

    def __init__(self, options: O, context: Context) -> None:
        self.options, self.context = options, context

    @property
    def reads(self) -> Mapping[str, Wants]:
        """The columns that it needs, and what each must hold: ``columns``, and those that options name whose type is
        marked by `Reads`, such as `TextColumn`."""
        found = dict(self.columns)
        for _, mark, value in self._marked(Reads):
            names = (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ()
            found |= dict.fromkeys(names, mark.wants)
        return found

    @property
    def writes(self) -> Mapping[str, pa.DataType]:
        """The columns that it sets: existing ones are replaced, and the others appended."""
        return {}

    @property
    def asks(self) -> Mapping[str, str]:
        """The models that it asks, by the option that names each, whose type is `ModelName`."""
        return {option: value for option, _, value in self._marked(Asks) if value is not None}

    @property
    def group_by(self) -> str:
        """Scope ``group``: the column that tells groups apart, by default that in option ``by``."""
        return getattr(self.options, "by", None) or "group_id"

    def _marked(self, kind: type[M]) -> list[tuple[str, M, Any]]:
        """Return the options whose types have such a mark: their names, marks and values."""
        marks = ((name, mark) for name, each in type(self.options).model_fields.items() for mark in each.metadata)
        return [(name, mark, getattr(self.options, name)) for name, mark in marks if isinstance(mark, kind)]

    def check(self, schema: pa.Schema) -> None:
        """Raise ConfigError if columns of this schema do not fit the options, beyond what ``reads`` says."""

    def schema_after(self, schema: pa.Schema) -> pa.Schema:
        """Return the schema of rows after it, by default with ``writes`` replaced or appended; called after `check`."""
        for name, kind in self.writes.items():
            column, at = pa.field(name, kind), schema.get_field_index(name)
            if at < 0:
                schema = schema.append(column)
            elif schema.field(at).type != kind or is_json(schema.field(at)):
                schema = schema.set(at, column)
        return schema

    def prepare(self) -> None:
        """Load what is heavy, once."""

    def observe(self, rows: pa.RecordBatch) -> None:
        """Scope ``all``: see a batch; `apply` gets the same batches in the same order after all were seen."""

    def settle(self) -> None:
        """Scope ``all``: conclude from what was observed."""

    def take_next(self, values: np.ndarray, rows: pa.RecordBatch) -> np.ndarray:
        """Scope ``all``: return the part that is for these rows, the next ones, of values ``[all rows]``."""
        first, self._next_row = self._next_row, self._next_row + rows.num_rows
        return values[first : self._next_row]

    def apply(self, rows: pa.RecordBatch) -> Applied:
        """Work on a batch; scope ``group``: on whole groups, of which each is in one batch."""
        raise NotImplementedError


operators: Registry[type[Operator[Any]]] = Registry("operator")


def register_operator(
    name: str, kind: Kind | None = None, *, writes: Mapping[str, pa.DataType] | None = None, version: str = "1"
) -> Callable[[Any], Any]:
    """Return a decorator that registers an operator: a subclass of `Operator`, or a function of a row, with its kind.

    A function's parameters without a default are columns, those with one are options, whose types are checked. What it
    returns is, by kind: ``clean``: the value of the column in ``writes``, by default that of its first parameter;
    ``filter``: whether the row stays, or a text: why it does not; ``prioritise``: a number; ``synthesise``: a list of
    dictionaries, rows that are added, with the columns that they do not share with the row. Raises ConfigError for
    another kind of value, or if another operator has the name.
    """

    def decorate(piece: Any) -> Any:
        if inspect.isclass(piece) and issubclass(piece, Operator):
            operators.register(name)(piece)
        elif kind is None:
            raise ConfigError("a function needs its kind", "give clean, filter, prioritise or synthesise", field=name)
        else:
            operators.register(name)(_of_function(piece, kind, writes or {}, version))
        return piece

    return decorate


def _of_function(
    function: Callable[..., Any], kind: Kind, writes: Mapping[str, pa.DataType], version: str
) -> type[FunctionOperator]:
    """Return the class of operators that call a function."""
    parameters, hints = inspect.signature(function).parameters.values(), get_type_hints(function)
    columns = [each.name for each in parameters if each.default is each.empty]
    if not columns:
        raise ConfigError("a function of no column", "name columns as parameters", field=function.__qualname__)
    options: dict[str, Any] = {
        each.name: (hints.get(each.name, Any), each.default) for each in parameters if each.name not in columns
    }
    members = {
        "function": staticmethod(function),
        "kind": kind,
        "version": version,
        "columns": dict.fromkeys(columns, "any"),
        "writes": {"priority": pa.float32()} if kind == "prioritise" else dict(writes),
        "Options": create_model("Options", __base__=Section, **options),
        **{name: getattr(function, name) for name in ("__module__", "__qualname__")},  # for the registry
    }
    return type(function.__name__, (FunctionOperator,), members)


class FunctionOperator(Operator[Section]):
    """Calls a function once for each row."""

    function: Callable[..., Any]

    def apply(self, rows: pa.RecordBatch) -> Applied:
        options = {name: getattr(self.options, name) for name in type(self.options).model_fields}
        rowwise = zip(*(values_of(rows, name) for name in self.columns), strict=True)
        found = [self.function(*values, **options) for values in rowwise]
        if self.kind == "filter":
            if None in found:
                raise TypeError("a filter returns whether the row stays, or a text, and not None")
            return Applied(rows, [each if isinstance(each, str) else None if each else "refused" for each in found])
        if self.kind == "synthesise":
            return self._added(rows, found)
        name, kind = next(iter(self.writes.items()), (next(iter(self.columns)), None))
        if kind is None and is_json(rows.schema.field(name)):
            found = [None if value is None else json.dumps(value, ensure_ascii=False) for value in found]
        kind = rows.schema.field(name).type if kind is None else kind
        return Applied(with_column(rows, name, pa.array(found, kind)))

    def _added(self, rows: pa.RecordBatch, found: list[list[dict[str, Any]]]) -> Applied:
        made, columns = [(row, each) for row, several in enumerate(found) for each in several], dict[str, list[Any]]()
        for name in sorted({name for _, each in made for name in each}):
            if name not in rows.schema.names:
                raise ValueError(f"a made row has the column {name!r}, and the rows have {rows.schema.names}")
            kept = rows.column(name).to_pylist()
            columns[name] = [each.get(name, kept[row]) for row, each in made]
        return copy_parents(rows, [row for row, _ in made], columns)


def is_text(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds texts: Polars writes large ones."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_list(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def values_of(rows: pa.RecordBatch, name: str) -> list[Any]:
    """Return the values of a column, those of JSON as what they stand for."""
    values: list[Any] = rows.column(name).to_pylist(maps_as_pydicts="lossy")
    if is_json(rows.schema.field(name)):
        return [None if value is None else json.loads(value) for value in values]
    return values


def with_column(rows: pa.RecordBatch, name: str, values: pa.Array) -> pa.RecordBatch:
    """Return rows with a column replaced, or appended."""
    if name in rows.schema.names:
        index = rows.schema.get_field_index(name)
        return rows.set_column(index, rows.schema.field(index).with_type(values.type), values)
    return rows.append_column(name, values)


def with_column_values(rows: pa.RecordBatch, name: str, values: Iterable[Any]) -> pa.RecordBatch:
    """Return rows with other values in a column, which keeps its type."""
    return with_column(rows, name, pa.array(values, rows.schema.field(name).type))


def copy_parents(rows: pa.RecordBatch, parents: Sequence[int], columns: Mapping[str, Iterable[Any]]) -> Applied:
    """Return the rows as they are, and a copy of each parent, by index, with these values of columns."""
    made = rows.take(pa.array(parents, pa.int64()))
    for name, values in columns.items():
        made = with_column_values(made, name, values)
    return Applied(rows, made=made, parents=[(index,) for index in parents])


def build_operator(config: OperatorConfig, field: str, context: Context) -> Operator[Any]:
    """Build an operator from its config, at this key. Raises ConfigError for an unknown name or a wrong option."""
    made = operators.get(config.name, f"{field}.name")
    if inspect.isfunction(made):  # named by module and attribute
        registered = (operators.get(name) for name in operators)
        made = next((each for each in registered if getattr(each, "function", None) is made), made)
    if not (inspect.isclass(made) and issubclass(made, Operator)):
        remedy, place = "decorate it with register_operator", f"{field}.name"
        raise ConfigError("is not an operator", remedy, field=place, value=config.name)
    try:
        return made(made.Options.model_validate(config.options), context)
    except ValidationError as error:
        wrong = explain(error, config.options, made.Options)
    except ConfigError as error:
        wrong = error
    raise ConfigError(wrong.problem, wrong.remedy, field=f"{field}.{wrong.field}", value=wrong.value)
