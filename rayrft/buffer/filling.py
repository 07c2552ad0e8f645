"""Groups of own rows from whoever has some: the way into a Buffer for jobs without a rollout engine."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rayrft.buffer.experience import Experience, to_batch
from rayrft.buffer.log.events import GroupReport
from rayrft.buffer.writer import BufferWriter
from rayrft.errors import DataError

if TYPE_CHECKING:
    from rayrft.algorithms import Algorithm


def put_groups(buffer: Any, shards: int, rows: list[Experience], algorithm: Algorithm) -> None:
    """Put rows, by their group ids; returns when they are in the log.

    Advantages that are missing are the algorithm's, from the rewards of the group. Raises DataError where a reward for
    that is missing too, or a row is faulty.
    """
    by_group: dict[str, list[Experience]] = {}
    for row in rows:
        by_group.setdefault(row.group_id, []).append(row)
    groups = [_with_advantages(group, algorithm) for group in by_group.values()]

    async def put() -> None:
        writer = BufferWriter(buffer, shards)
        await asyncio.gather(*(writer.put(to_batch(group), _report(group)) for group in groups))

    with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop of its own in this one
        thread.submit(asyncio.run, put()).result()


def _with_advantages(group: list[Experience], algorithm: Algorithm) -> list[Experience]:
    if all(row.advantages is not None for row in group):
        return group
    import torch

    from rayrft.algorithms import Group

    rewards = [row.reward for row in group if row.reward is not None]
    if len(rewards) < len(group):
        raise DataError(
            "a row has neither advantages nor a reward", field="group_id", value=group[0].group_id, remedy="score it"
        )
    advantages = algorithm.group_advantages(torch.tensor(rewards, dtype=torch.float64), Group()).tolist()
    return [
        replace(row, advantages=row.action_mask.astype(np.float32) * np.float32(advantage))
        for row, advantage in zip(group, advantages, strict=True)
    ]


def _report(group: list[Experience]) -> GroupReport:
    rewards = [row.reward for row in group if row.reward is not None]
    return GroupReport(
        rows=len(group),
        reward_sum=sum(rewards),
        scored=len(rewards),
        tokens=sum(int(row.action_mask.sum()) for row in group),
        truncated=sum(row.stop_reason == "length" for row in group),
    )
