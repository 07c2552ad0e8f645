"""The math reward: what equals the ground truth, what states an answer, and that nothing takes long or runs code."""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rayrft.rewards import RewardResult
from rayrft.rewards.math.formula import TooLarge, parse_formula, values
from rayrft.rewards.math.reading import Number, read_answer
from tests.conftest import ROOT
from tests.rewards import math_on_real_data as real
from tests.rewards import scored
from tests.rewards.scored import cells, pairs, right_and_wrong


def result(truth: str, response: str, /, **options: Any) -> RewardResult:
    return scored.result("math", truth, response, options)


def value(truth: str, response: str, /, **options: Any) -> float | None:
    return result(truth, response, **options).value


# A ground truth, what equals it, and after ≠ what does not.
ANSWERS = r"""
72              72.0
1000            1,000  10^3  1 \times 10^3  1e3
1000000         1 000 000
371,\!043,\!400  371043400
\frac{12}{5,\!525}  12/5525
\frac12         .5  0.5  \mathbf{\frac{1}{2}}  8\left(\frac{1}{2}\right)^{4}
\frac{-1}{2}    -\frac{1}{2}
1\frac{12}{13}  25/13
1 1/2           1.5
2^{2005}        2 \cdot 2^{2004}  ≠  2^{2004}
25\%            25%  0.25  25  25 percent  ≠  2.5%  0.0025
0.25            25%
2\sqrt{22}      \sqrt{88}
\frac{\sqrt6}3  \sqrt{\frac{2}{3}}
\sqrt[3]{x+1}   (x+1)^{1/3}
4x(8x^2-x+5)    32x^3 - 4x^2 + 20x
2 \tan x        \frac{2\sin x}{\cos x}
\cos 58^\circ   \sin 32^\circ
-375 + 500i     125(4i - 3)
9 \pi           9*pi
\sqrt{3} - 4    sqrt(3)-4
\frac{2n}{n+1}  2 - \frac{2}{n+1}
120             5!  \binom{10}{3}
\log_2 8        3
5               x = 5  2 + 3 = 5  \text{Area} = 5  5 of them  ≠  6  -5  3 = 5  2x + 1 = 5  5 million
5               ≠  5 hundred thousand  5 dozen  5万  5千个  –5  minus 5  负5  5或6  5; 6  1/0
x = 5           5  ≠  y = 5
\sqrt{2}        \sqrt{2} \approx 1.414  ≠  1.41421356
x - 3z = 0      x = 3z  ≠  x = 4z
\frac{x^2}{16} - \frac{y^2}{9} = 1  9x^2 - 16y^2 = 144
y = \pm\sqrt{3}x  y = \sqrt{3}x \text{ or } y = -\sqrt{3}x
\sqrt{5}, -\sqrt{5}  \pm\sqrt{5}
0,4             4, 0  x = 4 or x = 0  \{0, 4\}  ≠  4  0, 4, 5  (0, 4)
B, C            C and B
(9, 3)          \left(9, \frac{6}{2}\right)  x = 9, y = 3  ≠  (3, 9)  3, 9  (9, 3, 0)
(100,200)       (100, 200)
\left[ \frac{3}{2}, 2 \right)  [1.5, 2)
(3,4]           3 < \lambda \le 4  ≠  (3,4)  [3,4]  3 \le x \le 4
[3,\infty)      x \ge 3  ≠  x > 3
(-\infty,-7) \cup (1,2)  (1,2)\cup(-\infty,-7)  ≠  (1,2)
(-\infty,2)\cup(2,\infty)  x \ne 2  \mathbb{R}\setminus\{2\}  ≠  \mathbb{R}\setminus\{3\}
\begin{pmatrix} 2/5 \\ -1/5 \end{pmatrix}  \begin{bmatrix}0.4\\-0.2\end{bmatrix}
\begin{pmatrix} 1 \\ 2 \end{pmatrix}  (1, 2)  ≠  \begin{pmatrix} 1 & 2 \end{pmatrix}
17\text{ meters}  17  17 m  1700\text{ cm}  ≠  17\text{ seconds}  17 cm
8\sqrt{3} \text { square inches}  \sqrt{192}
2 hours         120 minutes
2\text{ square feet}  288\text{ square inches}
2\text{ cm}^2   2 square cm
156^\circ       156 degrees  156
\$6             6 dollars  USD 6  ≠  6 cents  6 kg  ¥6
¥6              6 yuan  6元  ￥6  CNY 6  ≠  6 dollars  €6
\$2.50          250 cents
3:1             6:2  ≠  1:3
12              12 m/s  12 m/s^{2}  12 N m  12 TVs  12 MPH  12元  12 m^2  12 m²  12个  12平方厘米  {\bf 12}
12              \boldsymbol{12}  \underline{12}\text{ cm}  ≠  1 2  \mathbf{13}  {\bf 13}
12 \text{ m/s}  12 m/s  12m/s  ≠  12 km/h
2\pi            2\pi cm
5000000         \$5 million  5 \text{ million dollars}
12 cm^2         1200平方毫米  ≠  12 cm
-5              –5  −5  minus 5  negative 5  负5
x - 5           x –5
5,6             5或6  5和6  x=5或x=6  5; 6  ≠  5  6
9               f(2) = 9  ≠  f(2) = 8  9 squared  9 \text{ squared}  9 cubed
81              9 squared  ≠  9
2xy             2yx  ≠  2ab
\text{even}     Even  ≠  odd
\text{(E)}      E
1;\frac{8}{9}   1, 8/9  ≠  8/9; 1  8/9, 1
\emptyset       \varnothing  ≠  0  \{0\}  \{\emptyset\}
18              18 USD  18 EUR  ≠  19 USD
\$18            18\text{ USD}  ≠  18\text{ EUR}  18\text{ cents}
-\frac{4}{11}   -0.\bar{36}
\frac17         0.\dot{1}4285\dot{7}
0.\overline{3}  \frac{1}{3}
0.004           0.4\%  ≠  0.04%
0.4             40\%  ≠  0.4\%
2024-03-05      2024-3-5  2024年3月5日  ≠  2024-05-03  2016
(-\infty,2)\cup(3,\infty)  x<2 \text{ or } x>3  x < 2, x > 3  ≠  x<2 \text{ and } x>3  x\le 2 \text{ or } x>3
(-\infty,2)\cup(3,\infty)  ≠  x<2 \text{ or } y>3  (-\infty,2)\cup(3,\infty), 98765
(-\infty,2)\cup(3,\infty)  ≠  (-\infty,2)\cup(3,\infty) \text{ or } (4,5)
x<2 \text{ or } x>3  (3,\infty)\cup(-\infty,2)
(2,3]           x>2 \text{ and } x\le 3  ≠  x>2 \text{ or } x\le 3
x > 2, x < 3    x < 3 and x > 2
(1,3)           (1,2)\cup[2,3)  ≠  (1,2)\cup(2,3)
\mathbb{R}      (-\infty,\infty)  ≠  (-\infty,\infty]
[1,2]\cup\{5\}  \{5\}\cup[1,2]  ≠  [1,2]\cup\{6\}
x < 2           \{x \mid x<2\}  ≠  \{x \mid x>2\}
\frac{1}{3}     ≠  0.33  0.3333333333  0.3\overline{4}
0               ≠  0.00000001
11/2            ≠  1 1/2
1.000000000000000000000000000001  ≠  1
x               ≠  X  x^2  \sqrt{x^2}
2x+1            ≠  2t+1
4               ≠  3 or 4  3, 4  \{3, 4\}  \pm 4
x < y           ≠  x > y
y = 2x          ≠  y > 2x
y \ge 2x        ≠  y = 2x
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}  ≠  \begin{pmatrix} 1 & 3 \\ 2 & 4 \end{pmatrix}
17\text{ square meters}  ≠  17\text{ meters}
5000            ≠  5千克
2               ≠  2xy
0.3             ≠  0.\overline{3}
\frac{3}{10120}  ≠  3/5/2024
(1, 2, 3)       ≠  (1,2)\cup(2,3)
"""


@pytest.mark.parametrize(("truth", "answer", "right"), right_and_wrong(ANSWERS))
def test_equal_answers_are_right_and_others_wrong_boxed_announced_and_bare(
    truth: str, answer: str, right: bool
) -> None:
    for response in (f"So we get $\\boxed{{{answer}}}$.", f"The answer is ${answer}$.", f"Hence\n${answer}$"):
        found = result(truth, response)
        assert (found.value, found.components) == (float(right), {"parsed": 1.0}), response


# An answer, and responses that announce it.
STATED = r"""
12      {"answer": 12}  Both add up.⏎```json⏎{"answer": "12", "confidence": 0.9}⏎```  {'answer': '12'}
12      The answer is 12 (3 × 4).  The answer is 12 (4(2 + 1)).  The answer is 12 apples (3 × 4).
12      The answer is 12 (see above).  The answer is 12 (twelve).  The answer is 12 (option B).
12      The answer is 12 (B).  答案是12（见上）。  The answer is $12$ cm$^2$.  The answer is 12 m/s.
1/2     {"answer": "\frac{1}{2}"}  {"answer": "\\frac{1}{2}"}  The answer is $\frac{1}{2}$ (or 0.5).
12, 13  {"answer": [12, 13]}
13      {"question": 12, "final_answer": 13}  {"wrong_answer": 12, "answer": 13}
3, 4    The answer is 3 (or maybe 4).  The answer is $3$ (or maybe $4$).  The answer is 3, perhaps 4.
3, 4    The answer is 3 (possibly 4)  The answer is 3 and 4.  The answer is $3$ and $4$.
3, 4    The answer is either 3 or 4.  The answer is 3 for x and 4 for y.
5       The answer is probably 5.  #### 5  The answer is 5.  The answer is: 5  **Answer:** 5
5       The final answer is $5$. I hope it is correct.  The answer is 5, because 2 + 3 = 5.
5       The answer is 5 apples and not 7 apples.  The answer is therefore $x = 5$.
5       The answer is that he has 5 eggs left.  Answer: \[ 5 \]  <answer>5</answer>
5       The answer is 4. No, wait. The answer is 5.  \boxed{4} was wrong: \boxed{5}
5       The answer is 4, I mean $\boxed{5}$  \fbox{5}  The answer is 5 (not 6).
5       The answer is x = 5 (since 2 + 3 = 5).  The answer is 5, since $x > 0$.  The answer is 10 minus 5
5       The answer is 5 rather than 6.
-5      The answer is -5  The answer is –5  The answer is –$5$  The answer is minus $5$
-1/2    The answer is $-\frac{1}{2}$
2469/2  The answer is 1,234.50 dollars.
10      The answer is 10 (5+5).
8       The answer is 8 (2^3).
25%     The answer is 25% (1/4).
9       The answer is 9 (x = 2).  The answer is 9 at x = 2.  The answer is 9 when x = 2.
9       The answer is $9$ at $x = 2$.
(1, 2)  The answer is (1, 2) (see the figure).  The answer is the point (1, 2).
f(x)    The answer is f (x).
3(x+1)  The answer is 3 (x+1).
3(xy+1)  The answer is 3 (xy + 1).
x^2+3(x-1)  The answer is x^2 + 3 (x - 1).
[1, 2)  The answer is [1, 2).
7       The answer is 7 if n = 3
36      The answer is 36 with a = 4 and b = 5
5000000  The answer is $5 million.  The answer is $5$ million dollars.
5, 6    The answer is $5$ (or $6$).  The answer is $5$, or $6$.  The answer is $5$ as well as $6$.  答案是5或6
5, 6    答案是5个或6个。  \boxed{5}, \boxed{6}  $\boxed{5}$ and $\boxed{6}$  x = \boxed{5}, y = \boxed{6}
5; 6    The answer is $5$; $6$
6       The answer is not 5 but 6.  答案不是5，而是6。  \boxed{4}, \boxed{5}, so that it is \boxed{6}
6       $\boxed{5}$⏎⏎$\boxed{6}$
50000   答案是5万元。
"""
# An answer, and responses whose last formula or number it is.
BARE = r"""
5       5  **5**  So he has 5.  It costs $5 a day.  2 + 3 = 5  Thus $x = 5$  First 3, then 4, and finally 5 eggs
5       He is 5.⏎⏎That is all.  - 5  \[⏎5⏎\]  The equation 2x + 1 = 11 holds for x = 5.  It is 5 rather than 6.
5       It is 5, not 6.
1/2     Therefore the probability is $\frac{1}{2}$.
-5      -5  It is −5
81      9 squared  It is 9 squared.
729     So we have 9 cubed
3, 4    It is 3 or 4
50%     The result is 50%.
9       The maximum is 9 at x=2.  The maximum is $9$ at $x=2$.  For n = 3 the sum is 9.  最大值为9（当x=2时）
12      The total is 12 (3 × 4).  It is $12$ ($2$ each).  The area is 12 cm².  The area is 12 cm^2.
12      The area is $12$ cm$^2$.  It holds a 12-gallon tank.
12.5663706143592  The area is 4π cm².
3.46410161513775  So it is 2√3
6.47213595499958  So it is 2 (1 + √5).
84      The area is $12 (3+4)$ in all
4       The radius is $8\left(\frac{1}{2}\right)$ in all
29      He spent $29 on water  He spent ¥29 on water  So they pay €29 in all.  The fine is -¥29 + ¥58 in all
7       So €3 + €4 = €7  So $3 + $4 = $7  So ¥3 + ¥4 = ¥7  So ¥3 + ¥4  It is £(3+4)  It is 7€  So it is 7¥
12      So 3 × ¥4 = ¥12
10%     He gets a 10% discount.
6       There are 14 - 8 = 6 people who are not in the pool  It is 6 instead of 5
25      Hence $AC^2 = 25$ indeed
5, 6    x=5或x=6
50000   一共5万元
"""
# Responses that state no answer.
NOTHING = r"""
no idea  I do not know the answer.  The answer is not 5.  The answer isn't 5  The answer is between 3 and 5.
The answer is at least 5  The answer is 3 to 5  Is the answer 5?  Is the answer $5$?  It isn't $\$5$
The answer is 5?  The answer is 6, no: it is not 5⏎So the answer is not 5  The answer cannot be 5
The answer is 5 at least  The answer is 5 apples to 6 apples  The answer is 5 if x > 0 and 3 otherwise.
It is not \boxed{5}  \boxed{5–6}  答案不是5  答案是5到6  答案是不大于5  答案是5以上  答案是5吗?  \boxed{}
\boxed{\frac{1}{}
A train leaves
"""


@pytest.mark.parametrize(("answer", "response"), [*pairs(STATED), ("5", "答案是 \uff15。")])
def test_what_is_announced_is_the_answer(response: str, answer: str) -> None:
    for strict in (False, True):
        assert result("7", response, strict=strict).answer == answer
    assert value(answer.replace(", ", " and "), response) == 1.0


@pytest.mark.parametrize(("answer", "response"), pairs(BARE))
def test_without_an_announcement_the_last_formula_is_the_answer_unless_strict(response: str, answer: str) -> None:
    assert result("7", response).answer == answer
    assert result("7", response, strict=True).components == {"parsed": 0.0}
    assert value(answer, response, strict=True) == 0.0


@pytest.mark.parametrize("response", ["", "   \n", *cells(NOTHING)])
def test_what_states_no_answer_is_wrong_and_says_so(response: str) -> None:
    for truth in ("5", "3", "6"):
        found = result(truth, response)
        assert (found.value, found.components) == (0.0, {"parsed": 0.0})


def test_a_ground_truth_that_cannot_be_read_makes_the_reward_unknown_and_no_sum_is_computed() -> None:
    for truth in ("no number at all", "", "  ", r"\frac{1}{", "x" * 600, "see below: 5 of them"):
        found = result(truth, "The answer is 5.")
        assert found.value is None and "ground truth" in str(found.reason)
    for truth in (r"\sum_{i=1}^{10} i", r"\int_0^1 x\,dx"):
        assert result("55", f"\\boxed{{{truth}}}").components == {"parsed": 0.0}
        assert "cannot be compared" in str(result(truth, "The answer is 55").reason)


def test_scoring_imports_nothing_that_its_template_has_not_imported() -> None:
    code = """
import sys
from rayrft.experience import Task
from rayrft.rewards import build_reward
from rayrft.rewards.scorer import _import
_import("math")
reward, before = build_reward("math", {}), set(sys.modules)
for truth, answer in [("2 hours", "120 minutes"), ("2", "sqrt(4)"), ("(1,3)", "(1,2)\\\\cup[2,3)")]:
    assert reward(Task.create("test", "question", truth), answer).value == 1.0, truth
assert {name for name in sys.modules if "encodings" not in name} <= before, set(sys.modules) - before
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_magnitude_counts_unless_the_question_asks_for_it() -> None:
    for question, truth, response in (
        ("How many more dozen eggs does she need?", "7", "The answer is 7 dozen eggs."),
        ("How many eggs does she need?", "84", "The answer is 7 dozen eggs."),
        ("What is left, in millions?", "60", "So the club has $60 million"),
        ("What is left of the 80 million?", "60000000", "So the club has $60 million"),
        ("共有多少万人?", "5", "答案是5万人。"),
        ("共有多少人?", "50000", "答案是5万人。"),
    ):
        for answer in ("7", "84", "60", "60000000", "5", "50000"):
            assert scored.result("math", answer, response, asked=question).value == float(answer == truth)


def test_a_truth_may_be_a_solution_and_tolerance_is_a_share_of_it() -> None:
    assert value("2 + 3 = 5, so\n#### 5", "The answer is 5") == 1.0
    assert value("The sum is 6, so it is $\\boxed{5}$ in all.", "The answer is 6") == 0.0
    assert value(r"\frac{1}{3}", "0.33", tolerance=0.02) == 1.0
    assert value(r"\frac{1}{3}", "0.32", tolerance=0.02) == 0.0
    assert value(r"\sqrt{2}", "1.41", tolerance=0.01) == 1.0
    assert value(r"(\sqrt{2}, 1)", "(1.41, 1)", tolerance=0.01) == 1.0
    assert value("-100", "-99", tolerance=0.01) == 1.0
    assert value("-100", "100", tolerance=0.01) == 0.0
    for question, right in (("What share is left?", 0.0), ("What percent is left?", 1.0)):
        assert scored.result("math", "0.4", "It is 0.4%", asked=question).value == right


def test_equal_answers_have_one_vote() -> None:
    for answers in (
        ("5", "5.0", "x = 5", "5 apples", "10/2"),
        (r"\frac{\sqrt6}{3}", r"\sqrt{2/3}"),
        ("3, 4", "4 and 3", r"\{3,4\}"),
        ("(1, 2)", "(1.0, 2)"),
        ("Even", r"\text{even}"),
    ):
        assert len({result("7", f"\\boxed{{{answer}}}").answer for answer in answers}) == 1


# Nothing takes long or runs code

HOSTILE = {
    "tower": r"\boxed{9^{9^{9^9}}}",
    "tower in plain text": "The answer is 9^9^9^9^9^9",
    "factorial": r"\boxed{99999999!}",
    "power of a long number": r"\boxed{(10^{400})^{400}}",
    "small power": r"\boxed{0.9^{99999999999}}",
    "exponentials": r"\boxed{\exp(\exp(\exp(\exp(9))))}",
    "binomial": r"\boxed{\binom{999999999}{499999999}}",
    "parentheses": r"\boxed{" + "(" * 60 + "1" + ")" * 60 + "}",
    "a megabyte of terms": r"\boxed{1" + "+1" * 400_000 + "}",
    "a megabyte of signs": "-" * 1_000_000 + "1",
    "a megabyte of powers": "2^" * 300_000 + "2",
}  # fmt: skip
LONG = {
    "factorials of factorials": r"\boxed{((((9!)!)!)!)!}",
    "intervals": r"\boxed{(-\infty,1)" + r"\cup(2,3)" * 50 + "}",
    "a field": '{"answer": ' * 50_000,
    "digits": "9" * 1_000_000,
    "boxes": r"\boxed{1}" * 100_000,
    "announcements": "the answer is " * 70_000,
    "lines": "\n" * 1_000_000,
    "texts": r"\text{" * 100_000,
    "combining marks": "a" + "\u0301" * 500_000,
    "units": "The answer is 6 " + "km " * 100_000,
    "zeros": r"\boxed{\operatorname{zeros}(100000,100000)}",
    "file": r"\boxed{\input{/etc/passwd}}",
    "names after a condition": "9 at x = " + "\\a" * 200 + ",",
    "conditions": "The answer is 9 if " + "if and 1 " * 50_000,
    "asides": "The answer is 9 " + "(1 (" * 50_000,
    "half a character": "\ud800 6",
}


@pytest.mark.parametrize("response", HOSTILE.values(), ids=HOSTILE)
def test_what_is_too_large_to_be_computed_is_unknown(response: str) -> None:
    found = result("5", response)
    assert found.value is None and found.reason


@pytest.mark.parametrize("response", LONG.values(), ids=LONG)
def test_what_is_only_long_or_odd_is_never_right(response: str) -> None:
    for truth in ("5", r"\frac{x+1}{2}", "(3,4]", r"17\text{ meters}"):
        assert value(truth, response) in {0.0, None}


PIECES = r"( { \{ ^ ! | \frac \sqrt 1, - $ = < \cup # * m/ a_ (1, % ' _{ \pm"


@pytest.mark.parametrize("piece", [*re.split(" ", PIECES), "or ", "* "])
def test_a_hostile_piece_repeated_is_never_right(piece: str) -> None:
    for count in (30, 200, 5_000):
        for response in (
            piece * count,
            f"\\boxed{{{piece * count}}}",
            f"The answer is {piece * count}7",
            f"{piece * count}7",
        ):
            for truth in ("5", "x+1", "(3,4]", "3 m"):
                assert value(truth, response) in {0.0, None}


def test_of_what_a_box_holds_no_part_is_judged() -> None:
    assert value("258", "\\boxed{10" + "+1" * 248 + "}") == 1.0
    for terms in (249, 300, 9_000, 20_000):
        for truth in ("258", "259", str(10 + terms)):
            assert value(truth, "\\boxed{10" + "+1" * terms + "}") is None
    for truth in ("5", "x = 5"):
        assert value(truth, r"\boxed{\{,\}}") == value(truth, r"\boxed{\{;\}}") == 0.0, "an empty set"
    for truth in ("250", "251"):
        assert value(truth, "So we get " + "+".join(["1"] * 30_000)) is None


def test_no_response_runs_code(tmp_path: Path) -> None:
    path = tmp_path / "made"
    for shape in (
        *("{}", "The answer is {}", r"\boxed{{{}}}", "${}$", r"\boxed{{\text{{{}}}}}", r"\boxed{{x_{{{}}}}}", "1 + {}"),
        *(r"\boxed{{\sum_{{i=1}}^{{3}} {}}}", r"\boxed{{\operatorname{{{}}}(3)}}", "(lambda: {})()"),
    ):
        for truth in ("5", r"\sum_{i=1}^{3} i", "(3,4]"):
            assert value(truth, shape.format(f"__import__('os').system('touch {path}')")) in {0.0, None}
    assert not path.exists()


def test_formulas_with_the_same_values_cost_no_more_than_their_length() -> None:
    for text in ("(1+x)^{19000}", "e^{e^{e^{e^{e}}}}", "9" * 450 + "^" + "9" * 40, "0.1^{" * 39 + "9" + "}" * 39):
        with contextlib.suppress(TooLarge):
            assert len(list(values(parse_formula(text)))) in {1, 4}


# Numbers are decided exactly

DIGITS = st.integers(min_value=0, max_value=10**7)


def spelled(value: Fraction, how: int) -> str | None:
    """One of the ways to write a number; None where it has none."""
    sign, size = "-" if value < 0 else "", abs(value)
    if how == 0:
        return f"{value.numerator}/{value.denominator}"
    if how == 1:
        return f"{sign}\\frac{{{size.numerator}}}{{{size.denominator}}}"
    if how == 2:
        return f"{sign}{size.numerator:,}" if size.denominator == 1 else None
    scaled = size * 10**6
    if scaled.denominator != 1:
        return None
    whole, rest = divmod(scaled.numerator, 10**6)
    return f"{sign}{whole:,}.{rest:06}" if how == 3 else f"{sign}{whole}.{rest:06}".rstrip("0").rstrip(".")


@given(DIGITS, st.integers(1, 999), st.booleans(), st.integers(0, 4))
def test_a_number_is_read_as_it_is_written(numerator: int, denominator: int, negative: bool, how: int) -> None:
    number = Fraction(-numerator if negative else numerator, denominator)
    text = spelled(number, how)
    assume(text is not None)
    read = read_answer(str(text))
    assert isinstance(read, Number) and read.value == number and not read.percent and not read.unit


@given(
    st.fractions(-1000, 1000, max_denominator=64),
    st.sampled_from([0, 0, Fraction(1), Fraction(1, 8), Fraction(-1, 100)]),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_numbers_are_equal_if_their_values_are(value_: Fraction, by: Fraction, one: int, two: int) -> None:
    truth, answer = spelled(value_, one), spelled(value_ + by, two)
    assume(truth is not None and answer is not None)
    mine = value(str(truth), f"\\boxed{{{answer}}}")
    assert mine == float(by == 0)


@given(st.integers(0, 500), st.integers(0, 500))
def test_a_percent_sign_may_be_left_out(one: int, two: int) -> None:
    for truth, answer in ((f"{one}\\%", f"{two}\\%"), (f"{one}", f"{two}\\%"), (f"{one}\\%", f"{two}")):
        assert value(truth, f"\\boxed{{{answer}}}") == float(one == two)
    assert value(f"{one}\\%", f"{Fraction(one, 100)}") == 1.0
    assert value(f"{Fraction(one, 100)}", f"{one}%") == 1.0


LEAVES = {"x": "x", "y": "y", "2": "2", "-1": "(-1)", r"\frac{1}{2}": "(1/2)", r"\pi": "pi", r"\sqrt{2}": "sqrt(2)"}
TERMS = st.recursive(
    st.sampled_from(sorted(LEAVES.items())),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map(
            lambda each: (f"({each[0][0]} {each[1]} {each[2][0]})", f"({each[0][1]} {each[1]} {each[2][1]})")
        ),
        inner.map(lambda each: (f"({each[0]})^{{2}}", f"({each[1]})**2")),
        inner.map(lambda each: (f"\\frac{{{each[0]}}}{{3}}", f"({each[1]})/3")),
    ),
    max_leaves=4,
)


@given(TERMS, TERMS)
def test_formulas_are_decided_as_sympy_decides_them(one: tuple[str, str], two: tuple[str, str]) -> None:
    import sympy

    left, right = (sympy.sympify(each[1], rational=True) for each in (one, two))
    same = sympy.expand(left - right) == 0
    assert value(one[0], f"\\boxed{{{two[0]}}}") == float(same)
    assert value(one[0], f"\\boxed{{{sympy.latex(left.expand())}}}") == 1.0


# Real answers


def test_solutions_of_gsm8k_are_right_in_every_form_and_wrong_with_another_number() -> None:
    cases = list(real.gsm8k_cases(random.Random(0).sample(real.gsm8k(), 50)))
    assert [case for case, decided in real.decide(cases, real.rayrft) if decided != case.right] == []


@pytest.mark.skipif(
    not (real.DATA / "agieval").exists(), reason="RAYRFT_TEST_DATA names no folder with agieval/math.jsonl"
)
def test_answers_of_math_are_right_in_every_rewriting_and_wrong_in_every_trap_or_other_row() -> None:
    answers = real.math_answers()[::4]
    cases = [*real.math_cases(answers, others=5), *real.trap_cases(answers)]
    wrong = [case for case, decided in real.decide(cases, real.rayrft) if decided != case.right]
    assert [case for case in wrong if (case.truth, case.response) not in real.TRULY_EQUAL] == []
