"""What becomes of a group: rewards, unknown rewards, truncated answers, advantages, zero variance."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rayrft.algorithms import build
from rayrft.buffer.validation import stored_rows
from rayrft.config.reward import RewardConfig
from rayrft.experience import MASKED, Experience, VersionSpan, to_batch
from rayrft.explorer.evaluation import wilson_interval
from rayrft.explorer.scoring import (
    ScoredGroup,
    apply_rewards,
    drop_zero_variance,
    mask_old,
    mask_truncated,
    with_baseline,
)
from rayrft.rewards import RewardResult


def rows(*stop_reasons: str) -> list[Experience]:
    row = Experience(
        "e", "g", "t", np.arange(4, dtype=np.int32), 2, np.array([0, 0, 1, 1], dtype=np.uint8), np.zeros(4, np.float32)
    )
    return [dataclasses.replace(row, experience_id=str(i), stop_reason=why) for i, why in enumerate(stop_reasons)]


def config(**values: Any) -> RewardConfig:
    return RewardConfig(**values)


def score(rows: list[Experience], results: list[RewardResult], config: RewardConfig) -> ScoredGroup:
    return apply_rewards(rows, results, config, max_tokens=10)


UNKNOWN = RewardResult(None, reason="ZeroDivisionError: division by zero")


def test_a_group_without_variance_is_dropped_and_counted() -> None:
    scored = score(rows("stop", "stop"), [RewardResult(1.0)] * 2, config())
    group = drop_zero_variance(scored, build("grpo"))
    assert group.rows == [] and group.dropped == {"zero_variance": 2}
    assert group.report.rows == 2, "it was sampled all the same"


@pytest.mark.parametrize("name", ["grpo", "remax", "rloo"])
def test_rewards_that_the_trainer_cannot_tell_apart_have_no_variance(name: str) -> None:
    scored = score(rows("stop", "stop"), [RewardResult(0.3), RewardResult(0.3 + 1e-11)], config())
    scored = with_baseline(scored, score(rows("stop"), [RewardResult(0.3 - 1e-11)], config()))
    assert drop_zero_variance(scored, build(name)).dropped == {"zero_variance": 2}


@pytest.mark.parametrize("name", ["reinforce_pp", "ppo", "asymre"])
def test_a_group_without_variance_stays_where_something_is_learnt_from_it(name: str) -> None:
    scored = score(rows("stop", "stop"), [RewardResult(1.0)] * 2, config())
    assert drop_zero_variance(scored, build(name)) is scored


@pytest.mark.parametrize(
    ("policy", "kept", "dropped"),
    [("drop_row", 1, {"reward_unknown": 1}), ("drop_group", 0, {"reward_unknown": 2}), ("fallback", 2, {})],
)
def test_an_unknown_reward_is_not_zero(policy: Any, kept: int, dropped: dict[str, int]) -> None:
    group = score(rows("stop", "stop"), [RewardResult(1.0), UNKNOWN], config(on_unknown=policy, fallback=0.25))
    assert len(group.rows) == kept and group.dropped == dropped
    assert group.unknown == "ZeroDivisionError: division by zero"
    if policy == "fallback":
        assert group.rewards == [1.0, 0.25]
        assert group.rows[1].error == UNKNOWN.reason


def test_the_unknown_reward_of_an_answer_that_was_cut_is_unknown() -> None:
    group = score(rows("stop", "length"), [RewardResult(1.0), UNKNOWN], config())
    assert group.rewards == [1.0] and group.dropped == {"reward_unknown": 1} and group.unknown == UNKNOWN.reason
    fallback = config(on_unknown="fallback", fallback=0.25)
    assert score(rows("length"), [UNKNOWN], fallback).rewards == [0.0]


def test_a_trajectory_of_several_rows_is_dropped_whole_where_one_is_unknown() -> None:
    places = ("g/0/0", "g/0/1", "g/1/0", "g/1/1")
    parts = [
        dataclasses.replace(row, experience_id=name) for row, name in zip(rows(*["stop"] * 4), places, strict=True)
    ]
    results = [RewardResult(1.0), UNKNOWN, RewardResult(0.5), RewardResult(0.25)]
    group = score(parts, results, config())
    assert [row.experience_id for row in group.rows] == ["g/1/0", "g/1/1"] and group.rewards == [0.5, 0.25]
    assert group.dropped == {"reward_unknown": 2}
    assert len(score(parts, results, config(on_unknown="fallback")).rows) == 4


@pytest.mark.parametrize(("worth", "earned"), [(1.0, 0.0), (-1.0, -1.0)])
def test_an_answer_without_its_end_earns_nothing_unless_asked_for(worth: float, earned: float) -> None:
    results = [RewardResult(worth), RewardResult(worth)]
    assert score(rows("stop", "length"), results, config()).rewards == [worth, earned]
    assert score(rows("stop", "length"), results, config(truncated="score")).rewards == [worth, worth]


def test_a_reward_that_the_workflow_gave_stays() -> None:
    [row] = rows("length")
    own = dataclasses.replace(row, reward=0.75)
    assert score([own], [RewardResult(0.75)], config()).rewards == [0.75], "its cut is the workflow's business"


def answer(tokens: int, stop_reason: str = "stop") -> Experience:
    """An answer of so many tokens in its last turn, which a turn of three and an observation come before, and one comes
    after."""
    mask = np.array([0, 1, 1, 1, 0] + [1] * tokens + [0], dtype=np.uint8)
    [row] = rows(stop_reason)
    return dataclasses.replace(row, token_ids=np.arange(len(mask), dtype=np.int32), prompt_length=1, action_mask=mask)


@pytest.mark.parametrize(
    ("tokens", "reward"), [(1, 1.0), (6, 1.0), (7, 0.75), (8, 0.5), (9, 0.25), (10, 0.0), (12, 0.0)]
)
def test_the_soft_overlong_punishment_by_hand(tokens: int, reward: float) -> None:
    # At most 10 tokens, of which the last 4 cost 1/4 each.
    soft = config(truncated="soft", overlong_buffer=4)
    group = score([answer(tokens, "length" if tokens >= 10 else "stop")], [RewardResult(1.0)], soft)
    assert group.rewards == [group.rows[0].reward] == [reward]


def test_answers_that_are_all_wrong_are_not_told_apart_by_their_length() -> None:
    soft = config(truncated="soft", overlong_buffer=4)
    long = [answer(length) for length in (1, 1, 8)]
    wrong = score(long, [RewardResult(0.0)] * 3, soft)
    assert wrong.rewards == [0.0, 0.0, -0.5]
    group = drop_zero_variance(wrong, build("dapo"))
    assert group.rows == [] and group.dropped == {"zero_variance": 3}
    mixed = score(long, [RewardResult(value) for value in (0.0, 0.0, 0.5)], soft)
    assert mixed.rewards == [0.0] * 3
    assert drop_zero_variance(mixed, build("dapo")) is mixed, "one is better, if too long"


def test_the_soft_overlong_punishment_is_not_for_rewards_that_the_workflow_gave() -> None:
    own = dataclasses.replace(answer(10), reward=0.5)
    assert score([own], [RewardResult(0.5)], config(truncated="soft", overlong_buffer=4)).rewards == [0.5]


def test_a_masked_answer_keeps_its_reward_and_counts_as_dropped() -> None:
    scored = score(
        rows("stop", "length", "stop"), [RewardResult(float(n)) for n in (3, 0, 0)], config(truncated="mask")
    )
    group = mask_truncated(scored)
    assert [(row.status, row.reward) for row in group.rows] == [("finished", 3.0), ("masked", 0.0), ("finished", 0.0)]
    assert group.dropped == {"truncated": 1} and group.report.rows == 3 and group.report.truncated == 1
    cut = mask_truncated(score(rows("length", "length"), [RewardResult(1.0)] * 2, config(truncated="mask")))
    assert cut.rows == [] and cut.dropped == {"truncated": 2}, "nothing would be left to train"


def test_an_answer_that_repeats_itself_is_truncated_and_loses_the_penalty_but_not_in_the_eyes_of_filters() -> None:
    results = [RewardResult(1.0), RewardResult(1.0)]
    scored = score(rows("stop", "repetition"), results, config(truncated="score", repetition_penalty=0.25))
    assert scored.rewards == [1.0, 0.75] and scored.raw_rewards == [1.0, 1.0] and scored.report.truncated == 1
    assert score(rows("stop", "repetition"), results, config()).rewards == [1.0, 0.0]
    masked = mask_truncated(score(rows("stop", "repetition"), results, config(truncated="mask")))
    assert masked.dropped == {"truncated": 1}


def test_a_buffer_for_overlong_answers_and_its_punishment_need_each_other() -> None:
    for values in ({"truncated": "soft"}, {"overlong_buffer": 4}, {"truncated": "mask", "overlong_buffer": 4}):
        with pytest.raises(ValueError, match=r"[Gg]ive both or neither"):
            config(**values)


def baseline(*results: RewardResult) -> Any:
    scored = score(rows("stop", "stop"), [RewardResult(1.0), RewardResult(0.5)], config())
    return with_baseline(scored, score(rows(*["stop"] * len(results)), list(results), config()))


def test_a_greedy_answer_is_the_baseline_and_not_among_the_sampled() -> None:
    group = baseline(RewardResult(0.75), RewardResult(0.25))
    assert [row.greedy_reward for row in group.rows] == [0.5, 0.5]
    assert group.report.rows == 2 and group.report.reward_sum == 1.5


def test_without_the_reward_of_the_greedy_answer_a_group_is_dropped_and_says_why() -> None:
    group = baseline(UNKNOWN)
    assert group.rows == [] and group.dropped == {"baseline_unknown": 2}
    assert group.unknown == UNKNOWN.reason and not group.rewards


def test_wilson_interval_by_hand() -> None:
    # 5 of 10, z = 2: centre 0.5, half = 2 / 1.4 * sqrt(0.025 + 0.01) = 0.26726
    low, high = wilson_interval(5, 10, z=2.0)
    assert (low, high) == (pytest.approx(0.5 - 0.267261, abs=1e-6), pytest.approx(0.5 + 0.267261, abs=1e-6))
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(0, 500)[0] == 0.0 and wilson_interval(500, 500)[1] == 1.0


def test_only_tokens_that_are_new_enough_are_trained_and_the_group_is_as_old_as_these() -> None:
    spans = [(VersionSpan(2, 3, 4), VersionSpan(3, 4, 5)), (VersionSpan(2, 4, 4),), (VersionSpan(2, 4, 5),)]
    sampled = [dataclasses.replace(row, weight_versions=each, logprobs=np.array([0, 0, -1, -2], np.float32))
               for row, each in zip(rows("stop", "stop", "stop"), spans, strict=True)]  # fmt: skip
    scored = score(sampled, [RewardResult(1.0)] * 3, config())
    group = mask_old(scored, 5)
    assert [row.action_mask.tolist()[2:] for row in group.rows] == [[0, 1], [1, 1], [1, 1]]
    assert group.rows[0].logprobs.tolist() == [0, 0, 0, -2] and group.rows[0].weight_versions == (spans[0][1],)
    assert [row.status == MASKED for row in group.rows] == [False, True, False]
    assert group.dropped == {"old_tokens": 1} and sampled[0].action_mask.tolist() == [0, 0, 1, 1]
    [stored] = stored_rows(to_batch(group.rows), np.array([0]), np.zeros(1), 0, 0)
    assert stored.version == 5
    assert mask_old(scored, 4).rows == scored.rows and mask_old(scored, 6).rows == []


def test_a_row_whose_turns_have_rewards_by_number_is_masked_rather_than_one_of_its_turns() -> None:
    [row] = rows("stop")
    mask, spans = np.array([1, 0, 1, 1], np.uint8), (VersionSpan(0, 1, 4), VersionSpan(2, 3, 4), VersionSpan(3, 4, 5))
    turns = dataclasses.replace(row, action_mask=mask, weight_versions=spans, metrics={"turn_reward_1": 1.0})
    young = dataclasses.replace(turns, weight_versions=(VersionSpan(0, 3, 5), VersionSpan(2, 4, 5)))
    half = dataclasses.replace(turns, weight_versions=(VersionSpan(0, 1, 5), *spans[1:]))
    scored = score([turns, young, half], [RewardResult(1.0)] * 3, config())
    group = mask_old(scored, 5)
    assert [each.status == MASKED for each in group.rows] == [True, False, False]
    assert [each.action_mask.tolist() for each in group.rows] == [[1, 0, 1, 1], [1, 0, 1, 1], [1, 0, 0, 1]]


def test_a_row_is_masked_rather_than_the_token_of_a_step_that_has_a_reward() -> None:
    [row] = rows("stop")
    mask, spans = np.array([1, 0, 1, 1], np.uint8), (VersionSpan(0, 1, 5), VersionSpan(2, 3, 4), VersionSpan(3, 4, 5))
    base = dataclasses.replace(row, action_mask=mask, weight_versions=spans)
    old, young = (dataclasses.replace(base, metrics={f"token_reward_{token}": 1.0}) for token in (2, 3))
    group = mask_old(score([old, young], [RewardResult(1.0)] * 2, config()), 5)
    assert [each.status == MASKED for each in group.rows] == [True, False]
    assert [each.action_mask.tolist() for each in group.rows] == [[1, 0, 1, 1], [1, 0, 0, 1]]


# Shaping


def of_lengths(*lengths: int) -> list[Experience]:
    """Rows with so many sampled tokens."""
    sized = []
    for index, length in enumerate(lengths):
        mask = np.array([0, 0] + [1] * length, dtype=np.uint8)
        [row] = rows("stop")
        sized.append(
            row.with_fields(
                experience_id=f"g/{index}",
                token_ids=np.arange(len(mask), dtype=np.int32),
                action_mask=mask,
                logprobs=np.zeros(len(mask), np.float32),
            )
        )
    return sized


@pytest.mark.parametrize(
    ("step", "warm_up", "earned"),
    # lambda of 10, 20, 30 tokens is 0.5, 0, -0.5; the wrong one of 10 earns nothing for being short.
    [
        (0, 0, [1.5, 1.0, 0.5, 0.0]),
        (0, 4, [1.0, 1.0, 1.0, 0.0]),
        (1, 4, [1.125, 1.0, 0.875, 0.0]),
        (9, 4, [1.5, 1.0, 0.5, 0.0]),
    ],
)
def test_shorter_right_answers_of_a_group_earn_more_once_it_is_warm(
    step: int, warm_up: int, earned: list[float]
) -> None:
    results = [RewardResult(1.0 - 1e-16), RewardResult(1.0), RewardResult(1.0), RewardResult(0.0)]
    rules = config(length={"warm_up": warm_up})
    group = apply_rewards(of_lengths(10, 20, 30, 10), results, rules, max_tokens=64, step=step)
    assert group.rewards == pytest.approx(earned) and group.rewards == [row.reward for row in group.rows]
    assert group.raw_rewards == pytest.approx([1.0, 1.0, 1.0, 0.0])


def test_long_wrong_answers_lose_and_equal_lengths_earn_nothing() -> None:
    wrong = score(of_lengths(10, 20), [RewardResult(0.0)] * 2, config(length={"weight": 2.0}))
    assert wrong.rewards == [0.0, -1.0]
    assert score(of_lengths(7, 7), [RewardResult(1.0)] * 2, config(length={})).rewards == [1.0, 1.0]
    assert score([], [], config(length={})).rewards == []


def test_rewards_of_a_workflow_are_kept_whatever_their_lengths() -> None:
    short, long = of_lengths(10, 20)
    rows = [short.with_fields(reward=0.25), long]
    assert score(rows, [RewardResult(0.25), RewardResult(1.0)], config(length={})).rewards == [0.25, 0.5]


def test_a_group_whose_answers_differ_in_shaping_alone_has_no_variance() -> None:
    results = [RewardResult(0.0, shaping=0.5), RewardResult(0.0, shaping=-0.5)]
    scored = score(rows("stop", "stop"), results, config())
    assert scored.rewards == [0.5, -0.5] and scored.raw_rewards == [0.0, 0.0]
    assert drop_zero_variance(scored, build("grpo")).dropped == {"zero_variance": 2}


def test_rewards_of_turns_are_kept_with_the_row() -> None:
    [row] = score(rows("stop"), [RewardResult(1.0, turns=(0.25, 0.75))], config()).rows
    assert row.metrics == {"turn_reward_0": 0.25, "turn_reward_1": 0.75} and row.reward == 1.0
