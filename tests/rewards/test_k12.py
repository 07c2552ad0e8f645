"""Answers to school questions: what counts as right, in English and Chinese, and what does not."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrft.experience import Task
from rayrft.rewards import RewardResult, build_reward
from rayrft.rewards.text.statements import statements
from tests.conftest import ROOT
from tests.rewards.scored import score

OPTIONS = ("(A)2", "(B)4.5", "(C)45", "(D)a train")


def result(answer: str, response: str, settings: dict[str, Any] | None = None, /, **metadata: Any) -> RewardResult:
    task = Task.create("test", "question", answer, metadata=metadata)
    return score(build_reward("k12", settings or {}), task, response)


def value(answer: str, response: str, settings: dict[str, Any] | None = None, /, **metadata: Any) -> float | None:
    return result(answer, response, settings, **metadata).value


@pytest.mark.parametrize(
    "response",
    [
        "B",
        "b",
        "(B)",
        "（Ｂ）",
        "B.",
        "B. 4.5",
        "4.5",
        "$4.5$.",
        "The answer is B.",
        "The answer is (b).",
        "the correct answer is: **B**",
        "The answer is B because 4.5 is half of 9.",
        "Answer: Option B",
        "\\boxed{B}",
        "So it is $\\boxed{\\text{B}}$, and A and C are wrong.",
        "#### B",
        "I choose B, not C.",
        "The answer is not A but B",
        "Let me see. A is too small.\nThe answer is C? No.\nThe answer is B",
        "Choice B is correct. Choices A, C, and D are incorrect.",
        "A is not correct, and B is correct.",
        "答案：B",
        "答案是B。",
        "故选B。",
        "本题答案为（B），因为其余均错误",
        "A错误，B正确，C错误，D错误。",
        "选项B正确",
        "The answer is not obvious.\nB",
    ],
)
def test_a_choice_is_recognised_however_it_is_said(response: str) -> None:
    assert value("B", response, options=OPTIONS) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "A",
        "A or B",
        "The answer is B or C",
        "Both A and B",
        "ABCD",
        "A, B, C, D",
        "B is incorrect.",
        "Choices B and C are incorrect.",
        "45",
        "4 . 5 or 2",
        "Options: (A) 2 (B) 4.5",
        "I do not know",
        "Because I think so",
        "The answer is B.\nThe answer is C.",
        "B错误",
        "Be brief",
    ],
)
def test_what_chooses_otherwise_or_nothing_is_wrong(response: str) -> None:
    assert value("B", response, options=OPTIONS) == 0.0


LED_IN = [
    "It is {}.",
    "It's {}",
    "So it must be {}",
    "Therefore, {}",
    "I think it is {}.",
    "That is {}",
    "I would choose {}",
]
LED_IN += ["所以应该是{}", "我认为是{}。", "Hence it should be {} because I checked"]
OPEN = [
    "It is not {}",
    "It isn't {}",
    "Is it {}?",
    "So it is {}?",
    "So what about {}",
    "It could be {}",
    "这是{}吗?",
    "不是{}",
]


def test_what_leads_in_to_an_answer_is_no_part_of_it() -> None:
    for led_in in LED_IN:
        for right, said, metadata in (
            ("B", "B", {"options": OPTIONS}),
            ("B", "4.5", {"options": OPTIONS}),
            ("Paris", "Paris", {}),
            ("42 cm", "0.42 m", {"kind": "number"}),
        ):
            if "because" not in led_in or said == "B":
                assert value(right, led_in.format(said), **metadata) == 1.0, (led_in, said)
    for led_in in OPEN:
        assert value("B", led_in.format("B"), options=OPTIONS) == 0.0, led_in
        assert led_in.endswith("?") or value("Paris", led_in.format("Paris")) == 0.0, led_in
    assert value("It is raining", "It is raining.") == 1.0


def test_the_word_that_begins_a_sentence_is_no_letter() -> None:
    assert value("A", "A train leaves at noon", options=OPTIONS) == 0.0
    assert value("D", "A train", options=OPTIONS) == 1.0, "it is the text of D"
    assert value("A", "The answer is A", options=OPTIONS) == 1.0


@pytest.mark.parametrize(
    "response", ["AC", "A and C", "both A and C", "A, C", "C、A", "A和C", "（A）（C）", "答案：A、C", "故选AC."]
)
def test_several_right_options_are_all_to_be_chosen(response: str) -> None:
    assert value("AC", response, options=OPTIONS) == 1.0
    assert value("A", response, options=OPTIONS) == 0.0
    assert value("ACD", response, {"partial": 0.5}, options=OPTIONS) == 0.5
    assert value("AD", response, {"partial": 0.5}, options=OPTIONS) == 0.0, "one of them is wrong"


def test_strict_takes_only_what_is_announced() -> None:
    assert value("B", "B", {"strict": True}, options=OPTIONS) == 0.0
    assert value("B", "It is hard.\nThe answer is B", {"strict": True}, options=OPTIONS) == 1.0
    assert value("B", "It is hard.\n**Answer:**\n\nB", {"strict": True}, options=OPTIONS) == 1.0


@pytest.mark.parametrize(
    ("right", "response"),
    [
        ("C", "答案：C\n易错点：容易误选A。"),
        ("C", "答案：C，不要选A"),
        ("C", "答案：C\n注意：不可选A"),
        ("C", "有同学认为应选A，其实选C"),
        ("C", "The answer is C, and the most tempting wrong answer is A."),
        ("C", "If I choose A, it fails.\nC"),
        ("A", "若x=2，则矛盾，所以选A"),
        ("B", "错误的选项是A\n正确选项：B"),
        *(
            (letter, f"{lead}{letter}。")
            for letter in "BD"
            for lead in ("故选：", "应选", "选", "因此本题应选", "我选择")
        ),
        *((letter, f"{lead}{letter}") for letter in "BD" for lead in ("排除A，选", "不符合题意故选", "故选择选项")),
        ("", "解析：若x=2则选A"),
        ("", "若x=2，应选A"),
        ("", "不应选A"),
        ("", "从A中选B"),
        ("D", "正确的选项是D"),
        ("D", "正确选项：D"),
        ("ABD", "正确的有ABD"),
        ("D", "符合题意的是D。"),
        ("", "不正确选项：D"),
        ("D", "The answer is probably D."),
        ("D", "The answer has to be D"),
        ("D", "The correct statement is D."),
        ("BD", "The correct answers are:\n- B\n- D"),
        ("BD", "答案：\n\n* B\n* D"),
    ],
)
def test_only_what_a_response_takes_for_right_is_announced(right: str, response: str) -> None:
    for truth in ("A", "B", "C", "D", "BD", "ABD"):
        assert value(truth, response, options=OPTIONS) == float(truth == right), truth


JUDGED = {
    "AB": [
        *("A正确；B正确；C错误；D错误。", "A is correct. B is correct. C is incorrect.", "A、B正确，C错误"),
        *("A is correct.\nB is correct.\nC is incorrect.", "答案是A，还有B", "The answer is A as well as B"),
        "答案：A正确，B正确",
    ],
    "B": [
        *("A. 错误 B. 正确 C. 错误", "A错B对C错", "A: ✗\nB: ✓\nC: ✗\nD: ✗", "A. 错误\nB. 正确\nC. 错误\nD. 错误"),
        *("A. wrong\nB. right\nC. wrong\nD. wrong", "A) wrong\nB) right", "(A) wrong\n(B) right\n(C) wrong"),
        *("A. 2 is too small\nB. 4.5 is right.\nC. 45 is too much", "A、光合作用，A错误；\nB、呼吸作用，B正确；"),
        *("B. 4.5 is half of nine, and the others are wrong.", "(B)，因为其余均错误"),
        "- **A**: Incorrect, because 2 is small.\n- **B**: Correct.\n- **C**: Incorrect.",
        *(
            "So B.\n\nD: too large.",
            "Let me see.\nB. Because 4.5 is half of nine",
            "A is not correct and B is correct.",
        ),
        *(
            "The answer is B, because A is wrong and C is correct only for 1",
            "A不符合题意，B符合题意",
            "B is the answer.",
        ),
    ],
    "D": [
        "The answer is: option d.",
        "答案：选项d",
        "The answer is D, and B is wrong.",
        "答案：D，B错误",
        "So B?\nD. a train",
    ],
    "": [
        *("A. 2\nB. 4.5\nC. 45\nD. a train", "A is correct, I think.\nNo, A is wrong.\nB is wrong", "D: incorrect"),
        *("If B is correct, fine", "I doubt that B is correct", "Neither A nor B is correct", "B is not the answer"),
        *("选A或B", "选A还是B", "A train is correct", "Both A and B are wrong", "I doubt (B) is correct"),
    ],
}


@pytest.mark.parametrize(("right", "response"), [(right, said) for right, texts in JUDGED.items() for said in texts])
def test_options_may_be_judged_one_by_one(right: str, response: str) -> None:
    for truth in ("A", "B", "C", "D", "AB"):
        assert value(truth, response, options=OPTIONS) == float(truth == right), truth


def test_the_option_that_is_wrong_is_chosen_where_it_is_asked_for() -> None:
    for response in (
        "错误的是D",
        "不正确的是D",
        "The incorrect statement is D.",
        "A正确；B正确；C正确；D错误。",
        "D is the answer",
    ):
        for question in ("下列说法错误的是", "Which one is incorrect?"):
            task = Task.create("test", question, "D", metadata={"options": OPTIONS})
            assert score(build_reward("k12", {}), task, response).value == 1.0, (question, response)
        assert value("D", response, options=OPTIONS) == float(response == "D is the answer")


def test_an_option_may_be_a_verdict() -> None:
    for right, response in (("A", "A. True"), ("B", "False"), ("B", "B. False"), ("", "A. True\nB. False")):
        for truth in "AB":
            assert value(truth, response, options=("True", "False")) == float(truth == right), response


@pytest.mark.parametrize(
    "text", ["选举", "请选择语言", "所以从5人中选2人共有10种方法。", "故选2人", "我们选举", "自然选择"]
)
def test_to_select_is_to_answer_only_before_letters(text: str) -> None:
    assert not any(statement.announced for statement in statements(text))
    assert value(text, text) == value(text, f"答案是{text}") == 1.0


TRUE = ["True", "T", "yes.", "Yes, it is", "The statement is correct.", "正确", "对", "√", "对的。", "是"]
FALSE = ["False", "F", "no", "No, never.", "It is not true.", "It is incorrect", "错", "不正确", "×", "否"]


@pytest.mark.parametrize(("said", "truth"), [*((each, True) for each in TRUE), *((each, False) for each in FALSE)])
def test_true_and_false_have_many_words(said: str, truth: bool) -> None:
    assert value("true", said, kind="true_false") == float(truth)
    assert value("错误", said, kind="true_false") == float(not truth)
    assert value(said, "The answer is False", kind="true_false") == float(not truth)


@pytest.mark.parametrize(
    "said", ["", "maybe", "true or false", "no solution exists", "The right triangle", "正确还是错误"]
)
def test_what_says_neither_is_wrong_for_both(said: str) -> None:
    assert value("true", said, kind="true_false") == value("false", said, kind="true_false") == 0.0


EXPLAINED = {
    True: [
        *(
            "不存在错误",
            "无错误",
            "I would say true.",
            "没有错误",
            "没有错",
            "该命题是真命题。",
            "这是一个正确的说法。",
            "并非错误",
            "非常正确",
            "该说法完全正确",
        ),
        *(
            "True or False: True",
            "It is not false",
            "This is a true statement.",
            "2×3=6，正确",
            "对，没有错误",
            "( √ )",
        ),
        *("The claim that 3 is not prime is true", "True, since 2 is even", "本题说法正确，故答案为对", "这是真的"),
        "Let us check.\nThe sun is a star, so the statement is true.",
    ],
    False: [
        "False\n\nExplanation: the correct value is 5.",
        "The statement is false.\nCorrect version: The sun is a star.",
        "错误\n\n解析：正确的说法应为太阳是恒星。",
        "False.\n\nThe correct statement is: the sun is a star.",
        "**False**\n\n**Explanation:** the right value is 5",
        "It is true that birds fly, but the statement is false",
        "First we check whether it is true.\nIt is false.",
        "The statement is false because the correct value is 5",
        *("False (the correct value is 5)", "False — it is true only for n>2", "错，因为正确的是5", "判断题：错误"),
        *("这个说法未必正确", "不可能正确", "不见得正确", "并非正确", "不完全正确", "难说正确", "说法有误", "不是真的"),
        *("There is no way this is true", "I doubt that this is true", "It is not the case that this is true"),
        *("The claim that 3 is not prime is false.", "True or False: False", "It isn't true.", "这是错误的判断"),
        *("错误。应改为：正确的做法是节约用水", "原命题不成立，故为假命题", "对还是错：错", "This is not right"),
    ],
    None: [
        *(
            "Yes and no",
            "No, it is true.",
            "neither true nor false",
            "It might be true",
            "It may be false",
            "It is sometimes true",
            "正确吗",
        ),
        *(
            "True.\nOn reflection, the statement is false.",
            "如果正确",
            "I wonder whether it is true",
            "正确的说法是什么",
        ),
    ],
}


@pytest.mark.parametrize(("truth", "said"), [(truth, said) for truth, texts in EXPLAINED.items() for said in texts])
def test_an_explanation_is_no_verdict(truth: bool | None, said: str) -> None:
    assert value("true", said, kind="true_false") == float(truth is True)
    assert value("错误", said, kind="true_false") == float(truth is False)


def test_a_blank_has_variants() -> None:
    blanks = [["the mitochondrion", "mitochondria", "线粒体"]]
    for said in ["Mitochondrion", "The answer is mitochondria.", "答案：线粒体。", "  the  mitochondrion "]:
        assert value("", said, blanks=blanks) == 1.0, said
    assert value("", "not mitochondria", blanks=blanks) == 0.0
    assert value("The answer is blowing in the wind", "The answer is blowing in the wind.") == 1.0
    assert value("5", "The answer is 4.\n5") == 0.0
    assert value("5", "5.0") == value("1/2", "0.5") == value("$-5$", "−5") == 1.0
    assert value("5", "50") == value("5", "4.5") == 0.0


@pytest.mark.parametrize(
    ("response", "chosen"),
    [
        ('{"answer": "B"}', "B"),
        ('"answer": "B"', "B"),
        ('I think so.\n```json\n{\n  "answer": "B",\n  "confidence": 0.9\n}\n```', "B"),
        ('{"answer": ["A", "C"]}', "AC"),
        ("{'answer': '(B)'}", "B"),
        ('{"reasoning": "The answer is C? No.", "final_answer": "B"}', "B"),
        ('{"wrong_answer": "B", "answer": "C"}', "C"),
        ('{"answer": "B or C"}', ""),
        ("正确答案：(B) text", "B"),
        ("正确答案：（B）C和D是同位素", "B"),
        ("The answer is (B) C and D are isotopes.", "B"),
        ("The answer is **(B)** A and C are metals.", "B"),
        ("The answer is (B) and (D).", "BD"),
        ("The answer is (B)(D).", "BD"),
        ("The answer is (B), D.", "BD"),
        ("The answer is not (B) C and D are isotopes.", ""),
    ],
)
def test_a_field_and_an_option_with_its_text_name_the_letters(response: str, chosen: str) -> None:
    for right in ("B", "C", "AC", "BD", "BCD", "ABC"):
        assert value(right, response, kind="choice") == float(right == chosen)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("(1) Paris (2) London", True),
        ("(1) Paris; (2) London", True),
        ("①Paris②London", True),
        ("答案：① Paris，② London", True),
        ("It is easy.\n(1) Paris\n(2) London", True),
        ("1. Paris\n2. London", True),
        ("Answer:\n(1) Paris\n(2) London", True),
        ("The answers are (1) Paris and (2) London.", True),
        ("第一空：Paris；第二空：London", True),
        ("Blank 1: Paris, blank 2: London", True),
        ('{"answer": ["Paris", "London"]}', True),
        ("The capital of France is Paris and that of England is London.", True),
        ("So the capital of France is Paris, and that of England is London", True),
        ("(1) London (2) Paris", False),
        ("①London②Paris", False),
        ("(2) Paris (1) London", False),
        ("(1) Paris (2) London (3) Rome", False),
        ("(1) Paris (2) not London", False),
        ("The capital of France is London and that of England is Paris.", False),
        ("The capital of France is not Paris and that of England is London.", False),
        ("The capital of France is Paris or London and that of England is London.", False),
    ],
)
def test_blanks_may_be_numbered_or_filled_into_the_question(response: str, right: bool) -> None:
    question = "Fill in. The capital of France is ____ and that of England is ( )."
    task = Task.create("test", question, "Paris; London", metadata={"blanks": ["Paris", "London"]})
    assert score(build_reward("k12", {}), task, response).value == float(right)


@pytest.mark.parametrize(
    ("question", "response", "right"),
    [
        ("法国的首都是____。", "法国的首都是巴黎。", True),
        ("____是法国的首都。", "所以巴黎是法国的首都", True),
        ("法国的首都是____。", "法国的首都不是巴黎。", False),
        ("法国的首都是____。", "英国的首都是巴黎。", False),
        ("____", "法国的首都是巴黎。", False),
    ],
)
def test_a_sentence_fills_the_blank_of_its_own_question_alone(question: str, response: str, right: bool) -> None:
    assert score(build_reward("k12", {}), Task.create("test", question, "巴黎"), response).value == float(right)


def test_several_blanks_are_compared_in_order() -> None:
    blanks = [["5"], ["10", "ten"]]
    for said in [
        "5; 10",
        "5, ten",
        "5和10",
        "The answer is 5 and 10.",
        "答案：5；10",
        "\\boxed{5, 10}",
        "答案：\n1. 5\n2. 10",
    ]:
        assert value("", said, blanks=blanks) == 1.0, said
    assert value("", "10; 5", blanks=blanks) == 0.0
    assert value("", "5", blanks=blanks) == 0.0
    assert value("", "5; 11", {"partial": 0.5}, blanks=blanks) == 0.25


@pytest.mark.parametrize(
    ("answer", "said", "right"),
    [
        ("9.8 m/s^2", "9.8 m/s²", True),
        ("9.8 m/s^2", "The answer is about 9.8 m/s^2.", True),
        ("9.8 m/s^2", "g = 9.8", True),
        ("9.8 m/s^2", "980 cm/s^2", True),
        ("9.8 m/s^2", "9.8 m/s", False),
        ("9.8 m/s^2", "9.8 kg", False),
        ("9.8 m/s^2", "9.9 m/s^2", False),
        ("72 km/h", "20 m/s", True),
        ("72 km/h", "20米每秒", True),
        ("3 kg", "3000克", True),
        ("3 kg", "3千克", True),
        ("3 m", "3 km", False),
        ("20 °C", "293.15 K", True),
        ("1,200", "1200", True),
        ("1200", "1.2×10^3", True),
        ("1200", "1.2e3", True),
        ("1200", "$1.2 \\times 10^{3}$", True),
        ("0.25", "25%", True),
        ("0.25", "\\frac{1}{4}", True),
        ("0.25", "1/4", True),
        ("25", "25%", False),
        ("30000", "3万", True),
        ("5 apples", "5", True),
        ("5", "5 apples", True),
        ("5", "-5", False),
        ("5", "five", False),
        ("5", "between 4 and 6", False),
        ("5", "1/0", False),
    ],
)
def test_numbers_are_compared_with_their_units(answer: str, said: str, right: bool) -> None:
    assert value(answer, said, {"kind": "number"}) == float(right)


@pytest.mark.parametrize(
    "said",
    [
        *("x = 8 or x = 9", "x=8或x=9", "x=8, y=9", "x₁=8, x₂=9", "x=8；x=9", "x = 9 (y = 8)", "x = 8 or 9"),
        *(
            "9个以上",
            "9 at least",
            "9多个",
            "9 minus x",
            "9ab",
            "9 ab",
            "9pi",
            "9π",
            "9 squared",
            "9个半",
            "9x",
            "9 or more",
        ),
        *(
            "9%",
            "9的平方",
            "9减x",
            "9 over 2",
            "9 halves",
            "9来个",
            "9 times x",
            "9 to 10",
            "9\\alpha",
            "9 hundred",
        ),
        *("9百万", "9千", "9 trillion", "9 dozen eggs", "9 per cent", "9\\frac{1}{2}", "9 1/2", "9½"),
    ],
)
def test_a_number_is_alone_but_for_its_unit(said: str) -> None:
    assert value("9", said, kind="number") == value("9", f"\\boxed{{{said}}}", kind="number") == 0.0
    assert value("8", said, kind="number") == 0.0


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        *(
            ("9", f"9{unit}")
            for unit in ("个", "人", " red apples", "m", "平方厘米", "加仑", "岁", "名学生", "\\text{ cm}")
        ),
        *(
            ("9", f"9{unit}")
            for unit in ("左右", " (cm)", " of the cake", "°", " Ω", " \\Omega", " mi", " times", "$", " kg·m/s^2")
        ),
        *(
            ("9", said)
            for said in ("x = 9", "3+6 = 8+1 = 9", "Since a = 3 and b = 6, a + b = 9", "a=3, b=6, 所以a+b=9")
        ),
        *(
            ("1.5", said)
            for said in ("1又1/2", "1\\frac{1}{2}", "\\boxed{1\\frac{1}{2}}", "1 1/2", "1½", "$1\\frac12$")
        ),
        *(
            ("1 1/2", "1.5"),
            ("5000000", "5百万"),
            ("30000000", "3千万"),
            ("500 m", "5百米"),
            ("500000", "5 hundred thousand"),
        ),
        *(
            ("5 m^2", "5 square meters"),
            ("5 m^2", "5 meters squared"),
            ("5 m^3", "5 cubic meters"),
            ("2 kWh", "2千瓦时"),
            ("5 years", "5年"),
            ("5 km^2", "5平方公里"),
            ("5 cm", "5(cm)"),
        ),
        *(("5 km/h", "5 kilometers per hour"), ("60 mph", "60 miles per hour"), ("9.8 N/kg", "9.8牛/千克")),
        *(("90°", "90^\\circ"), ("90°", "$90^{\\circ}$"), ("90°", "90 degrees"), ("25 °C", "25 degrees Celsius")),
        *(("25 °C", "25^\\circ C"), ("25 °C", "25摄氏度"), ("77 °F", "25 °C"), ("10 V", "10伏特"), ("10 Ω", "10欧姆")),
        *(("5人", "5 people"), ("5 people", "5个人"), ("$5", "5 dollars"), ("$5", "500 cents"), ("$5", "\\$5.00")),
        *(("5元", "¥5"), ("5元", "50角"), ("5 dollars", "about $5"), ("5000000 dollars", "$5 million")),
    ],
)
def test_quantities_have_many_forms(answer: str, said: str) -> None:
    assert value(answer, said, kind="number") == 1.0


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        *(("$5", "5 cents"), ("$5", "5元"), ("5 m^2", "5 m"), ("5 m^2", "5 cubic meters"), ("5 km/h", "5 m/s")),
        *(("5人", "5米"), ("25 °C", "25 °F"), ("10 V", "10 A"), ("5 apples", "5 kg"), ("5元", "5角"), ("1", "1 1/2")),
    ],
)
def test_another_unit_is_another_answer(answer: str, said: str) -> None:
    assert value(answer, said, kind="number") == 0.0


@pytest.mark.parametrize(
    ("answer", "said", "right"),
    [
        ("5 km", "The distance is 5 kilometres.", True),
        ("12", "First 3 + 9.\nSo the total is 12.", True),
        ("12", "Tom has 12 apples left.", True),
        ("12元", "一共12元。", True),
        ("12", "他一共有12个苹果。", True),
        ("12", "The total isn't 12.", False),
        ("12", "The total is not 12.", False),
        ("12", "The total is at least 12.", False),
        ("12", "The total is 12 more than that.", False),
        ("12", "The total is 12 or 13.", False),
        ("12", "他没有12个苹果。", False),
        ("12", "总数不是12。", False),
        ("12", "It takes 12 steps to see that the total is unknown.", False),
    ],
)
def test_a_sentence_with_one_number_says_it_where_nothing_is_announced(answer: str, said: str, right: bool) -> None:
    assert value(answer, said, kind="number") == float(right)


def test_numbers_may_be_near() -> None:
    assert value("100", "101", {"kind": "number", "tolerance": 0.02}) == 1.0
    assert value("100", "103", {"kind": "number", "tolerance": 0.02}) == 0.0
    assert value("100", "103", kind="number", tolerance=0.05) == 1.0


@pytest.mark.parametrize(
    ("answer", "metadata", "reason"),
    [
        ("?", {"options": OPTIONS}, "names no option"),
        ("perhaps", {"kind": "true_false"}, "neither true nor false"),
        ("many", {"kind": "number"}, "is not a number"),
        ("B", {"kind": "essay"}, "'essay'"),
    ],
)
def test_a_reference_that_answers_nothing_makes_the_reward_unknown(
    answer: str, metadata: dict[str, Any], reason: str
) -> None:
    found = result(answer, "B", **metadata)
    assert found.value is None and reason in str(found.reason)


HOSTILE = [
    *(
        "9" * 20_000,
        "9^" * 10_000,
        "(" * 20_000,
        "\\boxed{" * 3_000,
        "answer is " * 5_000,
        "A, " * 10_000,
        "1,000" * 5_000,
    ),
    *(
        "10^99" * 4_000,
        "5 " + "m" * 20_000,
        "5 m**9999999999",
        "5 " + "(m" * 15,
        "1e999",
        "5 m" + "/s" * 90,
        "\0" * 100,
    ),
    *("不" * 20_000, "答案" * 10_000, " " * 20_000, "A" * 20_000, "A " * 10_000, "-" * 20_000, "1.5×10^99 " * 50),
]


@pytest.mark.parametrize("kind", ["choice", "true_false", "blanks", "number"])
@pytest.mark.parametrize("response", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_responses_are_wrong_and_nothing_else(kind: str, response: str) -> None:
    answer = {"choice": "B", "true_false": "true", "blanks": "right", "number": "7 m"}[kind]
    found = result(answer, response, kind=kind, options=OPTIONS)
    assert found.value == 0.0, found


@given(st.text(max_size=200), st.sampled_from(["choice", "true_false", "blanks", "number"]))
def test_no_response_is_an_error(response: str, kind: str) -> None:
    answer = {"choice": "B", "true_false": "true", "blanks": "right", "number": "7 m"}[kind]
    assert result(answer, response, kind=kind, options=OPTIONS).value in {0.0, 1.0}


STYLES: list[Callable[[str, list[str]], str]] = [
    lambda right, texts: right,
    lambda right, texts: f"The answer is {right}.",
    lambda right, texts: f"The correct answer is ({')('.join(right)}).",
    lambda right, texts: f"Let us see.\nAnswer: {', '.join(right)}",
    lambda right, texts: f"We find that \\boxed{{{right}}} holds.",
    lambda right, texts: f"Therefore {' and '.join(right)} {'are' if right[1:] else 'is'} correct.",
    lambda right, texts: f"故选{right}。",
    lambda right, texts: f"答案：{'、'.join(right)}",
    lambda right, texts: f"#### {right.lower() if len(right) == 1 else right}",
    lambda right, texts: "；".join(f"{each}{'正确' if each in right else '错误'}" for each in "ABCD"),
    lambda right, texts: "\n".join(f"{each}. {'Right' if each in right else 'Wrong'}" for each in "ABCD"),
    lambda right, texts: texts[0] if len(texts) == 1 else f"Both {' and '.join(right)}",
]


@pytest.mark.parametrize("name", ["sat-math", "gaokao-physics", "gaokao-biology"])
def test_real_choice_questions_are_told_right_from_wrong_in_twelve_styles(name: str) -> None:
    path = Path(os.environ.get("RAYRFT_TEST_DATA", ROOT / "tests" / "samples"), "agieval", f"{name}.jsonl")
    if not path.exists():
        pytest.skip(f"{path} is not there")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    reward, missed, accepted = build_reward("k12", {}), list[Any](), list[Any]()
    for row in rows:
        options = row["options"]
        texts = {text[1]: re.sub(r"^\([A-Z]\)", "", text) for text in options}
        task = Task.create("agieval", row["question"], "".join(row["label"]), metadata={"options": options})
        other = chr((ord(task.answer[0]) - ord("A") + 1) % 4 + ord("A"))
        for number, style in enumerate(STYLES):
            if number == len(STYLES) - 1 and len(set(texts.values())) < len(options):
                continue  # two options say the same
            for letters, found in ((task.answer, missed), (other if other not in task.answer else "", accepted)):
                said = style(letters, [texts[each] for each in letters]) if letters else ""
                if letters and score(reward, task, said).value != float(found is missed):
                    found.append((number, letters, said, task.answer, options))
    assert not missed and not accepted, (len(missed), len(accepted), missed[:3], accepted[:3])


def test_the_answer_is_looked_for_at_the_end_of_a_long_response() -> None:
    assert value("B", "x" * 10**6 + "\nThe answer is B", options=OPTIONS) == 1.0
