"""The ledger of own rows: sampled = trained + dropped + held, at all times."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ledger:
    """Counts rows from the moment they reach the Buffer. A row used several times is trained when it leaves."""

    sampled: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_tasks: Counter[str] = field(default_factory=Counter)
    """Tasks that gave no rows at all, such as those with too long a prompt."""

    def drop(self, rows: int, reason: str) -> None:
        self.dropped[reason] += rows

    def check(self, held: int) -> dict[str, Any]:
        """The counters, after asserting that they close."""
        if self.sampled != self.trained + self.dropped.total() + held:
            raise AssertionError(
                f"rows are lost or doubled: sampled {self.sampled} != trained {self.trained} "
                f"+ dropped {self.dropped.total()} + held {held}"
            )
        return {
            "sampled": self.sampled,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "held": held,
            "dropped_tasks": dict(self.dropped_tasks),
        }
