"""What people say of answers, as it is kept, and what follows from it for rewards and labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from rayrft.config.serve import FeedbackConfig

View = Literal["one", "pair", "group"]
"""How an item shows answers to a question: one of them, to be scored or edited; two, to pick the better one; all of the
group, to be ranked."""
Thumb = Literal["up", "down"]


@dataclass(frozen=True)
class Judgement:
    """What a person said of an item. ``id`` is made by the page: one that comes twice is the same judgement."""

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
    """How long the person looked at it."""

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Experience ids (better, worse) of each two answers that were compared."""
        return [(better, worse) for at, better in enumerate(self.ranking) for worse in self.ranking[at + 1 :]]


@dataclass(frozen=True)
class Judged:
    """A person gave a judgement."""

    judgement: Judgement
    kind: Literal["judged"] = "judged"


@dataclass(frozen=True)
class Undone:
    """A person took a judgement back."""

    id: str
    kind: Literal["undone"] = "undone"


Outcome = Literal["applied", "late", "refused"]


@dataclass(frozen=True)
class Sent:
    """A row of the run got its people's reward and labels; ``late``: it was trained or dropped before."""

    experience_id: str
    reward: float | None
    labels: dict[str, str]
    outcome: Outcome
    reason: str = ""
    before: float | None = None
    """The row's own reward, to be given back when all judgements of it are undone."""
    kind: Literal["sent"] = "sent"


@dataclass(frozen=True)
class EditSent:
    """An edited answer became a demonstration of the run, or was refused."""

    id: str
    outcome: Outcome
    reason: str = ""
    demonstration: str = ""
    """Its experience id."""
    kind: Literal["edit_sent"] = "edit_sent"


@dataclass(frozen=True)
class EditWithdrawn:
    """The run was told that an edited answer, which it had as a demonstration, was taken back."""

    id: str
    outcome: Outcome
    reason: str = ""
    kind: Literal["edit_withdrawn"] = "edit_withdrawn"


Entry = Annotated[Judged | Undone | Sent | EditSent | EditWithdrawn, Field(discriminator="kind")]
entries: TypeAdapter[Entry] = TypeAdapter(Entry)


@dataclass(frozen=True)
class Wanted:
    """What a row should have by what people said; no reward: its own."""

    reward: float | None = None
    labels: dict[str, str] = field(default_factory=dict)


class Judgements:
    """All that people said, built entry by entry; of a person's judgements of an item the latest counts."""

    def __init__(self, config: FeedbackConfig) -> None:
        self._config = config
        self.all: dict[str, Judgement] = {}
        """By id; without those that were taken back, or replaced by the same person's later ones."""
        self.undone: dict[str, Judgement | None] = {}
        """Those that were taken back, by id."""
        self.sent: dict[str, Sent] = {}
        """By experience id, the latest."""
        self.edits: dict[str, EditSent] = {}
        """By the judgement's id."""
        self.withdrawn: dict[str, EditWithdrawn] = {}
        """By the judgement's id."""
        self._edited: dict[str, Judgement] = {}
        self._by_item: dict[str, dict[str, Judgement]] = {}
        self._by_row: dict[str, dict[str, Judgement]] = {}
        self._by_person: dict[str, dict[str, Judgement]] = {}
        self._changed: dict[str, None] = {}
        """Rows of which people said something since the run was told, in order."""
        self._before: dict[str, float | None] = {}

    def add(self, entry: Entry) -> None:
        """Take the next entry of the journal."""
        match entry:
            case Judged(judgement):
                if judgement.id not in self.all and judgement.id not in self.undone:
                    replaced = self.of_item(judgement.item).get(judgement.person)
                    if replaced is not None:
                        self._remove(replaced)
                    self.all[judgement.id] = judgement
                    self._by_item.setdefault(judgement.item, {})[judgement.person] = judgement
                    self._by_person.setdefault(judgement.person, {})[judgement.id] = judgement
                    if judgement.edit is not None:
                        self._edited[judgement.id] = judgement
                    for row in judgement.rows:
                        self._by_row.setdefault(row, {})[judgement.id] = judgement
                        self._changed.setdefault(row)
            case Undone(judgement_id):
                given = self.all.get(judgement_id)
                self.undone.setdefault(judgement_id, given)
                if given is not None:
                    self._remove(given)
            case Sent(experience_id):
                self._before.setdefault(experience_id, entry.before)
                self.sent[experience_id] = entry
                if not self.is_unsent(experience_id):
                    self._changed.pop(experience_id, None)
            case EditSent(judgement_id):
                self.edits[judgement_id] = entry
            case EditWithdrawn(judgement_id):
                self.withdrawn[judgement_id] = entry

    def of_item(self, item: str) -> dict[str, Judgement]:
        """Return the judgements of an item by person."""
        return self._by_item.get(item, {})

    def of_person(self, person: str) -> list[Judgement]:
        """Return a person's judgements in the order in which they were given."""
        return list(self._by_person.get(person, {}).values())

    def wanted(self, row: str) -> Wanted:
        """Return the reward and labels of a row."""
        given = list(self._by_row.get(row, {}).values())
        rewards = [reward for each in given if (reward := self.reward(each, row)) is not None]
        labels = _labels(row, given)
        if (sent := self.sent.get(row)) is not None:
            labels = {**dict.fromkeys(sent.labels, ""), **labels}  # what was taken back cannot be removed, only emptied
        if rewards and self._config.set_rewards:
            return Wanted(sum(rewards) / len(rewards), labels)
        changed = sent is not None and sent.reward is not None
        return Wanted(self._before.get(row) if changed else None, labels)

    def reward(self, judgement: Judgement, row: str) -> float | None:
        """Return the reward that a judgement gives to one of its rows: by the score, else the thumb, else the place in
        the ranked group; None if it says nothing of its value."""
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
        """Return the rows whose reward and labels the run was not told, and was not refused."""
        return [row for row in self._changed if self.is_unsent(row)]

    def is_unsent(self, row: str) -> bool:
        """Return whether the run was not told of a row's reward and labels."""
        wanted, sent = self.wanted(row), self.sent.get(row)
        known = Wanted() if sent is None else Wanted(sent.reward, sent.labels)
        return wanted != known

    def unsent_edits(self) -> list[Judgement]:
        """Return the judgements whose edited answers the run was not told."""
        return [each for each in self._edited.values() if self.is_edit_unsent(each.id)]

    def unsent_withdrawals(self) -> list[EditSent]:
        """Return the demonstrations of edits that were taken back, or edited again, of which the run was not told."""
        return [each for each in self.edits.values() if each.id not in self._edited and self.is_edit_unsent(each.id)]

    def is_edit_unsent(self, judgement_id: str) -> bool:
        """Return whether the run was not told of an edited answer, or that it was taken back since."""
        sent = self.edits.get(judgement_id)
        if judgement_id in self._edited:
            return sent is None
        return sent is not None and sent.outcome == "applied" and judgement_id not in self.withdrawn

    def _remove(self, judgement: Judgement) -> None:
        del self.all[judgement.id]
        if self._by_item[judgement.item].get(judgement.person) == judgement:
            del self._by_item[judgement.item][judgement.person]
        del self._by_person[judgement.person][judgement.id]
        self._edited.pop(judgement.id, None)
        for row in judgement.rows:
            del self._by_row[row][judgement.id]
            self._changed.setdefault(row)


def _labels(row: str, given: Iterable[Judgement]) -> dict[str, str]:
    """Return what people said of a row as labels of it; empty ones are left out."""
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
