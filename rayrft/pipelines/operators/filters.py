"""Operators that leave out rows by a condition, or all but the best."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import Annotated, Literal, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from rayrft.config.base import Section, invalid, section_rule
from rayrft.data.selection import Selection
from rayrft.errors import ConfigError, DataError
from rayrft.experience import ROUNDING, reaches
from rayrft.pipelines import operator
from rayrft.pipelines.operator import AnyColumn, Applied, NumberColumn, Operator, register_operator
from rayrft.pipelines.operators.clean import OneColumn, RowFilter
from rayrft.pipelines.rows import FORMULA, gone, grouped, numbers, seeded, share_of


class Conditional(Section):
    where: str | None = None
    """A condition in DuckDB's SQL for the rows that are meant; by default all."""


W = TypeVar("W", bound=Conditional)


class ConditionalOperator(Operator[W]):
    """An operator on rows that meet a condition, one row at a time."""

    def check(self, schema: pa.Schema) -> None:
        try:
            self.selection = Selection(schema, where=self.options.where)
        except DataError as error:
            raise ConfigError(error.problem, error.remedy, field="where", value=error.value) from None


class ExpressionOptions(Conditional):
    where: str
    """A condition in DuckDB's SQL over any columns: ``reward > 0.5 and len(turns) < 6``."""


@register_operator("expression")
class Expression(ConditionalOperator[ExpressionOptions]):
    """Leave out rows that do not meet a condition, or for which it is null. It sees one row at a time, and no files."""

    kind = "filter"

    def apply(self, rows: pa.RecordBatch) -> Applied:
        return Applied(rows, gone(f"not {self.options.where}", self.selection.met(rows)))


class BandOptions(Section):
    column: NumberColumn = "pass_rate"
    min: float = 0.0
    max: float = 1.0
    """Bounds that belong to the band."""
    unknown: Literal["keep", "drop"] = "keep"
    """What becomes of rows without a number."""

    @section_rule
    def _ordered(self) -> None:
        if self.min > self.max:
            raise invalid("min", f"is above max, {self.max:g}", value=self.min)


@register_operator("difficulty_band")
class DifficultyBand(RowFilter[BandOptions]):
    """Leave out rows whose measured pass rate (operator ``pass_rate``, or a column of yours) is outside a band."""

    def values(self, rows: pa.RecordBatch) -> list[float]:
        return numbers(rows, self.options.column).tolist()

    def reason(self, value: float) -> str | None:
        if value != value:
            return "unknown difficulty" if self.options.unknown == "drop" else None
        if not reaches(value, self.options.min):
            return f"too hard: {value:g}"
        return None if reaches(self.options.max, value) else f"too easy: {value:g}"


class OutlierOptions(Section):
    column: AnyColumn = "reward"
    """Numbers; of a list or a text, the length."""
    by: str = "group_id"
    deviations: float = Field(3.0, gt=0)
    """Largest distance from the group's median, in standard deviations. These are estimated from the median absolute
    deviation (times 1.4826) or, if more than half of the group are equal, from the mean one (times 1.2533)."""
    min_rows: int = Field(4, ge=3)
    """Smaller groups stay as they are."""


@register_operator("outliers")
class Outliers(Operator[OutlierOptions]):
    """Leave out rows whose reward, length or other number is infinite, or far from the others of its group (modified
    z-score, Iglewicz and Hoaglin 1993). Where a group has two values, such as right and wrong, neither is an outlier,
    however rare."""

    kind = "filter"
    scope = "group"

    def check(self, schema: pa.Schema) -> None:
        kind = schema.field(self.options.column).type
        number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        if not (number or operator.is_list(kind) or operator.is_text(kind)):
            raise ConfigError("holds neither numbers nor lists nor texts", field="column", value=self.options.column)

    def apply(self, rows: pa.RecordBatch) -> Applied:
        column = rows.column(self.options.column)
        if operator.is_list(column.type) or operator.is_text(column.type):
            values = np.array([np.nan if each is None else len(each) for each in column.to_pylist()], np.float64)
        else:
            values = numbers(rows, self.options.column)
        reasons: list[str | None] = [None] * rows.num_rows
        for indices in grouped(rows.column(self.options.by).to_pylist()):
            known = np.array([index for index in indices if values[index] == values[index]], np.int64)
            if len(known) < self.options.min_rows:
                continue
            finite = known[np.isfinite(values[known])]
            outliers = set(known.tolist()) - set(finite.tolist())
            steps = np.diff(np.unique(values[finite]), prepend=-np.inf)
            if np.count_nonzero(steps > ROUNDING * np.abs(values[finite]).max(initial=0)) > 2:
                distance = np.abs(values[finite] - np.median(values[finite]))
                deviation = 1.4826 * np.median(distance) or 1.2533 * np.mean(distance)
                outliers |= set(finite[distance > self.options.deviations * deviation].tolist())
            for index in outliers:
                reasons[index] = f"{self.options.column} is an outlier: {values[index]:g}"
        return Applied(rows, reasons)


class RepetitionOptions(OneColumn):
    ngram: int = Field(4, ge=1)
    """Words of an n-gram."""
    max_share: float = Field(0.3, ge=0, le=1)
    """Largest share of n-grams that occurred earlier in the text."""
    max_run: int = Field(50, ge=2)
    """Longest run of one character, other than white space."""
    min_words: int = Field(20, ge=1)
    """In shorter texts only runs of characters count."""


_RUN = re.compile(r"(\S)\1+")


@register_operator("repetition")
class Repetition(RowFilter[RepetitionOptions]):
    """Leave out texts that repeat themselves (after Rae et al. 2021, A.1.1, who count n-grams likewise)."""

    def reason(self, value: str) -> str | None:
        run = max((len(found[0]) for found in _RUN.finditer(value)), default=0)
        if run > self.options.max_run:
            return f"a character is repeated: {run} times"
        words, n = value.lower().split(), self.options.ngram
        grams = list(zip(*(words[start:] for start in range(n)), strict=False))
        if len(words) < self.options.min_words or not grams:
            return None
        share = 1 - len(set(grams)) / len(grams)
        return None if reaches(self.options.max_share, share) else f"repeats itself: {share:.2f} of its {n}-grams"


class MixingOptions(OneColumn):
    max_share: float = Field(0.2, ge=0, le=0.5)
    """Largest share of letters, in words of two or more, outside the script that most of them are of."""
    min_letters: int = Field(20, ge=1)
    """Shorter texts stay."""


_WORD = re.compile(r"[^\W\d_]{2,}")
_FORMULA = re.compile(rf"{FORMULA}|```.*?```", re.DOTALL)
_JAPANESE = {"HIRAGANA", "KATAKANA"}


@register_operator("language_mixing")
class LanguageMixing(RowFilter[MixingOptions]):
    """Leave out texts that mix scripts, such as English and Chinese; formulas and blocks of code do not count."""

    def reason(self, value: str) -> str | None:
        if value.isascii():
            return None
        scripts = Counter(_script(letter) for word in _WORD.findall(_FORMULA.sub(" ", value)) for letter in word)
        if not _JAPANESE.isdisjoint(scripts):  # which is written with Chinese characters, too
            scripts["CJK"] += sum(scripts.pop(name, 0) for name in _JAPANESE)
        letters = scripts.total()
        if letters < self.options.min_letters:
            return None
        share = 1 - max(scripts.values()) / letters
        names = " and ".join(name.lower() for name, _ in scripts.most_common(2))
        return None if reaches(self.options.max_share, share) else f"mixes scripts: {names}, {share:.2f} of the letters"


def _script(letter: str) -> str:
    return "LATIN" if letter.isascii() else unicodedata.name(letter, "OTHER").partition(" ")[0]


class FormatOptions(OneColumn):
    pattern: str
    r"""A regular expression (Python's): ``\\boxed\{.+\}``."""
    must: Literal["contain", "be", "lack"] = "contain"
    """Whether the text has it somewhere, is it as a whole, or has it nowhere."""

    @section_rule
    def _compiles(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise invalid("pattern", f"is not a regular expression: {error}", value=self.pattern) from None


@register_operator("format")
class Format(RowFilter[FormatOptions]):
    """Leave out texts without a form, or with one."""

    def reason(self, value: str) -> str | None:
        pattern, must = re.compile(self.options.pattern, re.DOTALL), self.options.must
        found = pattern.fullmatch(value) if must == "be" else pattern.search(value)
        fits = (found is None) == (must == "lack")
        return None if fits else f"{self.options.column} must {must} {self.options.pattern}"


class TopOptions(Section):
    column: NumberColumn = "priority"
    """The score."""
    share: float = Field(gt=0, le=1)
    """Share of the rows to keep, rounded up."""
    by: Annotated[str | None, operator.Reads("any")] = None
    """Take the share of each group apart; a row without a group is one of its own."""


@register_operator("top_share")
class TopShare(Operator[TopOptions]):
    """Keep the rows with the highest scores; of equal ones the first, and none without a score.

    Memory: 8 bytes a row, and its group.
    """

    kind = "filter"
    scope = "all"

    def prepare(self) -> None:
        self._scores: list[np.ndarray] = []
        self._groups: list[str | None] = []

    def observe(self, rows: pa.RecordBatch) -> None:
        self._scores.append(numbers(rows, self.options.column))
        if self.options.by is not None:
            self._groups += rows.column(self.options.by).to_pylist()

    def settle(self) -> None:
        scores = np.concatenate(self._scores) if self._scores else np.empty(0)
        self._kept = np.zeros(len(scores), bool)
        members = [np.arange(len(scores))] if self.options.by is None else map(np.array, grouped(self._groups))
        for indices in members:
            best = indices[np.argsort(-scores[indices], kind="stable")]  # NaN comes last
            self._kept[best[: share_of(self.options.share, len(indices))]] = True
        self._kept &= ~np.isnan(scores)

    def apply(self, rows: pa.RecordBatch) -> Applied:
        return Applied(rows, gone("below the top share", self.take_next(self._kept, rows)))


@register_operator("sample", "filter")
def sample(id: str, share: float = 0.1, seed: int = 0) -> bool | str:
    """Keep about a share of the rows, drawn by their ids: the same rows give the same sample, in any order."""
    return seeded(id, seed).random() < share or "not drawn"
