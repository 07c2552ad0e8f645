"""Groups of own rows from whoever has some: the way into a Buffer for jobs without a rollout engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rayrft.buffer.experience import Experience, to_batch
from rayrft.buffer.log.events import GroupReport
from rayrft.buffer.writer import BufferWriter
from rayrft.errors import DataError

if TYPE_CHECKING:
    from rayrft.algorithms import Algorithm


def put_groups(buffer: Any, shards: int, rows: list[Experience], algorithm: Algorithm) -> None:
    """Put rows, by their group ids; returns when they are in the log.

    Advantages that are missing are the algorithm's, from the rewards of the group. Raises DataError where a reward is
    missing for that, or the reward of a greedy answer is needed besides, and where a row is faulty.
    """
    by_group: dict[str, list[Experience]] = {}
    for row in rows:
        by_group.setdefault(row.group_id, []).append(row)
    groups = [complete(group, algorithm) for group in by_group.values()]

    async def put() -> None:
        writer = BufferWriter(buffer, shards)
        await asyncio.gather(*(writer.put(to_batch(group), _report(group)) for group in groups))

    with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop of its own in this one
        thread.submit(asyncio.run, put()).result()


def complete(group: list[Experience], algorithm: Algorithm) -> list[Experience]:
    """The rows of one group with advantages; see `put_groups`."""
    from rayrft.buffer.advantages import with_advantages  # with it comes torch

    if not algorithm.advantage_is_by_token and all(row.advantages is not None for row in group):
        return group

    def fault(problem: str, remedy: str) -> DataError:
        return DataError(problem, field="group_id", value=group[0].group_id, remedy=remedy)

    if any(row.reward is None for row in group):
        raise fault("a row has no reward from which advantages could be computed", "score it")
    if algorithm.needs_greedy_baseline:
        raise fault(
            f"advantage {algorithm.advantage!r} needs the reward of a greedy answer, which no row is",
            "put rows with advantages",
        )
    return with_advantages(group, algorithm)


def _report(group: list[Experience]) -> GroupReport:
    rewards = [row.reward for row in group if row.reward is not None]
    return GroupReport(
        rows=len(group),
        reward_sum=sum(rewards),
        scored=len(rewards),
        tokens=sum(int(row.action_mask.sum()) for row in group),
        truncated=sum(row.stop_reason == "length" for row in group),
    )
