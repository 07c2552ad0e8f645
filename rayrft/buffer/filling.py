"""Groups of own rows from whoever has some: the way into a Buffer for jobs without a rollout engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from rayrft.buffer.experience import Experience, from_batch, to_batch
from rayrft.buffer.log.events import GroupReport
from rayrft.buffer.writer import BufferWriter, Receipt
from rayrft.errors import DataError

if TYPE_CHECKING:
    from rayrft.algorithms import Algorithm


def put_groups(buffer: Any, shards: int, rows: list[Experience], algorithm: Algorithm, group_size: int) -> None:
    """Put rows, by their group ids; returns when they are in the log.

    Advantages that are missing are the algorithm's, from the rewards of the group. Raises DataError, and puts nothing,
    where a reward is missing for that, or the reward of a greedy answer is needed besides, where a column cannot hold
    what a row has, and where a group is not of ``group_size`` trajectories (or of fewer, whose rows have advantages).
    Raises DataError, too, where the Buffer refused groups: ``value`` says which rows it found faulty, by experience or
    group id. Those groups count for nothing, and may be put again, mended; the others were taken.
    """
    by_group: dict[str, list[Experience]] = {}
    for row in from_batch(to_batch(rows)):  # with the columns' types
        by_group.setdefault(row.group_id, []).append(row)
    for group in by_group.values():
        check_size(group, algorithm, group_size)
    groups = [complete(group, algorithm) for group in by_group.values()]

    async def put() -> list[Receipt]:
        writer = BufferWriter(buffer, shards)
        return await asyncio.gather(*(writer.put(to_batch(group), _report(group)) for group in groups))

    with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop of its own in this one
        receipts = thread.submit(asyncio.run, put()).result()
    refused = [receipt for receipt in receipts if receipt.faults]
    if refused:
        reasons = Counter(fault.reason for receipt in refused for fault in receipt.faults)
        raise DataError(
            f"{len(refused)} of {len(groups)} groups were refused: {', '.join(reasons)}",
            field="rows",
            value={fault.experience_id: fault.reason for receipt in refused for fault in receipt.faults},
            remedy="mend them, and put them again: the other groups were taken",
        )


def check_size(group: list[Experience], algorithm: Algorithm, group_size: int) -> None:
    """Raises DataError where a group has more trajectories than the stage's ``group_size``; or fewer, and advantages
    that are still to be computed would not be those of the whole group."""
    size = len({row.repeat for row in group})
    known = algorithm.advantage_is_by_token or all(row.advantages is not None for row in group)
    if size > group_size or (size < group_size and not known):
        raise DataError(
            f"a group of {size} trajectories, where the stage's group_size is {group_size}",
            field="group_id",
            value=group[0].group_id,
            remedy="put whole groups of that size; smaller ones only with advantages",
        )


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
