"""Feedback on rows that are in the Buffer."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from rayrft.errors import DataError, FeedbackRefused
from tests.buffer.actor import Start, admit, put, rows_of
from tests.buffer.rows import group, plan
from tests.errors import about


def test_a_reward_given_before_training_changes_the_groups_advantages(start: Start) -> None:
    buffer = start(sampler={"name": "priority"})
    put(buffer, None, group(1, rows=3))
    ray.get(buffer.feedback.remote("1/0", reward=7.0, labels={"quality": "good"}))
    ray.get(buffer.open_stage.remote(plan(1, scheduled=False)))
    rows = rows_of(ray.get(buffer.lease.remote(0, 1, 5)))
    advantages = [float(row.advantages[-1]) for row in rows]
    assert advantages[0] > 0 > advantages[1], "rewards are 7, 1 and 2 now"
    assert abs(sum(advantages)) < 1e-5


def test_feedback_after_training_is_refused_with_the_version_and_recorded(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1, version=5)))
    [ticket] = ray.get(admit(buffer))
    put(buffer, ticket)
    ray.get(buffer.lease.remote(5, 1, 5))
    ray.get(buffer.ack.remote(5))
    with pytest.raises(FeedbackRefused, check=about("0/1", 5)) as caught:
        ray.get(buffer.feedback.remote("0/1", reward=1.0))
    assert caught.value.cause.value == 5
    assert ray.get(buffer.stats.remote()).late_feedback == 1


def test_feedback_on_an_unknown_row_names_it(buffer: Any) -> None:
    put(buffer, None, group(1))
    for unknown in ("2/0", "1/9"):
        with pytest.raises(DataError, match=f"found '{unknown}'"):
            ray.get(buffer.feedback.remote(unknown, reward=1.0))


def test_a_reward_that_is_not_a_number_is_refused(buffer: Any) -> None:
    put(buffer, None, group(1))
    with pytest.raises(DataError, check=about("feedback")):
        ray.get(buffer.feedback.remote("1/0", reward=float("nan")))
