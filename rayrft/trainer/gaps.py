"""The row of a step whose log-probs of engine and trainer differ most."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rayrft.algorithms.batch import keep
from rayrft.trainer.batches import MicroBatch
from rayrft.trainer.result import RowGap

_MOST = 512
"""Tokens of the row that are reported: all of most rows. A line of the record has 8 KB with so many."""


@torch.no_grad()
def widest_gap(batch: Sequence[tuple[MicroBatch, Tensor]]) -> RowGap | None:
    """Return the row with the largest mean difference of the trainer's log-probs, ``[T]`` by micro-batch, and the
    engine's; None if none was sampled, or nothing differs. The host waits for a GPU twice."""
    batch = [each for each in batch if each[0].experiences]  # others fill up what a rank has less than the others
    if not batch:
        return None
    usual = [(micro.tokens.usual(), logprobs) for micro, logprobs in batch]
    gaps = [keep(logprobs - tokens.behaviour_logprobs, tokens.mask) for tokens, logprobs in usual]
    means = torch.cat([tokens.mean(gap.abs()) for (tokens, _), gap in zip(usual, gaps, strict=True)]).tolist()
    names = [name for micro, _ in batch for name in micro.experiences]
    lengths = [length for micro, _ in batch for length in micro.lengths]
    widest, row = max(zip(means, range(len(means)), strict=True))
    if not widest > 0:
        return None
    own = torch.cat(gaps)[sum(lengths[:row]) :][: lengths[row]]
    tokens = own.abs().topk(min(_MOST, lengths[row])).indices
    index, gap = torch.stack([tokens.double(), own[tokens].double()]).tolist()
    found = zip(index, gap, strict=True)
    return RowGap(names[row], widest, tuple((int(token), float(f"{each:.4g}")) for token, each in found if each))
