"""How far people agree, corrected for chance: Krippendorff's alpha."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import ne
from typing import TypeVar

from rayrft.feedback.judgements import Judgement

V = TypeVar("V", bound=Hashable)
Distance = Callable[[V, V], float]
"""By default 0 for values that are equal, and 1 for others."""


def interval(one: float, other: float) -> float:
    """The distance of numbers: the square of their difference."""
    return (one - other) ** 2


def krippendorff_alpha(units: Iterable[Sequence[V]], distance: Distance[V] = ne) -> float | None:
    """Return Krippendorff's alpha from people's values of each item; items with fewer than two do not count.

    alpha = 1 - D_o / D_e (Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability"). D_o is the mean distance of
    two values of one item, each item weighing as many as it has values, and D_e that of any two values. None without
    two values of one item, or if all are the same.
    """
    units = [list(unit) for unit in units if len(unit) > 1]
    counts = Counter(value for unit in units for value in unit)
    total = counts.total()
    observed = sum(sum(distance(one, other) for one in unit for other in unit) / (len(unit) - 1) for unit in units)
    expected = sum(a * b * distance(one, other) for one, a in counts.items() for other, b in counts.items())
    return 1 - observed * (total - 1) / expected if expected else None


@dataclass(frozen=True)
class Agreement:
    """How far people agree in one question."""

    question: str
    value: float | None
    """Krippendorff's alpha: 1 if they agree, 0 as by chance; None if it is not defined."""
    items: int
    people: int


def measure_agreement(judgements: Iterable[Judgement]) -> list[Agreement]:
    """Return the figures of each question that at least two people answered for an item.

    Scores are compared by the square of their difference; thumbs, picks and the best of ranked groups by whether they
    are the same. What is picked is the answer's place among the item's, in the order of their ids: the ids themselves
    differ from item to item, so that by chance nobody would agree.
    """
    questions: dict[str, Callable[[Judgement], Hashable | None]] = {
        "score": lambda each: each.score,
        "thumb": lambda each: each.thumb,
        "pick": lambda each: _first(each) if each.view == "pair" else None,
        "best of group": lambda each: _first(each) if each.view == "group" else None,
    }
    given = list(judgements)
    found = []
    for question, value in questions.items():
        by_item: dict[str, dict[str, Hashable]] = {}
        for each in given:
            if (answer := value(each)) is not None:
                by_item.setdefault(each.item, {})[each.person] = answer
        shared = [answers for answers in by_item.values() if len(answers) > 1]
        people = {person for answers in shared for person in answers}
        if shared:
            distance: Distance[Hashable] = interval if question == "score" else ne  # type: ignore[assignment]
            alpha = krippendorff_alpha([[*answers.values()] for answers in shared], distance)
            found.append(Agreement(question, alpha, len(shared), len(people)))
    return found


def _first(judgement: Judgement) -> int | str | None:
    if judgement.tie:
        return "tie"
    return sorted(judgement.rows).index(judgement.ranking[0]) if judgement.ranking else None
