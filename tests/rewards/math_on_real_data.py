"""The math reward on real answers, beside plain math-verify: what is refused that is right, and taken that is wrong.

``RAYRFT_TEST_DATA=… python -m tests.rewards.math_on_real_data`` prints the table; with ``--show`` what was decided
wrongly. The folder holds GSM8K (``gsm8k/*.jsonl``), and MATH and blanks of Gaokao from AGIEval
(``agieval/math.jsonl``, ``gaokao-mathcloze.jsonl``).
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from rayrft.experience import Task
from rayrft.rewards import build_reward
from tests.rewards.scored import DATA, real_rows, score

Judge = Callable[[str, str], bool | None]


@dataclass(frozen=True)
class Case:
    """A ground truth, a response, and whether it is right."""

    form: str
    truth: str
    response: str
    right: bool


def rayrft(truth: str, response: str) -> bool | None:
    """What the reward decides; None is unknown."""
    value = score(_REWARD, Task.create("test", "question", truth), response).value
    return None if value is None else value == 1.0


_REWARD = build_reward("math", {})


def math_verify(truth: str, response: str) -> bool | None:
    """What the library decides by itself, as its documentation uses it."""
    from math_verify import parse, verify

    expected, found = (parse(text, parsing_timeout=None) for text in (f"${truth}$", response))
    return verify(expected, found, timeout_seconds=None)


# GSM8K


def gsm8k() -> list[str]:
    """The solutions of all rows."""
    return [json.loads(line)["answer"] for path in sorted((DATA / "gsm8k").glob("*.jsonl")) for line in path.open()]


FORMS: dict[str, Callable[[int], str]] = {
    "boxed": lambda n: f"So the total is $\\boxed{{{n}}}$.",
    "boxed, thousands": lambda n: f"We get \\boxed{{{n:,}}}",
    "the answer is": lambda n: f"Adding 3 and 4 of these, we see it. The answer is {n}.",
    "dollars": lambda n: f"The final answer is ${n:,} dollars.",
    "in mathematics, with a unit": lambda n: f"The answer is ${n}$ apples.",
    "decimal": lambda n: f"The answer is {n}.0",
    "bold": lambda n: f"Each of 7 gets some, so in the end:\n\n**{n}**",
    "last number": lambda n: f"There are 12 boxes of 9, so he has {n:,} eggs left in all.",
    "full-width": lambda n: "答案是 " + "".join(chr(ord(c) + 0xFEE0) for c in str(n)) + "。",
    "fraction": lambda n: f"The answer is $\\frac{{{3 * n}}}{{3}}$.",
    "name": lambda n: f"The answer is $x = {n}$.",
    "sum": lambda n: f"\\boxed{{{n - 4} + 4 = {n}}}",
    "percent": lambda n: f"The answer is {n}%.",
}


def gsm8k_cases(solutions: Sequence[str]) -> Iterator[Case]:
    """Each solution itself, and its number in all forms; then the same with another number."""
    for solution in solutions:
        shown = solution.rpartition("#### ")[2].strip()
        number = int(shown.replace(",", ""))
        other = number + 1 + len(solution) % 9
        yield Case("gsm8k: solution", shown, solution, True)
        yield Case("gsm8k: solution", shown, solution.replace(f"#### {shown}", f"#### {other}"), False)
        for name, form in FORMS.items():
            yield Case(f"gsm8k: {name}", shown, form(number), True)
            yield Case(f"gsm8k: {name}", shown, form(other), False)


# MATH


def math_answers() -> list[str]:
    """The answers of all rows."""
    return [row["answer"] for row in real_rows("agieval", "math.jsonl")]


def gaokao_cases() -> Iterator[Case]:
    """Answers to blanks, often with signs of mathematics in them, in all styles."""
    for row in real_rows("agieval", "gaokao-mathcloze.jsonl"):
        for style in STYLES:
            yield Case("gaokao: itself", row["answer"], style(row["answer"].replace("$", "")), True)


def _decimal(text: str) -> str | None:
    """The decimal that a simple fraction is, if it is finite."""
    found = re.fullmatch(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}", text.strip())
    if not found:
        return None
    value = Fraction(int(found[2]), int(found[3]))
    return f"{found[1]}{float(value)!r}" if 10**30 % value.denominator == 0 else None


def _turned(text: str) -> str | None:
    """The elements of a bare list in the other order."""
    parts = text.split(", ") if re.fullmatch(r"[^()\[\]!]*, [^()\[\]!]*", text) else []
    return ", ".join(reversed(parts)) if len(parts) > 1 else None


def _terms_turned(text: str) -> str | None:
    """A sum of two terms in the other order."""
    found = re.fullmatch(r"([^-+,=()&]+?) ?([-+]) ?([^-+,=()&]+)", text)
    if not found or re.search("text|matrix", text) or found[1].count("{") != found[1].count("}"):
        return None
    return f"{'-' if found[2] == '-' else ''}{found[3]} + {found[1]}"


def _symbolic(operation: str) -> Callable[[str], str | None]:
    """The answer as sympy writes it after an operation: multiplied out, factored, simplified."""

    def rewrite(text: str) -> str | None:
        if re.search(r"[,;:%$=]|text|circ|infty|matrix|\\cup|\\!|\d\\frac|[A-Z]|^[-\d.]+$", text):
            return None
        import sympy
        from math_verify import parse

        read = parse(f"${text}$", parsing_timeout=None)
        if not read or not isinstance(read[0], sympy.Expr):
            return None
        return str(sympy.latex(getattr(sympy, operation)(read[0].doit())))

    return rewrite


def _replaced(pattern: str, by: str) -> Callable[[str], str | None]:
    def rewrite(text: str) -> str | None:
        found = re.sub(pattern, by, text)
        return found if found != text else None

    return rewrite


_ALONE = r"(?! ?[\\A-Za-z(])"
"""What follows a divisor without a sign belongs to it: 21/2\\pi, as math-verify reads it, is not 21\\pi/2."""

REWRITINGS: dict[str, Callable[[str], str | None]] = {
    "itself": lambda text: text,
    "dfrac": _replaced(r"\\frac", r"\\dfrac"),
    "frac without d": _replaced(r"\\[dt]frac", r"\\frac"),
    "slash": _replaced(rf"(?<!\d)\\[dt]?frac\{{(\d+)\}}\{{(\d+)\}}{_ALONE}", r"\1/\2"),
    "slash in parentheses": _replaced(rf"(?<!\d)\\[dt]?frac\{{([^{{}}]+)\}}\{{([^{{}}]+)\}}{_ALONE}", r"(\1)/(\2)"),
    "decimal": _decimal,
    "list in another order": _turned,
    "terms in another order": _terms_turned,
    "left and right": _replaced(r"^([(\[])(.*)([)\]])$", r"\\left\1 \2 \\right\3"),
    "without left and right": _replaced(r"\\(?:left|right) ?", ""),
    "spaces": lambda text: re.sub(r"(?<=[+\-=,])|(?=[+\-=])", r"\\, ", text) if re.search(r"[+\-=]", text) else None,
    "no spaces": _replaced(r"(?<![A-Za-z\d]) +|(?<!\\) +(?![A-Za-z\d])", ""),
    "expand": _symbolic("expand"),
    "factor": _symbolic("factor"),
    "simplify": _symbolic("simplify"),
    "degrees in words": _replaced(r"^(\d+)\^\\circ$", r"\1 degrees"),
    "without degrees": _replaced(r"^(\d+)\^\\circ$", r"\1"),
    "without the unit": _replaced(r" ?(?:\\,)?\\text ?\{ [a-z ]+\}$", ""),
    "unit in words": _replaced(r"(?:\\,)?\\text ?\{( [a-z ]+)\}$", r"\1"),
    "without thousands": _replaced(r",\\!", ""),
    "plain thousands": _replaced(r",\\!", ","),
    "without money": _replaced(r"\\\$", ""),
    "percent in words": _replaced(r"\\%", " percent"),
    "without percent": _replaced(r"\\%", ""),
    "bmatrix": _replaced("pmatrix", "bmatrix"),
    "with a name": lambda text: f"t = {text}" if re.fullmatch(r"-?[\d.]+|-?\\frac\{\d+\}\{\d+\}", text) else None,
    "inequality": _replaced(r"^\((\S+),(\d+)\]$", r"\1 < x \\le \2"),
    "other side": _replaced(r"^(.+) = 0$", r"0 = \1"),
    "sqrt as power": _replaced(r"\\sqrt\{(\d+)\}", r"{\1}^{\\frac{1}{2}}"),
    "braces": _replaced(r"\\frac (\d+) ?(?:(\d)|\{(\d+)\})", r"\\frac{\1}{\2\3}"),
    "text": _replaced(r"^\\text\{(\w+)\}$", r"\1"),
}
STYLES: Sequence[Callable[[str], str]] = (
    lambda text: f"Therefore the result is $\\boxed{{{text}}}$.",
    lambda text: f"The answer is ${text}$.",
    lambda text: f"After 3 steps we find it.\n\n${text}$",
)


def math_cases(answers: Sequence[str], others: int, seed: int = 0) -> Iterator[Case]:
    """Each answer in all rewritings and styles; then those of other rows, which are wrong unless they are the same."""
    for answer in answers:
        for name, rewrite in REWRITINGS.items():
            rewritten = rewrite(answer)
            for style in STYLES if rewritten is not None else ():
                yield Case(f"math: {name}", answer, style(str(rewritten)), True)
    rng, different = random.Random(seed), sorted(set(answers))
    for answer in different:
        for other in rng.sample(different, min(others, len(different))):
            if other != answer:
                yield Case("math: of another row", answer, STYLES[0](other), False)


def _near(text: str) -> str | None:
    """A fraction rounded to four decimals, where it is not finite."""
    found = re.fullmatch(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}", text.strip())
    return f"{found[1]}{int(found[2]) / int(found[3]):.4f}" if found and _decimal(text) is None else None


def _swapped(text: str) -> str | None:
    """A tuple of other numbers in the other order, or an interval with another bracket."""
    found = re.fullmatch(r"\(([^,()]+), ?([^,()]+)\)", text)
    if found and found[1] != found[2]:
        return f"({found[2]}, {found[1]})"
    return f"({text[1:]}" if re.fullmatch(r"\[[^,]+,[^,]+[\])]", text) else None


TRAPS: dict[str, Callable[[str], str | None]] = {
    "hedged": lambda text: f"The answer is either ${text}$ or $98765$.",
    "hedged, boxed": lambda text: f"\\boxed{{{text} \\text{{ or }} 98765}}",
    "one of many": lambda text: f"\\boxed{{{text}, 98765}}" if ";" not in text else None,
    "denied": lambda text: f"The answer is not ${text}$.",
    "isn't": lambda text: f"It isn't ${text}$",
    "asked": lambda text: f"Is the answer ${text}$?",
    "an earlier box": lambda text: f"First \\boxed{{{text}}}. But that is wrong. Hence \\boxed{{98765}}.",
    "an earlier announcement": lambda text: f"The answer is ${text}$. No: the answer is $98765$.",
    "range": lambda text: f"The answer is ${text}$ to $98765$.",
    "false equation": lambda text: f"\\boxed{{98765 = {text}}}" if not re.search("[A-Za-z=]", text) else None,
    "rounded": lambda text: f"\\boxed{{{_near(text)}}}" if _near(text) else None,
    "a little more": lambda text: f"\\boxed{{{text}.0000001}}" if text.isdigit() else None,
    "negated": lambda text: f"\\boxed{{-{text}}}" if re.fullmatch(r"[1-9]\d*|\\frac\{\d+\}\{\d+\}", text) else None,
    "tuple or interval changed": lambda text: f"\\boxed{{{_swapped(text)}}}" if _swapped(text) else None,
    "unit of another dimension": _replaced(r"^(.*)(?:meters|cm|square inches)(.*)$", r"\\boxed{\1seconds\2}"),
    "exponent": lambda text: f"\\boxed{{{text}^2}}" if text.isdigit() and int(text) > 1 else None,
}


def trap_cases(answers: Sequence[str]) -> Iterator[Case]:
    """Responses that hold a right answer and do not state it, or nearly state it."""
    for answer in dict.fromkeys(answers):
        for name, trap in TRAPS.items():
            if (response := trap(answer)) is not None:
                yield Case(f"trap: {name}", answer, response, False)


TRULY_EQUAL = {(r"25\%", STYLES[0](r"\frac{1}{4}"))}
"""Answers of other rows that are equal all the same."""


def decide(cases: Sequence[Case], judge: Judge) -> list[tuple[Case, bool | None]]:
    """What a judge decides of each."""
    return [(case, judge(case.truth, case.response)) for case in cases]


def main() -> None:
    """Print the tables."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--every", type=int, default=1, help="take each n-th row of GSM8K")
    arguments.add_argument("--rival-every", type=int, default=20, help="of these, each n-th for math-verify, too")
    arguments.add_argument("--show", action="store_true", help="print what was decided wrongly")
    options = arguments.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    solutions = gsm8k()[:: options.every]
    few = list(gsm8k_cases(solutions[:: options.rival_every]))
    of_math = [*math_cases(math_answers(), 20), *trap_cases(math_answers()), *gaokao_cases()]
    report("rayrft, all rows", decide(list(gsm8k_cases(solutions)), rayrft), options.show)
    for title, cases in (("some rows", few), ("MATH", of_math)):
        report(f"rayrft, {title}", decide(cases, rayrft), options.show)
        report(f"math-verify, {title}", decide(cases, math_verify), False)


def report(title: str, decided: list[tuple[Case, bool | None]], show: bool) -> None:
    """Print by form how many right and how many wrong answers were taken, and the wrong decisions."""
    counts = Counter((form, case.right, value) for case, value in decided for form in (case.form, "all"))
    print(f"\n| {title:32} | right: taken, refused, unknown | wrong: taken, refused, unknown |")
    for form in dict.fromkeys(form for form, _, _ in counts):
        cells = [", ".join(str(counts[form, right, value]) for value in (True, False, None)) for right in (True, False)]
        print(f"| {form:32} | {cells[0]:30} | {cells[1]:30} |")
    for case, value in decided if show else ():
        if value != case.right:
            print(f"{case.form}: {case.truth!r} {value} {case.response!r}")


if __name__ == "__main__":
    main()
