"""Whose turn it is: sources interleaved in proportion to their weights, without chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


class Interleave:
    """Turns of sources, each at most ``limits[i]`` times (None: without end).

    After any k turns each source has had its share of k rounded down or up: the quota method of Balinski and Young.
    Among sources that have had less than their share of the turns so far, the one goes next whose next turn would fall
    due first. When a source ends, the others go on in their proportions, counted afresh from there.

    Weights are turned into the smallest whole numbers w; every sum(w) turns each source has had exactly w of them, and
    the next such round is the same again.
    """

    def __init__(self, weights: Sequence[float], limits: Sequence[int | None] = ()) -> None:
        self._weights = _whole(weights)
        self._limits = list(limits) or [None] * len(weights)
        self.seek(0)

    @property
    def counts(self) -> list[int]:
        """Turns that each source has had."""
        return list(self._counts)

    def next(self) -> int | None:
        """The source whose turn it is; None when all have ended."""
        if not self._open:
            return None
        self._turn += 1
        behind = [i for i in self._open if self._taken[i] * self._round < self._weights[i] * self._turn]
        source = min(behind, key=lambda i: (self._taken[i] + 1) / self._weights[i])
        self._taken[source] += 1
        self._counts[source] += 1
        if self._turn == self._round or self._counts[source] == self._limits[source]:
            self._begin_round()
        return source

    def seek(self, position: int) -> None:
        """Go to where ``position`` turns from the start lead, or to the end if that is sooner.

        Whole rounds are skipped: it costs at most (number of sources) * sum(w) turns, and at most ``position``.
        """
        self._counts = [0] * len(self._weights)
        self._begin_round()
        left = position
        while left > 0 and self._open:
            left -= self._skip_rounds(left) if self._turn == 0 else 0
            if left > 0:
                self.next()
                left -= 1

    def _begin_round(self) -> None:
        self._open = [i for i, limit in enumerate(self._limits) if limit is None or self._counts[i] < limit]
        self._round = sum(self._weights[i] for i in self._open)
        self._turn, self._taken = 0, [0] * len(self._weights)

    def _skip_rounds(self, most: int) -> int:
        """Take as many whole rounds of at most ``most`` turns as end no source: one that ends cuts its round short."""
        room = [(limit - self._counts[i] - 1) // self._weights[i] for i in self._open if (limit := self._limits[i])]
        rounds = min([most // self._round, *room])
        for i in self._open:
            self._counts[i] += rounds * self._weights[i]
        return rounds * self._round


def _whole(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the proportion of the weights, each taken as it is written in decimal."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(each.denominator for each in exact))
    whole = [int(each * scale) for each in exact]
    return [each // math.gcd(*whole) for each in whole]
