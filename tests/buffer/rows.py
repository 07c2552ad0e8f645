"""Rows that say in their tokens who they are: row r of group g is made of the token 10 g + r."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from rayrft.buffer.events import GroupReport, StoredGroup, StoredRows
from rayrft.buffer.leases import Lease
from rayrft.buffer.schedule import StagePlan
from rayrft.experience import Experience, VersionSpan, pack, to_batch


def group(
    number: int, rows: int = 2, *, length: int = 4, version: int = 0, deviation: float = 0.5, name: str | None = None
) -> list[Experience]:
    """Own rows; the rewards of two have this standard deviation (divisor n), row r has reward r by default."""
    mask = np.array([0] + [1] * (length - 1), dtype=np.uint8)
    return [
        Experience(
            experience_id=f"{name or number}/{row}",
            group_id=str(name or number),
            task_id="t",
            token_ids=np.full(length, number * 10 + row, dtype=np.int32),
            prompt_length=1,
            action_mask=mask,
            logprobs=-mask.astype(np.float32),
            weight_versions=(VersionSpan(1, length, version),),
            reward=2 * deviation * row,
        )
        for row in range(rows)
    ]


def expert_rows(count: int) -> list[Experience]:
    """Demonstrations, made of the tokens 900, 901 ..."""
    return [row.with_fields(source="expert", weight_versions=(), reward=None) for row in group(90, count)]


def pairs(count: int) -> list[Experience]:
    """Preference pairs ``given/0`` …, the chosen side first."""
    names = [f"given/{number // 2}" for number in range(2 * count)]
    return [
        row.with_fields(group_id=name, experience_id=f"{name}/{at % 2}", pair_id=name, chosen=at % 2 == 0)
        for at, (name, row) in enumerate(zip(names, expert_rows(2 * count), strict=True))
    ]


def packed(rows: list[Experience]) -> list[pa.Buffer]:
    """Rows as calls of the Buffer take them."""
    return [pack(to_batch(rows))]


def stored_group(key: int, *, score: float, version: int) -> StoredGroup:
    """The journal's entry of a group of one row."""
    return StoredGroup(key, 0, StoredRows(key, 1, 0, 1, 1, version, score), None, {}, GroupReport())


def plan(groups: int = 2, **changes: Any) -> StagePlan:
    return StagePlan(groups, **changes)


def train_rows(lease: Lease, algorithm: str = "grpo") -> list[Any]:
    """What the trainer makes of a lease's rows."""
    # With these comes torch, which most tests of the Buffer do without.
    from rayrft.algorithms import build
    from rayrft.trainer.batches import fetch_rows

    return [row for share in lease.shares for row in fetch_rows(share, build(algorithm))]


def trained_ids(lease: Lease) -> list[int]:
    """The tokens that a lease's rows are made of, sorted."""
    return sorted(int(row.token_ids[0]) for row in train_rows(lease))
