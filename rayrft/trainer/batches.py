"""From leased rows to the micro-batches of one optimiser step."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rayrft.algorithms import TokenBatch
from rayrft.buffer.leases import BatchShare
from rayrft.experience import list_column, unpack
from rayrft.trainer.packing import Packing


@dataclass(frozen=True)
class TrainRow:
    """What the losses need of an experience; arrays of shape ``[T]``. ``weight`` is its importance weight.

    ``pair`` numbers the preference pair that it is one side of; the other side is the row before or after it. A pair
    that is in a batch twice, as across the end of an epoch, has two numbers.
    """

    token_ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    expert: bool
    weight: float = 1.0
    reward: float = 0.0
    pair: int | None = None
    chosen: bool = False
    images: tuple[str, ...] = ()
    group: str = ""
    experience: str = ""
    alone: bool = False
    """Whether it shares its micro-batch with nothing but the other side of its pair."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows as the forward pass takes them: ``token_ids`` ``[T]``, row after row, with the length of each row; and as
    the losses do."""

    token_ids: Tensor
    lengths: tuple[int, ...]
    tokens: TokenBatch
    candidates: Tensor | None = None
    """``[A, K]`` int64: tokens whose log-probs are wanted in the place of each predicted token, besides its own."""
    images: tuple[tuple[str, ...], ...] = ()
    """Paths of the images of each row; nothing where no row has any."""
    groups: tuple[str, ...] = ()
    """Ids of the group of each row."""
    experiences: tuple[str, ...] = ()
    """Ids of the rows."""

    @cached_property
    def packing(self) -> Packing:
        """Where the rows lie."""
        return Packing.of(list(self.lengths), self.token_ids.device)

    @cached_property
    def predicted(self) -> Tensor:
        """``[A]``: places of the action tokens that something before them predicts."""
        return torch.nonzero(self.tokens.mask & (self.packing.positions > 0)).squeeze(-1)


def fetch_mini_batches(share: BatchShare) -> list[list[TrainRow]]:
    """A rank's rows of each mini-batch."""
    rows = iter(fetch_rows(share))
    return [list(islice(rows, count)) for count in share.rows]


def fetch_rows(share: BatchShare) -> list[TrainRow]:
    """Read a rank's share out of the object store, without copying what shared memory holds."""
    import ray

    messages: list[pa.Buffer] = ray.get([part.ref for part in share.parts])
    rows: list[TrainRow] = []
    for message, part in zip(messages, share.parts, strict=True):
        rows += read_rows(unpack(message), part.rows, part.weights, part.alone, start=len(rows))
    return rows


def read_rows(
    batch: pa.RecordBatch, indices: np.ndarray, weights: np.ndarray, alone: np.ndarray, *, start: int = 0
) -> list[TrainRow]:
    """The rows of these indices with their importance weights; expert rows have no advantages and get zeros.

    ``start`` is the place of the first in the rank's share. A pair's number is the place of its first side.
    """
    tokens, masks, logprobs, advantages = (
        list_column(batch.column(name), indices) for name in ("token_ids", "action_mask", "logprobs", "advantages")
    )
    taken = (
        batch.select(["source", "reward", "pair_id", "chosen", "images", "group_id", "experience_id"])
        .take(pa.array(indices))
        .to_pydict()
    )
    rows: list[TrainRow] = []
    names = taken["pair_id"]
    for place, weight in enumerate(weights):
        token_ids, mask, behaviour = tokens[place], masks[place], logprobs[place]
        assert token_ids is not None and mask is not None and behaviour is not None  # not nullable in the schema
        advantage = advantages[place]
        pair = None if names[place] is None else start + place
        if pair is not None and place and names[place - 1] == names[place] and rows[-1].pair == pair - 1:
            pair = rows[-1].pair  # the row before is the first side of this one's pair
        rows.append(
            TrainRow(
                token_ids,
                mask,
                behaviour,
                np.zeros(len(token_ids), dtype=np.float32) if advantage is None else advantage,
                expert=taken["source"][place] == "expert",
                weight=float(weight),
                reward=taken["reward"][place] or 0.0,
                pair=pair,
                chosen=bool(taken["chosen"][place]),
                images=tuple(taken["images"][place] or ()),
                group=taken["group_id"][place],
                experience=taken["experience_id"][place],
                alone=bool(alone[place]),
            )
        )
    return rows


def micro_batches(
    rows: list[TrainRow], max_tokens: int, device: torch.device, *, padded: bool = False
) -> list[MicroBatch]:
    """Micro-batches of at most ``max_tokens`` tokens, as few as can be; where rows are ``padded``, padding counts too.

    A longer row, and one that is to, stands alone; the sides of a pair stay together. Packed ones are of nearly equal
    size, padded ones hold rows of nearly equal length. The result does not depend on the order of the rows.
    """
    units = [list(unit) for _, unit in groupby(rows, key=lambda row: (row.pair, id(row) if row.pair is None else 0))]
    size = _padded if padded else _tokens
    units.sort(key=lambda unit: (-size(unit), [(row.token_ids.tobytes(), row.images) for row in unit]))
    bins = [unit for unit in units if size(unit) > max_tokens or unit[0].alone]
    fit = [unit for unit in units if size(unit) <= max_tokens and not unit[0].alone]
    bins += _alike(fit, max_tokens) if padded else _level(fit, max_tokens)
    return [_flatten(held, device) for held in bins]


def empty_batch(device: torch.device) -> MicroBatch:
    """A micro-batch of nothing, for a rank that has fewer than the others: collectives need every rank."""
    zeros = np.zeros(2, dtype=np.float32)
    return _flatten([TrainRow(zeros.astype(np.int32), zeros, zeros, zeros, expert=False)], device)


def _tokens(unit: list[TrainRow]) -> int:
    return sum(len(row.token_ids) for row in unit)


def _padded(unit: list[TrainRow]) -> int:
    return len(unit) * max(len(row.token_ids) for row in unit)


def _alike(units: list[list[TrainRow]], max_tokens: int) -> list[list[TrainRow]]:
    """Units, longest first, one after the other into a bin until it is full: no other way needs fewer bins."""
    bins: list[list[TrainRow]] = []
    for unit in units:
        if not bins or _padded(bins[-1] + unit) > max_tokens:
            bins.append([])
        bins[-1] += unit
    return bins


def _level(units: list[list[TrainRow]], max_tokens: int) -> list[list[TrainRow]]:
    """Each unit, longest first, to the bin that holds least (longest processing time first, Graham 1969), among the
    smallest number of bins that do so without one overflowing."""
    count = -(-sum(map(_tokens, units)) // max_tokens)
    while True:
        bins: list[list[TrainRow]] = [[] for _ in range(count)]
        heap = [(0, number) for number in range(count)]
        for unit in units:
            tokens, number = heap[0]
            bins[number] += unit
            heapq.heapreplace(heap, (tokens + _tokens(unit), number))
        if all(tokens <= max_tokens for tokens, _ in heap):
            return bins
        count += 1


def _flatten(rows: list[TrainRow], device: torch.device) -> MicroBatch:
    lengths = [len(row.token_ids) for row in rows]
    pairs = {
        name: number for number, name in enumerate(dict.fromkeys(row.pair for row in rows if row.pair is not None))
    }
    tokens = TokenBatch(
        mask=_join([row.mask for row in rows]).bool().to(device),
        sequence=torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths)).to(device),
        behaviour_logprobs=_join([row.logprobs for row in rows]).float().to(device),
        advantages=_join([row.advantages for row in rows]).float().to(device),
        expert=torch.tensor([row.expert for row in rows], device=device),
        weight=torch.tensor([row.weight for row in rows], dtype=torch.float32, device=device),
        reward=torch.tensor([row.reward for row in rows], dtype=torch.float32, device=device),
        pair=torch.tensor([-1 if row.pair is None else pairs[row.pair] for row in rows], device=device),
        chosen=torch.tensor([row.chosen for row in rows], device=device),
    )
    images = tuple(row.images for row in rows)
    token_ids = _join([row.token_ids for row in rows]).to(device, torch.int64)
    return MicroBatch(
        token_ids,
        tuple(lengths),
        tokens,
        images=images if any(images) else (),
        groups=tuple(row.group for row in rows),
        experiences=tuple(row.experience for row in rows if row.experience),
    )


def _join(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))
