"""Operators that write ``pass_rate``, and ``priority``: the higher, the sooner a row is worth training on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from rayrft.config.base import Section
from rayrft.experience import reaches
from rayrft.pipelines.operator import Applied, Kind, NumberColumn, O, Operator, TextColumn, Wants, register_operator
from rayrft.pipelines.operators import hashing
from rayrft.pipelines.rows import numbers, of_groups, with_numbers


class NumberOperator(Operator[O]):
    """An operator that writes numbers, by default priorities: a subclass implements `values` instead of `apply`."""

    kind: ClassVar[Kind] = "prioritise"
    writes: ClassVar[Mapping[str, pa.DataType]] = {"priority": pa.float32()}

    def apply(self, rows: pa.RecordBatch) -> Applied:
        [(name, kind)] = self.writes.items()
        return Applied(with_numbers(rows, name, self.values(rows), kind))

    def values(self, rows: pa.RecordBatch) -> np.ndarray:
        """Return the number of each row, NaN where it has none."""
        raise NotImplementedError


class RateOptions(Section):
    column: NumberColumn = "pass_rate"


@register_operator("difficulty")
class Difficulty(NumberOperator[RateOptions]):
    """``1 - pass_rate``; none where the pass rate is unknown."""

    def values(self, rows: pa.RecordBatch) -> np.ndarray:
        return 1 - numbers(rows, self.options.column)


@register_operator("uncertainty")
class Uncertainty(NumberOperator[RateOptions]):
    """``4 p (1 - p)`` for a pass rate p: 1 where half of the answers are right, 0 where all or none are. It is
    four times the variance of the reward, which bounds what a group can teach."""

    def values(self, rows: pa.RecordBatch) -> np.ndarray:
        rate = numbers(rows, self.options.column)
        return 4 * rate * (1 - rate)


class DeviationOptions(Section):
    reward: NumberColumn = "reward"
    by: str = "group_id"


@register_operator("reward_deviation")
class RewardDeviation(NumberOperator[DeviationOptions]):
    """The standard deviation of the known rewards of a row's group."""

    scope = "group"

    def values(self, rows: pa.RecordBatch) -> np.ndarray:
        return of_groups(rows, self.options.by, self.options.reward, lambda rewards: float(np.std(rewards)))


class PassRateOptions(Section):
    by: str = "task_id"
    """The rows of a task share its value."""
    reward: NumberColumn = "reward"
    right: float = 0.5
    """Rewards above count as right."""


@register_operator("pass_rate")
class PassRate(NumberOperator[PassRateOptions]):
    """Write ``pass_rate``: the share of right answers among all to the same task whose reward is known."""

    kind = "clean"
    scope = "group"
    writes: ClassVar[Mapping[str, pa.DataType]] = {"pass_rate": pa.float64()}

    def values(self, rows: pa.RecordBatch) -> np.ndarray:
        def rate(rewards: np.ndarray) -> float:
            return float(np.mean([not reaches(self.options.right, each) for each in rewards]))

        return of_groups(rows, self.options.by, self.options.reward, rate)


class HumanOptions(Section):
    label: str = "score"
    """The entry of ``labels`` that holds it."""
    scale: tuple[float, float] = (0.0, 1.0)
    """The scores that become priorities 0 and 1."""


@register_operator("human_score")
class HumanScore(NumberOperator[HumanOptions]):
    """What a person gave in a label, from 0 to 1; none where nobody gave a number."""

    columns: ClassVar[Mapping[str, Wants]] = {"labels": "map"}

    def values(self, rows: pa.RecordBatch) -> np.ndarray:
        import pandas as pd

        low, high = self.options.scale
        given = [dict(labels or ()).get(self.options.label) for labels in rows.column("labels").to_pylist()]
        known = pd.to_numeric(pd.Series(given, dtype=object), errors="coerce").to_numpy(np.float64)
        return np.clip((known - low) / (high - low), 0, 1)


class NoveltyOptions(Section):
    column: TextColumn = "question"
    ngram: int = Field(3, ge=1)


_CELLS = 1 << 24


@register_operator("novelty")
class Novelty(NumberOperator[NoveltyOptions]):
    """The share of a text's n-grams that no other row has.

    n-grams are counted in 16 MiB, whatever their number; a cell that two share makes both seem known, which at a
    million different ones happens to 6 in 100.
    """

    scope = "all"

    def prepare(self) -> None:
        self._rows = np.zeros(_CELLS, np.uint8)

    def observe(self, rows: pa.RecordBatch) -> None:
        for cells in self._cells(rows):
            self._rows[cells] = np.minimum(self._rows[cells], 1) + 1  # 0, 1, or more rows

    def values(self, rows: pa.RecordBatch) -> np.ndarray:
        shares = [np.mean(self._rows[cells] == 1) if len(cells) else np.nan for cells in self._cells(rows)]
        return np.array(shares, np.float64)

    def _cells(self, rows: pa.RecordBatch) -> list[np.ndarray]:
        """Return each row's cells, each once."""
        grams, bounds = hashing.ngrams(*hashing.words(rows.column(self.options.column)), self.options.ngram)
        cells = (grams % np.uint64(_CELLS)).astype(np.int64)
        return [np.unique(cells[start:end]) for start, end in itertools.pairwise(bounds)]
