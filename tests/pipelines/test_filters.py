"""Filters and priorities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rayrft.errors import ConfigError
from tests.errors import about
from tests.pipelines.small import applied, reasons, rows


def kept(name: str, column: str, values: list[Any], **options: Any) -> list[Any]:
    """What a filter on one column keeps."""
    found, _ = applied(name, rows(**{column: values}), **options)
    return [row[column] for row in found]


def priorities(name: str, batch: pa.RecordBatch, **options: Any) -> list[float | None]:
    found, _ = applied(name, batch, **options)
    return [None if row["priority"] is None else round(row["priority"], 4) for row in found]


def test_an_expression_keeps_rows_that_meet_it() -> None:
    batch = rows(reward=[1.0, 0.2, None, 0.9], turns=[["a"], ["a"], ["a"], ["a"] * 7])
    found, outcome = applied("expression", batch, where="reward > 0.5 and len(turns) < 6")
    assert [row["reward"] for row in found] == [1.0]
    assert reasons(outcome) == ["not reward > 0.5 and len(turns) < 6"] * 3


@pytest.mark.parametrize(
    "where", ["read_text('/etc/passwd') is not null", "sum(reward) > 1", "reward > 1; drop table x"]
)
def test_an_expression_reads_no_files_and_one_row_at_a_time(where: str) -> None:
    with pytest.raises(ConfigError, check=about("operators.0.where", where)):
        applied("expression", rows(reward=[1.0]), where=where)


def test_a_band_includes_its_bounds() -> None:
    values = [0.0, 0.125, 0.5, 0.875, 1.0, None]
    assert kept("difficulty_band", "pass_rate", values, min=0.125, max=0.875) == [0.125, 0.5, 0.875, None]
    assert kept("difficulty_band", "pass_rate", values, min=0.125, max=1, unknown="drop") == [0.125, 0.5, 0.875, 1.0]


def test_a_bound_is_met_up_to_rounding() -> None:
    third = float(np.float32(0.3))
    assert kept("difficulty_band", "pass_rate", [0.1 * 3, third, 0.29, 0.31], min=0.3, max=0.3) == [0.1 * 3, third]
    repeating = " ".join(["one two"] * 4 + ["three", "four", "five"])  # 3 of its 10 pairs of words are new
    assert kept("repetition", "answer", [repeating], ngram=2, min_words=1, max_share=0.5) == [repeating]


def test_outliers_are_those_of_their_group() -> None:
    batch = rows(
        group_id=["a"] * 6 + ["b"] * 6 + ["c"] * 3,
        reward=[1.0, 1.1, 0.9, 1.0, 1.05, 9.0, 9.0, 9.1, 8.9, 9.0, 9.05, None, 0.0, 0.0, 50.0],
    )
    found, outcome = applied("outliers", batch)
    assert reasons(outcome) == ["reward is an outlier: 9"] and outcome.left_out[0].values["group_id"] == "a"
    assert len(found) == 14
    batch = rows(group_id=["a"] * 6, token_ids=[[1] * n for n in (10, 11, 12, 10, 11, 200)])
    assert reasons(applied("outliers", batch, column="token_ids")[1]) == ["token_ids is an outlier: 200"]


@pytest.mark.parametrize(
    ("rewards", "gone"),
    [
        ([0.0] * 18 + [0.1, 1.0], ["1"]),
        ([0.0, 1.0] * 4, []),
        ([0.0] * 6 + [1.0] * 2, []),
        ([0.0] * 19 + [1.0], []),
        ([1.0] * 18 + [1 - 2**-24, 0.0], []),
        ([1.0] * 4 + [float("inf")], ["inf"]),
        ([0.0, 1.0, 2.0, 1.0, float("inf"), float("-inf")], ["inf", "-inf"]),
        ([1.0, 1.0, float("inf")], []),
    ],
)
def test_outliers_are_far_away_or_infinite_and_no_value_of_two(rewards: list[float], gone: list[str]) -> None:
    _, outcome = applied("outliers", rows(group_id=["a"] * len(rewards), reward=rewards))
    assert reasons(outcome) == [f"reward is an outlier: {each}" for each in gone]


def test_texts_that_repeat_themselves_are_left_out() -> None:
    good = "She buys 3 apples and 4 pears, eats one of each, and then counts what is left: 2 apples and 3 pears."
    given = [good, "I think so. " * 20, "no " * 5, "a" * 60, "-" * 60, "=====\n" * 3 + good, "", None]
    assert kept("repetition", "answer", given) == [good, "no " * 5, given[5], "", None]


def test_texts_that_mix_scripts_are_left_out() -> None:
    english = "The answer is found by adding both of the numbers."
    given = [
        english,
        "首先我们把两个数字加起来然后得到最后的答案就是这样",
        "首先我们把两个数字 add them together and then 得到最后的答案 which is right",
        "Пусть x и y — два числа, тогда их сумма равна z, что и требовалось",
        "これは日本語の文章です。漢字とひらがなとカタカナが混ざっています",
        "答案是 $\\frac{abc}{def}$ 因为我们把两个数字加起来然后得到最后的答案",
        "Naïve café déjà vu à la crème brûlée",
        *("é 三", None),
        "\\(" * 200_000 + "\\[" * 200_000 + english,  # in time proportional to its length
    ]
    assert kept("language_mixing", "answer", given) == [text for text in given if text != given[2]]


@pytest.mark.parametrize(("must", "expected"), [("contain", [0, 2]), ("be", [2]), ("lack", [1, 3])])
def test_a_format_is_contained_the_whole_or_lacking(must: str, expected: list[int]) -> None:
    given = ["so \\boxed{3}\nindeed", "3", "\\boxed{3}", ""]
    assert kept("format", "answer", given, pattern=r"\\boxed\{.+?\}", must=must) == [given[index] for index in expected]


def test_the_top_share_is_rounded_up_and_of_equal_scores_the_first() -> None:
    assert kept("top_share", "priority", [1.0, 3.0, None, 2.0, 3.0], share=0.5) == [3.0, 2.0, 3.0]
    assert kept("top_share", "priority", [1.0, 1.0, 1.0], share=0.34) == [1.0, 1.0]
    assert kept("top_share", "priority", [1.0, None, 0.0], share=1.0) == [1.0, 0.0]
    batch = rows(priority=[1.0, 2.0, 5.0, 6.0], group_id=["a", "a", "b", "b"])
    found, _ = applied("top_share", batch, share=0.5, by="group_id")
    assert [row["priority"] for row in found] == [2.0, 6.0]


@pytest.mark.parametrize(
    ("name", "options", "column", "expected"),
    [
        ("top_share", {"column": "reward", "share": 0.5, "by": "group_id"}, "reward", [5.0, 1.0, 2.0, 3.0, 9.0]),
        ("outliers", {"min_rows": 3}, "reward", [5.0, 4.0, 1.0, 2.0, 3.0, 9.0]),
        ("reward_deviation", {}, "priority", [0.5, 0.5, 0.0, 0.0, 0.0, 0.0]),
        ("pass_rate", {"by": "group_id", "right": 4.5}, "pass_rate", [0.5, 0.5, 0.0, 0.0, 0.0, 1.0]),
    ],
)
def test_a_row_without_a_group_is_a_group_of_its_own(
    name: str, options: dict[str, Any], column: str, expected: list[float]
) -> None:
    batch = rows(group_id=["a", "a", None, None, None, None], reward=[5.0, 4.0, 1.0, 2.0, 3.0, 9.0])
    assert [row[column] for row in applied(name, batch, **options)[0]] == expected


@pytest.mark.parametrize(("share", "count"), [(0.07, 7), (0.55, 55), (0.071, 8), (1e-9, 1), (1.0, 100), (0.29, 29)])
def test_a_share_is_one_of_decimal_fractions(share: float, count: int) -> None:
    assert len(kept("top_share", "priority", [float(number) for number in range(100)], share=share)) == count


def test_difficulty_and_uncertainty_come_from_the_pass_rate() -> None:
    batch = rows(pass_rate=[0.0, 0.25, 0.5, 1.0, None])
    assert priorities("difficulty", batch) == [1, 0.75, 0.5, 0, None]
    assert priorities("uncertainty", batch) == [0, 0.75, 1, 0, None]


def test_reward_deviation_is_that_of_the_group() -> None:
    batch = rows(group_id=["a", "b", "a", "b", "c"], reward=[0.0, 1.0, 1.0, 1.0, None])
    assert priorities("reward_deviation", batch) == [0.5, 0, 0.5, 0, None]


def test_human_scores_are_scaled_and_clipped() -> None:
    labels = pa.array([{"score": "4"}, {"score": "9"}, {"score": "good"}, {}, None], pa.map_(pa.string(), pa.string()))
    batch = rows(x=[1, 2, 3, 4, 5]).append_column("labels", labels)
    assert priorities("human_score", batch, scale=[1, 5]) == [0.75, 1, None, None, None]


def test_novelty_is_the_share_of_what_no_other_row_says() -> None:
    given = ["one two three four five six", "one two three four nine ten", "a b c d e f", "too short", "c c c c c c c"]
    assert priorities("novelty", rows(question=given)) == [0.5, 0.5, 1, None, 1]
    assert priorities("novelty", rows(question=["a b c d", "a b c d", "a b c d"])) == [0, 0, 0]


def test_a_sample_is_drawn_by_ids() -> None:
    batch = rows(question=[f"question {number}" for number in range(200)])
    backwards = batch.take(pa.array(range(199, -1, -1)))
    one, more, same, other = (
        {row["id"] for row in applied("sample", given, share=share, seed=seed)[0]}
        for given, share, seed in ((batch, 0.2, 0), (batch, 0.4, 0), (backwards, 0.2, 0), (batch, 0.2, 1))
    )
    assert 20 < len(one) < 60 and one < more
    assert same == one != other
