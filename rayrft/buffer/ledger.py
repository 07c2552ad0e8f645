"""The ledger of usual rows, and what the Buffer and its log report of their contents."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ledger:
    """Where the usual rows are that arrived at the Buffer: sampled = trained + dropped (by reason) + held."""

    sampled: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    held: int = 0
    dropped_tasks: dict[str, int] = field(default_factory=dict)
    """Tasks that gave no rows, by reason, such as those with a too long prompt."""

    @property
    def closes(self) -> bool:
        """Whether no row is lost or counted twice."""
        return self.sampled == self.trained + sum(self.dropped.values()) + self.held

    def __str__(self) -> str:
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.dropped.items() if count)
        dropped = f"{sum(self.dropped.values())}{reasons and f' ({reasons})'}"
        return f"sampled {self.sampled} = trained {self.trained} + dropped {dropped} + held {self.held}"

    def lost_since(self, before: Ledger) -> dict[str, int]:
        """Return the rows and tasks that were dropped after ``before``, by reason."""
        was, now = (Counter(of.dropped) + Counter(of.dropped_tasks) for of in (before, self))
        return dict(now - was)


@dataclass(frozen=True)
class ExpertDraws:
    """Demonstrations of one name: their rows, how many were drawn in all, and the current epoch."""

    rows: int
    drawn: int
    epoch: int


@dataclass(frozen=True)
class RowStats:
    """The ledger, and the draws of demonstrations by name."""

    ledger: Ledger
    expert: dict[str, ExpertDraws]


@dataclass(frozen=True)
class ArchiveStats(RowStats):
    """Statistics of a Buffer's log. ``stores`` has rows, bytes and further counts by store."""

    run: str
    version: int
    step: int
    stores: dict[str, dict[str, int]]
    late_feedback: int
    torn_bytes: int
