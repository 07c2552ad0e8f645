"""Items to judge: answers of a run, ordered by a rule, each leased to one person at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayrft.config.serve import FeedbackConfig
from rayrft.experience import json_digest
from rayrft.feedback.judgements import MOST_RANKED, Judgement, Judgements, View

_AS_THEY_ARE = ("experience_id", "turns", "reward", "reward_components", "error", "stop_reason", "images")
SHOWN = (*_AS_THEY_ARE, "logprobs", "action_mask")
"""Fields of an experience that an answer is made of."""


@dataclass(frozen=True)
class ShownAnswer:
    """A row as the page shows it."""

    experience_id: str
    turns: tuple[dict[str, str], ...]
    reward: float | None
    reward_components: dict[str, float]
    error: str | None
    """The reward's explanation."""
    stop_reason: str | None
    waiting: bool
    """Whether it waits for training."""
    logprob: float
    """Mean log-prob of a token that the model produced, in nats."""
    images: tuple[str, ...] = ()
    """Paths."""

    @classmethod
    def of(cls, row: Mapping[str, Any], waiting: bool) -> ShownAnswer:
        """Build it from the fields of an experience by name, of which `SHOWN` are enough."""
        produced = row["logprobs"][row["action_mask"] == 1]
        logprob = float(produced.mean()) if len(produced) else 0.0
        return cls(**{name: row[name] for name in _AS_THEY_ARE}, waiting=waiting, logprob=logprob)

    @property
    def text(self) -> str:
        """The content of the last turn."""
        return self.turns[-1].get("content", "") if self.turns else ""


@dataclass(frozen=True)
class ShownGroup:
    """Answers to one question."""

    group_id: str
    task_id: str
    answers: tuple[ShownAnswer, ...]


@dataclass(frozen=True)
class Item:
    """One or more answers that a person judges at once."""

    key: str
    view: View
    task_id: str
    answers: tuple[ShownAnswer, ...]


def items_of(group: ShownGroup) -> list[Item]:
    """Return a group's items: each answer; two different ones, in an order without meaning; and all, if more differ."""
    answers = [answer for answer in group.answers if answer.text]
    items = [Item(f"one:{answer.experience_id}", "one", group.task_id, (answer,)) for answer in answers]
    different = list({answer.text: answer for answer in answers}.values())
    mixed = sorted(different, key=lambda answer: json_digest(answer.experience_id))[:MOST_RANKED]  # random but fixed
    if len(mixed) > 1:
        items.append(Item(f"pair:{group.group_id}", "pair", group.task_id, tuple(mixed[:2])))
    if len(mixed) > 2:
        items.append(Item(f"group:{group.group_id}", "group", group.task_id, tuple(mixed)))
    return items


def order_of(item: Item, rule: str, judgements: Judgements) -> tuple[bool, float, str]:
    """Return the sort key of an item: items that wait for training first, then by the rule.

    ``uncertain`` is least confidence per token (Settles and Craven 2008, "An Analysis of Active Learning Strategies for
    Sequence Labeling Tasks"). ``disagreement`` is query by committee (Seung et al. 1992), whose members are the reward,
    its parts and people.
    """
    value = {
        "random": lambda: 0.0,
        "uncertain": lambda: float(np.mean([answer.logprob for answer in item.answers])),
        "low_deviation": lambda: float(np.std([answer.reward or 0.0 for answer in item.answers])),
        "disagreement": lambda: -_disagreement(item, judgements),
    }[rule]()
    return not item.answers[0].waiting, value, json_digest(item.key)


def _disagreement(item: Item, judgements: Judgements) -> float:
    """Return the greatest deviation, over the answers, of the values that the reward, its parts and people give."""
    people = list(judgements.of_item(item.key).values())  # at once: others may be added meanwhile
    spread = [0.0]
    for answer in item.answers:
        values = [*answer.reward_components.values(), *([] if answer.reward is None else [answer.reward])]
        values += [value for each in people if (value := judgements.reward(each, answer.experience_id)) is not None]
        spread.append(float(np.std(values)) if values else 0.0)
    return max(spread)


@dataclass(frozen=True)
class _Lease:
    item: str
    ends: float


class Queue:
    """The items to judge and their leases, for one event loop.

    A person who asks again gets the same item. A lease expires (``clock``: seconds), or its person leaves or judges.
    """

    def __init__(
        self, config: FeedbackConfig, judgements: Judgements, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._judgements, self._clock = config, judgements, clock
        self.items: dict[str, Item] = {}
        """Queued and leased items by key."""
        self.totals: dict[View, int] = {}
        self._left: dict[View, dict[str, None]] = {"one": {}, "pair": {}, "group": {}}
        """Keys of items that not enough people have judged, in the order of the rule."""
        self._leases: dict[str, _Lease] = {}
        """By person, who has one at a time."""

    def arrange(self, groups: Iterable[ShownGroup]) -> list[Item]:
        """Return the items of groups in the order of the rule; it may be called in any thread."""
        items = [item for group in groups for item in items_of(group)]
        return sorted(items, key=lambda item: order_of(item, self._config.rule, self._judgements))

    def fill(self, items: list[Item]) -> None:
        """Replace the items by the arranged ones that the run has now; leased items stay."""
        had = {lease.item for lease in self._leases.values()}
        self.items = {key: item for key, item in self.items.items() if key in had}
        self.items.update((item.key, item) for item in items)
        for view in self._left:
            of_view = [item.key for item in items if item.view == view]
            self.totals[view] = len(of_view)
            self._left[view] = dict.fromkeys(key for key in of_view if not self._is_done(key))

    def left(self, view: View) -> int:
        """Return the number of items that not enough people have judged."""
        return len(self._left[view])

    def take(self, person: str, view: View) -> Item | None:
        """Lease an item to a person, exclusively unless ``agreement`` is above 1; None if no item is left for them."""
        now = self._clock()
        held = self._leases.get(person)
        if held is not None and held.ends > now and self.items[held.item].view == view and self._may(person, held.item):
            return self._lease(person, held.item, now)
        keys = (key for key in self._left[view] if self._may(person, key) and self._wanted(key, person, now))
        return self._lease(person, key, now) if (key := next(keys, None)) is not None else None

    def keep(self, person: str, key: str) -> bool:
        """Prolong a person's lease; return whether they have one.

        A lease that has expired, or was lost with the page's process, is renewed unless others have the item by now.
        """
        now, held = self._clock(), self._leases.get(person)
        if held is None or held.ends <= now:
            if key not in self.items or not (self._may(person, key) and self._wanted(key, person, now)):
                return False
        elif held.item != key:
            return False
        self._lease(person, key, now)
        return True

    def leave(self, person: str) -> None:
        """End a person's lease."""
        self._leases.pop(person, None)

    def others(self, key: str, person: str) -> list[str]:
        """Return the other people who have or have judged an item; none unless they are as many as are wanted."""
        others = sorted({*self._judges(key), *self._holders(key, self._clock())} - {person})
        return others if len(others) >= self._config.agreement else []

    def judged(self, judgement: Judgement) -> None:
        """End the lease on an item that was judged; drop the item from the queue if enough people have judged it."""
        held = self._leases.get(judgement.person)
        if held is not None and held.item == judgement.item:
            self.leave(judgement.person)
        if self._is_done(judgement.item):
            self._left[judgement.view].pop(judgement.item, None)

    def undone(self, judgement: Judgement, item: Item) -> None:
        """Put an item back, and lease it to the person whose judgement was undone."""
        self.items.setdefault(item.key, item)
        if not self._is_done(item.key):
            self._left[item.view].setdefault(item.key)
        self._lease(judgement.person, item.key, self._clock())

    def _lease(self, person: str, key: str, now: float) -> Item:
        self._leases[person] = _Lease(key, now + self._config.lease_s)
        return self.items[key]

    def _may(self, person: str, key: str) -> bool:
        return person not in self._judgements.of_item(key)

    def _wanted(self, key: str, person: str, now: float) -> bool:
        """Return whether one more person is wanted for an item."""
        holders = [each for each in self._holders(key, now) if each != person]
        return len(self._judges(key)) + len(holders) < self._config.agreement

    def _is_done(self, key: str) -> bool:
        return len(self._judges(key)) >= self._config.agreement

    def _judges(self, key: str) -> list[str]:
        return [person for person, given in self._judgements.of_item(key).items() if not given.skipped]

    def _holders(self, key: str, now: float) -> list[str]:
        return [person for person, lease in self._leases.items() if lease.item == key and lease.ends > now]


def item_json(item: Item, reference: str | None) -> dict[str, Any]:
    """Return an item as JSON: the turns that its answers share once, then the rest of each answer."""
    turns = [answer.turns for answer in item.answers]
    shared = min(map(len, turns)) - 1
    common = next((at for at in range(shared) if len({str(each[at]) for each in turns}) > 1), shared)
    return {
        "key": item.key,
        "view": item.view,
        "waiting": item.answers[0].waiting,
        "reference": reference,
        "images": len(item.answers[0].images),
        "context": [_turn(turn) for turn in turns[0][:common]],
        "answers": [
            {
                "id": answer.experience_id,
                "turns": [_turn(turn) for turn in answer.turns[common:]],
                "text": answer.text,
                "reward": answer.reward,
                "components": answer.reward_components,
                "reason": answer.error,
                "stop_reason": answer.stop_reason,
            }
            for answer in item.answers
        ],
    }


def _turn(turn: dict[str, str]) -> dict[str, str]:
    return {"role": turn.get("role", ""), "content": turn.get("content", "")}
