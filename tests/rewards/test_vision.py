"""Answers about pictures: what counts as right, and how much of it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrft.rewards import RewardResult
from tests.rewards import scored
from tests.rewards.scored import right_and_wrong
from tests.rewards.vision_on_pictures import digits, disagreements, rectangles


def result(kind: str, answer: str, response: str, options: Any = None, /, **metadata: Any) -> RewardResult:
    return scored.result("vision", answer, response, options, kind=kind, **metadata)


def value(kind: str, answer: str, response: str, options: Any = None, /, **metadata: Any) -> Any:
    return result(kind, answer, response, options, **metadata).value


# A count, and responses that state it; after ≠ those that count otherwise or leave it open.
COUNTS = r"""
3     3  three  There are 3 cats.  I see Three dogs  The answer is 3.  \boxed{3}  3个  图中有三只猫  答案：３
3     ≠  3 or 4  some  3.5  13  between 2 and 3  x3  一般  thirty-three  three dozen  3 hundred  3万  第三个  二三个
3     ≠  three and a half  \boxed{3}, \boxed{4}  1,3
10    十个
12    十二个
20    二十个
35    三十五个  Thirty five cats
2     两个
120   一百二十个
105   一百零五个  There are a hundred and five birds.
2304  两千三百零四个  two thousand, three hundred and four
21    twenty-one
100   one hundred
121   one hundred twenty-one
24    two dozen
36    3 dozen
500   5 hundred
1200  1,200 cats  ≠  1,200,0  1, 200
12345678901  12345678901  12,345,678,901
"""


@pytest.mark.parametrize(("number", "said", "right"), right_and_wrong(COUNTS))
def test_a_count_is_recognised_in_digits_and_words_as_a_whole(number: str, said: str, right: bool) -> None:
    assert value("count", number, said) == float(right)
    for part in {number[0], number[-1], number[-2:]} - {number}:
        assert not right or value("count", part, said) == 0.0


def test_text_is_right_as_far_as_it_is_the_same_and_choices_are_those_of_school() -> None:
    assert value("text", "No Entry", "no  entry\n") == 1.0
    assert value("text", "No Entry", "The answer is No Entry") == 1.0
    assert value("text", "The answer is 42", "The answer is 42") == 1.0
    assert value("text", "42", "I read it.\nThe answer is 42") == 1.0
    assert value("text", "abcd", "abce") == 0.75
    assert value("text", "abcd", "") == 0.0
    assert value("text", "出口", "出口") == 1.0
    assert value("text", "abcd", "abcd" * 10_000) < 0.05
    assert value("text", "abcd", "abce", {"threshold": 0.7}) == 1.0
    assert value("text", "abcd", "abce", {"threshold": 0.8}) == 0.0
    assert value("choice", "B", "The answer is (B)", options=["a cat", "a dog"]) == 1.0
    assert value("choice", "B", "a cat", options=["a cat", "a dog"]) == 0.0


def test_points_may_be_written_in_many_ways_and_what_is_no_point_is_wrong() -> None:
    for said in (
        *("(10, 20)", "[10,20]", '{"x": 10, "y": 20}', "<point>10 20</point>", "x1=10, y1=20", "位于10,20处"),
        *("The answer is (10.0, 20).", '```json\n[{"point_2d": [10, 20], "label": "cat 1"}]\n```'),
    ):
        assert value("point", "10, 20", said) == 1.0
        assert value("point", "11, 20", said) == 0.0
        assert value("point", "13, 24", said, radius=5) == 1.0
        assert value("point", "13, 24", said, radius=4.9) == 0.0
        assert value("point", "", said, box=[0, 0, 10, 20]) == 1.0
        assert value("point", "", said, box=[11, 0, 20, 20]) == 0.0
    for said in ("", "10", "10, 20, 30", "nowhere", "1e9999, 4", "(10, 20)\n\nBut I cannot see it."):
        assert value("point", "10, 20", said, radius=10**6) == 0.0


def test_boxes_are_right_as_far_as_they_overlap_and_may_fill_several_lines() -> None:
    assert value("box", "0, 0, 10, 10", "[0, 0, 10, 10]") == 1.0
    assert value("box", "0, 0, 10, 10", '{"bbox_2d": [0, 0, 10, 5]}') == 0.5
    assert value("box", "0, 0, 10, 10", "5 0 15 10") == pytest.approx(50 / 150)
    assert value("box", "0, 0, 10, 10", "20, 20, 30, 30") == 0.0
    assert value("box", "0, 0, 10, 10", "10, 10, 0, 0") == 0.0, "its corners are in another order"
    assert value("box", "0, 0, 10, 10", "0, 0, 10, 10, 10, 10") == 0.0, "two boxes hedge"
    assert value("box", "0, 0, 10, 10", "0, 0, 10, 6", {"threshold": 0.5}) == 1.0
    for said in (
        '```json\n[{"bbox_2d": [1, 2, 30, 40], "label": "cat 1"}]\n```',
        'The answer is:\n```json\n[\n  {"bbox_2d": [1, 2, 30, 40]}\n]\n```\nThat is the cat.',
        '{\n  "bbox_2d": [\n    1,\n    2,\n    30,\n    40\n  ]\n}',
        "I see 2 cats.\n\nTop-left: (1, 2)\nBottom-right: (30, 40)",
        "[[1, 2], [30, 40]]",
    ):
        assert value("box", "1, 2, 30, 40", said) == 1.0
        assert value("box", "30, 40, 50, 60", said) == 0.0
        assert value("box", "1, 2, 30, 40", said, {"strict": True}) == 0.0
        assert value("box", "1, 2, 30, 40", said.replace("40", "40, 50")) == 0.0


def test_grids_are_right_as_far_as_their_cells_are_and_may_stand_among_words() -> None:
    right = "XO.\n.X.\nO.X"
    assert value("grid", right, right) == 1.0
    assert value("grid", right, f"I see:\n```\n{right}\n```\nand nothing else") == 1.0
    assert value("grid", right, f"This is it:\n{right}") == 1.0
    assert value("grid", right, right.replace("O", "X")) == pytest.approx(7 / 9)
    assert value("grid", right, "XO.\n.X.") == 0.0
    assert value("grid", right, "XO.\n.X.\nO.") == 0.0
    assert value("grid", "red, blue\ngreen, red", "| red | blue |\n| green | red |") == 1.0
    for said in (
        *("[[1, 2],\n [3, 4]]", '[["1", "2"], ["3", "4"]]', "```json\n[[1, 2], [3, 4]]\n```"),
        "| 1 | 2 |\n|---|---|\n| 3 | 4 |",
        *("The answer is [[1,2],[3,4]].", "<answer>1 2\n3 4</answer>", "<answer>\n12\n34\n</answer>"),
        *("The grid:\n1 2\n3 4\nThat is what I see.", "43\n21\n\nNo, it is\n12\n34\n\nI hope this helps!"),
    ):
        for right, worth in (("12\n34", 1), ("1 2\n3 4", 1), ("12\n35", 0.75), ("12\n34\n56", 0), ("123\n456", 0)):
            assert value("grid", right, said) == worth, said


def test_what_is_read_and_drawn_is_worth_what_digits_and_pixels_say() -> None:
    rng = np.random.default_rng(1)
    cases = [*digits(rng.integers(0, 10, 90), rng), *rectangles(100, rng)]
    assert len(cases) > 1500 and disagreements(cases) == []


def test_a_reference_that_answers_nothing_makes_the_reward_unknown() -> None:
    for kind, answer, reason in (
        ("count", "many", "not a count"),
        ("text", " ", "empty"),
        ("point", "here", "not a point"),
        ("box", "1, 2, 3", "not a box"),
        ("box", "10, 10, 0, 0", "not a box"),
        ("grid", "ab\nc", "not a grid"),
        ("video", "1", "'video'"),
    ):
        found = result(kind, answer, "1")
        assert found.value is None and reason in str(found.reason)


ANSWERS = {"count": "3", "text": "no entry", "point": "1, 2", "box": "0, 0, 5, 5", "grid": "ab\ncd"}
HOSTILE = [
    *("9" * 20_000, "1, " * 10_000, "[" * 20_000, " " * 20_000, "|\n" * 10_000, "```\n" * 5_000, "三" * 20_000),
    *("-1." * 9_000, '"' + "a" * 20_000, "one hundred and " * 1_000, "][" * 9_000),
]


@pytest.mark.parametrize("kind", ANSWERS)
def test_hostile_responses_are_wrong_and_nothing_else(kind: str) -> None:
    for number, response in enumerate(HOSTILE):
        found = result(kind, ANSWERS[kind], response)
        assert found.value is not None and found.value < 0.1, (number, found)


@given(st.text(max_size=200), st.sampled_from(sorted(ANSWERS)))
def test_no_response_is_an_error(response: str, kind: str) -> None:
    found = result(kind, ANSWERS[kind], response)
    assert found.value is not None and 0.0 <= found.value <= 1.0
    json.dumps(found.answer)
