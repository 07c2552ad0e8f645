"""What becomes of a group: rewards, unknown rewards, truncated answers, advantages, zero variance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rayrft.algorithms import build
from rayrft.buffer.validation import stored_rows
from rayrft.config.reward import RewardConfig
from rayrft.experience import MASKED, Experience, VersionSpan, to_batch
from rayrft.explorer import scoring
from rayrft.explorer.scoring import apply_rewards, drop_zero_variance, mask_old, mask_truncated, with_baseline
from rayrft.rewards import RewardResult

UNKNOWN = RewardResult(None, reason="ZeroDivisionError: division by zero")
SOFT = {"truncated": "soft", "overlong_buffer": 4}
"""At most 10 tokens, of which the last 4 cost 1/4 each."""


def made(mask: Sequence[int] = (0, 0, 1, 1), stop_reason: str = "stop", name: str = "g/0", **more: Any) -> Experience:
    ids, zeros = np.arange(len(mask), dtype=np.int32), np.zeros(len(mask), np.float32)
    prompt = list(mask).index(1)
    row = Experience(name, "g", "t", ids, prompt, np.array(mask, np.uint8), zeros, stop_reason=stop_reason)
    return row.with_fields(**more)


def rows(*stop_reasons: str) -> list[Experience]:
    return [made(stop_reason=why, name=f"g/{at}") for at, why in enumerate(stop_reasons)]


def of_lengths(*lengths: int) -> list[Experience]:
    """Rows with so many sampled tokens."""
    return [made([0, 0, *[1] * length], name=f"g/{at}") for at, length in enumerate(lengths)]


def answer(tokens: int, stop_reason: str = "stop", **more: Any) -> Experience:
    """An answer of so many tokens in its last turn; a turn of three and an observation come before it, one after."""
    return made([0, 1, 1, 1, 0, *[1] * tokens, 0], stop_reason, **more)


def score(
    rows: list[Experience], results: Sequence[float | RewardResult], step: int = 0, **rules: Any
) -> scoring.ScoredGroup:
    given = [each if isinstance(each, RewardResult) else RewardResult(each) for each in results]
    return apply_rewards(rows, given, RewardConfig(**rules), max_tokens=10, step=step)


@pytest.mark.parametrize("name", ["grpo", "remax", "rloo", "reinforce_pp", "ppo", "asymre"])
def test_a_group_that_the_trainer_cannot_tell_apart_is_dropped_where_nothing_is_learnt_from_it(name: str) -> None:
    scored = with_baseline(score(rows("stop", "stop"), [0.3, 0.3 + 1e-11]), score(rows("stop"), [0.3 - 1e-11]))
    group = drop_zero_variance(scored, build(name))
    if name in ("grpo", "remax", "rloo"):
        assert group.rows == [] and group.dropped == {"zero_variance": 2}
        assert group.report.rows == 2, "it was sampled nevertheless"
    else:
        assert group is scored


@pytest.mark.parametrize(
    ("policy", "kept", "dropped"),
    [("drop_row", 1, {"reward_unknown": 1}), ("drop_group", 0, {"reward_unknown": 2}), ("fallback", 2, {})],
)
def test_an_unknown_reward_is_not_zero(policy: Any, kept: int, dropped: dict[str, int]) -> None:
    group = score(rows("stop", "stop"), [1.0, UNKNOWN], on_unknown=policy, fallback=0.25)
    assert len(group.rows) == kept and group.dropped == dropped
    assert group.unknown == "ZeroDivisionError: division by zero"
    if policy == "fallback":
        assert group.rewards == [1.0, 0.25]
        assert group.rows[1].error == UNKNOWN.reason


def test_the_unknown_reward_of_an_answer_that_was_cut_is_unknown() -> None:
    group = score(rows("stop", "length"), [1.0, UNKNOWN])
    assert group.rewards == [1.0] and group.dropped == {"reward_unknown": 1} and group.unknown == UNKNOWN.reason
    assert score(rows("length"), [UNKNOWN], on_unknown="fallback", fallback=0.25).rewards == [0.0]


def test_a_trajectory_of_several_rows_is_dropped_whole_where_one_is_unknown() -> None:
    parts = [made(name=name) for name in ("g/0/0", "g/0/1", "g/1/0", "g/1/1")]
    results = [1.0, UNKNOWN, 0.5, 0.25]
    group = score(parts, results)
    assert [row.experience_id for row in group.rows] == ["g/1/0", "g/1/1"] and group.rewards == [0.5, 0.25]
    assert group.dropped == {"reward_unknown": 2}
    assert len(score(parts, results, on_unknown="fallback").rows) == 4


@pytest.mark.parametrize(("worth", "earned"), [(1.0, 0.0), (-1.0, -1.0)])
def test_an_answer_without_its_end_earns_nothing_unless_asked_for(worth: float, earned: float) -> None:
    assert score(rows("stop", "length"), [worth, worth]).rewards == [worth, earned]
    assert score(rows("stop", "length"), [worth, worth], truncated="score").rewards == [worth, worth]


@pytest.mark.parametrize(("rules", "other"), [({}, 1.0), (SOFT, 1.0), ({"length": {}}, 1.5)])
def test_a_reward_that_the_workflow_gave_stays_whatever_its_length_and_end(rules: Any, other: float) -> None:
    own = answer(10, "length", reward=0.75)
    assert score([own, answer(1, name="g/1")], [0.75, 1.0], **rules).rewards == [0.75, other]


@pytest.mark.parametrize(
    ("tokens", "reward"), [(1, 1.0), (6, 1.0), (7, 0.75), (8, 0.5), (9, 0.25), (10, 0.0), (12, 0.0)]
)
def test_the_soft_overlong_punishment_by_hand(tokens: int, reward: float) -> None:
    group = score([answer(tokens, "length" if tokens >= 10 else "stop")], [1.0], **SOFT)
    assert group.rewards == [group.rows[0].reward] == [reward]


def test_answers_that_are_all_wrong_are_not_told_apart_by_their_length_or_by_shaping() -> None:
    long = [answer(length) for length in (1, 1, 8)]
    wrong = score(long, [0.0] * 3, **SOFT)
    shaped = score(long, [RewardResult(0.0, shaping=by) for by in (0.5, 0.0, -0.5)])
    assert wrong.rewards == [0.0, 0.0, -0.5] and shaped.rewards == [0.5, 0.0, -0.5]
    for group in (wrong, shaped):
        dropped = drop_zero_variance(group, build("dapo"))
        assert dropped.rows == [] and dropped.dropped == {"zero_variance": 3} and group.raw_rewards == [0.0] * 3
    mixed = score(long, [0.0, 0.0, 0.5], **SOFT)
    assert mixed.rewards == [0.0] * 3
    assert drop_zero_variance(mixed, build("dapo")) is mixed, "one is better, if too long"


def test_a_masked_answer_keeps_its_reward_and_counts_as_dropped() -> None:
    group = mask_truncated(score(rows("stop", "length", "stop"), [3.0, 0.0, 0.0], truncated="mask"))
    assert [(row.status, row.reward) for row in group.rows] == [("finished", 3.0), ("masked", 0.0), ("finished", 0.0)]
    assert group.dropped == {"truncated": 1} and group.report.rows == 3 and group.report.truncated == 1
    cut = mask_truncated(score(rows("length", "length"), [1.0, 1.0], truncated="mask"))
    assert cut.rows == [] and cut.dropped == {"truncated": 2}, "nothing would be left to train"


def test_an_answer_that_repeats_itself_is_truncated_and_loses_the_penalty_but_not_in_the_eyes_of_filters() -> None:
    repeats = rows("stop", "repetition")
    scored = score(repeats, [1.0, 1.0], truncated="score", repetition_penalty=0.25)
    assert scored.rewards == [1.0, 0.75] and scored.raw_rewards == [1.0, 1.0] and scored.report.truncated == 1
    assert score(repeats, [1.0, 1.0]).rewards == [1.0, 0.0]
    assert mask_truncated(score(repeats, [1.0, 1.0], truncated="mask")).dropped == {"truncated": 1}


def test_a_buffer_for_overlong_answers_and_its_punishment_need_each_other() -> None:
    for values in ({"truncated": "soft"}, {"overlong_buffer": 4}, {"truncated": "mask", "overlong_buffer": 4}):
        with pytest.raises(ValueError, match=r"[Gg]ive both or neither"):
            RewardConfig(**values)  # type: ignore[arg-type]


def test_the_baseline_is_the_mean_of_the_greedy_answer_and_without_it_a_group_is_dropped_and_says_why() -> None:
    sampled = score(rows("stop", "stop"), [1.0, 0.5])
    known = with_baseline(sampled, score(rows("stop", "stop"), [0.75, 0.25]))
    assert [row.greedy_reward for row in known.rows] == [0.5, 0.5]
    group = with_baseline(sampled, score(rows("stop"), [UNKNOWN]))
    assert group.rows == [] and group.dropped == {"baseline_unknown": 2} and group.report.rows == 2
    assert group.unknown == UNKNOWN.reason and not group.rewards


def test_only_tokens_that_are_new_enough_are_trained_and_the_group_is_as_old_as_these() -> None:
    spans = [(VersionSpan(2, 3, 4), VersionSpan(3, 4, 5)), (VersionSpan(2, 4, 4),), (VersionSpan(2, 4, 5),)]
    logprobs = np.array([0, 0, -1, -2], np.float32)
    sampled = [made(weight_versions=each, logprobs=logprobs) for each in spans]
    scored = score(sampled, [1.0] * 3)
    group = mask_old(scored, 5)
    assert [row.action_mask.tolist()[2:] for row in group.rows] == [[0, 1], [1, 1], [1, 1]]
    assert group.rows[0].logprobs.tolist() == [0, 0, 0, -2] and group.rows[0].weight_versions == (spans[0][1],)
    assert [row.status == MASKED for row in group.rows] == [False, True, False]
    assert group.dropped == {"old_tokens": 1} and sampled[0].action_mask.tolist() == [0, 0, 1, 1]
    [stored] = stored_rows(to_batch(group.rows), np.array([0]), np.zeros(1), 0, 0)
    assert stored.version == 5
    assert mask_old(scored, 4).rows == scored.rows and mask_old(scored, 6).rows == []


def turned(*versions: int, **metrics: float) -> Experience:
    """Two turns, of one and two tokens, each token under its version."""
    spans = tuple(VersionSpan(at, at + 1, version) for at, version in zip((0, 2, 3), versions, strict=True))
    return made((1, 0, 1, 1), weight_versions=spans, metrics=metrics)


@pytest.mark.parametrize(
    ("row", "mask"),
    [
        (turned(4, 4, 5, turn_reward_1=1.0), None),
        (turned(5, 5, 5, turn_reward_1=1.0), [1, 0, 1, 1]),
        (turned(5, 4, 5, turn_reward_1=1.0), [1, 0, 0, 1]),
        (turned(5, 4, 5, token_reward_2=1.0), None),
        (turned(5, 4, 5, token_reward_3=1.0), [1, 0, 0, 1]),
    ],
)
def test_a_row_is_masked_rather_than_a_turn_with_a_number_or_the_token_of_a_step_that_has_a_reward(
    row: Experience, mask: list[int] | None
) -> None:
    found, _ = mask_old(score([row, made(name="g/1")], [1.0, 1.0]), 5).rows
    assert (found.status == MASKED, found.action_mask.tolist()) == (mask is None, mask or [1, 0, 1, 1])


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
def test_shorter_right_answers_of_a_group_earn_more_once_warm(step: int, warm_up: int, earned: list[float]) -> None:
    group = score(of_lengths(10, 20, 30, 10), [1.0 - 1e-16, 1.0, 1.0, 0.0], step, length={"warm_up": warm_up})
    assert group.rewards == pytest.approx(earned) and group.rewards == [row.reward for row in group.rows]
    assert group.raw_rewards == pytest.approx([1.0, 1.0, 1.0, 0.0])


def test_long_wrong_answers_lose_and_equal_lengths_earn_nothing() -> None:
    assert score(of_lengths(10, 20), [0.0, 0.0], length={"weight": 2.0}).rewards == [0.0, -1.0]
    assert score(of_lengths(7, 7), [1.0, 1.0], length={}).rewards == [1.0, 1.0]
    assert score([], [], length={}).rewards == []
