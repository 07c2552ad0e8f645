"""What a step gets from the Buffer: its batch, dealt to ranks."""

from __future__ import annotations

from dataclasses import dataclass

from rayrft.buffer.balance import balance
from rayrft.buffer.store import ExpertStore, GroupReport, Ref, StoredGroup


@dataclass(frozen=True)
class BatchShare:
    """One rank's part of a batch: rows by object, each object with the row indices that count."""

    parts: tuple[tuple[Ref, tuple[int, ...]], ...]
    tokens: int


@dataclass(frozen=True)
class Lease:
    """A step's batch, dealt to ranks, and what is known of it before it is trained."""

    step: int
    shares: tuple[BatchShare, ...]
    usual_rows: int
    expert_rows: int
    staleness: tuple[int, ...]
    """Of each group: trainer version less its oldest token version."""
    rollouts: GroupReport
    """Everything that was sampled since the last lease, kept or dropped."""
    waited_s: float


def deal(
    groups: list[StoredGroup], store: ExpertStore | None, expert: list[int], world_size: int
) -> tuple[BatchShare, ...]:
    """Shares of nearly equal tokens. Groups stay whole; the rows ``expert`` of ``store`` are dealt one by one."""
    expert_tokens = [int(store.tokens[row]) for row in expert] if store else []
    sizes = [group.tokens for group in groups] + expert_tokens
    shares = []
    for items in balance(sizes, world_size):
        parts = [(groups[i].ref, tuple(range(groups[i].rows))) for i in items if i < len(groups)]
        drawn = tuple(expert[i - len(groups)] for i in items if i >= len(groups))
        if store and drawn:
            parts.append((store.ref, drawn))
        shares.append(BatchShare(tuple(parts), sum(sizes[i] for i in items)))
    return tuple(shares)
