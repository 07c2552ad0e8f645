"""Rows whose quality a language model judges."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from rayrft.config.base import Section, invalid, section_rule
from rayrft.errors import ConfigError, RequestRefused
from rayrft.experience import Task, reaches
from rayrft.pipelines.operator import AnyColumn, Applied, Context, ModelName, Reads, register_operator
from rayrft.pipelines.rows import id_column, with_numbers
from rayrft.pipelines.run.models import RemoteChat
from rayrft.pipelines.subjects import AskingOperator
from rayrft.rewards import Transcript
from rayrft.rewards.judge import Judge


class JudgedOptions(Section):
    """The options of the judge are those of reward `judge`."""

    model: ModelName
    """The judge, by the name of a model that can be asked."""
    least: float
    """Rows with a lower grade are left out."""
    column: AnyColumn = "answer"
    """What is judged: texts, or conversations, of which that is the last answer (``turns`` of experiences)."""
    question: Annotated[str | None, Reads("text")] = None
    """Column with what the text answers."""
    reference: Annotated[str | None, Reads("text")] = None
    """Column with a right answer, which the judge is shown."""
    rubric: str | None = None
    template: str | None = None
    low: int = 0
    high: int = 10
    votes: int = Field(1, ge=1)
    temperature: float = Field(0.0, ge=0)
    max_tokens: int = Field(512, ge=1)
    longest: int = Field(16_000, ge=1)
    without: Literal["leave_out", "keep"] = "leave_out"
    """What becomes of a row for which the judge gives no grade."""

    @section_rule
    def _on_the_scale(self) -> None:
        if not self.low <= self.least <= self.high:
            raise invalid("least", f"is not on the scale from {self.low} to {self.high}", value=self.least)


@register_operator("judged")
class Judged(AskingOperator[JudgedOptions]):
    """Leave out rows that a judge gives a low grade, by a rubric; the median of its verdicts is written to ``grade``,
    on the scale from ``low`` to ``high``. The judge is that of reward `judge`: what it is shown stands between tags
    that no text can close."""

    kind = "filter"
    writes: ClassVar[Mapping[str, pa.DataType]] = {"grade": pa.float32()}

    def __init__(self, options: JudgedOptions, context: Context) -> None:
        super().__init__(options, context)
        names = {"template", "low", "high", "votes", "temperature", "max_tokens", "longest"}
        names |= {"rubric"} if options.rubric is not None else set()
        given = options.model_dump(include=names)
        try:
            self._judge = Judge(auxiliary=options.model, show_reference=options.reference is not None, **given)
        except ConfigError as error:
            option = str(error.field).rpartition(".")[2]
            raise ConfigError(error.problem, error.remedy, field=option, value=error.value) from None

    def prepare(self) -> None:
        self._judge.use({self.options.model: RemoteChat(self.options.model)})

    async def work(self, rows: pa.RecordBatch) -> Applied:
        names = rows.column(id_column(rows.schema)).to_pylist()
        found = await asyncio.gather(*map(self._grade, names, rows.to_pylist(maps_as_pydicts="lossy")))
        grades = np.array([np.nan if isinstance(each, str) else each for each in found], np.float64)
        reasons = [self._reason(each) for each in found]
        notes = [each for each in found if isinstance(each, str)] if self.options.without == "keep" else []
        return Applied(with_numbers(rows, "grade", grades, pa.float32()), reasons, notes=notes)

    async def _grade(self, name: str, row: dict[str, Any]) -> float | str:
        """Return the grade of a row, or why there is none."""
        options = self.options
        judged = row[options.column]
        if isinstance(judged, list) and judged and isinstance(judged[-1], dict):
            turns = tuple({"role": turn.get("role", ""), "content": turn.get("content") or ""} for turn in judged)
        elif isinstance(judged, str) and judged:
            asked = [{"role": "question", "content": row[options.question] or ""}] if options.question else []
            turns = (*asked, {"role": "assistant", "content": judged})
        else:
            return "nothing to judge"
        reference = (row[options.reference] or "") if options.reference else ""
        try:
            result = await self._judge.score(Task(name, "", reference), Transcript(turns))
        except RequestRefused as error:
            return f"no answer of the judge: {error.problem}"
        if result.value is None:
            return "no grade in the form that was asked for"
        return options.low + result.value * (options.high - options.low)

    def _reason(self, found: float | str) -> str | None:
        if isinstance(found, str):
            return found if self.options.without == "leave_out" else None
        return None if reaches(found, self.options.least) else f"a low grade: {found:g}"
