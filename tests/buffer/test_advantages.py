"""Advantages of rows that did not come from the Explorer, or whose reward was changed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rayrft.algorithms import build
from rayrft.buffer.client import complete
from rayrft.buffer.feedback import change
from rayrft.buffer.validation import find_faults
from rayrft.errors import DataError
from rayrft.experience import Experience, to_batch
from tests.buffer.rows import group, plan
from tests.errors import about


def bare(rewards: list[float | None], **changes: Any) -> list[Experience]:
    """Rows of one group, of a prompt token and three of the answer, without advantages."""
    rows = group(1, len(rewards))
    return [
        dataclasses.replace(row, reward=reward, advantages=None, **changes)
        for row, reward in zip(rows, rewards, strict=True)
    ]


def on_tokens(rows: list[Experience]) -> list[list[float]]:
    return [row.advantages.tolist() for row in rows if row.advantages is not None]


def test_rows_without_advantages_get_those_of_the_algorithm() -> None:
    assert on_tokens(complete(bare([1.0, 0.0]), build("rloo"))) == [[0, 1, 1, 1], [0, -1, -1, -1]]


def test_rows_for_a_critic_stay_without_advantages_and_come_through_the_door() -> None:
    rows = complete(bare([1.0, 0.0]), build("ppo"))
    assert [row.advantages for row in rows] == [None, None]
    assert find_faults(to_batch(rows)) == {}


@pytest.mark.parametrize("name", ["step_wise", "gigpo"])
def test_rows_are_looked_at_by_turn_where_the_algorithm_does(name: str) -> None:
    # Two turns of a token each around an observation. Returns 2 and 0 of two trajectories: +-1 without deviation.
    rows = bare([1.0, 0.0], action_mask=np.array([0, 1, 0, 1], np.uint8))
    rows[0] = dataclasses.replace(rows[0], metrics={"turn_reward_0": 1.0})
    first, second = on_tokens(complete(rows, build("gigpo", {"advantage": name})))
    assert first[1] > 0 > second[1] and first[3] > 0 > second[3]
    assert first[0] == first[2] == second[0] == second[2] == 0
    same = name == "step_wise"
    assert (first[1] == first[3]) == same, "gigpo has a share that compares the turns of equal states"


@pytest.mark.parametrize(
    ("rewards", "name", "problem"),
    [
        ([1.0, None], "grpo", r"no reward to compute advantages from.*score the row"),
        ([1.0, None], "ppo", r"no reward to compute advantages from.*score the row"),
        ([1.0, 0.0], "remax", r"'remax' needs the reward of a greedy answer.*put rows with advantages"),
    ],
)
def test_what_advantages_lack_is_told(rewards: list[float | None], name: str, problem: str) -> None:
    with pytest.raises(DataError, match=f"(?i){problem}"):
        complete(bare(rewards), build(name))


def test_advantages_that_came_with_the_rows_stay() -> None:
    rows = group(1)
    assert complete(rows, build("remax")) is rows


def test_feedback_on_a_reward_for_a_critic_changes_the_reward_alone() -> None:
    rows = change(bare([1.0, 0.0]), "1/1", 1.0, {}, plan(advantage="gae"))
    assert [row.reward for row in rows] == [1.0, 1.0]
    assert [row.advantages for row in rows] == [None, None]


def test_feedback_follows_the_advantages_of_turns() -> None:
    rows = change(bare([0.0, 0.0, 0.0]), "1/0", 2.0, {}, plan(advantage="step_wise"))
    [first, second, third] = on_tokens(rows)
    assert first[3] == pytest.approx(2 / 3**0.5, abs=1e-5) and second[3] == third[3] == pytest.approx(
        -(3**-0.5), abs=1e-5
    )


def test_feedback_on_a_reward_is_refused_where_a_greedy_answer_would_be_needed() -> None:
    with pytest.raises(DataError, check=about("feedback", "remax")):
        change(group(1), "1/0", 5.0, {}, plan(advantage="remax"))
    assert change(group(1), "1/0", None, {"good": "yes"}, plan(advantage="remax"))[0].labels == {"good": "yes"}
