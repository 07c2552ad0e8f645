"""Answers to school questions, in English and Chinese: choice, true or false, blanks, and numbers with units."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from rayrft.experience import Task
from rayrft.rewards.base import Reward, RewardResult, inline, register_reward
from rayrft.rewards.text.choices import choice
from rayrft.rewards.text.numbers import Quantity, read_quantity
from rayrft.rewards.text.statements import LONGEST_STATEMENT, Statement, nfkc, normal_form, plain, statements
from rayrft.rewards.text.verdicts import verdict

Kind = Literal["choice", "true_false", "blanks", "number"]


@register_reward("k12")
@inline
def k12(kind: Kind = "blanks", *, strict: bool = False, partial: float = 0.0, tolerance: float = 0.0) -> Reward:
    """1 if the response's final answer is right, else 0; component ``parsed`` is 1 if it has one.

    The kind is that of the task's ``metadata["kind"]``; else a task with ``metadata["options"]``, the texts of its
    options in order, is a choice, and any other one is of the ``kind`` given here.

    * ``choice``: the task's answer is the right letters, such as ``B`` or ``AC``. A response names letters, says the
      text of one option, or judges the options one by one. Where several are right, some of them without a wrong one
      give ``partial``.
    * ``true_false``: the task's answer is a word such as true, 正确, no, F, √; so is that of a response, in a clause of
      its first or last line. It has none if it says both.
    * ``blanks``: ``metadata["blanks"]`` lists the accepted variants of each blank, in order; else there is one, and the
      task's answer fills it. Right blanks among wrong ones give their share of ``partial``.
    * ``number``: right within ``metadata["tolerance"]``, by default ``tolerance``, as a share of the task's answer. A
      response may leave out the unit; another one of the same dimension is converted. Two numbers are no answer.

    What a response announces is its answer: in a box, after ``####``, "the answer is" or 答案; the last of several.
    Without one its last line is, unless ``strict``.
    """

    _registry()  # the first answer is scored where others wait, too

    def score(task: Task, response: str) -> RewardResult:
        asked = task.metadata.get("kind", "choice" if task.metadata.get("options") else kind)
        found = statements(response, strict=strict)
        match asked:
            case "choice":
                return choice(task, found, partial)
            case "true_false":
                return _true_false(task, found)
            case "blanks":
                return _blanks(task, found, partial)
            case "number":
                return _number(task, found, task.metadata.get("tolerance", tolerance))
        return RewardResult(None, reason=f"no kind of school question is called {asked!r}")

    return score


# True or false


def _true_false(task: Task, found: Sequence[Statement]) -> RewardResult:
    right = verdict(task.answer)
    if right is None:
        return RewardResult(None, reason=f"the reference answer {task.answer!r} is neither true nor false")
    for statement in found:
        first = statement.before.partition("\n")[0][:LONGEST_STATEMENT]
        if (said := verdict(statement.text, first)) is not None:
            return RewardResult(float(said == right), {"parsed": 1.0}, answer=str(said))
    return RewardResult(0.0, {"parsed": 0.0}, answer="")


# Blanks

_SENTENCE = re.compile(r"(?<=[^\s.])(?:[.!?](?:\s|$)|。)|\s+\(?(?:because|since|where)\b|,?\s*因为")


def _blanks(task: Task, found: Sequence[Statement], partial: float) -> RewardResult:
    blanks = [[each] if isinstance(each, str) else each for each in task.metadata.get("blanks", [task.answer])]
    for statement in found:
        # The whole line first: "Mr. Smith" is no end of a sentence.
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


_HAN_DIGITS = "零一二三四五六七八九"
_NUMBERED = re.compile(
    rf"\((\d)\)|第\s*([\d{_HAN_DIGITS}])\s*空\s*:?|\bblank\s*(\d)\s*:|(?:^|(?<=\s))(\d)[.)、](?=\s)", re.IGNORECASE
)
_BLANK = re.compile(r"(?:\\?_){2,}|\(\s*\)|\\underline\s*\{(?:[^{}\w]|\\\w+)*\}")


def _numbered(text: str, count: int) -> list[str]:
    """Return the parts after the numbers 1 to ``count``, if the text ends with such a list: (1) … (2) …"""
    marks = list(_NUMBERED.finditer(text))[-count:]
    digits = [mark[mark.lastindex or 0] for mark in marks]
    numbers = [int(digit) if digit.isdigit() else _HAN_DIGITS.index(digit) for digit in digits]
    if count == 1 or numbers != [*range(1, count + 1)]:
        return []
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    parts = (text[mark.end() : end] for mark, end in zip(marks, ends, strict=True))
    return [re.sub(r"^[\s:]+|[\s,;、]*(?:\band\b|和)?[\s,;、]*$", "", part) for part in parts]


def _filled(text: str, question: str, count: int) -> list[str]:
    """Return the text in place of the question's blanks, if it is the question's sentence otherwise."""
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
    """Return the parts of an answer to so many blanks: of the question's sentence, by number, or by the first separator
    that gives so many."""
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
    said = read_quantity(text)
    return said is not None and any(said == read_quantity(variant) for variant in variants)


# Numbers

_UNITS = {
    "千米": "km", "公里": "km", "厘米": "cm", "毫米": "mm", "分米": "dm", "微米": "um", "纳米": "nm", "米": "m",
    "千克": "kg", "公斤": "kg", "毫克": "mg", "克": "g", "吨": "t", "毫升": "ml", "升": "l", "公顷": "ha",
    "小时": "h", "分钟": "min", "秒": "s", "天": "day", "时": "h", "年": "year",
    "星期": "week", "周": "week", "个月": "month", "焦耳": "J", "牛顿": "N", "瓦特": "W", "伏特": "V",
    "安培": "A", "帕斯卡": "Pa", "欧姆": "ohm", "赫兹": "Hz", "库仑": "C", "摩尔": "mol", "千": "k", "毫": "m",
    "牛": "N", "焦": "J", "瓦": "W", "伏": "V", "安": "A", "帕": "Pa", "欧": "ohm", "Ω": "ohm",
    "摄氏度": "degC", "°": "degree", "度": "degree", "每": "/",
    "美元": "dollar", "元": "yuan", "角": "jiao", "个人": "person", "人": "person",
}  # fmt: skip
"""Longer names first: they are replaced in this order."""


def _registry() -> Any:
    from rayrft.rewards.text.unit_registry import REGISTRY

    return REGISTRY


_SPOKEN = [
    (re.compile(r"(?:°|\bdegrees?)\s*C(?:elsius)?\b", re.IGNORECASE), "degC"),
    (re.compile(r"(?:°|\bdegrees?)\s*F(?:ahrenheit)?\b", re.IGNORECASE), "degF"),
    (re.compile(r"\bsq(?:uare|\.)?\s+([A-Za-z]+)|([A-Za-z]+)\s+squared\b"), r"\1\2**2"),
    (re.compile(r"\bcu(?:bic|\.)?\s+([A-Za-z]+)|([A-Za-z]+)\s+cubed\b"), r"\1\2**3"),
    (re.compile(r"\s+per\s+"), "/"),
]
_FACTOR = r"[A-Za-zµμ_]++(?:\*\*-?\d)?+"
_UNIT = re.compile(rf"{_FACTOR}(?:(?:\s*+[*/]\s*+|\s++(?:per\s++)?)\(?{_FACTOR}\)?)*+")
"""Nothing that pint would have to calculate."""


@lru_cache(maxsize=256)
def parse_unit(text: str) -> Any:
    """Return the unit that the text begins with; None if it begins with none."""
    power = {"平方": "**2", "立方": "**3"}
    text = re.sub(r"(平方|立方)(千米|公里|厘米|分米|毫米|米)", lambda found: _UNITS[found[2]] + power[found[1]], text)
    for pattern, replacement in _SPOKEN:
        text = pattern.sub(replacement, text)
    for name, symbol in _UNITS.items():
        text = text.replace(name, symbol)
    text = re.sub(r"(?<=[A-Za-zµμ])\^?\{?([-−]?\d)\}?", r"**\1", text.replace("·", "*").replace("⋅", "*"))
    [first, *_] = re.split(r"\s+(?![/*(]|per\b)", text)
    for candidate in (text, first) if "/" in text or "*" in text else (first,):
        if len(candidate) <= 40 and _UNIT.fullmatch(candidate):
            try:
                return _registry().parse_units(candidate)
            except Exception:  # of pint's and of tokenize's: the text is no unit
                continue
    return None


def _number(task: Task, found: Sequence[Statement], tolerance: float) -> RewardResult:
    right = read_quantity(task.answer)
    if right is None:
        return RewardResult(None, reason=f"the reference answer {task.answer!r} is no number")
    for statement in found:
        texts = [_SENTENCE.split(text, maxsplit=1)[0] for text in statement.readings]
        tries = (read_quantity(text) or read_quantity(_result(text)) or read_quantity(_stated(text)) for text in texts)
        if (quantity := next(filter(None, tries), None)) is not None:
            value = _in_unit(quantity, right.unit)
            close = value is not None and math.isclose(value, right.value, rel_tol=max(tolerance, 1e-9), abs_tol=1e-12)
            answer = f"{float(quantity.value):g} {quantity.unit}".strip()
            return RewardResult(float(close), {"parsed": 1.0}, answer=answer)
    return RewardResult(0.0, {"parsed": 0.0}, answer="")


_CONCLUSION = re.compile(
    r"\b(?:so|hence|thus|therefore|then)\b|所以|因此|故|则|可?得|^\W*(?:since|with|as|if|given|由|因为|当).*,", re.I
)


def _result(text: str) -> str:
    """Return what a calculation comes to; nothing of what only bounds it, or of several equations."""
    text = _CONCLUSION.split(text)[-1]
    if re.search(r"[<>!≠≤≥]|\\(?:[lg]eq?|neq?)\b", text):
        return ""
    equations = [part for part in re.split(r"[,](?!\d{3})|[;、或和与且(]|\b(?:or|and)\b", text) if "=" in part]
    return text.rpartition("=")[2] if len(equations) == 1 else ""


_STATES = re.compile(
    r"\b(?:is|are|was|were|equals?|ha[sd]|have|costs?|takes?|needs?|makes?|gets?|leaves?)\s|(?<![没不非])[是为有共得要需]"
)


def _stated(text: str) -> str:
    """Return what a sentence with one number says, from its verb on."""
    return _STATES.split(text)[-1] if len(re.findall(r"\d[\d.,]*", text)) == 1 else ""


def _in_unit(quantity: Quantity, wanted: str) -> float | None:
    """Return the value in a unit, or as it is where one of them has none; None where the units do not fit."""
    if not quantity.unit or not wanted or quantity.unit.rstrip("s") == wanted.rstrip("s"):
        return float(quantity.value)
    unit, target = parse_unit(quantity.unit), parse_unit(wanted)
    if unit is None or target is None or not unit.is_compatible_with(target):
        return None
    try:
        return float(_registry().Quantity(float(quantity.value), unit).m_as(target))
    except Exception:  # of pint's, for units such as decibels that have no such ratio
        return None
