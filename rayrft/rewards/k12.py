"""Answers to school questions, in English and Chinese: choice, true or false, blanks, and numbers with units."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal

from rayrft.experience import Task
from rayrft.rewards.base import Reward, RewardResult, inline, register_reward, task_value
from rayrft.rewards.text.choices import choice
from rayrft.rewards.text.notation import CURRENCY_SIGNS, normalized
from rayrft.rewards.text.numbers import HAN_DIGITS, Number, read_quantity
from rayrft.rewards.text.statements import LONGEST_STATEMENT, Statement, nfkc, normal_form, plain, statements, unwrapped
from rayrft.rewards.text.units import conversion, parse_unit
from rayrft.rewards.text.verdicts import verdict

_Kind = Literal["choice", "true_false", "blanks", "number"]


@register_reward("k12")
@inline
def k12(kind: _Kind = "blanks", *, strict: bool = False, partial: float = 0.0, tolerance: float = 0.0) -> Reward:
    """1 if the response's final answer is right, else 0; component ``parsed`` is 1 if it has one.

    The kind is ``metadata["kind"]``, else ``choice`` with ``metadata["options"]``, else ``kind``.

    * ``choice``, of options in order or by letter: the task's answer is letters, such as ``B`` or ``AC``. A response
      names letters, quotes one option, or judges one by one. Some of several right letters alone give ``partial``.
    * ``true_false``: the task's answer is a word such as true, 正确, no, F, √; so is the response's, in a clause of its
      first or last line, unless it has both.
    * ``blanks``: ``metadata["blanks"]`` lists the accepted variants of each blank, in order; by default the task's
      answer fills a single blank. Right blanks among wrong ones give their share of ``partial``.
    * ``number``: right within ``metadata["tolerance"]``, by default ``tolerance``, a share of the task's answer. The
      unit may be left out; a unit of the same dimension is converted. Two numbers are not an answer.

    The answer is announced in a box, after ``####``, "the answer is" or 答案; the last of several counts. Without one,
    it is the last line, unless ``strict``.
    """

    parse_unit("m")  # imports pint: the first answer is scored where others wait, too

    def score(task: Task, response: str) -> RewardResult:
        asked = task_value(task, "kind", str, "choice" if task.metadata.get("options") else kind)
        found = statements(response, strict=strict)
        if asked == "choice":
            return choice(task, found, partial)
        if asked == "true_false":
            return _true_false(task, found)
        if asked == "blanks":
            return _blanks(task, found, partial)
        if asked == "number":
            return _number(task, found, task_value(task, "tolerance", float, tolerance))
        return RewardResult(None, reason=f"unknown kind of school question: {asked!r}")

    return score


def _true_false(task: Task, found: Sequence[Statement]) -> RewardResult:
    right = verdict(task.answer)
    if right is None:
        return RewardResult(None, reason=f"the reference answer {task.answer!r} is neither true nor false")
    for statement in found:
        first = statement.before.partition("\n")[0][:LONGEST_STATEMENT]
        if (said := verdict(statement.text, first)) is not None:
            return RewardResult(float(said == right), {"parsed": 1.0}, answer=str(said))
    return RewardResult(0.0, {"parsed": 0.0}, answer="")


_SENTENCE = re.compile(r"(?<=[^\s.])(?:[.!?](?:\s|$)|。)|\s+\(?(?:because|since|where)\b|,?\s*因为")


def _blanks(task: Task, found: Sequence[Statement], partial: float) -> RewardResult:
    variants = task_value(task, "blanks", Sequence[str | Sequence[str]], [task.answer])
    blanks = [[each] if isinstance(each, str) else each for each in variants]
    for statement in found:
        # The whole line first: "Mr." does not end a sentence.
        texts = [text for each in statement.readings for text in (each, _SENTENCE.split(each, maxsplit=1)[0])]
        if found[-1].text.endswith(statement.text) and not statement.boxed:
            texts.insert(0, found[-1].text)  # what looks like an announcement may be part of the answer
        if len(blanks) > 1 and not statement.announced:
            texts.append("\n".join(statement.last_lines))
        tries = [_split(text, len(blanks), nfkc(task.question)) for text in texts]
        if filled := [parts for parts in tries if len(parts) == len(blanks)]:
            shares = [sum(map(_fills, parts, blanks)) / len(blanks) for parts in filled]
            value = 1.0 if max(shares) == 1 else partial * max(shares)
            return RewardResult(value, {"parsed": 1.0}, answer=";".join(map(normal_form, filled[-1])))
    return RewardResult(0.0, {"parsed": 0.0}, answer="")


_NUMBERED = re.compile(
    rf"(?i)\((\d)\)|第\s*([\d{''.join(HAN_DIGITS)}])\s*空\s*:?|\bblank\s*(\d)\s*:|(?:^|(?<=\s))(\d)[.)、](?=\s)"
)
_BLANK = re.compile(r"(?:\\?_){2,}|\(\s*\)|\\underline\s*\{(?:[^{}\w]|\\\w+)*\}")


def _numbered(text: str, count: int) -> list[str]:
    """Return the parts after the numbers 1 to ``count``, if the text ends with such a list: (1) … (2) …"""
    marks = list(_NUMBERED.finditer(text))[-count:]
    digits = [mark[mark.lastindex or 0] for mark in marks]
    numbers = [int(digit) if digit.isdigit() else HAN_DIGITS[digit] for digit in digits]
    if count == 1 or numbers != [*range(1, count + 1)]:
        return []
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    parts = (text[mark.end() : end] for mark, end in zip(marks, ends, strict=True))
    return [re.sub(r"^[\s:]+|[\s,;、]*(?:\band\b|和)?[\s,;、]*$", "", part) for part in parts]


def _filled(text: str, question: str, count: int) -> list[str]:
    """Return the parts of the text in place of the question's blanks, if it repeats the question's sentence."""
    first, *others = _BLANK.split(question)
    if len(others) != count:
        return []
    context = [re.split(r"[.!?。\n]", first)[-1], *others[:-1], re.split(r"[.!?。\n]", others[-1])[0]]
    if len("".join(context).strip()) < 2:
        return []
    spoken = r"\s*(.+?)\s*".join(r"\s*".join(map(re.escape, plain(each).split())) for each in context)
    found = re.fullmatch(rf"\W*{spoken}\W*", plain(text), re.IGNORECASE | re.DOTALL)
    return list(found.groups()) if found else []


def _split(text: str, count: int, question: str) -> list[str]:
    """Return the parts for blanks: of the question's sentence, by number, or by the first separator that fits."""
    if parts := _filled(text, question, count) or _numbered(text, count):
        return parts
    if count > 1:
        for separator in (";", r"[,、]\s*(?:and\b)?", r"\band\b|和", r"[,、]\s*(?:and\b)?|\band\b|和", r"\s+"):
            parts = [part for part in re.split(separator, plain(text)) if part.strip()]
            if len(parts) == count:
                return parts
    return [text]


def _fills(text: str, variants: Sequence[str]) -> bool:
    if any(normal_form(text).casefold() == normal_form(variant).casefold() for variant in variants):
        return True
    said = _quantity(text)
    return said is not None and any(_is_same(said, quantity) for quantity in map(_quantity, variants) if quantity)


_NAMED = re.compile(r"^\s*\\?[A-Za-zα-ωΔ]\w{0,5}\s*[=≈]\s*")
_ABOUT = re.compile(r"(?i)^\s*(?:about|approximately|around|roughly|约为?|大约|\\approx|≈)\s*|(?:左右|上下)$")
_LONGEST, _LARGEST = 200, 10**200


def _quantity(text: str) -> Number | None:
    """Read a number with its unit, perhaps after a name or "about"; a percentage as the share that it is."""
    text = re.sub(r"\\mu\s*", "μ", unwrapped(text).replace("\\Omega", "Ω")).strip(" *_\"'")
    text = re.sub(rf"^(.*\d)\s*(?!\$)([{CURRENCY_SIGNS}])$", r"\2\1", text)
    money = len(re.findall(r"(?<!\\)\$", text)) % 2 and re.search(r"(?<!\\)\$(?=\s*[\d.])", text)
    text = text if money else re.sub(r"(?<!\\)\$", "", text)  # dollar signs of mathematics
    text = _ABOUT.sub("", _NAMED.sub("", text.rstrip("。.,"))).strip()
    text = re.sub(r"(?<=[\d}])(?:\s*\(([^()]*)\)|([A-Za-zΩ](?:\s*\^.*)?))$", r" \1\2", text)  # "5 (cm)", "5m"
    number = read_quantity(normalized(text)) if len(text) <= _LONGEST else None
    if number is None or abs(number.value) > _LARGEST:
        return None
    return replace(number, value=number.value / 100, percent=False) if number.percent else number


def _number(task: Task, found: Sequence[Statement], tolerance: float) -> RewardResult:
    right, share = _quantity(task.answer), max(tolerance, 1e-9)
    if right is None:
        return RewardResult(None, reason=f"the reference answer {task.answer!r} is not a number")
    for statement in found:
        texts = [_SENTENCE.split(text, maxsplit=1)[0] for text in statement.readings]
        tries = (_quantity(text) or _quantity(_result(text)) or _quantity(_stated(text)) for text in texts)
        if (quantity := next(filter(None, tries), None)) is not None:
            factor, offset = conversion(quantity.unit, right.unit, unknown_fits=False) or (math.nan, math.nan)
            close = math.isclose(quantity.value * factor + offset, right.value, rel_tol=share, abs_tol=1e-12)
            answer = f"{float(quantity.value):g} {parse_unit(quantity.unit) or quantity.unit}".strip()
            return RewardResult(float(close), {"parsed": 1.0}, answer=answer)
    return RewardResult(0.0, {"parsed": 0.0}, answer="")


_CONCLUSION = re.compile(
    r"\b(?:so|hence|thus|therefore|then)\b|所以|因此|故|则|可?得|^\W*(?:since|with|as|if|given|由|因为|当).*,", re.I
)


def _result(text: str) -> str:
    """Return the result of a single equation, else nothing."""
    text = _CONCLUSION.split(text)[-1]
    if re.search(r"[<>!≠≤≥]|\\(?:[lg]eq?|neq?)\b", text):
        return ""
    equations = [part for part in re.split(r"[,](?!\d{3})|[;、或和与且(]|\b(?:or|and)\b", text) if "=" in part]
    return text.rpartition("=")[2] if len(equations) == 1 else ""


_STATES = re.compile(
    r"\b(?:is|are|was|were|equals?|ha[sd]|have|costs?|takes?|needs?|makes?|gets?|leaves?)\s|(?<![没不非])[是为有共得要需]"
)


def _stated(text: str) -> str:
    """Return the part after the verb of a sentence with one number, else nothing."""
    return _STATES.split(text)[-1] if len(re.findall(r"\d[\d.,]*", text)) == 1 else ""


def _is_same(one: Number, other: Number) -> bool:
    """Whether two numbers have the same value and unit."""
    same = one.value == other.value and bool(one.unit) == bool(other.unit)
    return same and conversion(one.unit, other.unit, unknown_fits=False) == (Fraction(1), Fraction(0))
