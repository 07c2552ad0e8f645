"""Statistics of scoring, by domain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from rayrft.rewards.base import RewardResult


@dataclass
class DomainStats:
    """The scoring of a domain in some period."""

    scored: int = 0
    unknown: int = 0
    errors: int = 0
    """Unknown rewards of calls that raised, missed the deadline, or died."""
    retried: int = 0
    """How often a call was made again because a process or an actor died."""
    seconds: float = 0.0
    """Of all calls together, from the start of execution."""
    slowest_s: float = 0.0
    pending: int = 0
    """Transcripts that wait for their reward now."""

    @classmethod
    def of(cls, several: Iterable[DomainStats | None]) -> DomainStats:
        """Join statistics of several Explorers, or periods."""
        known = [each for each in several if each is not None]
        sums = {field.name: sum(getattr(each, field.name) for each in known) for field in fields(cls)}
        return cls(**{**sums, "slowest_s": max((each.slowest_s for each in known), default=0.0)})

    def add(self, results: Sequence[RewardResult]) -> None:
        """Count the results of a call."""
        self.scored += len(results)
        for result in results:
            self.unknown += result.value is None
            self.errors += result.error
            self.retried += result.tries - 1
            self.seconds += result.seconds
            self.slowest_s = max(self.slowest_s, result.seconds)
