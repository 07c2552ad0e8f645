"""The groups that a sampler may draw: those that are ready, in a stage that has no order of its own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rayrft.buffer.groups import Fate, GroupTable
from rayrft.buffer.samplers import Draw, Sampler


class Pool:
    """Follows the group table. Without a sampler (while a journal is read, and where the schedule chooses) it is empty
    and does nothing."""

    def __init__(self) -> None:
        self._sampler: Sampler | None = None

    def close(self) -> None:
        """No sampler from here on."""
        self._sampler = None

    def fill(self, build: Callable[[], Sampler], groups: GroupTable, clock: int) -> None:
        """Begin with a new sampler and every group that is ready, in order of arrival."""
        self._sampler = build()
        self.refill(groups, clock)

    def refill(self, groups: GroupTable, clock: int) -> None:
        """Hold what is ready now, in order of arrival."""
        if self._sampler is not None:
            at = groups.where(Fate.READY)
            uses = groups.uses[at].astype(np.int64)
            self._sampler.rebuild(at, groups.score[at], groups.version[at], uses, groups.last_step[at], clock)

    def add(self, slots: list[int], groups: GroupTable) -> None:
        """These groups are ready."""
        if self._sampler is not None and slots:
            at = np.array(slots, dtype=np.int64)
            self._sampler.add(at, groups.score[at], groups.version[at])
            if groups.uses[at].any():
                self._sampler.used(at, groups.uses[at].astype(np.int64), groups.last_step[at])

    def leave(self, slots: list[int]) -> None:
        """These groups are not ready any more."""
        if self._sampler is not None and slots:
            self._sampler.remove(np.array(slots, dtype=np.int64))

    def update(self, slot: int, score: float) -> None:
        """The group's score changed."""
        if self._sampler is not None:
            self._sampler.update(np.array([slot]), np.array([score]))

    def eligible(self, clock: int) -> int:
        """Groups that may be drawn now."""
        return 0 if self._sampler is None else self._sampler.eligible(clock)

    def draw(self, count: int, clock: int, number: int) -> Draw | None:
        """The ``number``-th draw; None while there are too few."""
        return None if self._sampler is None else self._sampler.draw(count, clock, number)
