"""Action tokens as a rows x tokens grid, and discounted sums to the end of a row (rewards to go)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rayrft.algorithms.batch import TokenBatch


@dataclass(frozen=True)
class Grid:
    """Indices of masked-in tokens in a left-aligned grid ``[N, L]``: N rows, L the largest number of tokens in a row.

    Prompts, observations and padding are skipped, so that consecutive action tokens of a row are adjacent.
    """

    mask: Tensor
    row: Tensor
    position: Tensor
    """``row`` and ``position``: ``[tokens in the mask]``."""
    rows: int
    width: int

    @classmethod
    def of(cls, batch: TokenBatch) -> Self:
        row = batch.sequence[batch.mask]
        order = row.argsort(stable=True)
        counts = torch.bincount(row, minlength=batch.rows)
        starts = counts.cumsum(0) - counts
        position = torch.empty_like(row)
        position[order] = torch.arange(row.numel(), device=row.device) - starts[row[order]]
        return cls(batch.mask, row, position, batch.rows, int(counts.max()) if row.numel() else 0)

    def unflatten(self, values: Tensor) -> Tensor:
        """Convert ``[T]`` to ``[N, L]``, zeros after the end of a row."""
        return values.new_zeros(self.rows, self.width).index_put((self.row, self.position), values[self.mask])

    def flatten(self, grid: Tensor) -> Tensor:
        """Convert ``[N, L]`` to ``[T]``, zeros off the mask."""
        values = grid.new_zeros(self.mask.shape)
        values[self.mask] = grid[self.row, self.position]
        return values


def to_go(values: Tensor, discount: float = 1.0) -> Tensor:
    """Compute ``S_t = x_t + discount S_{t+1}`` along the rows of ``[N, L]``, the discounted sum to the row's end.

    By doubling (Hillis and Steele 1986): after k rounds S_t holds the first 2^k terms. Values and lengths of other rows
    do not change a bit of the result.
    """
    total, reach = values.clone(), 1
    while reach < values.shape[1]:
        total[:, :-reach] += discount**reach * total[:, reach:]
        reach *= 2
    return total
