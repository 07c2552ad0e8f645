"""Statistics of scoring, by domain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from rayrft.rewards.base import RewardResult


@dataclass(frozen=True)
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

    @classmethod
    def of_results(cls, results: Sequence[RewardResult]) -> DomainStats:
        """Return the statistics of some calls."""
        return cls(
            len(results),
            sum(each.value is None for each in results),
            sum(each.error for each in results),
            sum(each.tries - 1 for each in results),
            sum(each.seconds for each in results),
            max((each.seconds for each in results), default=0.0),
        )
