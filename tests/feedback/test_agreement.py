"""Figures of agreement, against examples that were computed by hand or published."""

from __future__ import annotations

import pytest

from rayrft.feedback.agreement import cohen_kappa, interval, krippendorff_alpha, measure_agreement
from rayrft.feedback.judgements import Judgement, View


def test_kappa_of_a_table_computed_by_hand() -> None:
    # 20 yes/yes, 5 yes/no, 10 no/yes, 15 no/no: observed 35/50; by chance 25·30/2500 + 25·20/2500 = 0.5.
    pairs = [("y", "y")] * 20 + [("y", "n")] * 5 + [("n", "y")] * 10 + [("n", "n")] * 15
    assert cohen_kappa(pairs) == pytest.approx((0.7 - 0.5) / (1 - 0.5))


def test_weighted_kappa_counts_by_how_much_two_differ() -> None:
    # Squares: observed (0 + 1 + 4)/3; by chance, over {1, 2, 3} x {1, 3, 5}: 39/9.
    assert cohen_kappa([(1, 1), (2, 3), (3, 5)], interval) == pytest.approx(1 - 5 / 13)


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
    assert cohen_kappa([(1, 1), (2, 2)]) == 1.0 and krippendorff_alpha([[1, 1, 1], [2, 2]]) == 1.0
    assert cohen_kappa([(1, 2), (2, 1)]) == -1.0
    assert cohen_kappa([(1, 1), (1, 1)]) is None and krippendorff_alpha([[1, 1], [1, 1]]) is None
    assert cohen_kappa([]) is None and krippendorff_alpha([[1], [2]]) is None


def said(person: str, item: str, view: View = "one", **what: object) -> Judgement:
    return Judgement(f"{person}{item}", person, item, view, ("a", "b"), **what)  # type: ignore[arg-type]


def test_two_people_get_kappa_more_get_alpha_and_what_one_alone_answered_does_not_count() -> None:
    two = [said("Ann", "x", score=1), said("Bob", "x", score=1), said("Ann", "y", score=5), said("Bob", "y", score=4)]
    [figure] = measure_agreement([*two, said("Ann", "z", score=3), said("Cem", "w", score=2)])
    assert (figure.question, figure.figure, figure.items, figure.people) == ("score", "Cohen's kappa", 2, 2)
    assert figure.value == cohen_kappa([(1, 1), (5, 4)], interval)
    [figure] = measure_agreement([*two, said("Cem", "y", score=4)])
    assert (figure.figure, figure.people) == ("Krippendorff's alpha", 3)
    assert figure.value == krippendorff_alpha([[1, 1], [5, 4, 4]], interval)
    picks = [
        said("Ann", "p", "pair", ranking=("a", "b")),
        said("Bob", "p", "pair", tie=True),
        said("Ann", "q", "pair", ranking=("b", "a")),
        said("Bob", "q", "pair", ranking=("b", "a")),
    ]
    [figure] = measure_agreement(picks)
    assert figure.question == "pick" and figure.value == cohen_kappa([("a", "tie"), ("b", "b")])


def test_who_picks_at_random_agrees_as_by_chance_whatever_the_answers_are_called() -> None:
    def pick(person: str, number: int, first: bool) -> Judgement:
        rows = (f"{number}/0", f"{number}/1")
        return Judgement(
            f"{person}{number}", person, f"pair:{number}", "pair", rows, ranking=rows if first else rows[::-1]
        )

    # Of each four items they agree in two, whichever they pick.
    mixed = [pick(who, at, bool(at & bit)) for at in range(40) for who, bit in (("Ann", 1), ("Bob", 2))]
    opposite = [pick(who, at, (at % 2 == 0) == (who == "Ann")) for at in range(40) for who in ("Ann", "Bob")]
    assert [figure.value for figure in measure_agreement(mixed)] == [0.0]
    assert [figure.value for figure in measure_agreement(opposite)] == [-1.0]
