"""The order in which demonstrations are drawn: it follows from a seed and how many were drawn before."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rayrft.buffer.events import Extent
from rayrft.config.seeds import generator

DemonstrationKind = tuple[int, bool]
"""How many consecutive rows are drawn together, 2 for preference pairs, and whether they are answers labelled good or
bad."""


@dataclass
class ExpertCursor:
    """Draws demonstrations without replacement, reshuffled every epoch.

    ``unit`` consecutive rows are drawn together: 2 for preference pairs. Rows that are added join in the next epoch.
    """

    extent: Extent
    seed: int
    unit: int = 1
    epoch: int = 0
    cursor: int = 0
    drawn: int = 0
    labelled: bool = False
    excluded: list[int] = field(default_factory=list)
    """Rows that are skipped: training failed on them twice, or they were withdrawn."""
    loaded: Extent | None = None
    """The extent that the set had before it grew; None if it was never loaded."""
    rows: int = 0
    """Of the current epoch."""

    def __post_init__(self) -> None:
        self.rows = self.rows or self.extent.rows

    @property
    def kind(self) -> DemonstrationKind:
        return self.unit, self.labelled

    def peek(self, count: int) -> list[int]:
        """Return the next ``count`` row indices (whole units), across epoch ends."""
        return self._walk(count)[0]

    def advance(self, count: int) -> None:
        """Advance the cursor by ``count`` rows."""
        self.drawn += count
        before = self.epoch
        if self.excluded or self.rows < self.extent.rows:
            _, self.epoch, self.cursor = self._walk(count)
        else:
            epochs, self.cursor = divmod(self.cursor + count, self.rows)
            self.epoch += epochs
        if self.epoch > before:
            self.rows = self.extent.rows

    def grow(self, extent: Extent) -> None:
        """Note that rows were added. An epoch that has not begun has them, too."""
        self.extent = extent
        if not self.cursor:
            self.rows = extent.rows

    def exclude(self, rows: Iterable[int]) -> None:
        """Skip rows from now on."""
        self.excluded += sorted({*rows} - {*self.excluded})

    def _walk(self, count: int) -> tuple[list[int], int, int]:
        """Return the next ``count`` rows, and the epoch and cursor after them."""
        rows: list[int] = []
        epoch, cursor = self.epoch, self.cursor
        while len(rows) < count and len(self.excluded) < self.extent.rows:
            size = self.rows if epoch == self.epoch else self.extent.rows
            units = generator(self.seed, "demonstrations", epoch).permutation(size // self.unit)
            order = (units[:, None] * self.unit + np.arange(self.unit)).ravel()[cursor:]
            valid = np.flatnonzero(~np.isin(order, self.excluded))[: count - len(rows)]
            rows += order[valid].tolist()
            taken = int(valid[-1]) + 1 if len(rows) == count else len(order)
            epoch, cursor = (epoch, cursor + taken) if taken < len(order) else (epoch + 1, 0)
        return rows, epoch, cursor
