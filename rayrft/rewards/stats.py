"""What scoring was like, by domain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from rayrft.rewards.base import RewardResult


@dataclass(frozen=True)
class DomainStats:
    """What a domain's scoring was like since it was last asked."""

    scored: int = 0
    unknown: int = 0
    errors: int = 0
    """How many of the unknown ones raised, were not done in time, or died."""
    retried: int = 0
    """How often a call was made again, as a process or an actor had died of it."""
    seconds: float = 0.0
    """Of all calls together, from the start of execution."""
    slowest_s: float = 0.0
    pending: int = 0
    """Transcripts that wait for their reward now."""

    @classmethod
    def of(cls, several: Iterable[DomainStats | None]) -> DomainStats:
        """Join those of several Explorers, or times."""
        known = [each for each in several if each is not None]
        sums = {field.name: sum(getattr(each, field.name) for each in known) for field in fields(cls)}
        return cls(**{**sums, "slowest_s": max((each.slowest_s for each in known), default=0.0)})


@dataclass
class Tally:
    """Counts what `DomainStats` says."""

    scored: int = 0
    unknown: int = 0
    errors: int = 0
    retried: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    pending: int = 0

    def add(self, result: RewardResult) -> None:
        """Count a result."""
        self.scored += 1
        self.unknown += result.value is None
        self.errors += result.error
        self.retried += result.tries - 1
        self.seconds += result.seconds
        self.slowest_s = max(self.slowest_s, result.seconds)

    def take(self) -> DomainStats:
        """Return what was counted, and begin anew, but for what is pending."""
        taken = DomainStats(**asdict(self))
        self.__init__(pending=self.pending)  # type: ignore[misc]
        return taken
