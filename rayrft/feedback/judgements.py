"""Judgements of answers as they are kept, and the rewards and labels that follow from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from rayrft.config.serve import FeedbackConfig
from rayrft.errors import DataError

View = Literal["one", "pair", "group"]
"""How an item shows answers: one, to be scored or edited; two, to pick the better; all of the group, to be ranked."""
Thumb = Literal["up", "down"]
MOST_RANKED = 9
"""Answers that are ranked at once: a keyboard has nine digits."""
ROWS: dict[View, tuple[int, int]] = {"one": (1, 1), "pair": (2, 2), "group": (2, MOST_RANKED)}
"""The least and the most answers of an item, by its view."""


@dataclass(frozen=True)
class Judgement:
    """A person's judgement of an item. The page makes the ``id``: the same id twice is the same judgement."""

    id: str
    person: str
    item: str
    view: View
    rows: tuple[str, ...]
    """Experience ids of the answers, in the order in which they were shown."""
    score: int | None = None
    thumb: Thumb | None = None
    ranking: tuple[str, ...] = ()
    """Experience ids, the best first; of a pair, the better one is picked."""
    tie: bool = False
    """No answer of the pair is better."""
    edit: str | None = None
    """The answer as it should be."""
    labels: tuple[str, ...] = ()
    comment: str = ""
    skipped: bool = False
    given_at: float = 0.0
    """Seconds since 1970."""
    seconds: float = 0.0
    """Time that the person spent on the item."""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Experience ids (better, worse) of each two answers that were compared."""
        return [(better, worse) for at, better in enumerate(self.ranking) for worse in self.ranking[at + 1 :]]


judgement_type: TypeAdapter[Judgement] = TypeAdapter(Judgement)


def check_judgement(given: Judgement, settings: FeedbackConfig) -> Judgement:
    """Return a judgement; of a skipped one nothing else counts.

    Raises DataError, whose field is the judgement's, if it does not fit its view or the scores of the settings.
    """
    least, most = ROWS[given.view]
    single, levels, score, edit = given.view == "one", settings.levels, given.score, given.edit
    of_one = {"score": score, "thumb": given.thumb, "edit": edit}
    said = any(of_one.values()) or given.ranking or given.tie or given.labels or given.comment.strip()
    rules: list[tuple[str, object, str]] = [
        ("rows", len(set(given.rows)) < len(given.rows), "must not name a row twice"),
        ("rows", not least <= len(given.rows) <= most, f"must be {least} to {most} for the view {given.view!r}"),
        ("score", score is not None and not 1 <= score <= levels, f"must be 1 to {levels}"),
        ("ranking", given.ranking and sorted(given.ranking) != sorted(given.rows), "must name each answer once"),
        *((name, not single and value is not None, "is only for a single answer") for name, value in of_one.items()),
        ("ranking", single and given.ranking, "is only for several answers"),
        ("tie", given.tie and (given.view != "pair" or given.ranking), "is only for a pair without a pick"),
        ("edit", edit is not None and not edit.strip(), "must not be empty"),
        ("score", not said and not given.skipped, "or another judgement must be given; skip the item instead"),
    ]
    for name, broken, problem in rules:
        if broken:
            raise DataError(problem, field=name)
    if not given.skipped:
        return given
    about = (given.id, given.person, given.item, given.view, given.rows)
    return Judgement(*about, skipped=True, given_at=given.given_at, seconds=given.seconds)


@dataclass(frozen=True)
class JudgementAdded:
    """A person gave a judgement."""

    judgement: Judgement
    kind: Literal["judged"] = "judged"


@dataclass(frozen=True)
class JudgementUndone:
    """A person took a judgement back."""

    id: str
    kind: Literal["undone"] = "undone"


SendOutcome = Literal["applied", "late", "refused"]


@dataclass(frozen=True)
class RowSent:
    """A row of the run got its people's reward and labels; ``late``: it was trained or dropped before."""

    experience_id: str
    reward: float | None
    labels: dict[str, str]
    outcome: SendOutcome
    reason: str = ""
    before: float | None = None
    """The row's own reward, which it gets back when all judgements of it are undone."""
    kind: Literal["sent"] = "sent"


@dataclass(frozen=True)
class EditSent:
    """An edited answer became a demonstration of the run, or was refused; ``withdrawn``: it was undone or edited again,
    and the run draws it no more."""

    id: str
    outcome: SendOutcome
    reason: str = ""
    demonstration: str = ""
    """Its experience id."""
    withdrawn: bool = False
    kind: Literal["edit_sent"] = "edit_sent"


Entry = Annotated[JudgementAdded | JudgementUndone | RowSent | EditSent, Field(discriminator="kind")]
entries: TypeAdapter[Entry] = TypeAdapter(Entry)


@dataclass(frozen=True)
class TargetFeedback:
    """Reward and labels that a row should have by its judgements; without a reward, its own."""

    reward: float | None = None
    labels: dict[str, str] = field(default_factory=dict)


class Judgements:
    """The judgements of a run, built entry by entry; of a person's judgements of an item the latest counts."""

    def __init__(self, config: FeedbackConfig, entries: Iterable[Entry] = ()) -> None:
        self._config = config
        self.all: dict[str, Judgement] = {}
        """By id; without the ones that were undone, or replaced by the same person's later ones."""
        self.undone: dict[str, Judgement | None] = {}
        """Undone judgements by id."""
        self.sent: dict[str, RowSent] = {}
        """By experience id, the latest."""
        self.edits: dict[str, EditSent] = {}
        """By the judgement's id, the latest."""
        self._by_item: dict[str, dict[str, Judgement]] = {}
        self._by_row: dict[str, dict[str, Judgement]] = {}
        self._by_person: dict[str, dict[str, Judgement]] = {}
        self._changed: dict[str, None] = {}
        """Rows with changes that the run does not have yet, in order."""
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Take the next entry of the journal."""
        match entry:
            case JudgementAdded(judgement):
                if judgement.id not in self.all and judgement.id not in self.undone:
                    replaced = self.of_item(judgement.item).get(judgement.person)
                    if replaced is not None:
                        self._remove(replaced)
                    self.all[judgement.id] = judgement
                    self._by_item.setdefault(judgement.item, {})[judgement.person] = judgement
                    self._by_person.setdefault(judgement.person, {})[judgement.id] = judgement
                    for row in judgement.rows:
                        self._by_row.setdefault(row, {})[judgement.id] = judgement
                        self._changed.setdefault(row)
            case JudgementUndone(judgement_id):
                given = self.all.get(judgement_id)
                self.undone.setdefault(judgement_id, given)
                if given is not None:
                    self._remove(given)
            case RowSent(experience_id):
                first = self.sent.setdefault(experience_id, entry)
                self.sent[experience_id] = replace(entry, before=first.before)
                if not self.is_unsent(experience_id):
                    self._changed.pop(experience_id, None)
            case EditSent(judgement_id):
                self.edits[judgement_id] = entry

    def of_item(self, item: str) -> dict[str, Judgement]:
        """Return the judgements of an item by person."""
        return self._by_item.get(item, {})

    def of_person(self, person: str) -> list[Judgement]:
        """Return a person's judgements in the order in which they were given."""
        return list(self._by_person.get(person, {}).values())

    def target(self, row: str) -> TargetFeedback:
        """Return the reward and labels that a row should have."""
        given = list(self._by_row.get(row, {}).values())
        rewards = [reward for each in given if (reward := self.reward(each, row)) is not None]
        labels = _labels(row, given)
        if (sent := self.sent.get(row)) is not None:
            labels = {**dict.fromkeys(sent.labels, ""), **labels}  # a sent label cannot be removed, only emptied
        if rewards and self._config.set_rewards:
            return TargetFeedback(sum(rewards) / len(rewards), labels)
        return TargetFeedback(sent.before if sent is not None and sent.reward is not None else None, labels)

    def reward(self, judgement: Judgement, row: str) -> float | None:
        """Return the reward that a judgement gives to one of its rows: by the score, else the thumb, else the place in
        the ranked group; None if it has none of these."""
        low, high = self._config.reward_range
        if judgement.score is not None:
            share = (judgement.score - 1) / (self._config.levels - 1)
        elif judgement.thumb is not None:
            share = float(judgement.thumb == "up")
        elif judgement.view == "group" and row in judgement.ranking:
            share = 1 - judgement.ranking.index(row) / (len(judgement.ranking) - 1)
        else:
            return None
        return low + share * (high - low)

    def unsent(self) -> list[str]:
        """Return the rows whose reward and labels were not sent to the run."""
        return [row for row in self._changed if self.is_unsent(row)]

    def is_unsent(self, row: str) -> bool:
        """Return whether the reward and labels of a row were not sent to the run."""
        sent = self.sent.get(row)
        return self.target(row) != (TargetFeedback(sent.reward, sent.labels) if sent else TargetFeedback())

    def unsent_edits(self) -> list[Judgement]:
        """Return the judgements whose edited answers were not sent to the run."""
        return [each for each in self.all.values() if each.edit is not None and self.is_edit_unsent(each.id)]

    def unsent_withdrawals(self) -> list[EditSent]:
        """Return the sent edits that were undone or edited again, and not yet withdrawn from the run."""
        return [each for each in self.edits.values() if each.id not in self.all and self.is_edit_unsent(each.id)]

    def is_edit_unsent(self, judgement_id: str) -> bool:
        """Return whether an edited answer was not sent to the run, or was sent, undone and not withdrawn."""
        given, sent = self.all.get(judgement_id), self.edits.get(judgement_id)
        if given is not None and given.edit is not None:
            return sent is None
        return sent is not None and sent.outcome == "applied" and not sent.withdrawn

    def _remove(self, judgement: Judgement) -> None:
        del self.all[judgement.id]
        if self._by_item[judgement.item].get(judgement.person) == judgement:
            del self._by_item[judgement.item][judgement.person]
        del self._by_person[judgement.person][judgement.id]
        for row in judgement.rows:
            del self._by_row[row][judgement.id]
            self._changed.setdefault(row)


def _labels(row: str, given: Iterable[Judgement]) -> dict[str, str]:
    """Return the labels of a row by its judgements, without empty ones."""
    said = [each for each in given if not each.skipped]
    scores = [each.score for each in said if each.score is not None]
    thumbs = Counter(each.thumb for each in said if each.thumb is not None)
    places = [each.ranking.index(row) + 1 for each in said if row in each.ranking]
    found = {
        "score": f"{sum(scores) / len(scores):g}" if scores else "",
        "thumb": thumbs.most_common(1)[0][0] if thumbs else "",
        "place": f"{sum(places) / len(places):g}" if places else "",
        "labels": ", ".join(dict.fromkeys(label for each in said for label in each.labels)),
        "comment": "\n".join(each.comment for each in said if each.comment),
        "people": ", ".join(sorted({each.person for each in said})),
    }
    return {name: value for name, value in found.items() if value}
