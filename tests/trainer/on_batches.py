"""Operators on training batches as users write them: good ones, and such as return what they may not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

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


@rayrft.register_operator("dies_on_batches", "filter")
def dies_on_batches(source: str) -> bool:
    os._exit(7)


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


class _Puts(_Any):
    """Puts other values into a column."""

    column: ClassVar[str]

    def values(self, rows: pa.RecordBatch) -> list[Any]:
        raise NotImplementedError

    def apply(self, rows: pa.RecordBatch) -> Applied:
        return Applied(with_column(rows, self.column, pa.array(self.values(rows), rows.schema.field(self.column).type)))


@rayrft.register_operator("other_tokens")
class OtherTokens(_Puts):
    column = "token_ids"

    def values(self, rows: pa.RecordBatch) -> list[Any]:
        return [[5] * len(ids) for ids in rows.column("token_ids").to_pylist()]


@rayrft.register_operator("other_places")
class OtherPlaces(_Puts):
    column = "place"

    def values(self, rows: pa.RecordBatch) -> list[Any]:
        return [0] * rows.num_rows


@rayrft.register_operator("other_sources")
class OtherSources(_Puts):
    column = "source"

    def values(self, rows: pa.RecordBatch) -> list[Any]:
        return ["expert"] * rows.num_rows


@rayrft.register_operator("negative_weights")
class NegativeWeights(_Puts):
    column = "weight"

    def values(self, rows: pa.RecordBatch) -> list[Any]:
        return [-1.0] * rows.num_rows


@rayrft.register_operator("longer_masks")
class LongerMasks(_Puts):
    column = "action_mask"

    def values(self, rows: pa.RecordBatch) -> list[Any]:
        return [[*mask, 1] for mask in rows.column("action_mask").to_pylist()]


@rayrft.register_operator("turns_round")
class TurnsRound(_Any):
    """The rows in another order, each as it is."""

    def apply(self, rows: pa.RecordBatch) -> Applied:
        return Applied(rows.take(pa.array(np.arange(rows.num_rows)[::-1])))
