"""The operator on whole columns."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Literal

import pyarrow as pa
from pydantic import Field

from rayrft.config.base import Section
from rayrft.data.formats import is_json, json_field
from rayrft.data.tables import converted
from rayrft.errors import ConfigError, DataError, nearest
from rayrft.pipelines.operator import Applied, Operator, register_operator, values_of
from rayrft.pipelines.rows import id_column

_TYPES = {"text": pa.string(), "number": pa.float64(), "integer": pa.int64(), "boolean": pa.bool_()}


class ColumnsOptions(Section):
    """Changes of columns, applied in this order."""

    rename: dict[str, str] = Field(default_factory=dict)
    """New names by old ones. ``reward_model.ground_truth`` and ``prompt.0.content`` name values within a column, which
    stays; they become texts unless ``cast`` says otherwise."""
    cast: dict[str, Literal["text", "number", "integer", "boolean", "json"]] = Field(default_factory=dict)
    drop: tuple[str, ...] = ()


@register_operator("columns")
class ChangeColumns(Operator[ColumnsOptions]):
    """Rename, convert and drop columns; leave out rows with a missing inner value, or one that cannot be converted."""

    kind = "clean"

    @property
    def writes(self) -> Mapping[str, pa.DataType]:
        return dict.fromkeys((*self.options.rename.values(), *self.options.cast), pa.null())

    def check(self, schema: pa.Schema) -> None:
        _known(id_column(schema), self.schema_after(schema).names, "drop")

    def schema_after(self, schema: pa.Schema) -> pa.Schema:
        fields = {column.name: column for column in schema}
        for old, new in self.options.rename.items():
            if new in fields:
                raise ConfigError("there is a column of this name", "drop it before", field="rename", value=new)
            whole = _known(old if old in fields else old.partition(".")[0], fields, "rename") == old
            fields[new] = fields.pop(old).with_name(new) if whole else pa.field(new, pa.string())
        for name, kind in self.options.cast.items():
            _known(name, fields, "cast")
            fields[name] = json_field(name) if kind == "json" else pa.field(name, _TYPES[kind])
        for name in self.options.drop:
            del fields[_known(name, fields, "drop")]
        return pa.schema(list(fields.values()))

    def apply(self, rows: pa.RecordBatch) -> Applied:
        schema, reasons = self.schema_after(rows.schema), list[str | None]([None] * rows.num_rows)
        old_names = {new: old for old, new in self.options.rename.items()}
        columns = [self._column(rows, old_names.get(each.name, each.name), each, reasons) for each in schema]
        return Applied(pa.RecordBatch.from_arrays(columns, schema=schema), reasons)

    def _column(self, rows: pa.RecordBatch, old: str, field: pa.Field, reasons: list[str | None]) -> pa.Array:
        """Return a column with its values converted, and note in ``reasons`` why rows are left out."""
        name, path = (old, []) if old in rows.schema.names else (old.partition(".")[0], old.split(".")[1:])
        kind = self.options.cast.get(field.name, "text" if path else None)
        if kind is None:
            return rows.column(name)
        values = values_of(rows, name)
        for row, value in enumerate(values):
            values[row] = None
            try:
                for part in path:
                    value = value[int(part) if isinstance(value, list) else part]
                if value is not None:
                    values[row] = json.dumps(value, ensure_ascii=False) if is_json(field) else converted(value, kind)
            except (LookupError, TypeError):
                reasons[row] = f"no {old}"
            except (ValueError, DataError):
                reasons[row] = f"{old} is not {kind}: {value!r}"
        return pa.array(values, field.type)


def _known(name: str, columns: Collection[str], option: str) -> str:
    if name in columns:
        return name
    raise ConfigError("there is no such column", nearest(name, columns), field=option, value=name)
