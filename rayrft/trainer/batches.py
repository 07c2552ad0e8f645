"""Leased rows, the micro-batches of one optimiser step made from them, and the row with the widest gap."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from rayrft.algorithms import Algorithm, TokenBatch, rows_by_pair
from rayrft.algorithms.batch import keep
from rayrft.buffer.leases import BatchShare, BlockRows, balance
from rayrft.data.turns import compute_advantages, turn_rewards
from rayrft.experience import Experience, field_values, list_column, unpack
from rayrft.runtime.ray_api import ray
from rayrft.trainer.packing import Packing, common_prefix, on_device, shared_prefixes
from rayrft.trainer.result import RowGap

_SHARED = 16
"""Activation memory of a computed token over the key-value memory of a token whose state belongs to another row."""

_SCORED = ["experience_id", "group_id", "token_ids", "action_mask", "reward", "reward_components"]
_SCORED += ["greedy_reward", "metrics"]
"""Columns that advantages are computed from."""
_TAKEN = ["source", "reward", "pair_id", "chosen", "margin", "images", "group_id", "experience_id", "stop_reason"]
"""Other columns of a trained row."""
_NONE = np.empty(0, np.float32)
_MOST_GAPS = 512
"""Tokens of the widest row that are reported: all of most rows. A line of the record has 8 KB with so many."""


@dataclass(frozen=True)
class TrainRow:
    """The fields of an experience that losses need; arrays of shape ``[T]``. ``weight`` is its importance weight.

    ``pair`` is the number of the row's preference pair; the other side is the row before or after it. A pair that is in
    a batch twice, as across the end of an epoch, has two numbers.
    """

    token_ids: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    expert: bool
    weight: float = 1.0
    reward: float | None = None
    turn_rewards: np.ndarray | None = None
    """None if no turn has a reward of its own."""
    truncated: bool = False
    """Whether the answer was cut for its length."""
    pair: int | None = None
    chosen: bool = False
    margin: float = 0.0
    """By how much the chosen row of its pair is the better one, if that is known."""
    images: tuple[str, ...] = ()
    group: str = ""
    experience: str = ""
    alone: bool = False
    """Whether the row gets a micro-batch to itself (with the other side of its pair)."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass: ``token_ids`` ``[T]``, rows concatenated, their lengths, and the inputs of losses."""

    token_ids: Tensor
    lengths: tuple[int, ...]
    packing: Packing
    tokens: TokenBatch
    predicted: Tensor
    """``[A]``: indices of the action tokens that are not first in their row, so that a state predicts them."""
    sampled: tuple[bool, ...]
    """Whether each row was sampled by the policy: neither a demonstration nor in a pair."""
    candidates: Tensor | None = None
    """``[A, K]`` int64: further tokens to score at the position of each predicted token."""
    images: tuple[tuple[str, ...], ...] = ()
    """Image paths by row; empty if no row has images."""
    groups: tuple[str, ...] = ()
    """Group id of every row."""
    experiences: tuple[str, ...] = ()
    """Experience ids of the rows."""

    def annotated(self, **fields: Tensor) -> Self:
        """Return the micro-batch with these fields of its `TokenBatch`."""
        return replace(self, tokens=replace(self.tokens, **fields))


def fetch_mini_batches(share: BatchShare, algorithm: Algorithm) -> list[list[TrainRow]]:
    """Fetch a rank's rows with the algorithm's advantages, one list per mini-batch."""
    rows = iter(fetch_rows(share, algorithm))
    return [list(islice(rows, count)) for count in share.rows]


def fetch_rows(share: BatchShare, algorithm: Algorithm) -> list[TrainRow]:
    """Read a rank's share from the object store, without copying out of shared memory."""
    messages: list[pa.Buffer] = ray.get([part.ref for part in share.parts])
    rows: list[TrainRow] = []
    for message, part in zip(messages, share.parts, strict=True):
        rows += read_rows(unpack(message), part, algorithm, start=len(rows))
    return rows


def read_rows(batch: pa.RecordBatch, part: BlockRows, algorithm: Algorithm, *, start: int = 0) -> list[TrainRow]:
    """Return the rows of the share's part of a block, with their advantages.

    ``start`` is the index of the first row in the rank's share. A pair's number is the index of its first side.
    """
    columns = (batch.column(name) for name in ("token_ids", "action_mask", "logprobs"))
    tokens, masks, logprobs = (list_column(column, part.rows) for column in columns)
    by_critic = algorithm.advantage_is_by_token
    taken = batch.select([*_TAKEN, "metrics"] if by_critic else _TAKEN).take(pa.array(part.rows)).to_pylist()
    advantages = _advantages(batch, part.groups, algorithm)
    rows: list[TrainRow] = []
    for i, (index, row) in enumerate(zip(part.rows.tolist(), taken, strict=True)):
        token_ids, mask, behaviour = tokens[i], masks[i], logprobs[i]
        assert token_ids is not None and mask is not None and behaviour is not None  # not nullable in the schema
        pair = None if row["pair_id"] is None else start + i
        if pair is not None and i and taken[i - 1]["pair_id"] == row["pair_id"] and rows[-1].pair == pair - 1:
            pair = rows[-1].pair  # the row before is the first side of this one's pair
        turns = turn_rewards(mask, dict(row["metrics"] or ())) if by_critic else None
        rows.append(
            TrainRow(
                token_ids,
                mask,
                behaviour,
                advantages[index] if index in advantages else np.zeros(len(token_ids), dtype=np.float32),
                expert=row["source"] == "expert",
                weight=float(part.weights[i]),
                reward=row["reward"],
                turn_rewards=turns if turns is not None and turns.any() else None,
                truncated=row["stop_reason"] == "length",
                pair=pair,
                chosen=bool(row["chosen"]),
                margin=row["margin"] or 0.0,
                images=tuple(row["images"] or ()),
                group=row["group_id"],
                experience=row["experience_id"],
                alone=bool(part.alone[i]),
            )
        )
    return rows


def _advantages(batch: pa.RecordBatch, groups: np.ndarray, algorithm: Algorithm) -> dict[int, np.ndarray]:
    """Return the advantages by row of all rows of the block's ``groups``, unless a critic provides them later."""
    found: dict[int, np.ndarray] = {}
    if not algorithm.advantage_is_by_token:
        columns = batch.select(_SCORED)
        for first, count in np.unique(groups, axis=0).tolist():
            values = field_values(columns.slice(first, count))
            each = ({name: values[name][row] for name in _SCORED} for row in range(count))
            rows = [Experience(task_id="", prompt_length=0, logprobs=_NONE, **fields) for fields in each]
            found.update(enumerate(compute_advantages(rows, algorithm) if rows else [], start=first))
    return found


@dataclass(frozen=True)
class _Unit:
    """Rows that stay together."""

    rows: list[TrainRow]
    tokens: int
    """With padding, or those that rows share counted for less."""
    squares: int = 0
    """Twice the number of pairs of a computed token and one that it attends to, if rows are packed."""

    @classmethod
    def packed(cls, rows: list[TrainRow], shared: list[int]) -> Self:
        """Return the unit of rows of which each shares so many tokens, at its beginning, with another one."""
        sizes = [(len(row.token_ids), own) for row, own in zip(rows, shared, strict=True)]
        return cls(rows, sum(_cost(*size) for size in sizes), sum(length**2 - own**2 for length, own in sizes))


def micro_batches(
    rows: list[TrainRow], max_tokens: int, device: torch.device, *, padded: bool = False, attention: float = 0.0
) -> list[MicroBatch]:
    """Split rows into micro-batches of at most ``max_tokens`` tokens; if ``padded``, padding counts too, else a token
    that is computed for another row counts 1 / `_SHARED`.

    A longer row, and one marked ``alone``, gets its own; the sides of a pair stay together, and so do packed rows of a
    group as far as they fit. Packed micro-batches have nearly equal costs, a row of s tokens ``s + attention s^2``
    (`data.models.attention_cost`); padded ones hold rows of nearly equal length, and are the fewest. Those that cost
    most come first, so that ranks, which wait for each other, work on equal ones. The result does not depend on the
    order of rows.
    """
    groups = [list(unit) for _, unit in groupby(rows, key=lambda row: (row.pair, id(row) if row.pair is None else 0))]
    units = [_Unit(unit, _padded(unit)) for unit in groups] if padded else _merge_groups(groups, max_tokens)
    units.sort(key=lambda each: (-each.tokens, [_content(row) for row in each.rows]))
    bins = [[unit] for unit in units if unit.tokens > max_tokens or unit.rows[0].alone]
    fit = [unit for unit in units if unit.tokens <= max_tokens and not unit.rows[0].alone]
    bins += _fill_in_order(fit, max_tokens) if padded else _balance(fit, max_tokens, attention)
    bins.sort(key=lambda units: -sum(unit.tokens + attention * unit.squares for unit in units))
    return [flatten([row for unit in units for row in unit.rows], device) for units in bins]


def mismatched(rows: list[TrainRow], everywhere: list[TrainRow]) -> list[TrainRow]:
    """Pair each prompt of ``rows`` with an answer to another prompt of ``everywhere``, which contains the rows: the
    result does not depend on how rows are selected and ordered.

    All rows are sorted by prompt, and each gets the answer that stands as many places later as the most frequent prompt
    has rows. Where that prompt has more than half of the rows, those without an answer to another prompt are left out.
    Only a row's first prompt is kept; everything after it is its answer.
    """
    order = sorted(everywhere, key=lambda row: (_prompt(row), _hash(row)))
    shift = max(Counter(map(_prompt, order)).values(), default=0)
    after = {_hash(row): order[(place + shift) % len(order)] for place, row in enumerate(order)}
    made = []
    for row in rows:
        other = after[_hash(row)]
        if _prompt(other) == _prompt(row):
            continue
        start, first = int(row.mask.argmax()), int(other.mask.argmax())
        ids = np.concatenate([row.token_ids[:start], other.token_ids[first:]])
        mask = np.concatenate([row.mask[:start], other.mask[first:]])
        zeros = np.zeros(len(ids), np.float32)
        made.append(TrainRow(ids, mask, zeros, zeros, expert=True, images=row.images))
    return made


def _prompt(row: TrainRow) -> tuple[bytes, tuple[str, ...]]:
    return row.token_ids[: int(row.mask.argmax())].tobytes(), row.images


def _hash(row: TrainRow) -> bytes:
    return hashlib.blake2b(row.token_ids.tobytes() + row.mask.tobytes(), digest_size=16).digest()


def empty_batch(device: torch.device) -> MicroBatch:
    """Return a micro-batch with no action token, for a rank that has fewer than the others: collectives need all."""
    zeros = np.zeros(2, dtype=np.float32)
    return flatten([TrainRow(zeros.astype(np.int32), zeros, zeros, zeros, expert=False)], device)


def _merge_groups(units: list[list[TrainRow]], max_tokens: int) -> list[_Unit]:
    """Merge the rows of a group, which begin alike, into units of at most ``max_tokens``."""
    merged: list[_Unit] = []
    groups: dict[str, list[TrainRow]] = {}
    for unit in units:
        if len(unit) > 1 or unit[0].alone or not unit[0].group:
            found = sorted(shared_prefixes([row.token_ids for row in unit]))  # by row
            merged.append(_Unit.packed(unit, [shared for *_, shared in found]))
        else:
            groups.setdefault(unit[0].group, []).append(unit[0])
    for rows in groups.values():
        tokens, unit, shares = 0, list[TrainRow](), list[int]()
        rows.sort(key=_content)
        for before, row in zip([None, *rows], rows, strict=False):
            length = len(row.token_ids)
            shared = common_prefix(before.token_ids, row.token_ids) if before else 0
            if unit and tokens + _cost(length, shared) > max_tokens:
                merged.append(_Unit.packed(unit, shares))
                tokens, unit, shares, shared = 0, [], [], 0
            unit.append(row)
            shares.append(shared)
            tokens += _cost(length, shared)
        merged.append(_Unit.packed(unit, shares))
    return merged


def _content(row: TrainRow) -> tuple[bytes, tuple[str, ...]]:
    return row.token_ids.tobytes(), row.images


def _cost(length: int, shared: int) -> int:
    return length - shared + shared // _SHARED


def _padded(unit: list[TrainRow]) -> int:
    return len(unit) * max(len(row.token_ids) for row in unit)


def _fill_in_order(units: list[_Unit], max_tokens: int) -> list[list[_Unit]]:
    """Fill one bin after the other with the units, which come longest first. No other order needs fewer bins."""
    bins: list[list[_Unit]] = []
    for unit in units:
        if not bins or _padded([row for each in (*bins[-1], unit) for row in each.rows]) > max_tokens:
            bins.append([])
        bins[-1].append(unit)
    return bins


def _balance(units: list[_Unit], max_tokens: int, attention: float) -> list[list[_Unit]]:
    """Put the units into bins of equal cost (`balance`), with the smallest number for which none overflows."""
    tokens = [unit.tokens for unit in units]
    costs = [unit.tokens + attention * unit.squares for unit in units]
    count = -(-sum(tokens) // max_tokens)
    while units:
        if bins := balance(costs, count, tokens=tokens, room=max_tokens):
            return [[units[item] for item in items] for items in bins]
        count += 1
    return []


def flatten(rows: list[TrainRow], device: torch.device) -> MicroBatch:
    """Return rows as one micro-batch, laid out on the host: every wait for a GPU would keep it idle."""

    def by_row(values: Iterable[Any], dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(list(values), dtype=dtype)

    def by_token(arrays: Iterable[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(list(arrays)))

    ids = [row.token_ids for row in rows]
    lengths = list(map(len, ids))
    packing, turns = Packing.of(ids), None
    if any(row.turn_rewards is not None for row in rows):
        blank = [np.zeros(length, np.float32) for length in lengths]
        turns = by_token(row.turn_rewards if row.turn_rewards is not None else blank[i] for i, row in enumerate(rows))
    tokens = TokenBatch(
        mask=by_token(row.mask for row in rows).bool(),
        sequence=torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths)),
        behaviour_logprobs=by_token(row.logprobs for row in rows).float(),
        advantages=by_token(row.advantages for row in rows).float(),
        expert=by_row(row.expert for row in rows),
        weight=by_row((row.weight for row in rows), torch.float32),
        reward=by_row((row.reward or 0.0 for row in rows), torch.float32),
        turn_rewards=turns,
        truncated=by_row(row.truncated for row in rows),
        pairs=rows_by_pair([row.pair for row in rows], [row.chosen for row in rows]),
        chosen=by_row(row.chosen for row in rows),
        margin=by_row((row.margin for row in rows), torch.float32),
    )
    images = tuple(row.images for row in rows)
    batch = MicroBatch(
        by_token(ids).long(),
        tuple(lengths),
        packing,
        tokens,
        predicted=torch.nonzero(tokens.mask & (packing.positions > 0)).squeeze(-1),
        sampled=tuple(not row.expert and row.pair is None for row in rows),
        images=images if any(images) else (),
        groups=tuple(row.group for row in rows),
        experiences=tuple(row.experience for row in rows if row.experience),
    )
    return on_device(batch, device)


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
    tokens = own.abs().topk(min(_MOST_GAPS, lengths[row])).indices
    index, gap = torch.stack([tokens.double(), own[tokens].double()]).tolist()
    found = zip(index, gap, strict=True)
    return RowGap(names[row], widest, tuple((int(token), float(f"{each:.4g}")) for token, each in found if each))
