"""Answers about pictures: counts, text that is read, points, boxes and grids."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Literal

from rayrft.experience import Task
from rayrft.rewards.base import Reward, RewardResult, inline, register_reward, task_value
from rayrft.rewards.text.choices import choice
from rayrft.rewards.text.numbers import read_count
from rayrft.rewards.text.statements import Statement, nfkc, plain, statements

_Kind = Literal["count", "choice", "text", "point", "box", "grid"]


@register_reward("vision")
@inline
def vision(kind: _Kind = "count", *, strict: bool = False, threshold: float | None = None) -> Reward:
    """The score of the response's final answer, in [0, 1]; component ``parsed`` is 1 if it has one.

    The kind is the task's ``metadata["kind"]``, else ``kind``.

    * ``count``: 1 if the response has the task's number, in digits or words, and no other number.
    * ``choice``: as in reward ``k12``.
    * ``text``: 1 minus the Levenshtein distance to the task's answer, divided by the longer length, without case and
      white space; of the announced answer or the whole response, the nearer one.
    * ``point``: the task's answer is ``x, y``; 1 if the response's point is within ``metadata["radius"]`` (default 0)
      or, with ``metadata["box"]``, inside ``[x1, y1, x2, y2]``.
    * ``box``: the task's answer is ``x1, y1, x2, y2``; the intersection over union.
    * ``grid``: the task's answer has one row a line, of characters or, between blanks or commas, words; the share of
      equal cells, 0 for another shape. The last of several grids counts.

    With ``threshold`` a value of at least that is 1, and a smaller one 0. Points and boxes are numbers in any brackets
    or tags, with names or without, in pixels; unless ``strict``, they may fill the last fenced block or paragraph.
    """

    def score(task: Task, response: str) -> RewardResult:
        asked = task_value(task, "kind", str, kind)
        found = statements(response, strict=strict)
        if asked == "choice":
            return choice(task, found)
        if asked not in _KINDS:
            return RewardResult(None, reason=f"unknown kind of question about a picture: {asked!r}")
        result = _KINDS[asked](task, found, response, strict)
        if threshold is None or result.value is None:
            return result
        components = {**result.components, "raw": result.value}
        return RewardResult(float(result.value >= threshold), components, answer=result.answer)

    return score


_NOTHING = RewardResult(0.0, {"parsed": 0.0}, answer="")


def _count(task: Task, found: Sequence[Statement], response: str, strict: bool) -> RewardResult:
    right = read_count(nfkc(task.answer))
    if right is None:
        return RewardResult(None, reason=f"the reference answer {task.answer!r} is not a count")
    for statement in found:
        if (said := read_count(statement.text)) is not None:
            return RewardResult(float(said == right), {"parsed": 1.0}, answer=str(said))
    return _NOTHING


def _text(task: Task, found: Sequence[Statement], response: str, strict: bool) -> RewardResult:
    from rapidfuzz.distance import Levenshtein

    right = _folded(task.answer)
    if not right:
        return RewardResult(None, reason="the reference answer is empty")
    announced = [_folded(statement.text) for statement in found[:1] if statement.announced]
    # The exact distance of a far longer text is not worth its time.
    longest, texts = 10 * len(right) + 100, (*announced, _folded(response))
    values = {text: Levenshtein.normalized_similarity(text[:longest], right) for text in texts}
    read = max(values, key=values.__getitem__)
    return RewardResult(values[read], {"parsed": float(bool(read))}, answer=read)


def _folded(text: str) -> str:
    return " ".join(nfkc(text).split()).casefold()


_NUMBER = re.compile(r"(?<![\w.])[-+]?\d{1,7}(?:\.\d{1,6})?(?![\w.]*\d)", re.ASCII)
_QUOTED = re.compile(r'"[^"\n]*+"')


def _numbers(text: str, count: int) -> list[float] | None:
    """Return the numbers of a text that has ``count`` of them, without digits of names, ``x1`` or ``"cat 1"``."""
    unnamed = _QUOTED.sub(lambda quoted: " " if re.search(r"[^\W\d]", quoted[0]) else quoted[0], plain(text))
    numbers = [float(number) for number in _NUMBER.findall(unnamed)]
    return numbers if len(numbers) == count else None


_MOST_ROWS = 500
_FENCE = re.compile(r"```[a-z]*\n(.*?)```", re.DOTALL)


def _coordinates(found: Sequence[Statement], response: str, strict: bool, count: int) -> list[float] | None:
    """Return the numbers of the first statement with ``count`` of them or, unless strict, of the last block."""
    texts = [statement.text for statement in found]
    if not strict:
        fenced = _FENCE.findall(response)
        texts += [fenced[-1]] if fenced else [re.split(r"\n\s*\n", nfkc(response).strip())[-1]]
    return next(filter(None, (_numbers(text, count) for text in texts)), None)


def _point(task: Task, found: Sequence[Statement], response: str, strict: bool) -> RewardResult:
    box, right = task_value(task, "box", Sequence[float]), _numbers(task.answer, 2)
    if box is None and right is None:
        return RewardResult(None, reason=f"the reference answer {task.answer!r} is not a point")
    said = _coordinates(found, response, strict, 2)
    if said is None:
        return _NOTHING
    if box is not None:
        inside = all(low <= at <= high for low, at, high in zip(box[:2], said, box[2:], strict=True))
    else:
        inside = math.dist(said, right or ()) <= task_value(task, "radius", float, 0.0)
    return RewardResult(float(inside), {"parsed": 1.0}, answer=json.dumps(said))


def _box(task: Task, found: Sequence[Statement], response: str, strict: bool) -> RewardResult:
    right = _numbers(task.answer, 4)
    if right is None or not _area(right):
        return RewardResult(None, reason=f"the reference answer {task.answer!r} is not a box: x1, y1, x2, y2")
    said = _coordinates(found, response, strict, 4)
    if said is None:
        return _NOTHING
    corners = zip(said[:2], right[:2], said[2:], right[2:], strict=True)
    both = math.prod(max(0.0, min(high, other) - max(low, first)) for low, first, high, other in corners)
    value = both / (_area(said) + _area(right) - both)
    return RewardResult(value, {"parsed": 1.0, "iou": value}, answer=json.dumps(said))


def _area(box: Sequence[float]) -> float:
    """Return the area of a box, or 0 if its corners are swapped."""
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


_RULE = re.compile(r":?-{3,}:?(?:\s*\|\s*:?-{3,}:?)++")
"""The line below the head of a table in Markdown."""


def _rows(text: str) -> list[list[str]]:
    """Return the words of each line, or of each list in a list of lists."""
    text = re.sub(r"</?[a-z]+>", "\n", nfkc(text))
    if re.search(r"\[\s*\[", text):
        text = re.sub(r"\]\s*,?\s*\[|\[\s*\[|\]\s*\]", "\n", re.sub("[\"']", "", text))
    lines = (line.strip(" |[],;\t") for line in text.splitlines())
    return [re.split(r"[\s,|]+", line) for line in lines if line and not _RULE.fullmatch(line)]


def _cells(rows: list[list[str]]) -> list[list[str]]:
    """Return the rows' words or, where each has but one, their characters."""
    return [list(row[0]) for row in rows] if all(len(row) == 1 for row in rows) else rows


def _grid(task: Task, found: Sequence[Statement], response: str, strict: bool) -> RewardResult:
    right = _cells(_rows(task.answer))
    if not right or len({len(row) for row in right}) > 1:
        return RewardResult(None, reason="the reference answer is not a grid: rows of equal length")
    fenced = _FENCE.findall(response)
    # Words may stand before and after the grid.
    rows = _rows(fenced[-1] if fenced else response)[-_MOST_ROWS:]
    grids = (_cells(rows[end - len(right) : end]) for end in range(len(rows), len(right) - 1, -1))
    said = next((grid for grid in grids if [len(row) for row in grid] == [len(row) for row in right]), None)
    if said is None or (fenced and len(rows) != len(right)):
        return _NOTHING
    cells = [(one, other) for row, rows in zip(said, right, strict=True) for one, other in zip(row, rows, strict=True)]
    value = sum(one == other for one, other in cells) / len(cells)
    return RewardResult(value, {"parsed": 1.0}, answer="\n".join(" ".join(row) for row in said))


_KINDS = {"count": _count, "text": _text, "point": _point, "box": _box, "grid": _grid}
