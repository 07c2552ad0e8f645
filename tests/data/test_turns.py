"""Advantages of a group's rows: whole rows, or turns of a workflow of several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayrft.algorithms import build, presets
from rayrft.data.turns import Turns, compute_advantages, turn_rewards
from rayrft.errors import DataError
from rayrft.experience import Experience
from tests.errors import about

MASK = np.array([0, 0, 1, 1, 0, 1, 1, 1], np.uint8)
"""A prompt of two tokens, a turn of two, an observation of one, a turn of three."""


def row(repeat: str, *, observation: int = 4, mask: np.ndarray = MASK, **metrics: float) -> Experience:
    ids = np.arange(10, 10 + len(mask), dtype=np.int32)
    ids[4:5] = observation
    return Experience(
        f"g/{repeat}", "g", "t", ids, int(mask.argmax()), mask, np.zeros(len(mask), np.float32), metrics=metrics
    )


def advantages(rows: list[Experience], rewards: list[float], name: str, **pieces: Any) -> list[list[float]]:
    """Of every token, by row."""
    algorithm = build("gigpo", {"advantage": name, **pieces})
    return [values.tolist() for values in compute_advantages(rows, algorithm, rewards)]


def test_turns_are_the_runs_of_the_mask_and_the_reward_is_the_last_ones() -> None:
    turns = Turns.of([replace(row("0"), reward=1.0), replace(row("1", turn_reward_0=0.5), reward=2.0)])
    assert turns.spans == ((0, 2, 4), (0, 5, 8), (1, 2, 4), (1, 5, 8))
    assert turns.rewards.tolist() == [0.0, 1.0, 0.5, 2.0]
    assert turns.group.trajectory is not None and turns.group.turn is not None and turns.group.state is not None
    assert turns.group.trajectory.tolist() == [0, 0, 1, 1] and turns.group.turn.tolist() == [0, 1, 0, 1]
    assert turns.group.state.tolist() == [0, 1, 0, 1], "the same prompt, and the same observation"


def test_states_differ_by_observation_or_by_what_the_workflow_says() -> None:
    seen = Turns.of(
        [row("0"), row("1", observation=5), row("2", turn_state_1=7.0), row("3", observation=6, turn_state_1=7.0)]
    )
    assert seen.group.state is not None
    first, second = seen.group.state[::2].tolist(), seen.group.state[1::2].tolist()
    assert first == [0] * 4 and second == [1, 2, 3, 3]


def test_segments_of_one_repeat_are_one_trajectory() -> None:
    short = np.array([0, 1, 1], np.uint8)
    turns = Turns.of([row("0/0", mask=short), row("1/0", mask=short), row("0/1"), row("1/1", mask=short)])
    assert turns.group.trajectory is not None and turns.group.turn is not None
    assert turns.group.trajectory.tolist() == [0, 1, 0, 0, 1]
    assert turns.group.turn.tolist() == [0, 0, 1, 2, 1]


def test_every_turn_has_its_advantage_and_observations_have_none() -> None:
    # Without deviation: trajectories +-0.5. Both first turns were taken in one state, with returns to go 0.5 and 0:
    # +-0.25. The second turns had different observations: 0.
    found = advantages([row("0"), row("1", observation=5)], [1.0, 0.0], "gigpo", discount=0.5, deviation=False)
    assert found[0] == pytest.approx([0, 0, 0.75, 0.75, 0, 0.5, 0.5, 0.5])
    assert found[1] == pytest.approx([0, 0, -0.75, -0.75, 0, -0.5, -0.5, -0.5])


def test_rewards_of_turns_count_for_their_trajectory() -> None:
    # Returns 1.5 and 1: the deviation is 0.5 / sqrt(2).
    found = advantages([row("0", turn_reward_0=0.5), row("1")], [1.0, 1.0], "step_wise")
    assert found[0][2] == found[0][7] == pytest.approx(0.5**0.5, abs=1e-5)
    assert found[1][2] == pytest.approx(-(0.5**0.5), abs=1e-5)
    assert not np.any(advantages([row("0"), row("1")], [1.0, 1.0], "step_wise"))


def test_of_one_turn_each_gigpo_is_grpo_twice_over() -> None:
    rows = [row(str(number), mask=np.array([0, 0, 1, 1], np.uint8)) for number in range(3)]
    rewards = [1.0, 0.0, 0.5]
    expected = advantages(rows, rewards, "grpo")
    assert advantages(rows, rewards, "step_wise") == expected
    # The prompt is the state: the group within the group is the group.
    doubled = [[pytest.approx(2 * value) for value in each] for each in expected]
    assert advantages(rows, rewards, "gigpo") == doubled


@pytest.mark.parametrize("name", [name for name in presets if "rollouts" in build(name).needs and name != "ppo"])
def test_every_algorithm_computes_advantages_on_action_tokens_alone(name: str) -> None:
    rows = [replace(each, greedy_reward=0.25) for each in scored({"right": 1.0}, {"right": 0.5})]
    rows = [replace(each, reward=reward) for each, reward in zip(rows, [1.0, 0.5], strict=True)]
    found = compute_advantages(rows, build(name))
    assert all(values.dtype == np.float32 and not values[MASK == 0].any() for values in found)
    assert any(values.any() for values in found) == (name not in ("distill", "jsd"))


def scored(*components: dict[str, float]) -> list[Experience]:
    return [replace(row(str(n)), reward=0.0, reward_components=each) for n, each in enumerate(components)]


def test_components_of_rewards_are_compared_apart() -> None:
    rows = scored({"right": 1.0, "form": 5.0}, {"form": 5.0, "right": 0.0})
    for given in ({}, {"reward_components": {"right": 1.0}}, {"reward_components": {"form": 3.0, "right": 1.0}}):
        found = compute_advantages(rows, build("gdpo", given))
        assert [values[2] for values in found] == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)


@pytest.mark.parametrize(
    ("components", "given", "lacking"),
    [
        ([{"right": 1.0}, {"right": 0.0, "form": 1.0}], {}, "'g/0' has no form"),
        ([{"right": 1.0}, {"right": 0.0}], {"right": 1.0, "form": 1.0}, "'g/0' has no form"),
        ([{"right": 1.0, "form": 0.0}, {"form": 0.0}], {"right": 1.0}, "'g/1' has no right"),
        ([{"right": 1.0}, {"right": np.nan}], {}, "'g/1' has no right"),
        ([{"right": 1.0}, {"right": np.inf}], {}, "'g/1' has no right"),
        ([{}, {}], {}, "'g/0' has no components"),
    ],
)
def test_a_row_without_a_component_of_its_reward_is_refused(
    components: list[dict[str, float]], given: dict[str, float], lacking: str
) -> None:
    algorithm = build("gdpo", {"reward_components": given})
    with pytest.raises(DataError, match=lacking, check=about("reward_components")):
        compute_advantages(scored(*components), algorithm)


def test_rewards_of_turns_are_on_their_last_tokens_and_those_of_steps_at_theirs() -> None:
    found = turn_rewards(MASK, {"turn_reward_0": 0.5, "turn_reward_1": -1.0, "turn_reward_2": 9.0, "other": 9.0})
    assert found.tolist() == [0, 0, 0, 0.5, 0, 0, 0, -1.0] and found.dtype == np.float32
    steps = {"token_reward_2": 2.0, "token_reward_3": 1.0, "token_reward_x": 9}
    assert turn_rewards(MASK, {"turn_reward_0": 0.5, **steps}).tolist() == [0, 0, 2.0, 1.5, 0, 0, 0, 0]


def test_remax_compares_with_the_greedy_answer() -> None:
    rows = [replace(row(str(number)), reward=reward, greedy_reward=0.75) for number, reward in enumerate([1.0, 0.5])]
    assert [values[2] for values in compute_advantages(rows, build("remax"))] == [0.25, -0.25]
    with pytest.raises(ValueError, match="greedy"):
        compute_advantages([replace(row, greedy_reward=None) for row in rows], build("remax"))


# Steps inside turns


def test_a_turn_is_split_after_the_steps_that_have_rewards() -> None:
    # A turn of five tokens: steps end with its first and third; what follows is the last step's.
    mask = np.array([0, 1, 1, 1, 1, 1, 0, 1], np.uint8)
    one = row("0", mask=mask, token_reward_1=0.5, token_reward_3=-1.0, turn_reward_0=0.25)
    turns = Turns.of([replace(one, reward=2.0), replace(row("1", mask=mask, token_reward_7=4.0), reward=1.0)])
    assert turns.spans == ((0, 1, 2), (0, 2, 6), (0, 7, 8), (1, 1, 6), (1, 7, 8))
    assert turns.rewards.tolist() == [0.5, -0.75, 2.0, 0.0, 5.0]
    assert turns.group.turn is not None and turns.group.state is not None
    assert turns.group.turn.tolist() == [0, 1, 2, 0, 1]
    assert turns.group.state.tolist() == [0, 1, 2, 0, 2], "the same prompt, and the same observation"


def test_steps_after_the_same_text_of_the_same_turn_are_in_one_state() -> None:
    mask = np.array([0, 0, 1, 1, 1], np.uint8)
    steps = {"token_reward_2": 1.0, "token_reward_4": 1.0}
    same, told = row("0", mask=mask, **steps), row("1", mask=mask, turn_state_0=3.0, **steps)
    other = replace(same, experience_id="g/2", token_ids=np.array([10, 11, 99, 13, 4], np.int32))
    turns = Turns.of([same, row("3", mask=mask, **steps), other, told])
    assert turns.group.state is not None and turns.group.state.tolist() == [0, 1, 0, 1, 0, 2, 3, 4]


def test_steps_have_advantages_of_their_own_by_hand() -> None:
    # Two answers to one prompt, split after their first tokens, which are the same. Returns 1 + 0 and 0 + 0.5:
    # A^E = +-0.25. Returns to go at discount 0.5: (1 + 0, 0) and (0 + 0.25, 0.5). First steps: one state,
    # A^S = +-0.375. Second steps: one state, since the text so far is the same, A^S = -+0.25.
    mask = np.array([0, 0, 1, 1, 1], np.uint8)
    first = row("0", mask=mask, token_reward_2=1.0, token_reward_3=0.0)
    rows = [first, row("1", mask=mask, token_reward_2=0.0, token_reward_4=0.0)]
    found = advantages(rows, [0.0, 0.5], "gigpo", discount=0.5, deviation=False)
    assert found[0] == pytest.approx([0, 0, 0.25 + 0.375, 0.25 - 0.25, 0.25 - 0.25])
    assert found[1] == pytest.approx([0, 0, -0.25 - 0.375, -0.25 + 0.25, -0.25 + 0.25])
    # Process supervision: the steps are 1, 0 and 0, 0.5, of mean 0.375; each gets what is to come.
    steps = advantages(rows, [0.0, 0.5], "process")
    deviation = float(np.std([1.0, 0.0, 0.0, 0.5], ddof=1))
    assert steps[0][2:] == pytest.approx([0.25 / deviation, -0.375 / deviation, -0.375 / deviation], abs=1e-5)
    assert steps[1][2:] == pytest.approx([-0.25 / deviation, 0.125 / deviation, 0.125 / deviation], abs=1e-5)
    # Of all steps together the trajectory is compared: 1 and 0.5.
    both = advantages(rows, [0.0, 0.5], "step_wise")
    assert both[0][2:] == pytest.approx([0.5**0.5] * 3, abs=1e-5)
