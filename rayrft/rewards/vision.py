"""Answers about pictures: counts, text that is read, points, boxes and grids."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Literal

from rayrft.experience import Task
from rayrft.rewards.answers import Statement, nfkc, plain, statements
from rayrft.rewards.base import Reward, RewardResult, inline, register_reward
from rayrft.rewards.k12 import choice

Kind = Literal["count", "choice", "text", "point", "box", "grid"]


@register_reward("vision")
@inline
def vision(kind: Kind = "count", *, strict: bool = False, threshold: float | None = None) -> Reward:
    """How right the response's final answer is, in [0, 1]; component ``parsed`` is 1 if it has one.

    The kind is that of the task's ``metadata["kind"]``, else ``kind``.

    * ``count``: 1 if the response says the task's number, in digits or as a word, and no other one.
    * ``choice``: as reward ``k12`` has it.
    * ``text``: 1 minus the Levenshtein distance to the task's answer, divided by the longer length; case and white
      space do not count. Without an announced answer the whole response is what was read.
    * ``point``: the task's answer is ``x, y``; 1 if the response's point is within ``metadata["radius"]`` of it (0:
      there). With ``metadata["box"]``, ``[x1, y1, x2, y2]``, 1 if it is in that.
    * ``box``: the task's answer is ``x1, y1, x2, y2``; the intersection over union of both areas.
    * ``grid``: the task's answer has a row a line, of characters or, where they stand between blanks or commas, words;
      the share of cells that are the same, 0 where the shape is another one.

    With ``threshold`` a value of at least that is 1, and a smaller one 0. Points and boxes are numbers in any brackets
    or tags, with names or without, in the pixels of the task.
    """

    def score(task: Task, response: str) -> RewardResult:
        asked = task.metadata.get("kind", kind)
        found = statements(response, strict=strict)
        match asked:
            case "choice":
                return choice(task, found)
            case "count":
                result = _count(task, found)
            case "text":
                result = _text(task, found, response)
            case "point":
                result = _point(task, found)
            case "box":
                result = _box(task, found)
            case "grid":
                result = _grid(task, response)
            case _:
                return RewardResult(None, reason=f"no kind of question about a picture is called {asked!r}")
        if threshold is None or result.value is None:
            return result
        return RewardResult(
            float(result.value >= threshold), {**result.components, "raw": result.value}, None, result.answer
        )

    return score


_NOTHING = RewardResult(0.0, {"parsed": 0.0}, answer="")

_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
)
_COUNTS = {word: number for number, word in enumerate([*_WORDS.split(), "eighteen", "nineteen", "twenty"])}
_CHINESE = {"零": 0, "一": 1, "两": 2, "二": 2, "三": 3, "四": 4, "五": 5, "六": 6, "七": 7, "八": 8, "九": 9, "十": 10}
_COUNT = re.compile(
    rf"(?<![\w.])(?:(?P<digits>\d{{1,9}})(?!\.?\d)|(?P<word>{'|'.join(_COUNTS)})\b)"
    rf"|(?P<chinese>[{''.join(_CHINESE)}]{{1,3}})(?=$|[个只条张辆人本朵棵头匹艘架块件。,\s])",
    re.IGNORECASE,
)


def _counted(text: str) -> int | None:
    """Return the one number that the text says; None if it says none, or several."""
    said = set[int]()
    for found in _COUNT.finditer(plain(text)):
        if found["digits"]:
            said.add(int(found["digits"]))
        elif found["word"]:
            said.add(_COUNTS[found["word"].lower()])
        else:
            said.add(_chinese(found["chinese"]))
    return said.pop() if len(said) == 1 else None


def _chinese(text: str) -> int:
    """Return a number below 100."""
    tens, ten, ones = text.rpartition("十")
    return (10 * _CHINESE.get(tens, 1) if ten else 0) + (_CHINESE.get(ones, 0) if ones else 0)


def _count(task: Task, found: Sequence[Statement]) -> RewardResult:
    right = _counted(nfkc(task.answer))
    if right is None:
        return RewardResult(None, reason=f"the reference answer {task.answer!r} is no count")
    for statement in found:
        if (said := _counted(statement.text)) is not None:
            return RewardResult(float(said == right), {"parsed": 1.0}, answer=str(said))
    return _NOTHING


def _text(task: Task, found: Sequence[Statement], response: str) -> RewardResult:
    from rapidfuzz.distance import Levenshtein

    said = found[0].text if found and found[0].announced else nfkc(response)
    read, right = (" ".join(each.split()).casefold() for each in (said, nfkc(task.answer)))
    if not right:
        return RewardResult(None, reason="the reference answer is empty")
    # What is far longer is far off: its exact distance is not worth its time.
    value = Levenshtein.normalized_similarity(read[: 10 * len(right) + 100], right)
    return RewardResult(value, {"parsed": float(bool(read))}, answer=read)


_NUMBER = re.compile(r"(?<![\w.])[-+]?\d{1,7}(?:\.\d{1,6})?(?![\w.]*\d)")


def _numbers(text: str, count: int) -> list[float] | None:
    """Return the numbers of the text, if there are so many. Digits of names, such as ``x1``, are none."""
    numbers = [float(number) for number in _NUMBER.findall(plain(text))]
    return numbers if len(numbers) == count else None


def _coordinates(found: Sequence[Statement], count: int) -> list[float] | None:
    return next(filter(None, (_numbers(statement.text, count) for statement in found)), None)


def _point(task: Task, found: Sequence[Statement]) -> RewardResult:
    box, right = task.metadata.get("box"), _numbers(task.answer, 2)
    if box is None and right is None:
        return RewardResult(None, reason=f"the reference answer {task.answer!r} is no point")
    said = _coordinates(found, 2)
    if said is None:
        return _NOTHING
    if box is not None:
        inside = all(low <= at <= high for low, at, high in zip(box[:2], said, box[2:], strict=True))
    else:
        inside = math.dist(said, right or ()) <= task.metadata.get("radius", 0.0)
    return RewardResult(float(inside), {"parsed": 1.0}, answer=json.dumps(said))


def _box(task: Task, found: Sequence[Statement]) -> RewardResult:
    right = _numbers(task.answer, 4)
    if right is None or not _area(right):
        return RewardResult(None, reason=f"the reference answer {task.answer!r} is no box: x1, y1, x2, y2")
    said = _coordinates(found, 4)
    if said is None:
        return _NOTHING
    corners = zip(said[:2], right[:2], said[2:], right[2:], strict=True)
    both = math.prod(max(0.0, min(high, other) - max(low, first)) for low, first, high, other in corners)
    value = both / (_area(said) + _area(right) - both)
    return RewardResult(value, {"parsed": 1.0, "iou": value}, answer=json.dumps(said))


def _area(box: Sequence[float]) -> float:
    """Return the area of a box, 0 if its corners are in another order."""
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def _cells(text: str) -> list[list[str]]:
    rows = [
        re.split(r"[\s,|]+", row.strip(" |[],;\t")) for row in nfkc(text).strip().splitlines() if row.strip(" |[],;\t")
    ]
    return [list(row[0]) for row in rows] if all(len(row) == 1 for row in rows) else rows


_FENCE = re.compile(r"```[a-z]*\n(.*?)```", re.DOTALL)


def _grid(task: Task, response: str) -> RewardResult:
    right = _cells(task.answer)
    if not right or len({len(row) for row in right}) > 1:
        return RewardResult(None, reason="the reference answer is no grid: rows of as many cells")
    fenced = _FENCE.findall(response)
    # Words may stand before the grid: its rows are the last ones.
    said = _cells(fenced[-1]) if fenced else _cells("\n".join(response.strip().splitlines()[-len(right) :]))
    if [len(row) for row in said] != [len(row) for row in right]:
        return _NOTHING
    cells = [(one, other) for row, rows in zip(said, right, strict=True) for one, other in zip(row, rows, strict=True)]
    value = sum(one == other for one, other in cells) / len(cells)
    return RewardResult(value, {"parsed": 1.0}, answer="\n".join(" ".join(row) for row in said))
