"""Answers to school questions: what counts as right, in English and Chinese, and what does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrft.experience import Task
from rayrft.rewards import RewardResult, build_reward
from rayrft.rewards.text.statements import statements
from tests.rewards import scored
from tests.rewards.scored import cells, pairs, real_rows, right_and_wrong, score

OPTIONS = ("(A)2", "(B)4.5", "(C)45", "(D)a train")
REWARD = build_reward("k12", {})


def result(answer: str, response: str, options: Any = None, /, **asked: Any) -> RewardResult:
    return scored.result("k12", answer, response, options, **asked)


def value(answer: str, response: str, options: Any = None, /, **asked: Any) -> float | None:
    return result(answer, response, options, **asked).value


# The letters that are chosen (- for none), and responses that choose them.
CHOSEN = r"""
B    B  b  (B)  （Ｂ）  B.  B. 4.5  4.5  $4.5$.  The answer is B.  The answer is (b).  the correct answer is: **B**
B    The answer is B because 4.5 is half of 9.  Answer: Option B  \boxed{B}  #### B  I choose B, not C.
B    So it is $\boxed{\text{B}}$, and A and C are wrong.  The answer is not A but B  The answer is not obvious.⏎B
B    Let me see. A is too small.⏎The answer is C? No.⏎The answer is B  答案：B  答案是B。  故选B。  选项B正确
B    Choice B is correct. Choices A, C, and D are incorrect.  A is not correct, and B is correct.
B    本题答案为（B），因为其余均错误  A错误，B正确，C错误，D错误。
-    A or B  The answer is B or C  A, B, C, D is all  B is incorrect.  Choices B and C are incorrect.  4 . 5 or 2
-    I do not know  Because I think so  B错误  Be brief  A train leaves at noon
A    A  The answer is A
C    45  The answer is B.⏎The answer is C.
AB   Both A and B
D    A train
AC   AC  A and C  both A and C  A, C  C、A  A和C  （A）（C）  答案：A、C  故选AC.
C    答案：C⏎易错点：容易误选A。  答案：C，不要选A  答案：C⏎注意：不可选A  有同学认为应选A，其实选C
C    The answer is C, and the most tempting wrong answer is A.  If I choose A, it fails.⏎C
A    若x=2，则矛盾，所以选A
B    错误的选项是A⏎正确选项：B
D    故选：D。  应选D。  选D。  因此本题应选D。  我选择D。  排除A，选D  不符合题意故选D  故选择选项D  正确的选项是D
D    正确选项：D  符合题意的是D。  The answer is probably D.  The answer has to be D  The correct statement is D.
-    解析：若x=2则选A  若x=2，应选A  不应选A  从A中选B  不正确选项：D
ABD  正确的有ABD
BD   The correct answers are:⏎- B⏎- D  答案：⏎⏎* B⏎* D
AB   A正确；B正确；C错误；D错误。  A is correct. B is correct. C is incorrect.  A、B正确，C错误
AB   A is correct.⏎B is correct.⏎C is incorrect.  答案是A，还有B  The answer is A as well as B  答案：A正确，B正确
B    A. 错误 B. 正确 C. 错误  A错B对C错  A: ✗⏎B: ✓⏎C: ✗⏎D: ✗  A. wrong⏎B. right⏎C. wrong⏎D. wrong
B    A) wrong⏎B) right  (A) wrong⏎(B) right⏎(C) wrong  A. 2 is too small⏎B. 4.5 is right.⏎C. 45 is too much
B    A、光合作用，A错误；⏎B、呼吸作用，B正确；  B. 4.5 is half of nine, and the others are wrong.
B    - **A**: Incorrect, because 2 is small.⏎- **B**: Correct.⏎- **C**: Incorrect.  So B.⏎⏎D: too large.
B    Let me see.⏎B. Because 4.5 is half of nine  A is not correct and B is correct.  (B)，因为其余均错误
B    The answer is B, because A is wrong and C is correct only for 1  A不符合题意，B符合题意  B is the answer.
D    The answer is: option d.  答案：选项d  The answer is D, and B is wrong.  答案：D，B错误  So B?⏎D. a train
-    A. 2⏎B. 4.5⏎C. 45⏎D. a train  A is correct, I think.⏎No, A is wrong.⏎B is wrong  D: incorrect
-    If B is correct, fine  I doubt that B is correct  Neither A nor B is correct  B is not the answer  选A或B
-    选A还是B  A train is correct  Both A and B are wrong  I doubt (B) is correct
B    {"answer": "B"}  "answer": "B"  {'answer': '(B)'}  正确答案：(B) text  正确答案：（B）C和D是同位素
B    I think so.⏎```json⏎{⏎"answer": "B",⏎"confidence": 0.9⏎}⏎```  The answer is (B) C and D are isotopes.
B    {"reasoning": "The answer is C? No.", "final_answer": "B"}  The answer is **(B)** A and C are metals.
C    {"wrong_answer": "B", "answer": "C"}
AC   {"answer": ["A", "C"]}  \boxed{A}, \boxed{C}
BD   The answer is (B) and (D).  The answer is (B)(D).  The answer is (B), D.
-    {"answer": "B or C"}  The answer is not (B) C and D are isotopes.
"""


@pytest.mark.parametrize(("right", "response"), [*pairs(CHOSEN), ("-", "")])
def test_the_chosen_letters_are_recognised_however_they_are_said(right: str, response: str) -> None:
    for truth in ("A", "B", "C", "D", "AB", "AC", "BD", "ABD", "BCD"):
        assert value(truth, response, options=OPTIONS) == float(truth == right), truth


LED_IN = cells("""
It is {}.  It's {}  So it must be {}  Therefore, {}  I think it is {}.  That is {}  I would choose {}  所以应该是{}
我认为是{}。
""")
OPEN = cells("It is not {}  It isn't {}  Is it {}?  So it is {}?  So what about {}  It could be {}  这是{}吗?  不是{}")


def test_what_leads_in_to_an_answer_is_no_part_of_it_and_an_option_may_be_a_verdict() -> None:
    for led_in in LED_IN:
        for right, said, metadata in (
            ("B", "B", {"options": OPTIONS}),
            ("B", "4.5", {"options": OPTIONS}),
            ("Paris", "Paris", {}),
            ("42 cm", "0.42 m", {"kind": "number"}),
        ):
            assert value(right, led_in.format(said), **metadata) == 1.0, (led_in, said)
    assert value("B", "Hence it should be B because I checked", options=OPTIONS) == 1.0
    for led_in in OPEN:
        assert value("B", led_in.format("B"), options=OPTIONS) == 0.0, led_in
        assert led_in.endswith("?") or value("Paris", led_in.format("Paris")) == 0.0, led_in
    assert value("It is raining", "It is raining.") == 1.0
    for right, response in (("A", "A. True"), ("B", "False"), ("B", "B. False"), ("", "A. True\nB. False")):
        for truth in "AB":
            assert value(truth, response, options=("True", "False")) == float(truth == right), response


def test_several_letters_give_partial_credit_and_strict_takes_what_is_announced() -> None:
    for truth, credit in (("ACD", 0.5), ("AD", 0.0)):
        assert value(truth, "A and C", {"partial": 0.5}, options=OPTIONS) == credit
    assert value("B", "B", {"strict": True}, options=OPTIONS) == 0.0
    assert value("B", "It is hard.\nThe answer is B", {"strict": True}, options=OPTIONS) == 1.0
    assert value("B", "It is hard.\n**Answer:**\n\nB", {"strict": True}, options=OPTIONS) == 1.0
    assert value("B", "x" * 10**6 + "\nThe answer is B", options=OPTIONS) == 1.0


@pytest.mark.parametrize("question", ["下列说法错误的是", "Which one is incorrect?"])
def test_the_option_that_is_wrong_is_chosen_where_it_is_asked_for(question: str) -> None:
    said = cells("错误的是D  不正确的是D  The incorrect statement is D.  A正确；B正确；C正确；D错误。  D is the answer")
    for response in said:
        assert value("D", response, options=OPTIONS, asked=question) == 1.0, response
        assert value("D", response, options=OPTIONS) == float(response == "D is the answer")


@pytest.mark.parametrize("text", cells("选举  请选择语言  所以从5人中选2人共有10种方法。  故选2人  我们选举  自然选择"))
def test_to_select_is_to_answer_only_before_letters(text: str) -> None:
    assert not any(statement.announced for statement in statements(text))
    assert value(text, text) == value(text, f"答案是{text}") == 1.0


# A verdict, and responses that give it; None if they leave it open.
VERDICTS = """
True   True  T  yes.  Yes, it is  The statement is correct.  正确  对  √  对的。  是  不存在错误  无错误
True   I would say true.
True   没有错误  没有错  该命题是真命题。  这是一个正确的说法。  并非错误  非常正确  该说法完全正确  It is not false
True   这是真的
True   True or False: True  This is a true statement.  2×3=6，正确  对，没有错误  ( √ )  True, since 2 is even
True   本题说法正确，故答案为对  Let us check.⏎The sun is a star, so the statement is true.
True   The claim that 3 is not prime is true
False  False  F  no  No, never.  It is not true.  It is incorrect  错  不正确  ×  否  判断题：错误  这个说法未必正确
False  不可能正确
False  False⏎⏎Explanation: the correct value is 5.  The statement is false.⏎Correct version: The sun is a star.
False  错误⏎⏎解析：正确的说法应为太阳是恒星。  False.⏎⏎The correct statement is: the sun is a star.  不见得正确
False  **False**⏎⏎**Explanation:** the right value is 5  It is true that birds fly, but the statement is false
False  First we check whether it is true.⏎It is false.  The statement is false because the correct value is 5
False  False (the correct value is 5)  False — it is true only for n>2  错，因为正确的是5  并非正确  不完全正确
False  难说正确
False  说法有误  不是真的  There is no way this is true  I doubt that this is true  It isn't true.  这是错误的判断
False  It is not the case that this is true  The claim that 3 is not prime is false.  True or False: False
False  错误。应改为：正确的做法是节约用水  原命题不成立，故为假命题  对还是错：错  This is not right
None   maybe  true or false  no solution exists  The right triangle  正确还是错误  Yes and no  No, it is true.  正确吗
None   neither true nor false  It might be true  It may be false  It is sometimes true  如果正确  正确的说法是什么
None   True.⏎On reflection, the statement is false.  I wonder whether it is true
"""


@pytest.mark.parametrize(("truth", "said"), [*pairs(VERDICTS), ("None", "")])
def test_true_and_false_have_many_words_and_an_explanation_is_no_verdict(truth: str, said: str) -> None:
    assert value("true", said, kind="true_false") == float(truth == "True")
    assert value("错误", said, kind="true_false") == float(truth == "False")


@pytest.mark.parametrize(("truth", "said"), [("True", "√"), ("True", "The statement is correct."), ("False", "F")])
def test_a_truth_is_read_like_a_response(truth: str, said: str) -> None:
    assert value(said, f"The answer is {truth}", kind="true_false") == 1.0
    assert value(said, f"The answer is {truth == 'False'}", kind="true_false") == 0.0


def test_a_blank_has_variants_and_several_are_compared_in_order() -> None:
    blanks = [["the mitochondrion", "mitochondria", "线粒体"]]
    for said in ["Mitochondrion", "The answer is mitochondria.", "答案：线粒体。", "  the  mitochondrion "]:
        assert value("", said, blanks=blanks) == 1.0, said
    assert value("", "not mitochondria", blanks=blanks) == 0.0
    assert value("The answer is blowing in the wind", "The answer is blowing in the wind.") == 1.0
    assert value("5", "The answer is 4.\n5") == 0.0
    assert value("5", "5.0") == value("1/2", "0.5") == value("$-5$", "−5") == 1.0
    assert value("5", "50") == value("5", "4.5") == 0.0
    blanks = [["5"], ["10", "ten"]]
    for said in cells(r"5; 10  5, ten  5和10  The answer is 5 and 10.  答案：5；10  \boxed{5, 10}  答案：⏎1. 5⏎2. 10"):
        assert value("", said, blanks=blanks) == 1.0, said
    for said in cells(r"The first is \boxed{5} and \boxed{10}.  \boxed{5}, $\boxed{10}$  x=\boxed{5}、y=\boxed{10}"):
        assert value("", said, blanks=blanks) == 1.0, said
    for said in ("10; 5", "5", r"\boxed{10}, \boxed{5}", r"\boxed{5}. No: \boxed{10}"):
        assert value("", said, blanks=blanks) == 0.0, said
    assert value("", "5; 11", {"partial": 0.5}, blanks=blanks) == 0.25


# Right, and after ≠ wrong, for the blanks Paris and London.
FILLED = """
right  (1) Paris (2) London  (1) Paris; (2) London  ①Paris②London  答案：① Paris，② London  1. Paris⏎2. London
right  It is easy.⏎(1) Paris⏎(2) London  Answer:⏎(1) Paris⏎(2) London  The answers are (1) Paris and (2) London.
right  第一空：Paris；第二空：London  Blank 1: Paris, blank 2: London  {"answer": ["Paris", "London"]}
right  The capital of France is Paris and that of England is London.
right  So the capital of France is Paris, and that of England is London
wrong  ≠  (1) London (2) Paris  ①London②Paris  (2) Paris (1) London  (1) Paris (2) London (3) Rome
wrong  ≠  (1) Paris (2) not London  The capital of France is London and that of England is Paris.
wrong  ≠  The capital of France is not Paris and that of England is London.
wrong  ≠  The capital of France is Paris or London and that of England is London.
"""


@pytest.mark.parametrize(("row", "response", "right"), right_and_wrong(FILLED))
def test_blanks_may_be_numbered_or_filled_into_the_question(row: str, response: str, right: bool) -> None:
    question = "Fill in. The capital of France is ____ and that of England is ( )."
    assert value("", response, asked=question, blanks=["Paris", "London"]) == float(right)


SENTENCES = """
法国的首都是____。  法国的首都是巴黎。  ≠  法国的首都不是巴黎。  英国的首都是巴黎。
____是法国的首都。  所以巴黎是法国的首都
____  ≠  法国的首都是巴黎。
"""


@pytest.mark.parametrize(("question", "response", "right"), right_and_wrong(SENTENCES))
def test_a_sentence_fills_the_blank_of_its_own_question_alone(question: str, response: str, right: bool) -> None:
    assert value("巴黎", response, asked=question) == float(right)


# A number, what equals it, and after ≠ what does not.
NUMBERS = r"""
9.8 m/s^2  9.8 m/s²  The answer is about 9.8 m/s^2.  g = 9.8  980 cm/s^2  ≠  9.8 m/s  9.8 kg  9.9 m/s^2
72 km/h    20 m/s  20米每秒
3 kg       3000克  3千克
3 m        ≠  3 km
20 °C      293.15 K
1,200      1200
1200       1.2×10^3  1.2e3  $1.2 \times 10^{3}$
0.25       25%  \frac{1}{4}  1/4
25         ≠  25%
5 apples   5  ≠  5 kg
5          5 apples  ≠  -5  five  between 4 and 6  1/0
9          9个  9人  9 red apples  9m  9平方厘米  9加仑  9岁  9名学生  9\text{ cm}  9左右  9 (cm)  9 of the cake  9°
9          9 Ω
9          9 \Omega  9 mi  9 times  9$  9 kg·m/s^2  x = 9  3+6 = 8+1 = 9  Since a = 3 and b = 6, a + b = 9
9          a=3, b=6, 所以a+b=9
9          ≠  x = 8 or x = 9  x=8或x=9  x=8, y=9  x₁=8, x₂=9  x=8；x=9  x = 9 (y = 8)  x = 8 or 9  9个以上  9 at least
9          ≠  9多个  9 minus x  9ab  9 ab  9pi  9π  9 squared  9个半  9x  9 or more  9%  9的平方  9减x  9 over 2
9          ≠  9 halves  9来个  9 times x  9 to 10  9\alpha  9 hundred  9百万  9千  9 trillion  9 dozen eggs
9          ≠  9 per cent  9\frac{1}{2}  9 1/2  9½
8          ≠  x = 8 or x = 9  x=8或x=9  x=8, y=9  x₁=8, x₂=9  x=8；x=9  x = 9 (y = 8)  x = 8 or 9
1.5        1又1/2  1\frac{1}{2}  \boxed{1\frac{1}{2}}  1 1/2  1½  $1\frac12$
1 1/2      1.5
1          ≠  1 1/2
30000000   3千万
5 m^2      5 square meters  5 meters squared  ≠  5 m  5 cubic meters
2 kWh      2千瓦时
5 years    5年
5 km^2     5平方公里
5 cm       5(cm)
5 km/h     5 kilometers per hour  ≠  5 m/s
60 mph     60 miles per hour
9.8 N/kg   9.8牛/千克
90°        90^\circ  $90^{\circ}$  90 degrees
25 °C      25^\circ C  25摄氏度  ≠  25 °F
10 V       10伏特  ≠  10 A
10 Ω       10欧姆
5人        5 people  ≠  5米
5 people   5个人
$5         5 dollars  500 cents  \$5.00  about $5  ≠  5 cents  5元
5元        ¥5  5￥  CNY 5  RMB 5  ≠  5角  $5
€5         5€  EUR 5  5 euros  ≠  £5  5 cents
£5         5£  GBP 5  5 GBP  ≠  $5
5000000    $5 million
5 km       The distance is 5 kilometres.
12元       一共12元。
12         First 3 + 9.⏎So the total is 12.  Tom has 12 apples left.  他一共有12个苹果。  ≠  The total isn't 12.
12         ≠  The total is at least 12.  The total is 12 more than that.  The total is 12 or 13.  The total is not 12.
12         ≠  他没有12个苹果。  总数不是12。  It takes 12 steps to see that the total is unknown.
"""


@pytest.mark.parametrize(("answer", "said", "right"), right_and_wrong(NUMBERS))
def test_numbers_are_compared_with_their_units(answer: str, said: str, right: bool) -> None:
    assert value(answer, said, kind="number") == float(right)
    assert len(said) > 12 or r"\boxed" in said or value(answer, rf"\boxed{{{said}}}", kind="number") == float(right)


def test_numbers_may_be_near() -> None:
    assert value("100", "101", {"kind": "number", "tolerance": 0.02}) == 1.0
    assert value("100", "103", {"kind": "number", "tolerance": 0.02}) == 0.0
    assert value("100", "103", kind="number", tolerance=0.05) == 1.0


def test_a_reference_that_answers_nothing_makes_the_reward_unknown() -> None:
    for answer, metadata, reason in (
        ("?", {"options": OPTIONS}, "names no option"),
        ("perhaps", {"kind": "true_false"}, "neither true nor false"),
        ("many", {"kind": "number"}, "is not a number"),
        ("B", {"kind": "essay"}, "'essay'"),
    ):
        found = result(answer, "B", **metadata)
        assert found.value is None and reason in str(found.reason)


ANSWERS = {"choice": "B", "true_false": "true", "blanks": "right", "number": "7 m"}
HOSTILE = [
    *("9" * 20_000, "9^" * 10_000, "(" * 20_000, "\\boxed{" * 3_000, "answer is " * 5_000, "A, " * 10_000),
    *("1,000" * 5_000, "10^99" * 4_000, "5 " + "m" * 20_000, "5 m**9999999999", "5 " + "(m" * 15, "1e999"),
    *("5 m" + "/s" * 90, "\0" * 100, "不" * 20_000, "答案" * 10_000, " " * 20_000, "A" * 20_000, "A " * 10_000),
    *("-" * 20_000, "1.5×10^99 " * 50),
]


@pytest.mark.parametrize("kind", ANSWERS)
def test_hostile_responses_are_wrong_and_nothing_else(kind: str) -> None:
    for number, response in enumerate(HOSTILE):
        assert result(ANSWERS[kind], response, kind=kind, options=OPTIONS).value == 0.0, number


@given(st.text(max_size=200), st.sampled_from(sorted(ANSWERS)))
def test_no_response_is_an_error(response: str, kind: str) -> None:
    assert result(ANSWERS[kind], response, kind=kind, options=OPTIONS).value in {0.0, 1.0}


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
    missed, accepted = list[Any](), list[Any]()
    for row in real_rows("agieval", f"{name}.jsonl"):
        options = row["options"]
        texts = {text[1]: re.sub(r"^\([A-Z]\)", "", text) for text in options}
        task = Task.create("agieval", row["question"], "".join(row["label"]), metadata={"options": options})
        other = chr((ord(task.answer[0]) - ord("A") + 1) % 4 + ord("A"))
        for number, style in enumerate(STYLES):
            if number == len(STYLES) - 1 and len(set(texts.values())) < len(options):
                continue  # two options say the same
            for letters, found in ((task.answer, missed), (other if other not in task.answer else "", accepted)):
                said = style(letters, [texts[each] for each in letters]) if letters else ""
                if letters and score(REWARD, task, said).value != float(found is missed):
                    found.append((number, letters, said, task.answer, options))
    assert not missed and not accepted, (len(missed), len(accepted), missed[:3], accepted[:3])


# Numbers and units mean the same to all rewards that read them

COUNTS = """
5000000  5 million  5百万
500000   5 hundred thousand
30000    3万个
60       5 dozen
5        5千克  5 kg
500      5百米
"""


@pytest.mark.parametrize(("number", "said"), pairs(COUNTS))
def test_a_magnitude_is_the_same_in_math_school_and_pictures(number: str, said: str) -> None:
    for reward, kind in (("math", ""), ("k12", "number"), ("vision", "count")):
        assert scored.result(reward, number, said, kind=kind).value == 1.0, reward
        assert scored.result(reward, str(2 * int(number)), said, kind=kind).value == 0.0, reward


QUANTITIES = """
25 °C      77 °F  25 degrees Celsius
5元        50角
5 dollars  5美元
£5         5 pounds  ≠  5 dollars
1 nm       1e-12 km
-5         minus 5
1.5        1又1/2
5 kg       ≠  5百 g
"""


@pytest.mark.parametrize(("answer", "said", "right"), right_and_wrong(QUANTITIES))
def test_units_and_forms_of_numbers_are_the_same_in_math_and_school(answer: str, said: str, right: bool) -> None:
    for reward, kind in (("math", ""), ("k12", "number")):
        assert scored.result(reward, answer, said, kind=kind).value == float(right), reward
