"""Equivalence of mathematical answers.

Numbers, fractions and percentages are compared exactly; formulas by their values at random points (`formula`); lists,
tuples, intervals, matrices, equations and quantities with units part by part (`reading`, `equality`); what remains,
such as sums, integrals and unions, by the library math-verify (`symbolic`).

What counts as equal: ``1/2`` and ``0.5``, ``1,000`` and ``1000``, ``2^{10}`` and ``1024``, ``x = 5`` (or another name)
and ``5``, ``x = 3z`` and ``x - 3z = 0``, ``3 < x`` and ``(3, \\infty)``, ``25%`` and both ``25`` and ``0.25``, ``17``
and ``17 m``, ``2 h`` and ``120 min``, a list and the same in another order, ``(1, 2)`` and the column of 1 and 2. What
does not: ``0.33`` and ``1/3`` (but see ``tolerance``), ``x = 5`` and ``y = 5``, ``17 s`` and ``17 m``, ``3 or 4`` and
``3``, ``(1, 2)`` and ``[1, 2]``, ``(1, 2)`` and ``(2, 1)``, ``3 = 5`` and ``5``.
"""

from __future__ import annotations

import re

from rayrft.experience import Task
from rayrft.rewards.answers import LONGEST_STATEMENT, nfkc, statements
from rayrft.rewards.base import Reward, RewardResult, imports, register_reward
from rayrft.rewards.equality import Undecided, canonical, equal
from rayrft.rewards.formula import TooLarge, Unreadable
from rayrft.rewards.reading import Answer, Other, Words, clear, normalized, read_answer
from rayrft.rewards.symbolic import OutOfTime, verify

_LONGEST_TRUTH = 500


@register_reward("math")
@imports("math_verify")
def math_answer(*, strict: bool = False, tolerance: float = 0.0, seconds: float = 2.0) -> Reward:
    """1 if the response's final answer equals the ground truth mathematically, else 0.

    What a response announces is its answer: in its last box, after ``####`` or "the answer is"; the last of several.
    Without one its last formula or number is, unless ``strict``. An answer that is denied ("not 5") or left open ("3 to
    4") is none. Component ``parsed`` is 1 if the response contains an answer.

    ``tolerance`` is the share of the truth by which a number may differ. ``seconds`` of processor time
    bound what math-verify compares, in a process's main thread; the worker's deadline bounds everything. What takes
    longer, or would be too large to compute, is unknown, and so is a ground truth that is no mathematical answer.
    """

    def score(task: Task, response: str) -> RewardResult:
        try:
            truth = _truth(task.answer)
        except TooLarge:
            truth = None
        if truth is None:
            return RewardResult(None, reason=f"the ground truth {task.answer[:80]!r} is not a mathematical answer")
        try:
            return _scored(truth, response)
        except (TooLarge, RecursionError):
            return RewardResult(None, {"parsed": 1.0}, reason="too large to be computed: the answer, or the truth")
        except OutOfTime:
            return RewardResult(
                None, {"parsed": 1.0}, reason=f"timeout: not compared within {seconds:g} s of processor time"
            )

    def _scored(truth: Answer, response: str) -> RewardResult:
        text = find_answer(response, strict=strict)
        if text is None:
            return RewardResult(0.0, {"parsed": 0.0}, answer="")
        answer = read_answer(text)
        try:
            right = equal(truth, answer, tolerance)
        except Undecided:
            try:
                right = verify(truth.text, answer.text, seconds)
            except Unreadable as error:
                if error.args[0] == truth.text:
                    return RewardResult(None, reason=f"the ground truth {truth.text!r} cannot be compared")
                return RewardResult(0.0, {"parsed": 0.0}, answer=canonical(answer))
        return RewardResult(float(right), {"parsed": 1.0}, answer=canonical(answer))

    return score


def _truth(text: str) -> Answer | None:
    if "####" in text or "\\boxed" in text:  # a whole solution
        text = find_answer(text, strict=True) or ""
    if not text.strip() or len(text) > _LONGEST_TRUTH:
        return None
    truth = read_answer(text)
    prose = isinstance(truth, Other) and re.search(
        r"[A-Za-z]{2,} [A-Za-z]{2,}", re.sub(r"\\text ?\{[^{}]*\}", "", truth.text)
    )
    return None if prose else truth


# Where the answer is

_COMMAND = r"\\[A-Za-z]+|\\[{}%]"
_PIECE = (
    rf"(?:{_COMMAND}|\{{(?:[^{{}}]|\{{(?:[^{{}}]|\{{[^{{}}]*+\}})*+\}})*+\}}|\d+(?:\.\d+)?|\.\d+|(?<![A-Za-z'’])(?![aAI]\s+[A-Za-z]{{2}})[A-Za-z](?![A-Za-z'’])"
    r"|[-+*/^_=<>!|()\[\]]|[$€£])%?"
)
_RUN = re.compile(rf"{_PIECE}(?:\s*+(?:,\s*+(?:and\b|or\b)?|\band\b|\bor\b)?\s*+{_PIECE})*+")
_LEAD = re.compile(
    r"[\s:*\"'“]*(?:(?:about|approximately|roughly|exactly|simply|just|only|therefore|thus|then|indeed|equal\s+to|given\s+by"
    r"|either|both|the\s+number|a\s+total\s+of|equals|clearly)\b[\s:*]*)*",
    re.IGNORECASE,
)
_OPEN = re.compile(
    r"[\s:*]*(?:not|n['’]t|never|neither|between|from|at\s+(?:least|most)|(?:more|less|greater|fewer)\s+than|over|under)\b"
    r"(?:\s+\w+){0,2}\s*[-\d$\\]",
    re.IGNORECASE,
)
_LEFT_OPEN = re.compile(
    r"\s*(?:\?|(?:to|through)\b\s*[-\d$\\]|[–—]\s*\d|(?:is|are)\s+(?:not|wrong|incorrect)\b)", re.IGNORECASE
)
_BEFORE = re.compile(r"(?:\bnot|n['’]t|\bnever)\s+(?:\w+\s+){0,2}$|\d\s*(?:to\b|[–—])\s*$", re.IGNORECASE)
_UNITS = re.compile(
    r"\s*(?:\\text\s*\{[^{}]*\}|(?!(?:to|is|are|and|or|but|so|because|since|as|which|for|not|an?|the|each|of|in|if|when|with|from)\b)[A-Za-z°µμ]+)(?:\s*\^\s*\{?\d\}?)?(?:\s*/\s*[A-Za-z]+)?"
)
_MATHEMATICAL = re.compile(r"(?<!\\)\$\$?((?:\\.|[^$\\])+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_BULLET = re.compile(r"^\s*(?:(?:[-*>#]+|\d+[.)])\s+|\*+)")
_MOST_LINES, _LONGEST_LINE = 20, 500


def find_answer(response: str, *, strict: bool = False) -> str | None:
    """Return the text of a response that states its answer; None if it states none, or leaves it open.

    Raises TooLarge if a box holds more than an answer.
    """
    if len(response) < 40 and _PLAIN_NUMBER.fullmatch(response) and not strict:
        return response
    for statement in statements(response, strict=True):
        if statement.boxed:
            if len(statement.text) == LONGEST_STATEMENT:
                raise TooLarge("cut")
            return statement.text
        if _OPEN.match(statement.text):
            return None
        found = _announced(statement.text)
        if found is not None:
            return found or None
    return None if strict else _last(response)


_PLAIN_NUMBER = re.compile(r"\s*-?\d+(?:\.\d+)?\s*")


def _announced(text: str) -> str | None:
    """Return the answer that an announcement begins with, or the only one in its sentence; empty where it is left open,
    None if it is none."""
    text = text[_LEAD.match(text).end() :].partition("</")[0]  # type: ignore[union-attr]
    if not text.strip():
        return None
    span = _MATHEMATICAL.match(text)
    if span and not re.match(r"\s*(?:,|and\b|or\b)\s*[$\\\d]", text[span.end() :]):
        rest = text[span.end() :]
        if _LEFT_OPEN.match(rest):
            return ""
        unit = _UNITS.match(rest)
        percent = "%" if re.match(r"\s*(?:\\?%|percent\b)", rest) else ""
        return f"{_inner(span)}{percent or (unit[0] if unit and len(unit[0]) < 40 else '')}"
    return _run(_unmarked(text))


def _inner(span: re.Match[str]) -> str:
    return next(group for group in span.groups() if group)


def _unmarked(text: str) -> str:
    """Return the text without the marks of mathematics in it and of emphasis."""
    text = re.sub(r"(?<!\\)\$((?:\\.|[^$\\])*)\$", r" \1 ", text.replace("\\!", ""))
    return (
        re.sub(r"(?<!\\)\\[()\[\],;]|\*\*|\\(?:left|right)(?![A-Za-z])", " ", text)
        .replace("{,}", ",")
        .replace("\\$", "$")
    )


def _run(text: str) -> str | None:
    text = text.strip()
    sentence = re.split(r"(?<=[^\s.])[.!](?:\s|$)", text, maxsplit=1)[0]
    whole = normalized(sentence)
    if len(whole) < 60 and clear(read_answer(sentence)):
        return sentence
    run = _RUN.match(text)
    if run and _states(run[0]):
        return _finished(text, run)
    runs = [run for run in _RUN.finditer(sentence) if re.search(r"\d", run[0])]
    return _finished(sentence, runs[0]) if len(runs) == 1 else None


def _states(run: str) -> bool:
    """Whether a run of mathematical signs says something: more than a bracket, or the word that begins a sentence."""
    return bool(re.search(r"\d|\\[A-Za-z]|[A-Za-z]\s*[-+*/^_=]", run)) or bool(
        re.fullmatch(r"\s*\(?[A-Za-z]\)?\s*", run) and run.strip() not in {"a", "A", "I"}
    )


def _finished(text: str, run: re.Match[str]) -> str:
    """Return the run with the unit after it; empty where it is left open."""
    rest = text[run.end() :]
    if _LEFT_OPEN.match(rest) or _BEFORE.search(text[: run.start()]):
        return ""
    if percent := re.match(r"\s*(?:\\?%|percent\b)", rest):
        return run[0] + percent[0]
    unit = _UNITS.match(rest) if re.search(r"[\d})]$", run[0]) else None
    return run[0] + (unit[0] if unit else "")


def _last(response: str) -> str | None:
    """Return the last formula or number of the last lines that hold one. Raises TooLarge if it is too long."""
    lines = [line for line in nfkc(response).split("\n") if line.strip()]
    for whole_line in reversed(lines[-_MOST_LINES:]):
        line = _BULLET.sub("", whole_line[-_LONGEST_LINE:]).strip()
        if re.fullmatch(r"[\s$\\[\]().,]*", line):
            continue
        text, cut = _unmarked(line).strip(" :*").rstrip(" .:*"), len(whole_line) > _LONGEST_LINE
        if len(text) < 80 and clear(answer := read_answer(text)) and not isinstance(answer, Words):
            return text
        spans = [found for found in _MATHEMATICAL.finditer(line) if re.search(r"\w", found[0])]
        if spans and spans[-1][0] == line.rstrip("."):
            return _inner(spans[-1])
        runs = [run for run in _RUN.finditer(text) if re.search(r"\d|\\[A-Za-z]{2}", run[0])]
        if not runs:
            continue
        if cut and runs[-1].start() <= 1:
            raise TooLarge("cut")
        if spans and not re.search(r"\d", rest := line[spans[-1].end() :]):
            inner = _inner(spans[-1])
            if inner.strip() in runs[-1][0] and not re.search(r"\b(?:or|and)\b", runs[-1][0]):
                left_open = _LEFT_OPEN.match(rest) or _BEFORE.search(line[: spans[-1].start()])
                return None if left_open else inner
        return _finished(text, runs[-1]) or None
    return None
