"""Operators on training batches as users write them: good ones, and such as return what they may not."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

import rayrft
from rayrft.pipelines import Applied, Operator
from rayrft.pipelines.operator import with_column


@rayrft.register_operator("priority_two", "prioritise")
def priority_two(reward: float | None) -> float:
    return 2.0


@rayrft.register_operator("raises_on_zero", "filter")
def raises_on_zero(reward: float | None) -> bool:
    if reward == 0.0:
        raise LookupError("no such thing")
    return True


@rayrft.register_operator("nothing_left", "filter")
def nothing_left(source: str) -> bool:
    return False


@rayrft.register_operator("dies_at_step_zero", "filter")
def dies_at_step_zero(step: int) -> bool:
    if not step:
        os._exit(7)
    return True


class _Any(Operator[Any]):
    kind = "clean"


@rayrft.register_operator("whole_batch")
class WholeBatch(_Any):
    """Sees each batch alone."""

    kind = "filter"
    scope = "all"

    def prepare(self) -> None:
        self._seen = 0

    def observe(self, rows: pa.RecordBatch) -> None:
        self._seen += rows.num_rows

    def apply(self, rows: pa.RecordBatch) -> Applied:
        return Applied(rows, [None if self._seen == rows.num_rows else "seen before"] * rows.num_rows)


@rayrft.register_operator("says_other_ids")
class SaysOtherIds(_Any):
    @property
    def writes(self) -> Mapping[str, pa.DataType]:
        return {"experience_id": pa.string()}


PUTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "other_tokens": ("token_ids", lambda ids: [5] * len(ids)),
    "other_places": ("place", lambda place: 0),
    "other_sources": ("source", lambda source: "expert"),
    "negative_weights": ("weight", lambda weight: -1.0),
    "longer_masks": ("action_mask", lambda mask: [*mask, 1]),
}
"""By operator: the column, and what it puts there in place of a value."""


def puts(column: str, change: Callable[[Any], Any]) -> type[_Any]:
    class Puts(_Any):
        def apply(self, rows: pa.RecordBatch) -> Applied:
            values = [change(value) for value in rows.column(column).to_pylist()]
            return Applied(with_column(rows, column, pa.array(values, rows.schema.field(column).type)))

    return Puts


for _name, _what in PUTS.items():
    rayrft.register_operator(_name)(puts(*_what))


@rayrft.register_operator("turns_round")
class TurnsRound(_Any):
    """The rows in another order, each as it is."""

    def apply(self, rows: pa.RecordBatch) -> Applied:
        return Applied(rows.take(pa.array(np.arange(rows.num_rows)[::-1])))
