"""Which item a person gets, and that nobody else gets it meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from rayrft.config.serve import FeedbackConfig
from rayrft.feedback.items import Item, Queue, ShownGroup, item_json, items_of
from rayrft.feedback.judgements import Judgement, JudgementAdded, Judgements, JudgementUndone
from tests.feedback.scripted import answer, group

NUMBERS = iter(range(1_000_000))


class Setting:
    """A queue with a clock that a test sets."""

    def __init__(self, *groups: ShownGroup, **settings: Any) -> None:
        self.now = 0.0
        config = FeedbackConfig(**settings)
        self.judgements = Judgements(config)
        self.queue = Queue(config, self.judgements, lambda: self.now)
        self.fill(*groups)

    def fill(self, *groups: ShownGroup) -> None:
        self.queue.fill(self.queue.arrange(groups))

    def judge(self, person: str, item: Item | None, **what: Any) -> Judgement:
        assert item is not None
        rows = tuple(answer.experience_id for answer in item.answers)
        given = Judgement(f"j{next(NUMBERS)}", person, item.key, item.view, rows, **what)
        self.judgements.add(JudgementAdded(given))
        self.queue.judged(given)
        return given

    def undo(self, given: Judgement, item: Item) -> None:
        self.judgements.add(JudgementUndone(given.id))
        self.queue.undone(given, item)

    def keys(self, people: Iterable[str]) -> list[str | None]:
        taken = [self.queue.take(person, "one") for person in people]
        return [item.key if item is not None else None for item in taken]


def test_everybody_gets_another_item_until_none_is_left() -> None:
    setting = Setting(group("g", "a", "b"), group("h", "c"))
    keys = setting.keys(["Ann", "Bob", "Cem", "Dan"])
    assert sorted(keys[:3]) == ["one:g/0", "one:g/1", "one:h/0"] and keys[3] is None  # type: ignore[type-var]
    assert setting.keys(["Ann", "Bob", "Cem"]) == keys[:3], "who asks again gets the same"


def test_a_lease_that_expires_is_given_on_and_one_that_is_kept_is_not() -> None:
    setting = Setting(group("g", "a"), lease_s=10)
    setting.keys(["Ann"])
    setting.now = 9.0
    assert setting.queue.keep("Ann", "one:g/0") and not setting.queue.keep("Bob", "one:g/0")
    setting.now = 18.0
    assert setting.keys(["Bob"]) == [None]
    setting.now = 19.0
    assert setting.keys(["Bob", "Ann"]) == ["one:g/0", None]
    assert not setting.queue.keep("Ann", "one:g/0")


def test_a_lease_that_was_lost_begins_anew_when_its_person_is_heard_of_unless_somebody_else_has_the_item() -> None:
    setting = Setting(group("g", "a"), lease_s=10)
    setting.keys(["Ann"])
    setting.now = 11.0
    assert setting.queue.keep("Ann", "one:g/0"), "she had slept, and nobody had asked"
    assert setting.keys(["Bob"]) == [None]
    setting.now = 22.0
    assert setting.keys(["Bob"]) == ["one:g/0"] and not setting.queue.keep("Ann", "one:g/0")
    after_a_restart = Setting(group("g", "a"), group("h", "b"))
    assert after_a_restart.queue.keep("Ann", "one:h/0")
    assert after_a_restart.keys(["Bob", "Ann", "Cem"]) == ["one:g/0", "one:h/0", None]
    assert not after_a_restart.queue.keep("Ann", "one:x/0")
    other = Setting(group("g", "a"), group("h", "b"))
    [shown] = other.keys(["Ann"])
    earlier = ({"one:g/0", "one:h/0"} - {shown}).pop()
    assert not other.queue.keep("Ann", str(earlier)), "a request that was late does not take what she has now"


def test_agreement_gives_an_item_to_so_many_people_and_to_none_twice() -> None:
    setting = Setting(group("g", "a"), agreement=2)
    assert setting.keys(["Ann", "Bob", "Cem"]) == ["one:g/0", "one:g/0", None]
    setting.judge("Ann", setting.queue.take("Ann", "one"), score=1)
    assert setting.keys(["Ann", "Cem"]) == [None, None]
    assert setting.queue.left("one") == 1
    setting.judge("Bob", setting.queue.take("Bob", "one"), score=1)
    assert setting.queue.left("one") == 0


def test_what_is_skipped_is_for_others_and_what_is_undone_comes_back_to_the_same_person() -> None:
    setting = Setting(group("g", "a"))
    skipped = setting.judge("Ann", setting.queue.take("Ann", "one"), skipped=True)
    assert setting.keys(["Ann", "Bob"]) == [None, "one:g/0"]
    item = setting.queue.take("Bob", "one")
    assert item is not None
    given = setting.judge("Bob", item, score=1)
    assert setting.queue.left("one") == 0
    setting.undo(given, item)
    assert setting.queue.left("one") == 1
    assert setting.keys(["Cem", "Bob"]) == [None, "one:g/0"]
    setting.undo(skipped, item)
    assert setting.keys(["Ann"]) == ["one:g/0"], "both have it, as both had seen it"


def test_what_is_judged_already_is_not_in_the_queue_after_a_restart_and_stays_known() -> None:
    setting = Setting(group("g", "a"), group("h", "b"))
    setting.judge("Ann", setting.queue.items["one:g/0"], score=1)
    setting.fill(group("g", "a"), group("h", "b"), group("i", "c"))
    assert sorted(setting.keys(["Bob", "Cem", "Dan"]), key=str) == [None, "one:h/0", "one:i/0"]
    setting.fill(group("i", "c"))
    assert {*setting.queue.items} == {"one:h/0", "one:i/0"}, "what somebody has stays, and nothing else"


@pytest.mark.parametrize(
    ("rule", "first"), [("uncertain", "unsure"), ("low_deviation", "flat"), ("disagreement", "split")]
)
def test_the_rule_says_what_comes_first(rule: str, first: str) -> None:
    def three(name: str, rewards: list[float], logprob: float, part: float) -> ShownGroup:
        more = {"logprob": logprob, "reward_components": {"part": part}}
        answers = (answer(f"{name}/{at}", f"{name} {at}", reward, **more) for at, reward in enumerate(rewards))
        return ShownGroup(name, "t", tuple(answers))

    groups = [
        three("unsure", [0.0, 0.5, 1.0], -5.0, 0.5),
        three("flat", [0.7, 0.7, 0.7], -1.0, 0.7),
        three("split", [0.0, 0.5, 1.0], -1.0, 9.0),
    ]
    for order in (groups, groups[::-1]):
        item = Setting(*order, rule=rule).queue.take("Ann", "group")
        assert item is not None and item.key == f"group:{first}"


def test_people_who_differ_from_the_reward_make_a_disagreement() -> None:
    groups = [group(name, "x", reward=1.0, reward_components={}) for name in ("g", "h")]
    setting = Setting(*groups, rule="disagreement", agreement=2)
    for key, score in (("one:g/0", 5), ("one:h/0", 1)):
        setting.judge("Ann", setting.queue.items[key], score=score)
    setting.fill(*groups)
    assert setting.keys(["Bob"]) == ["one:h/0"]


def test_rows_that_wait_for_training_come_before_all_others() -> None:
    trained = [group(f"t{number}", "x", waiting=False) for number in range(20)]
    setting = Setting(*trained, group("w", "x"))
    assert setting.keys(["Ann"]) == ["one:w/0"]


def test_only_different_answers_are_compared_and_empty_ones_are_not_shown() -> None:
    views = [item.view for item in items_of(group("g", "same", "same", "same"))]
    assert views == ["one", "one", "one"]
    items = items_of(group("g", "a", "b", "", "b"))
    assert [item.key for item in items] == ["one:g/0", "one:g/1", "one:g/3", "pair:g"]
    many = items_of(group("g", *map(str, range(30))))[-1]
    assert many.view == "group" and len(many.answers) == 9


def test_what_answers_have_in_common_is_shown_once() -> None:
    item = items_of(group("g", "a", "b"))[-1]
    shown = item_json(item, "42")
    assert [turn["content"] for turn in shown["context"]] == ["Question g?"]
    assert sorted(each["text"] for each in shown["answers"]) == ["a", "b"] and shown["reference"] == "42"
    longer = replace(item.answers[0], turns=({"role": "user", "content": "Other?"}, *item.answers[0].turns))
    parted = item_json(replace(item, answers=(longer, item.answers[1])), None)
    assert parted["context"] == [] and [len(each["turns"]) for each in parted["answers"]] == [3, 2]
