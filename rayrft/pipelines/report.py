"""What operators did: rows in and out, why rows were left out, seconds, a few examples; and in a run, step by step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayrft.errors import OperatorFailed, OperatorTimeout
from rayrft.pipelines.chain import ChainLink, Change, LeftOut, Outcome

if TYPE_CHECKING:
    from rich.table import Table

log = logging.getLogger(__name__)

_GLIMPSE = 200


@dataclass
class OperatorReport:
    """What one operator did; `taken` rows came, and `given` went on, with the `made` ones."""

    name: str
    taken: int = 0
    given: int = 0
    changed: int = 0
    made: int = 0
    seconds: float = 0.0
    reasons: Counter[str] = field(default_factory=Counter)
    """Rows left out, by reason."""
    changes: list[Change] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    made_rows: list[dict[str, Any]] = field(default_factory=list)
    """A few of each."""
    notes: Counter[str] = field(default_factory=Counter)
    """What did not succeed, by what it was."""
    noted: list[str] = field(default_factory=list)
    """A few of these, in full."""
    layouts: Counter[str] = field(default_factory=Counter)
    """Rows that were read, by layout."""

    def add(self, outcome: Outcome, samples: int) -> None:
        """Add what it did with one batch."""
        self.taken += outcome.taken
        self.given += outcome.given
        self.changed += outcome.changed
        self.made += outcome.made
        self.seconds += outcome.seconds
        self.reasons.update(reason_of(each.reason) for each in outcome.left_out)
        self.changes = [*self.changes, *outcome.changes][:samples]
        self.left_out = [*self.left_out, *outcome.left_out[:samples]][:samples]
        self.made_rows = [*self.made_rows, *outcome.made_rows][:samples]
        self.notes.update(map(reason_of, outcome.notes))
        self.noted = [*self.noted, *outcome.notes[:samples]][:samples]


def operator_table(reports: Sequence[OperatorReport]) -> Table:
    """Return a table of all operators."""
    from rich.table import Table

    table = Table("operator", "in", "out", "changed", "made", "left out", "seconds", "rows/s", box=None)
    for each in reports:
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in each.reasons.most_common()) or "0"
        rate = f"{each.taken / each.seconds:,.0f}" if each.seconds else ""
        counts = (f"{number:,}" for number in (each.taken, each.given, each.changed, each.made))
        table.add_row(each.name, *counts, left_out, f"{each.seconds:.2f}", rate)
    return table


def operator_examples(reports: Sequence[OperatorReport]) -> Iterator[str]:
    """Iterate over lines that show what each operator changed, made and left out."""
    for each in reports:
        if each.changes or each.left_out or each.made_rows or each.notes:
            yield f"\n{each.name}"
        for change in each.changes:
            yield f"  changed {change.row} {change.column}: {change.before!r} -> {change.after!r}"
        for row in each.made_rows:
            yield f"  made {glimpse(row)}"
        for gone in each.left_out:
            yield f"  left out {gone.row} ({gone.reason}): {glimpse(gone.values)}"
        for note, count in each.notes.most_common():
            yield f"  {count:,} without success: {note}"
        for note in each.noted:
            yield f"  such as: {_shortened(note)}"


@dataclass(frozen=True)
class OperatorStats:
    """What an operator did since it was last asked: rows that came, rows left out, changed and made, seconds."""

    taken: int = 0
    left_out: int = 0
    changed: int = 0
    made: int = 0
    failed: int = 0
    """Rows left out as it raised, was too slow, or died."""
    seconds: float = 0.0

    def __add__(self, other: OperatorStats) -> OperatorStats:
        return OperatorStats(*(one + two for one, two in zip(vars(self).values(), vars(other).values(), strict=True)))


class OperatorLog:
    """Counts what operators did, and logs what they could not."""

    def __init__(self, links: Sequence[ChainLink], place: str) -> None:
        self._links, self._place = links, place
        self._stats = [OperatorStats() for _ in links]
        self._logged = set[str]()

    def add(self, outcomes: Sequence[Outcome], among: Collection[str] | None = None) -> tuple[Counter[str], str | None]:
        """Count what each operator did; return the rows left out, of those ``among`` these if it is given, as
        ``operator: reason``, and the last problem."""
        left_out, problem = Counter[str](), None
        for number, outcome in enumerate(outcomes):
            link, gone = self._links[number], outcome.left_out
            raised = [each.reason for each in gone if each.reason.startswith("raised ")]
            problem = f"{link.field} {raised[-1]}" if raised else problem
            counted = (reason_of(each.reason) for each in gone if among is None or each.row in among)
            left_out.update(f"{link.name}: {reason}" for reason in counted)
            counts = outcome.taken, len(gone), outcome.changed, outcome.made, len(raised)
            self._stats[number] += OperatorStats(*counts, outcome.seconds)
        if problem is not None:
            self._note(problem)
        return left_out, problem

    def fail(self, error: OperatorFailed, rows: int, left_out: int = 0) -> str:
        """Count rows on which the error's operator failed, and those left out; return ``operator: reason``."""
        number = next((at for at, link in enumerate(self._links) if link.field == error.field), None)
        if number is not None:
            self._stats[number] += OperatorStats(rows, left_out, failed=left_out)
        self._note(str(error), *getattr(error, "__notes__", ()))
        name = "operators" if number is None else self._links[number].name
        return f"{name}: {'timeout' if isinstance(error, OperatorTimeout) else 'failed'}"

    def wrong(self, problem: str) -> OperatorFailed:
        """Return the error of operators that together return what they may not."""
        return OperatorFailed(problem, "correct the operator", field=self._place)

    def check(self, kept: Sequence[int], changed: Collection[str], fixed: Collection[str]) -> None:
        """Raise OperatorFailed if rows are there twice, or operators have changed one of the ``fixed`` columns."""
        if len(set(kept)) < len(kept):
            raise self.wrong("rows are there twice")
        if wrong := [name for name in changed if name in fixed]:
            raise self.wrong(f"changed column {wrong[0]!r} of a row")

    def take(self) -> dict[str, OperatorStats]:
        """Return the counts since the last call by operator; a second operator of one name has a number behind it."""
        seen, taken = Counter[str](), dict[str, OperatorStats]()
        for link, stats in zip(self._links, self._stats, strict=True):
            seen[link.name] += 1
            taken[link.name if seen[link.name] == 1 else f"{link.name}-{seen[link.name]}"] = stats
        self._stats = [OperatorStats() for _ in self._links]
        return taken

    def _note(self, problem: str, *details: str) -> None:
        """Log a problem, the first of its kind with its traceback."""
        kind = problem.partition(", on the batch")[0]
        log.warning("\n".join([problem, *details] if kind not in self._logged else [problem]))
        self._logged.add(kind)


def reason_of(reason: str) -> str:
    """Return a reason without its detail."""
    return reason.partition(": ")[0]


def glimpse(row: dict[str, Any]) -> str:
    """Return a row's values in one line, shortened: of an experience the answer first, and no tokens."""
    turns, skipped = row.get("turns") or (), {"turns", "token_ids", "action_mask", "logprobs", "weight_versions"}
    shown = {"answer": dict(turns[-1])["content"], **row} if turns else row
    values = {name: value for name, value in shown.items() if not (turns and name in skipped)}
    text = ", ".join(f"{name}: {value!r}" for name, value in values.items() if value not in (None, [], {}, ""))
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= _GLIMPSE else f"{text[:_GLIMPSE]}…"


def summary(reports: Sequence[OperatorReport]) -> list[str]:
    """Return a line by operator that left out, changed or made rows."""
    lines = []
    for each in reports:
        parts = [f"{count:,} rows, {layout}" for layout, count in each.layouts.most_common()]
        parts += [f"{count:,} left out as {reason}" for reason, count in each.reasons.most_common()]
        parts += [f"{each.changed:,} changed"] if each.changed else []
        parts += [f"{each.made:,} made"] if each.made else []
        parts += [f"{count:,} without success as {note}" for note, count in each.notes.most_common()]
        if parts:
            lines.append(f"{each.name}: {', '.join(parts)} (of {each.taken:,}, {each.seconds:.1f} s)")
    return lines
