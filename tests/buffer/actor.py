"""A Buffer actor under test: what producers do to it, and its ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray

from rayrft.buffer.client import BufferWriter
from rayrft.buffer.events import GroupReport
from rayrft.buffer.ledger import Ledger
from rayrft.buffer.schedule import Ticket
from rayrft.experience import Experience, to_batch
from tests.buffer.rows import group
from tests.scripted import handle

Start = Callable[..., Any]


def admit(buffer: Any, count: int = 10, call: list[int] = [0]) -> Any:  # noqa: B006 - counts its calls
    call[0] += 1
    return buffer.admit.remote("test", call[0], count)


def put(
    buffer: Any,
    ticket: Ticket | None,
    rows: list[Experience] | None = None,
    dropped: dict[str, int] | None = None,
    **report: Any,
) -> None:
    if rows is None:
        assert ticket is not None
        rows = group(ticket.sequence, version=ticket.version)
    reported = GroupReport(**{"rows": len(rows), "reward_sum": 1.0, "scored": len(rows), "tokens": 6, **report})
    asyncio.run(BufferWriter(handle(buffer)).put(to_batch(rows), reported, ticket=ticket, dropped=dropped))


def ledger(buffer: Any) -> Ledger:
    found: Ledger = ray.get(buffer.stats.remote()).ledger
    assert found.closes
    return found


def rows_of(lease: Any, algorithm: str = "grpo") -> list[Any]:
    # With these comes torch, which most tests of the Buffer do without.
    from rayrft.algorithms import build
    from rayrft.trainer.batches import fetch_rows

    return [row for share in lease.shares for row in fetch_rows(share, build(algorithm))]
