"""Operators on training batches: what a lease gave, before it is trained."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from rayrft.config.base import Section, invalid, section_rule
from rayrft.experience import SCHEMA, list_column
from rayrft.pipelines.operator import Applied, Operator, Reads, Wants, register_operator, with_column_values
from rayrft.pipelines.operators.filters import Conditional, ConditionalOperator
from rayrft.pipelines.rows import numbers

_ADDED = {"place": pa.int64(), "step": pa.int64(), "trained": pa.bool_(), "weight": pa.float32()}
BATCHES = pa.schema([*SCHEMA, *_ADDED.items()])
"""The columns that operators on batches see: those of `experience.SCHEMA`, the row's place in the batch, the optimiser
step, whether the row is trained, and its weight in the loss. If a row is not trained, its reward alone counts, in its
group's advantages.
"""


class RebalanceOptions(Section):
    expert_share: float = Field(gt=0, lt=1)
    """Share of the trained rows that are to be expert rows."""


@register_operator("rebalance")
class Rebalance(Operator[RebalanceOptions]):
    """Leave out usual or expert rows, drawn by the step, until expert rows have their share. A batch with one kind
    stays as it is. A usual row that is left out still counts in its group's advantages."""

    kind = "filter"
    scope = "all"
    columns: ClassVar[Mapping[str, Wants]] = {
        **dict.fromkeys(("source", "pair_id"), "text"),
        **{"trained": "any", "place": "number", "step": "number"},
    }

    def prepare(self) -> None:
        self._places = defaultdict[int, tuple[list[int], list[int]]](lambda: ([], []))
        """Of usual and of expert rows, by step: a file may have the batches of several."""
        self._gone = set[int]()

    def observe(self, rows: pa.RecordBatch) -> None:
        if rows.column("pair_id").null_count < rows.num_rows:
            raise ValueError("the batch has preference pairs, which are not expert rows to imitate")
        columns = (rows.column(name).to_pylist() for name in ("step", "place", "source", "trained"))
        for step, place, source, trained in zip(*columns, strict=True):
            if trained:
                self._places[step][source == "expert"].append(place)

    def settle(self) -> None:
        share = Fraction(self.options.expert_share).limit_denominator(1000)
        for step, (own, given) in self._places.items():
            if not own or not given:
                continue
            many, most = given, int(len(own) * share / (1 - share))
            if len(given) <= most:
                many, most = own, int(len(given) * (1 - share) / share)
            rng = random.Random(f"rebalance {step}")
            self._gone.update(rng.sample(many, max(0, len(many) - max(1, most))))

    def apply(self, rows: pa.RecordBatch) -> Applied:
        places = zip(rows.column("place").to_pylist(), rows.column("source").to_pylist(), strict=True)
        reasons = {True: "over the share of expert rows", False: "over the share of usual rows"}
        return Applied(rows, [reasons[source == "expert"] if at in self._gone else None for at, source in places])


class TruncateOptions(Section):
    max_tokens: int = Field(ge=1)
    """Tokens of a row, its prompt among them."""


_BY_TOKEN = ("token_ids", "action_mask", "logprobs", "teacher_logprobs")


@register_operator("truncate")
class Truncate(Operator[TruncateOptions]):
    """Cut rows after so many tokens. Rewards and advantages stay what they were of the whole answers."""

    kind = "clean"
    columns: ClassVar[Mapping[str, Wants]] = {**dict.fromkeys(_BY_TOKEN, "list"), "weight_versions": "any"}

    def apply(self, rows: pa.RecordBatch) -> Applied:
        most = self.options.max_tokens
        lengths = rows.column("token_ids").value_lengths().to_numpy(zero_copy_only=False)
        if (lengths <= most).all():
            return Applied(rows)
        for name in _BY_TOKEN:
            cut = [None if values is None else values[:most] for values in list_column(rows.column(name))]
            rows = with_column_values(rows, name, cut)
        spans = [
            None if each is None else [{**span, "end": min(span["end"], most)} for span in each if span["start"] < most]
            for each in rows.column("weight_versions").to_pylist()
        ]
        return Applied(with_column_values(rows, "weight_versions", spans))


class MaskOptions(Conditional):
    turns: list[int] = Field(min_length=1)
    """The numbers of the model's turns that are not trained; -1 is the last one."""


@register_operator("mask_turns")
class MaskTurns(ConditionalOperator[MaskOptions]):
    """Exclude turns of the model from the loss. A row whose other turns have rewards of their own by number is left
    out: they would be those of other turns."""

    kind = "clean"
    columns: ClassVar[Mapping[str, Wants]] = {"action_mask": "list", "logprobs": "list", "metrics": "map"}

    def apply(self, rows: pa.RecordBatch) -> Applied:
        masks, logprobs = list_column(rows.column("action_mask")), list_column(rows.column("logprobs"))
        spans, metrics = rows.column("weight_versions").to_pylist(), rows.column("metrics").to_pylist()
        reasons: list[str | None] = [None] * rows.num_rows
        for row in np.flatnonzero(self.selection.met(rows)).tolist():
            before, values = masks[row], logprobs[row]
            assert before is not None and values is not None  # not nullable in the schema
            starts, ends = np.flatnonzero(np.diff(before.astype(np.int8), prepend=0, append=0)).reshape(-1, 2).T
            mask, turns = before.copy(), len(starts)
            for turn in (each for each in self.options.turns if -turns <= each < turns):
                mask[starts[turn] : ends[turn]] = 0
            if (mask == before).all():
                continue
            if any(name.startswith("turn_") for name, _ in metrics[row] or ()):
                reasons[row] = "its turns have rewards of their own"
            masks[row], logprobs[row] = mask, np.where(mask, values, np.float32(0))
            spans[row] = [span for span in spans[row] or () if mask[span["start"] : span["end"]].any()]
        for name, changed in (("action_mask", masks), ("logprobs", logprobs), ("weight_versions", spans)):
            rows = with_column_values(rows, name, changed)
        return Applied(rows, reasons)


class ReweightOptions(Conditional):
    by: Annotated[float | str, Reads("number")]
    """A factor, or the name of a column of factors."""

    @section_rule
    def _no_sign(self) -> None:
        if isinstance(self.by, float) and not 0 <= self.by < float("inf"):
            raise invalid("by", "is not a factor", value=self.by, remedy="give a number from 0 on")


@register_operator("reweight")
class Reweight(ConditionalOperator[ReweightOptions]):
    """Multiply the weight of rows in the loss. The loss is still divided by the number of all tokens or rows."""

    kind = "clean"
    columns: ClassVar[Mapping[str, Wants]] = {"weight": "number"}

    def apply(self, rows: pa.RecordBatch) -> Applied:
        by, before, met = self.options.by, numbers(rows, "weight"), self.selection.met(rows)
        weights = np.where(met, before * (numbers(rows, by) if isinstance(by, str) else by), before)
        return Applied(with_column_values(rows, "weight", weights))
