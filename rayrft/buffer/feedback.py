"""Feedback of people and environments on rows in the Buffer."""

from __future__ import annotations

import numpy as np

from rayrft.buffer.events import Event, FeedbackNoted
from rayrft.buffer.groups import GroupStatus, GroupTable, unknown_row
from rayrft.buffer.store import Store
from rayrft.buffer.transitions.contents import GroupsMoved
from rayrft.buffer.validation import find_faults
from rayrft.errors import DataError, FeedbackRefused
from rayrft.experience import Experience, from_batch, to_batch


async def give_feedback(store: Store, experience_id: str, reward: float | None, labels: dict[str, str]) -> None:
    """Change a row before it is trained, by writing its group again, as files are immutable; see `Buffer.feedback`."""
    try:
        "".join([experience_id, *labels, *labels.values()]).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"not valid Unicode: {error.reason}", field="feedback", value=error.object) from None
    groups = store.state.groups
    async with store.move_lock:
        if (slot := next(groups.of_row(experience_id), None)) is None:
            raise unknown_row(experience_id)
        if _is_untrained(groups, slot):
            before = from_batch(await store.in_row_thread(store.rows.read_group, store.span(slot)))
            rows, moved = change(before, experience_id, reward, labels), list[Event]()
            if rows is not before:
                done = await store.in_row_thread(store.rows.append, to_batch(rows).serialize())
                moved = [GroupsMoved(done.extent, [slot], done.row, score=done.stored[0].score)]
            # A step may have leased the unchanged group meanwhile.
            if _is_untrained(groups, slot):
                return await store.commit(*moved)
        version, status = int(groups.last_step[slot]), groups.status[slot]
        if status == GroupStatus.PARKED:
            remedy = "give feedback when its group is complete"
            raise FeedbackRefused("the attempt is not finished", remedy, field=experience_id)
        await store.commit(FeedbackNoted(int(groups.segment[slot]), experience_id, reward, labels, version))
        if status == GroupStatus.DROPPED:
            remedy = "give feedback before rows are dropped; the reasons are in stats()"
            raise FeedbackRefused("the row was dropped and will not be trained", remedy, field=experience_id)
        problem = f"the row was taken for the step after version {version}"
        remedy = "the feedback is recorded; give it before the row is trained, or hold the run"
        raise FeedbackRefused(problem, remedy, field=experience_id, value=version)


def _is_untrained(groups: GroupTable, slot: int) -> bool:
    return groups.status[slot] == GroupStatus.READY and not groups.uses[slot]


def change(
    rows: list[Experience], experience_id: str, reward: float | None, labels: dict[str, str]
) -> list[Experience]:
    """Apply feedback to one row of a group; return ``rows`` itself if nothing changed.

    Raises DataError if there is no such row, or if the reward is not finite.
    """
    names = [row.experience_id for row in rows]
    if experience_id not in names:
        raise DataError("its group has no such row", f"its rows: {names}", field="experience_id", value=experience_id)
    old = rows[place := names.index(experience_id)]
    merged, reward = old.labels | labels, old.reward if reward is None else float(np.float32(reward))
    if (merged, reward) == (old.labels, old.reward):
        return rows
    rows = [*rows[:place], old.with_fields(labels=merged, reward=reward), *rows[place + 1 :]]
    if faults := find_faults(to_batch(rows)):
        raise DataError(next(iter(faults.values())), field="feedback", value=reward)
    return rows
