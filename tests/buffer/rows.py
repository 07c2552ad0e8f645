"""Rows that say in their tokens who they are: row r of group g is made of the token 10 g + r."""

from __future__ import annotations

from typing import Any

import numpy as np

from rayrft.buffer.leases import Lease
from rayrft.buffer.schedule import StagePlan
from rayrft.experience import Experience, VersionSpan


def group(
    number: int, rows: int = 2, *, length: int = 4, version: int = 0, advantage: float = 1.0, name: str | None = None
) -> list[Experience]:
    """Own rows; row r has reward r."""
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
            reward=float(row),
            advantages=mask.astype(np.float32) * np.float32(advantage),
        )
        for row in range(rows)
    ]


def expert_rows(count: int) -> list[Experience]:
    """Demonstrations, made of the tokens 900, 901 ..."""
    changes: dict[str, Any] = {"source": "expert", "advantages": None, "weight_versions": (), "reward": None}
    return [Experience(**{**vars(row), **changes}) for row in group(90, count)]


def plan(groups: int = 2, **changes: Any) -> StagePlan:
    return StagePlan(groups, **changes)


def trained_ids(lease: Lease) -> list[int]:
    """The tokens that a lease's rows are made of, sorted."""
    from rayrft.trainer.batches import fetch_rows  # with it comes torch, which most tests of the Buffer do without

    return sorted(int(row.token_ids[0]) for share in lease.shares for row in fetch_rows(share))


def hardest(view: Any, k: int) -> int:
    """A task sampler: the task with the lowest pass rate."""
    return int(np.argmin(view.rates))
