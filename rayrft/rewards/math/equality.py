"""Decide whether mathematical answers are equal, and give equal ones the same text."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise
from typing import Any

from rayrft.rewards.math.formula import Node, TooLarge, Unreadable, agree, mpmath, parse_formula, real, values
from rayrft.rewards.math.reading import OF_SETS, AnswerGroup, Formula, MathAnswer, Other, Relation, Words, is_constant
from rayrft.rewards.text.notation import letters
from rayrft.rewards.text.numbers import Number
from rayrft.rewards.text.units import conversion


class Undecided(Exception):
    """The equality of two answers cannot be decided."""


def equal(truth: MathAnswer, answer: MathAnswer, tolerance: float = 0.0) -> bool:
    """Whether an answer equals the truth, or its numbers differ by at most this share of the truth's. Raises Undecided,
    and TooLarge if a value is too large to compute."""
    if _squeezed(truth.text) == _squeezed(answer.text):
        return True
    if isinstance(truth, Relation) or isinstance(answer, Relation):
        return _relations(truth, answer, tolerance)
    if isinstance(truth, AnswerGroup) or isinstance(answer, AnswerGroup):
        return _groups(truth, answer, tolerance)
    if isinstance(truth, Words) or isinstance(answer, Words):
        return _word(truth) == _word(answer)
    if isinstance(truth, Other) or isinstance(answer, Other):
        raise Undecided
    if (converted := conversion(answer.unit, truth.unit, unknown_fits=True)) is None:
        return False
    factor, offset = converted
    if isinstance(truth, Number) and isinstance(answer, Number):
        value = answer.value if truth.percent == answer.percent else _as_percent(truth, answer)
        exact = not offset and factor in {1, 100, Fraction(1, 100)}
        return agree(truth.value, value * factor + offset, tolerance or (0.0 if exact else 1e-9))
    left, right = _node(truth), _node(answer)
    names = left.names() | right.names()
    decided = False
    for one, other in zip(values(left, names), values(right, names), strict=True):
        if one is None and other is None:
            continue
        decided = True
        scaled = other if other is None or factor == 1 else real(other) * real(factor) + real(offset)
        if not agree(one, scaled, tolerance):
            return False
    if not decided and names:
        raise Undecided
    return decided


def _as_percent(truth: Number, answer: Number) -> Fraction:
    """Return the answer's value if only one has a percent sign: 25% equals 25 and 0.25, but 0.4% not the share 0.4."""
    if answer.value == truth.value and (truth.percent or abs(truth.value) >= 1):
        return answer.value
    return answer.value * 100 if truth.percent else answer.value / 100


def _node(answer: Number | Formula) -> Node:
    if isinstance(answer, Formula):
        return answer.node
    return Node("number", value=answer.value / (100 if answer.percent else 1))


def _word(answer: MathAnswer) -> str:
    text = re.sub(r"\\text ?\{([^{}]*)\}", r"\1", answer.text)
    text = re.sub(r"[\s(){}]", "", text)
    return text if len(text) == 1 else text.casefold()


def _relations(truth: MathAnswer, answer: MathAnswer, tolerance: float) -> bool:
    if not isinstance(truth, Relation):
        return isinstance(answer, Relation) and _value_of(answer, truth, tolerance)
    if not isinstance(answer, Relation):
        return bool(truth.op == "=" and truth.name) and equal(truth.right, answer, tolerance)
    if truth.op != answer.op:
        return False
    if truth.name and answer.name and truth.name == answer.name and equal(truth.right, answer.right, tolerance):
        return True
    return _proportional(truth, answer, tolerance)


def _value_of(answer: Relation, truth: MathAnswer, tolerance: float) -> bool:
    """Whether an equation states the truth: ``x = 5``, by any name, or ``2 + 3 = 5``, but not ``3 = 5``."""
    if answer.op != "=":
        return False
    if not answer.name and (not is_constant(answer.left) or not equal(answer.right, answer.left)):
        return False
    return equal(truth, answer.right, tolerance)


def _proportional(truth: Relation, answer: Relation, tolerance: float) -> bool:
    """Whether the differences of both sides have a constant ratio, positive for inequalities."""
    sides = (truth.left, truth.right, answer.left, answer.right)
    if not all(isinstance(side, Number | Formula | Words) for side in sides):
        if isinstance(truth.right, AnswerGroup) or isinstance(answer.right, AnswerGroup):
            return False
        raise Undecided
    try:
        nodes = [parse_formula(side.text) if isinstance(side, Words) else _node(side) for side in sides]  # type: ignore[arg-type]
    except Unreadable:
        return False
    left, right = Node("-", (nodes[0], nodes[1])), Node("-", (nodes[2], nodes[3]))
    names, ratios = left.names() | right.names(), list[Any]()
    for one, other in zip(values(left, names), values(right, names), strict=True):
        if one and other:
            exact = isinstance(one, Fraction) and isinstance(other, Fraction)
            ratios.append(other / one if exact else real(other) / real(one))
    if len(ratios) < 2:
        raise Undecided  # the truth holds for all numbers, or for none that was tried
    positive = truth.op in {"=", "\\ne"} or all(real(ratio).real > 0 for ratio in ratios)
    return positive and all(agree(ratios[0], ratio, tolerance) for ratio in ratios[1:])


def _groups(truth: MathAnswer, answer: MathAnswer, tolerance: float) -> bool:
    if not isinstance(truth, AnswerGroup):
        items = answer.items if isinstance(answer, AnswerGroup) and answer.kind == "set" else ()
        return bool(items) and truth.text != "\\emptyset" and all(equal(truth, item, tolerance) for item in items)
    if not isinstance(answer, AnswerGroup):
        if isinstance(answer, Other):
            raise Undecided
        return truth.kind == "set" and all(equal(item, answer, tolerance) for item in truth.items)
    kinds = {truth.kind, answer.kind}
    listed = {"set", "blanks", "union", "intersection"}
    if kinds <= {"set", "union"} or (truth.kind == "set" and answer.kind in listed):
        each = all(any(equal(item, other, tolerance) for other in answer.items) for item in truth.items)
        same = each and all(any(equal(item, other, tolerance) for item in truth.items) for other in answer.items)
        if "set" in kinds:  # items of a list, "x < 2, y > 3", may have several variables
            return same and (kinds <= {"set", "blanks"} or len({letters(item.text) for item in answer.items}) == 1)
        if same:
            return True
    if kinds & OF_SETS.keys():
        return _same_points(truth, answer)
    left, right = _vector(truth), _vector(answer)
    ordered = answer.kind in {truth.kind, left.kind} or (answer.kind == "set" and truth.kind in {"()", "blanks"})
    if not (ordered or left.kind == right.kind) or len(left.items) != len(right.items):
        return False
    return all(equal(item, other, tolerance) for item, other in zip(left.items, right.items, strict=True))


def _same_points(truth: AnswerGroup, answer: AnswerGroup) -> bool:
    """Whether two sets of intervals and points are equal: whether they contain the same of their ends and of points
    between and beyond. Raises Undecided if the truth is not such a set."""
    ends = list[Any]()
    for group in (truth, answer):
        try:
            ends += _ends(group)
        except Undecided:
            if group is truth and truth.kind in OF_SETS:
                raise
            return False
    ends = sorted({end for end in ends if abs(end) != float("inf")})
    with mpmath.workdps(60):
        between = [(low + high) / 2 for low, high in pairwise(ends)]
    points = [*ends, *between, ends[0] - 1, ends[-1] + 1] if ends else [real(Fraction(0))]
    return all(_holds(truth, point) == _holds(answer, point) for point in points)


def _ends(answer: MathAnswer) -> list[Any]:
    """Return the ends of intervals and the points of a set of real numbers. Raises Undecided for other answers."""
    if isinstance(answer, AnswerGroup):
        if answer.kind not in {*OF_SETS, "set"} and (len(answer.kind) != 2 or len(answer.items) != 2):
            raise Undecided
        if answer.kind == "set" and any(isinstance(item, AnswerGroup) for item in answer.items):
            raise Undecided
        return [end for item in answer.items for end in _ends(item)]
    if answer.text.strip(" +-") == "\\infty":
        return [real(Fraction(-1 if "-" in answer.text else 1)) * float("inf")]
    [value] = values(_node(answer)) if isinstance(answer, Number | Formula) and is_constant(answer) else [None]
    if value is None or real(value).imag:
        raise Undecided
    return [real(value)]


def _holds(answer: MathAnswer, point: Any) -> bool:
    """Whether a set of real numbers contains the point."""
    if not isinstance(answer, AnswerGroup):
        return agree(_ends(answer)[0], point)
    if answer.kind in {*OF_SETS, "set"}:
        first, *others = (_holds(item, point) for item in answer.items)
        if answer.kind == "difference":
            return first and not any(others)
        return all([first, *others]) if answer.kind == "intersection" else any([first, *others])
    low, high = _ends(answer)
    at_low, at_high = (abs(end) != float("inf") and agree(end, point) for end in (low, high))
    inside = low < point < high and not at_low and not at_high
    return inside or (at_low and answer.kind[0] == "[") or (at_high and answer.kind[1] == "]")


def _vector(group: AnswerGroup) -> AnswerGroup:
    """Return a column of a matrix as a tuple."""
    cells = [row.items for row in group.items if isinstance(row, AnswerGroup)] if group.kind == "matrix" else []
    if len(cells) > 1 and all(len(row) == 1 for row in cells):
        return AnswerGroup(group.text, "()", tuple(row[0] for row in cells))
    return group


def canonical(answer: MathAnswer) -> str:
    """Return the same text for most equal answers: exact numbers, 15 digits of other constants, sorted sets."""
    match answer:
        case Number(_, value, percent):
            return f"{value}%" if percent else str(value)
        case Formula(_, node) if is_constant(answer):
            try:
                [constant] = values(node)
            except (TooLarge, RecursionError):
                constant = None
            if constant is not None:
                exact = isinstance(constant, Fraction)
                return str(constant if exact else mpmath.nstr(mpmath.chop(constant, 1e-30), 15))
        case Words():
            return _word(answer)
        case Relation(_, "=", left, right, name) if name or is_constant(left):
            return canonical(right)
        case Relation(_, op, left, right):
            return f"{canonical(left)} {op} {canonical(right)}"
        case AnswerGroup(_, kind, items):
            inner = list(map(canonical, items))
            if kind in {"set", "union", "intersection"}:
                inner = sorted(set(inner))
            opening, closing = (kind[0], kind[1]) if kind in {"()", "[]", "(]", "[)"} else ("", "")
            between = f" {OF_SETS[kind]} " if kind in OF_SETS else "; " if kind in {"blanks", "matrix"} else ", "
            return f"{opening}{between.join(inner)}{closing}"
    return _squeezed(answer.text)


def _squeezed(text: str) -> str:
    """Return the text without spaces, but for those between digits."""
    return re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r"([\^_])\{(\w)\}", r"\1\2", text))
