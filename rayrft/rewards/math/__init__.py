"""Equivalence of mathematical answers.

Numbers, fractions and percentages are compared exactly; formulas by their values at random points (`formula`); lists,
tuples, intervals and sets of them, matrices, equations and quantities with units part by part (`reading`, `equality`).
Sums, integrals and limits are not computed.

What counts as equal: ``1/2`` and ``0.5``, ``1,000`` and ``1000``, ``2^{10}`` and ``1024``, ``x = 5`` (or another name)
and ``5``, ``x = 3z`` and ``x - 3z = 0``, ``3 < x`` and ``(3, \\infty)``, ``25%`` and both ``25`` and ``0.25``, ``17``
and ``17 m``, ``2 h`` and ``120 min``, ``5 million`` and ``5000000``, a list and the same in another order, ``(1, 2)``
and the column of 1 and 2. What does not: ``0.33`` and ``1/3`` (but see ``tolerance``), ``x = 5`` and ``y = 5``,
``17 s`` and ``17 m``, ``5 million`` and ``5``, ``3 or 4`` and ``3``, ``(1, 2)`` and ``[1, 2]``, ``(1, 2)``
and ``(2, 1)``, ``3 = 5`` and ``5``.
"""

from __future__ import annotations

import re

from rayrft.experience import Task
from rayrft.rewards.base import Reward, RewardResult, imports, register_reward
from rayrft.rewards.math.equality import Undecided, canonical, equal
from rayrft.rewards.math.extract import find_answer
from rayrft.rewards.math.formula import TooLarge
from rayrft.rewards.math.reading import MathAnswer, Other, clear, read_answer
from rayrft.rewards.text.numbers import SCALE


@register_reward("math")
@imports("mpmath", "rayrft.rewards.text.unit_registry")
def math_answer(*, strict: bool = False, tolerance: float = 0.0) -> Reward:
    """1 if the response's final answer equals the ground truth mathematically, else 0.

    The answer is announced in a box, after ``####`` or "the answer is"; the last of several counts. Without one, it is
    the last formula or number, unless ``strict``. A denial ("not 5") or a range ("3 to 4") is not an answer. Component
    ``parsed`` is 1 if the response contains an answer.

    ``tolerance`` is the share of the truth by which a number may differ. The reward is unknown if a value is too large
    to compute, or the ground truth is not a mathematical answer or cannot be compared.
    """

    def score(task: Task, response: str) -> RewardResult:
        if (truth := _truth(_as_asked(task.answer, task.question))) is None:
            return RewardResult(None, reason=f"the ground truth {task.answer[:80]!r} is not a mathematical answer")
        try:
            return compare(truth, task.question, response)
        except (TooLarge, RecursionError):
            return RewardResult(None, {"parsed": 1.0}, reason="too large to be computed: the answer, or the truth")

    def compare(truth: MathAnswer, question: str, response: str) -> RewardResult:
        text = find_answer(response, strict=strict)
        if text is None:
            return RewardResult(0.0, {"parsed": 0.0}, answer="")
        text = _as_asked(text, question)
        answer = read_answer(text)
        try:
            right = equal(truth, answer, tolerance)
            if not right and "%" in text and _ASKS_PERCENT.search(question):
                right = equal(truth, read_answer(text.replace("%", "")), tolerance)
        except Undecided:
            if clear(truth) and not clear(answer):
                return RewardResult(0.0, {"parsed": 0.0}, answer=canonical(answer))
            return RewardResult(None, reason=f"the ground truth {truth.text!r} cannot be compared")
        return RewardResult(float(right), {"parsed": 1.0}, answer=canonical(answer))

    return score


_ASKS_PERCENT = re.compile(r"\b(?:what|how\s+many)\s+percent(?:age)?\b|百分之几", re.IGNORECASE)


def _truth(text: str) -> MathAnswer | None:
    try:
        if "####" in text or "\\boxed" in text:  # a whole solution
            text = find_answer(text, strict=True) or ""
        truth = read_answer(text) if text.strip() and len(text) <= 500 else None
    except TooLarge:
        return None
    words = re.sub(r"\\text ?\{[^{}]*\}", "", truth.text) if isinstance(truth, Other) else ""
    return None if re.search(r"[A-Za-z]{2,} [A-Za-z]{2,}", words) else truth


def _as_asked(text: str, question: str) -> str:
    """Return the text without a magnitude that the question asks for: "How many dozen eggs …?"."""
    if not (scale := SCALE.search(text)):
        return text
    asks = r"(?:\bhow\s+many(?:\s+\w+){0,2}?\s+|\bin\s+(?:the\s+)?|多少|几)" + re.escape(scale[0].strip().rstrip("s"))
    return text.replace(scale[0], " ") if re.search(asks, question, re.IGNORECASE) else text
