"""Action tokens laid out by row, and sums over what is still to come in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rayrft.algorithms.batch import TokenBatch


@dataclass(frozen=True)
class Grid:
    """Places ``[N, L]`` for the masked-in tokens of N rows, each row's from the left on, L being the most that any has.

    Prompts, observations and padding have no place: the next action token stands next to the one before.
    """

    mask: Tensor
    row: Tensor
    position: Tensor
    """``[tokens in the mask]``, both."""
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

    def lay_out(self, values: Tensor) -> Tensor:
        """``[T]`` to ``[N, L]``, zeros after the end of a row."""
        return values.new_zeros(self.rows, self.width).index_put((self.row, self.position), values[self.mask])

    def flatten(self, laid: Tensor) -> Tensor:
        """``[N, L]`` to ``[T]``, zeros off the mask."""
        values = laid.new_zeros(self.mask.shape)
        values[self.mask] = laid[self.row, self.position]
        return values


def to_go(values: Tensor, discount: float = 1.0) -> Tensor:
    """``[N, L]`` to ``[N, L]``: ``S_t = x_t + discount S_{t+1}``, the sum from each place to the end of its row.

    By doubling (Hillis and Steele 1986): after k rounds S_t holds the first 2^k terms. What other rows hold, and how
    long they are, changes no bit of it.
    """
    total, reach = values.clone(), 1
    while reach < values.shape[1]:
        total[:, :-reach] += discount**reach * total[:, reach:]
        reach *= 2
    return total
