"""Validation of rows on their way into the Buffer, and the metadata of groups that the Buffer keeps in memory.

All functions are vectorised over record batches, for thousands of rows per second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrft.buffer.events import StoredRows
from rayrft.experience import MASKED, SOURCES, TOKEN_REWARD, list_column, rewards_by_token

_ROUNDING = 1e-4
"""Nats by which rounding may bring a log-prob above 0."""


@dataclass(frozen=True)
class Limits:
    """Limits of a run's trainer and engines on rows; by default those of the schema."""

    vocabulary: int = 1 << 31
    """Exclusive upper bound of token ids."""
    max_length: int = 1 << 31
    """Maximum number of tokens of a row."""
    version: int = (1 << 63) - 1
    """Newest weight version that tokens can have been sampled under."""


@dataclass(frozen=True)
class Fault:
    """Why a row must not be trained. Rows are counted by reason, so reasons are few: they name columns, not values."""

    experience_id: str
    reason: str


def group_starts(batch: pa.RecordBatch) -> np.ndarray:
    """Return the first row of every group; the rows of a group are contiguous."""
    ids = np.asarray(batch.column("group_id").to_pylist(), dtype=object)
    return np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]])) if len(ids) else np.zeros(0, dtype=np.int64)


def stored_rows(
    batch: pa.RecordBatch, starts: np.ndarray, scores: np.ndarray, row: int, nbytes: int
) -> list[StoredRows]:
    """Return the metadata of the groups that start at rows ``starts`` of a batch, which is stored from row ``row`` of a
    segment on, in ``nbytes`` bytes."""
    spans, masked = batch.column("weight_versions"), is_masked(batch)
    versions = np.zeros(batch.num_rows, dtype=np.int64)
    filled = lengths_of(spans) > 0
    if filled.any():
        versions[filled] = np.minimum.reduceat(_values(spans, "version"), _offsets(spans)[:-1][filled])
    versions[masked] = versions.max(initial=0)  # what is never trained may be of any age
    rows = np.diff(starts, append=batch.num_rows)
    columns = (
        row + starts,
        rows,
        np.add.reduceat(masked.astype(np.int64), starts),
        np.add.reduceat(lengths_of(batch.column("token_ids")).astype(np.int64), starts),
        nbytes * rows // batch.num_rows,
        np.minimum.reduceat(versions, starts),
        scores.astype(np.float64),
    )
    return [StoredRows(*numbers) for numbers in zip(*(column.tolist() for column in columns), strict=True)]


def is_masked(batch: pa.RecordBatch) -> np.ndarray:
    """Return whether a row is stored for its reward alone; shape ``[rows]``."""
    return pc.fill_null(pc.equal(batch.column("status"), MASKED), False).to_numpy(zero_copy_only=False)


def find_faults(batch: pa.RecordBatch, limits: Limits = Limits()) -> dict[int, str]:
    """Return the reasons why rows must not be trained, by row; empty if all are valid.

    All rows that enter the Buffer are checked: an invalid one is rejected with its reason, never repaired.
    """
    faults: dict[int, str] = {}

    def mark(wrong: np.ndarray, reason: str) -> None:
        for row in np.flatnonzero(wrong).tolist():
            faults.setdefault(row, reason)

    if batch.num_rows == 0:
        return faults
    tokens, prompt = batch.column("token_ids"), batch.column("prompt_length").to_numpy(zero_copy_only=False)
    lengths, prompt = lengths_of(tokens), prompt.astype(np.int64)
    sources = np.asarray(batch.column("source").to_pylist(), dtype=object)
    mark(~np.isin(sources, SOURCES), "unknown source")
    mark(lengths > limits.max_length, "longer than max_length")
    for name in ("token_ids", "action_mask"):
        if (entries := _entries(batch.column(name))).null_count:
            mark(_any(batch.column(name), entries.is_null().to_numpy(zero_copy_only=False)), f"null in {name}")
    with np.errstate(invalid="ignore"):  # a null becomes NaN
        ids = _values(tokens).astype(np.int32, copy=False)
    # As unsigned integers, negative ids are beyond every vocabulary.
    mark(_any(tokens, ids.view(np.uint32) >= limits.vocabulary), "token outside the vocabulary")
    for name in ("reward", "greedy_reward", "margin"):
        numbers = pc.fill_null(batch.column(name), 0.0).to_numpy(zero_copy_only=False)
        mark(~np.isfinite(numbers), f"{name} not finite")
    for name in ("action_mask", "logprobs", "teacher_logprobs"):
        column = batch.column(name)
        if column.null_count == batch.num_rows:
            continue
        valid = column.is_valid().to_numpy(zero_copy_only=False)
        mark(valid & (lengths_of(column) != lengths), f"{name} and token_ids differ in length")
        if name != "action_mask":
            mark(valid & _any(column, ~np.isfinite(_values(column))), f"{name} not finite")
            mark(valid & _any(column, _values(column) > _ROUNDING), f"{name} above 0")
    mark((prompt <= 0) | (prompt >= lengths), "empty prompt or answer")
    fits = (lengths_of(batch.column("action_mask")) == lengths) & (prompt > 0) & (prompt < lengths)
    action = _MaskCounts(batch.column("action_mask"))
    mark(fits & (action.total == 0), "empty action_mask")
    mark(fits & (action.between(0, np.where(fits, prompt, 0)) > 0), "action_mask on prompt tokens")
    usual = sources == "usual"
    mark(usual & batch.column("reward").is_null().to_numpy(zero_copy_only=False), "missing reward")
    mark(_misplaced_rewards(batch), "step reward not finite or not at a model token")
    masked = is_masked(batch)
    mark(masked & ~usual, "masked row that is not usual")
    if masked.any():
        starts = group_starts(batch)
        whole = np.logical_and.reduceat(masked, starts)
        mark(np.repeat(whole, np.diff(starts, append=batch.num_rows)), "all rows of the group masked")
    mark(usual & fits & ~_versions_cover(batch, action, lengths), "action token without weight version")
    spans = batch.column("weight_versions")
    versions = _values(spans, "version")
    mark(_any(spans, (versions < 0) | (versions > limits.version)), "unpublished weight version")
    names, groups = batch.column("experience_id").to_pylist(), batch.column("group_id").to_pylist()
    foreign = [name != group and not name.startswith(group + "/") for name, group in zip(names, groups, strict=True)]
    mark(np.array(foreign), "experience_id does not start with group_id")
    if len(set(names)) < len(names):
        first = np.unique(np.array(names, dtype=object), return_index=True)[1]
        mark(usual & ~np.isin(np.arange(len(names)), first), "duplicate experience_id")
    return faults


def _misplaced_rewards(batch: pa.RecordBatch) -> np.ndarray:
    """Return whether a row has a reward of a step that is not finite, or not at an action token; shape ``[rows]``."""
    wrong = np.zeros(batch.num_rows, dtype=bool)
    if pc.any(pc.starts_with(_entries(batch.column("metrics")).field(0), TOKEN_REWARD)).as_py():
        masks = list_column(batch.column("action_mask"))
        for row, metrics in enumerate(batch.column("metrics").to_pylist()):
            mask, rewards = masks[row], rewards_by_token(dict(metrics or ()))
            wrong[row] = mask is not None and not all(
                token < len(mask) and mask[token] and math.isfinite(reward) for token, reward in rewards.items()
            )
    return wrong


class _MaskCounts:
    """Cumulative counts of action tokens, so that any span is counted by one subtraction."""

    def __init__(self, column: pa.ListArray) -> None:
        self._before = np.concatenate([[0], np.cumsum(_values(column) != 0, dtype=np.int32)])
        self._starts = _offsets(column)[:-1].astype(np.int64)
        self.total = np.diff(self._before[_offsets(column)])

    def between(self, start: np.ndarray | int, end: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        starts = self._starts if rows is None else self._starts[rows]
        return self._before[starts + end] - self._before[starts + start]


def _versions_cover(batch: pa.RecordBatch, action: _MaskCounts, lengths: np.ndarray) -> np.ndarray:
    """Return whether a row's spans are inside it, do not overlap, and cover its action tokens; shape ``[rows]``."""
    column = batch.column("weight_versions")
    starts, ends = _values(column, "start"), _values(column, "end")
    rows = np.repeat(np.arange(batch.num_rows), lengths_of(column))
    most = np.minimum(lengths, lengths_of(batch.column("action_mask")))[rows]
    fine = (starts >= 0) & (starts <= ends) & (ends <= most)
    fine[1:] &= (rows[1:] != rows[:-1]) | (starts[1:] >= ends[:-1])
    covered = action.between(np.where(fine, starts, 0), np.where(fine, ends, 0), rows)
    total = np.bincount(rows, weights=covered, minlength=batch.num_rows)
    broken = np.bincount(rows, weights=~fine, minlength=batch.num_rows)
    return (total == action.total) & (broken == 0)


def lengths_of(column: pa.ListArray) -> np.ndarray:
    """Return the lengths of the lists of a column, 0 for a null; shape ``[rows]``."""
    return column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)


def _offsets(column: pa.ListArray) -> np.ndarray:
    """Return where the entries of every row begin and end in `_entries`; shape ``[rows + 1]``."""
    return column.offsets.to_numpy() - column.offsets[0].as_py()


def _entries(column: pa.ListArray) -> pa.Array:
    """Return the concatenated entries of all rows of a list column."""
    return column.values.slice(column.offsets[0].as_py(), int(_offsets(column)[-1]))


def _values(column: pa.ListArray, field: str | None = None) -> np.ndarray:
    """Return the entries, or a field of them, as a numpy array."""
    entries = _entries(column)
    return (entries if field is None else entries.field(field)).to_numpy(zero_copy_only=False)


def _any(column: pa.ListArray, wrong: np.ndarray) -> np.ndarray:
    """Return whether any entry of a row is wrong; shape ``[rows]``."""
    if not wrong.any():
        return np.zeros(len(column), dtype=bool)
    return np.diff(np.concatenate([[0], np.cumsum(wrong)])[_offsets(column)]) > 0
