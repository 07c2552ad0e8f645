"""What a step gets from the Buffer: its batch, dealt to ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rayrft.buffer.balance import balance
from rayrft.buffer.log.events import GroupReport
from rayrft.buffer.log.shard import Ref


@dataclass(frozen=True)
class Part:
    """Rows of one block; ``weights`` are the importance weights of these rows, and ``alone`` says which of them are to
    stand in a micro-batch by themselves, so that it is known which one a step fails on."""

    ref: Ref
    rows: np.ndarray
    weights: np.ndarray
    alone: np.ndarray


@dataclass(frozen=True)
class BatchShare:
    """One rank's part of a batch: the rows of its mini-batches, one after the other; ``rows`` counts those of each."""

    parts: tuple[Part, ...]
    tokens: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Lease:
    """A step's batch, dealt to ranks, and what is known of it before it is trained."""

    step: int
    draw: int
    """By which it is told from another lease of the same step, where that was given back."""
    shares: tuple[BatchShare, ...]
    usual_rows: int
    expert_rows: int
    staleness: tuple[int, ...]
    """Of each group: trainer version less its oldest token version."""
    rollouts: GroupReport
    """Everything that was sampled since the last lease, kept or dropped."""
    waited_s: float


@dataclass(frozen=True)
class Unit:
    """What goes to one rank as a whole: a group, a demonstration, or a preference pair."""

    ref: Ref
    row: int
    rows: int
    tokens: int
    weight: float = 1.0
    alone: bool = False


def deal(units: list[Unit], world_size: int, mini_batches: int = 1) -> tuple[BatchShare, ...]:
    """Shares of nearly equal tokens, each in the order in which the units are given, however these lie in blocks.

    Every ``mini_batches``-th unit belongs to the same mini-batch, and each mini-batch is balanced by itself.
    """
    dealt: list[list[list[Unit]]] = [[] for _ in range(world_size)]
    for number in range(mini_batches):
        some = units[number::mini_batches]
        for rank, items in enumerate(balance([unit.tokens for unit in some], world_size)):
            dealt[rank].append([some[item] for item in items])
    return tuple(_share(each) for each in dealt)


def _share(mini_batches: list[list[Unit]]) -> BatchShare:
    parts = []
    units = [unit for each in mini_batches for unit in each]
    for ref, run in groupby(units, key=lambda unit: unit.ref):
        block = list(run)
        rows = np.concatenate([np.arange(unit.row, unit.row + unit.rows, dtype=np.int32) for unit in block])
        counts = [unit.rows for unit in block]
        weights = np.repeat(np.array([unit.weight for unit in block], np.float32), counts)
        parts.append(Part(ref, rows, weights, np.repeat([unit.alone for unit in block], counts)))
    sizes = tuple(sum(unit.rows for unit in each) for each in mini_batches)
    return BatchShare(tuple(parts), sum(unit.tokens for unit in units), sizes)
