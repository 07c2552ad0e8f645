"""Feedback of people and environments on rows in the Buffer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rayrft.buffer import events as e
from rayrft.buffer.groups import GroupStatus
from rayrft.buffer.ingest import group_key
from rayrft.buffer.store import Store
from rayrft.buffer.validation import find_faults
from rayrft.errors import DataError, FeedbackRefused
from rayrft.experience import Experience, from_batch, to_batch


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
            "ids are in the column experience_id; rows leave the log when it reaches buffer.log_bytes",
            field="experience_id",
            value=experience_id,
        )

    def _ready(self, slot: int) -> bool:
        groups = self._store.state.groups
        return groups.status[slot] == GroupStatus.READY and not groups.uses[slot]

    async def _rewrite(
        self, slot: int, experience_id: str, reward: float | None, labels: dict[str, str]
    ) -> list[e.Event]:
        store = self._store
        before = from_batch(await store.in_row_thread(store.rows.read_group, store.span(slot)))
        rows = change(before, experience_id, reward, labels)
        if rows is before:
            return []
        done = await store.in_row_thread(store.rows.append, to_batch(rows).serialize())
        return [e.Moved(done.extent, [slot], done.row, score=float(done.scores[0]))]

    async def _refuse(self, slot: int, experience_id: str, reward: float | None, labels: dict[str, str]) -> None:
        groups = self._store.state.groups
        version, status = int(groups.last_step[slot]), GroupStatus(int(groups.status[slot]))
        if status == GroupStatus.PARKED:
            raise FeedbackRefused(
                "the attempt is not finished", "give feedback when its group is complete", field=experience_id
            )
        await self._store.commit(e.FeedbackNoted(int(groups.segment[slot]), experience_id, reward, labels, version))
        if status == GroupStatus.DROPPED:
            raise FeedbackRefused(
                "the row was dropped and will not be trained",
                "give feedback before rows are dropped; the reasons are in stats()",
                field=experience_id,
            )
        raise FeedbackRefused(
            f"the row was taken for the step after version {version}",
            "the feedback is recorded; give it before the row is trained, or hold the run",
            field=experience_id,
            value=version,
        )


def change(
    rows: list[Experience], experience_id: str, reward: float | None, labels: dict[str, str]
) -> list[Experience]:
    """Apply feedback to one row of a group; return ``rows`` itself if nothing changed.

    Raises DataError if there is no such row, or if the reward is not finite.
    """
    places = [place for place, row in enumerate(rows) if row.experience_id == experience_id]
    if not places:
        known = f"its rows: {[row.experience_id for row in rows]}"
        raise DataError("its group has no such row", known, field="experience_id", value=experience_id)
    old = rows[places[0]]
    merged, reward = old.labels | labels, old.reward if reward is None else float(np.float32(reward))
    if (merged, reward) == (old.labels, old.reward):
        return rows
    row = replace(old, labels=merged, reward=reward)
    rows = [*rows[: places[0]], row, *rows[places[0] + 1 :]]
    if faults := find_faults(to_batch(rows)):
        raise DataError(next(iter(faults.values())), field="feedback", value=reward)
    return rows
