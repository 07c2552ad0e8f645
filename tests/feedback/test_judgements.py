"""Which rewards and labels follow from what people said, what the run was told of, and how far people agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rayrft.config.serve import FeedbackConfig
from rayrft.feedback.agreement import interval, krippendorff_alpha, measure_agreement
from rayrft.feedback.judgements import (
    EditSent,
    Judgement,
    JudgementAdded,
    Judgements,
    JudgementUndone,
    RowSent,
    TargetFeedback,
    View,
)


def said(number: str, person: str = "Ann", *, view: View = "one", item: str = "", **what: Any) -> Judgement:
    rows = {"one": ("g/0",), "pair": ("g/0", "g/1"), "group": ("g/0", "g/1", "g/2")}[view]
    return Judgement(number, person, item or f"{view}:g", view, rows, **what)


def known(*given: Judgement, **settings: Any) -> Judgements:
    return Judgements(FeedbackConfig(**settings), map(JudgementAdded, given))


@pytest.mark.parametrize(
    ("what", "reward"),
    [
        ({"score": 1}, -1.0),
        ({"score": 3}, 0.0),
        ({"score": 5}, 1.0),
        ({"thumb": "up"}, 1.0),
        ({"thumb": "down"}, -1.0),
        ({"score": 5, "thumb": "down"}, 1.0),
        ({"comment": "hm"}, None),
        ({"edit": "better"}, None),
        ({"skipped": True}, None),
    ],
)
def test_scores_and_thumbs_become_rewards_within_the_stated_range(what: dict[str, Any], reward: float | None) -> None:
    judgements = known(said("j", **what), reward_range=(-1.0, 1.0))
    assert judgements.target("g/0").reward == reward
    assert known(said("j", **what), set_rewards=False).target("g/0").reward is None


def test_a_ranked_group_has_evenly_spaced_rewards_and_a_pick_has_none() -> None:
    ranked = known(said("j", view="group", ranking=("g/2", "g/0", "g/1")))
    assert [ranked.target(row).reward for row in ("g/2", "g/0", "g/1")] == [1.0, 0.5, 0.0]
    assert [ranked.target(row).labels["place"] for row in ("g/2", "g/0", "g/1")] == ["1", "2", "3"]
    assert said("j", view="group", ranking=("c", "a", "b")).pairs == [("c", "a"), ("c", "b"), ("a", "b")]
    picked = known(said("j", view="pair", ranking=("g/1", "g/0")))
    assert picked.target("g/1") == TargetFeedback(None, {"place": "1", "people": "Ann"})
    assert said("j", view="pair", tie=True).pairs == []


def test_several_people_count_alike_and_of_each_only_the_latest_of_an_item() -> None:
    both = known(
        said("1", "Ann", score=1, labels=("rude",), comment="no"),
        said("2", "Bob", score=3, labels=("rude", "wrong")),
        said("3", "Ann", score=5, comment="yes"),
        said("4", "Cem", skipped=True, labels=("polite",)),
    )
    assert both.target("g/0") == TargetFeedback(
        0.75, {"score": "4", "labels": "rude, wrong", "comment": "yes", "people": "Ann, Bob"}
    )
    assert "1" not in both.all and [each.id for each in both.of_person("Ann")] == ["3"]


def test_one_id_is_one_judgement_also_after_it_was_undone() -> None:
    judgements = known(said("1", score=1), said("1", score=5))
    assert judgements.target("g/0").reward == 0.0
    judgements.add(JudgementUndone("1"))
    judgements.add(JudgementAdded(said("1", score=5)))
    assert judgements.target("g/0") == TargetFeedback() and judgements.unsent() == []


def test_what_was_undone_gives_the_rows_own_reward_back_and_empties_its_labels() -> None:
    judgements = known(said("1", score=5, comment="good"))
    assert judgements.unsent() == ["g/0"]
    wanted = judgements.target("g/0")
    judgements.add(RowSent("g/0", wanted.reward, wanted.labels, "applied", before=0.25))
    assert judgements.unsent() == []
    judgements.add(JudgementUndone("1"))
    back = judgements.target("g/0")
    assert back == TargetFeedback(0.25, {"score": "", "comment": "", "people": ""}) and judgements.unsent() == ["g/0"]
    judgements.add(RowSent("g/0", back.reward, back.labels, "applied", before=1.0))
    assert judgements.unsent() == []
    judgements.add(JudgementAdded(said("2", score=1)))
    judgements.add(JudgementUndone("2"))
    assert judgements.target("g/0").reward == 0.25, "what was there first, not what people said before"


def test_a_comment_alone_changes_no_reward_and_is_sent_once() -> None:
    judgements = known(said("1", comment="hm"))
    judgements.add(RowSent("g/0", None, judgements.target("g/0").labels, "late", before=0.25))
    assert judgements.unsent() == [], "what was refused is not sent again"


def test_an_edit_is_unsent_until_the_run_has_it() -> None:
    judgements = known(said("1", edit="better"), said("2", "Bob", edit="best"))
    judgements.add(JudgementUndone("2"))
    assert [each.id for each in judgements.unsent_edits()] == ["1"]
    judgements.add(EditSent("1", "applied", demonstration="human/1"))
    assert not judgements.unsent_edits() and not judgements.unsent_withdrawals()


def test_of_an_edit_that_is_taken_back_or_edited_again_the_run_is_told_once_if_it_had_it() -> None:
    judgements = known(said("1", edit="better"), said("2", "Bob", edit="best"), said("3", "Cem", edit="odd"))
    judgements.add(EditSent("1", "applied", demonstration="human/1"))
    judgements.add(EditSent("3", "refused", "too long"))
    for entry in (JudgementAdded(said("4", edit="better still")), JudgementUndone("2"), JudgementUndone("3")):
        judgements.add(entry)
    assert [each.id for each in judgements.unsent_edits()] == ["4"]
    assert [each.demonstration for each in judgements.unsent_withdrawals()] == ["human/1"]
    judgements.add(EditSent("2", "applied", demonstration="human/2"))  # it was on its way as it was taken back
    assert [each.demonstration for each in judgements.unsent_withdrawals()] == ["human/1", "human/2"]
    for judgement_id in ("1", "2"):
        judgements.add(replace(judgements.edits[judgement_id], withdrawn=True))
    assert judgements.unsent_withdrawals() == []


# Figures of agreement, against examples that were computed by hand or published


def test_alpha_of_a_table_computed_by_hand() -> None:
    # 20 yes/yes, 5 yes/no, 10 no/yes, 15 no/no: 15 of 50 differ; by chance, of 55 yes and 45 no, 2·55·45 of 100·99.
    pairs = [("y", "y")] * 20 + [("y", "n")] * 5 + [("n", "y")] * 10 + [("n", "n")] * 15
    assert krippendorff_alpha(pairs) == pytest.approx(1 - 0.3 / 0.5)


def test_alpha_of_krippendorffs_own_example() -> None:
    # Krippendorff 2011, part C: four observers, twelve units, values missing; nominal 0.743, interval 0.849.
    table = [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
        [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
    ]
    units = [[value for value in unit if value is not None] for unit in zip(*table, strict=True)]
    assert krippendorff_alpha(units) == pytest.approx(0.743, abs=5e-4)
    assert krippendorff_alpha(units, interval) == pytest.approx(0.849, abs=5e-4)


def test_who_agrees_fully_has_one_and_who_gives_one_value_to_all_has_no_figure() -> None:
    assert krippendorff_alpha([[1, 1, 1], [2, 2]]) == 1.0
    assert krippendorff_alpha([[1, 2], [2, 1]]) == -0.5  # 1 - 4 · 3 / 8
    assert krippendorff_alpha([[1, 1], [1, 1]]) is None and krippendorff_alpha([[1], [2]]) is None


def by(person: str, item: str, view: View = "one", **what: Any) -> Judgement:
    return Judgement(f"{person}{item}", person, item, view, ("a", "b"), **what)


def test_agreement_is_of_each_question_and_what_one_alone_answered_does_not_count() -> None:
    two = [by("Ann", "x", score=1), by("Bob", "x", score=1), by("Ann", "y", score=5), by("Bob", "y", score=4)]
    [figure] = measure_agreement([*two, by("Ann", "z", score=3), by("Cem", "w", score=2)])
    assert (figure.question, figure.items, figure.people) == ("score", 2, 2)
    assert figure.value == krippendorff_alpha([[1, 1], [5, 4]], interval)
    [figure] = measure_agreement([*two, by("Cem", "y", score=4)])
    assert figure.people == 3 and figure.value == krippendorff_alpha([[1, 1], [5, 4, 4]], interval)
    picks = [
        by("Ann", "p", "pair", ranking=("a", "b")),
        by("Bob", "p", "pair", tie=True),
        by("Ann", "q", "pair", ranking=("b", "a")),
        by("Bob", "q", "pair", ranking=("b", "a")),
    ]
    [figure] = measure_agreement(picks)
    assert figure.question == "pick" and figure.value == krippendorff_alpha([["a", "tie"], ["b", "b"]])


def test_who_picks_at_random_agrees_as_by_chance_whatever_the_answers_are_called() -> None:
    def pick(person: str, number: int, first: bool) -> Judgement:
        rows = (f"{number}/0", f"{number}/1")
        order = rows if first else rows[::-1]
        return Judgement(f"{person}{number}", person, f"pair:{number}", "pair", rows, ranking=order)

    # Of each four items they agree in two.
    mixed = [pick(who, at, bool(at & bit)) for at in range(40) for who, bit in (("Ann", 1), ("Bob", 2))]
    opposite = [pick(who, at, (at % 2 == 0) == (who == "Ann")) for at in range(40) for who in ("Ann", "Bob")]
    assert [figure.value for figure in measure_agreement(mixed)] == pytest.approx([1 / 80])  # 1 - 40 · 79 / 3200
    assert [figure.value for figure in measure_agreement(opposite)] == pytest.approx([-0.975])
