"""Feedback of people and environments on rows in the Buffer."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import numpy as np
import torch

from rayrft.algorithms import Algorithm, Group
from rayrft.buffer import events as e
from rayrft.buffer.entries import group_key
from rayrft.buffer.groups import GroupStatus
from rayrft.buffer.log.shard import Shard
from rayrft.buffer.schedule import StagePlan
from rayrft.buffer.store import Store
from rayrft.buffer.validation import find_faults
from rayrft.data.turns import Turns
from rayrft.errors import DataError, FeedbackRefused
from rayrft.experience import LEFT_OUT, Experience, from_batch, to_batch


class Feedback:
    """Changes rows before they are trained. Rows on disk are immutable: the changed group is written again."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def give(self, experience_id: str, reward: float | None, labels: dict[str, str]) -> None:
        """See `Buffer.feedback`."""
        try:
            "".join([experience_id, *labels, *labels.values()]).encode()
        except UnicodeEncodeError as error:
            raise DataError(f"not valid Unicode: {error.reason}", field="feedback", value=error.object) from None
        async with self._store.move_lock:
            slot = self._find(experience_id)
            if self._ready(slot):
                moved = await self._rewrite(slot, experience_id, reward, labels)
                # A step may have leased the unchanged group meanwhile.
                if self._ready(slot):
                    return await self._store.commit(*moved)
            await self._refuse(slot, experience_id, reward, labels)

    def _find(self, experience_id: str) -> int:
        groups = self._store.state.groups
        parts = experience_id.split("/")
        for length in range(len(parts), 0, -1):
            if (slot := groups.find(group_key("/".join(parts[:length])))) is not None:
                return slot
        raise DataError(
            "no row of this id is in the Buffer",
            field="experience_id",
            value=experience_id,
            remedy="ids are in the column experience_id; rows leave the log when it reaches buffer.log_bytes",
        )

    def _ready(self, slot: int) -> bool:
        groups = self._store.state.groups
        return groups.status[slot] == GroupStatus.READY and not groups.uses[slot]

    async def _rewrite(
        self, slot: int, experience_id: str, reward: float | None, labels: dict[str, str]
    ) -> list[e.Event]:
        shard = int(self._store.state.groups.shard[slot])
        batch = await self._store.shards.call(shard, Shard.read, [self._store.span(slot)])
        before = from_batch(batch)
        rows = change(before, experience_id, reward, labels, self._store.state.meta.plan or StagePlan(0))
        if rows is before:
            return []
        sync = self._store.config.fsync == "always"
        done = await self._store.shards.call(shard, Shard.append, to_batch(rows).serialize(), sync=sync)
        return [e.Moved(shard, done.extent, [slot], done.row, score=float(done.scores[0]))]

    async def _refuse(self, slot: int, experience_id: str, reward: float | None, labels: dict[str, str]) -> None:
        groups = self._store.state.groups
        version, status = int(groups.last_step[slot]), GroupStatus(int(groups.status[slot]))
        await self._store.commit(e.FeedbackNoted(experience_id, reward, labels, version))
        if status == GroupStatus.DROPPED:
            raise FeedbackRefused(
                "the row was dropped and will not be trained",
                field=experience_id,
                remedy="give feedback before rows are dropped; the reasons are in stats()",
            )
        raise FeedbackRefused(
            f"the row was taken for the step after version {version}",
            field=experience_id,
            value=version,
            remedy="the feedback is recorded; give it before the row is trained, or hold the run",
        )


def change(
    rows: list[Experience], experience_id: str, reward: float | None, labels: dict[str, str], plan: StagePlan
) -> list[Experience]:
    """Apply feedback to one row of a group, and recompute the group's advantages if the reward changed; return ``rows``
    itself if nothing changed.

    Raises DataError if there is no such row, if the reward is not finite, or if the advantages need other rewards, too.
    """
    places = [place for place, row in enumerate(rows) if row.experience_id == experience_id]
    if not places:
        known = f"its rows: {[row.experience_id for row in rows]}"
        raise DataError("its group has no such row", field="experience_id", value=experience_id, remedy=known)
    old = rows[places[0]]
    merged, reward = old.labels | labels, old.reward if reward is None else float(np.float32(reward))
    if (merged, reward) == (old.labels, old.reward):
        return rows
    row = dataclasses.replace(old, labels=merged, reward=reward)
    rows = [*rows[: places[0]], row, *rows[places[0] + 1 :]]
    if reward != old.reward:
        rows = _recomputed(rows, plan)
    if faults := find_faults(to_batch(rows)):
        raise DataError(next(iter(faults.values())), field="feedback", value=reward)
    return rows


def _recomputed(rows: list[Experience], plan: StagePlan) -> list[Experience]:
    """Return the rows with the stage's advantages, if it has any.

    Raises DataError if they need more than the group's rows, and ConfigError if their function is in a plug-in, which
    the Buffer does not load.
    """
    # Imported here because torch takes seconds to load, and most Buffers never get feedback.
    from rayrft.algorithms import Algorithm
    from rayrft.buffer.feedback import with_advantages

    algorithm = Algorithm(plan.name, advantage=plan.advantage, coefficients=plan.coefficients)
    if algorithm.needs_greedy_baseline:
        raise DataError(
            "a reward cannot be changed: the stage's advantages compare it with that of a greedy answer, which is not "
            "in the Buffer",
            field="feedback",
            value=plan.advantage,
            remedy="give labels only, or use another advantage",
        )
    if algorithm.compares_answers and any(LEFT_OUT in row.metrics for row in rows):
        raise DataError(
            "a reward cannot be changed: the stage's advantages compare it with those of truncated answers, which are "
            "not in the Buffer",
            field="feedback",
            value=plan.advantage,
            remedy="give labels only, or use another reward.truncated than mask",
        )
    return rows if plan.advantage == "none" else with_advantages(rows, algorithm)


def with_advantages(
    rows: list[Experience], algorithm: Algorithm, greedy_reward: float | None = None
) -> list[Experience]:
    """Compute the algorithm's advantages of one group from its rewards (a missing one counts as 0).

    They are equal on all action tokens of a row or, if the algorithm uses turns, of a turn. They are None if a critic
    is needed: the trainer computes those. Raises ValueError if the algorithm needs ``greedy_reward`` and it is None.
    """
    if algorithm.advantage_is_by_token:
        return [replace(row, advantages=None) for row in rows]
    if algorithm.needs_turns:
        turns = Turns.of(rows)
        known = replace(turns.group, greedy_reward=greedy_reward)
        found = turns.spread(algorithm.group_advantages(turns.rewards, known), rows)
    else:
        rewards = torch.tensor([row.reward or 0.0 for row in rows], dtype=torch.float64)
        values = algorithm.group_advantages(rewards, Group(greedy_reward)).tolist()
        found = [row.action_mask * np.float32(value) for row, value in zip(rows, values, strict=True)]
    return [replace(row, advantages=values) for row, values in zip(rows, found, strict=True)]
