"""Made rows: numbers drawn anew and calculated again, pairs and expert rows of groups, and their lineage."""

from __future__ import annotations

import re

from rayrft.buffer.expert_rows import demonstration_kind
from rayrft.experience import check_schema, from_batch, to_batch
from rayrft.pipelines.operators.synthesis import Problem, evaluate
from rayrft.pipelines.rows import lineage
from tests.pipelines.small import applied, experience_of, experiences, rows

GOOD = (
    "Maisie dropped off 33 flyers. Jim dropped off five more than twice as many as Maisie. How many did Jim drop off?",
    "Twice as many is 33 * 2 = <<33*2=66>>66 flyers.\nJim dropped off 66 + 5 = <<66+5=71>>71 flyers.\n#### 71",
)


def test_a_worked_problem_is_varied_and_right() -> None:
    batch = rows(question=[GOOD[0]], answer=[GOOD[1]], level=["easy"])
    found, outcome = applied("numeric_variation", batch, variations=5)
    assert outcome.made == 5
    seen = set()
    for made in found[1:]:
        [number] = map(int, re.findall(r"\d+", made["question"]))
        assert made["answer"] == (
            f"Twice as many is {number} * 2 = <<{number}*2={2 * number}>>{2 * number} flyers.\n"
            f"Jim dropped off {2 * number} + 5 = <<{2 * number}+5={2 * number + 5}>>{2 * number + 5} flyers.\n"
            f"#### {2 * number + 5}"
        )
        assert number != 33 and made["level"] == "easy"
        assert lineage(made).parents == (found[0]["id"],) and lineage(made).made_by == "numeric_variation/1"
        seen.add(number)
    assert len(seen) == 5
    assert applied("numeric_variation", batch, variations=5)[0] == found
    assert applied("numeric_variation", batch, variations=5, seed=1)[0] != found


def test_what_cannot_be_varied_for_sure_is_left_alone() -> None:
    for why, question, answer in (
        ("no calculation", "Ann has 33 eggs.", "She has 33 * 2 = 66. #### 66"),
        ("a wrong calculation", "Ann has 33 eggs.", "33 * 2 = <<33*2=67>>67 #### 67"),
        ("another result", "Ann has 33 eggs.", "33 * 2 = <<33*2=66>>66 #### 65"),
        ("twice in the question", "Ann has 33 eggs, Bob 33.", "33 + 33 = <<33+33=66>>66 #### 66"),
        ("may mean something else", "A week has 7 days.", "7 * 2 = <<7*2=14>>14 #### 14"),
        ("used twice", "Ann has 33 eggs.", "33 + 33 = <<33+33=66>>66 #### 66"),
        ("a number from nowhere", "Ann has 33 eggs.", "33 + 44 = <<33+44=77>>77 #### 77"),
        ("a given result", "33 eggs, 66 hens.", "33 * 2 = <<33*2=66>>66, 66 + 66 = <<66+66=132>>132 #### 132"),
        ("per cent", "Ann has 33% of all.", "33 * 2 = <<33*2=66>>66 #### 66"),
        ("code", "Ann has 33 eggs.", "__import__('os') <<__import__('os').getpid()=1>>1 #### 1"),
    ):
        assert Problem.read(question, answer) is None, why
        assert applied("numeric_variation", rows(question=[question], answer=[answer]))[1].made == 0
    answer = "33 + 5 = <<33+5=38>>38, that is 33+4 = 37 and one. #### 38"
    assert applied("numeric_variation", rows(question=["Ann has 33 eggs and gets five."], answer=[answer]))[1].made == 0


def test_a_variation_has_no_more_decimals_than_its_original() -> None:
    calculations = {"90/36=2.5": 1, "91*0.25=22.75": 2, "90+0.50=90.5": 1, "90/40=2.25": 2, "34/17=2": 0}
    for calculation, decimals in calculations.items():
        expression, result = calculation.split("=")
        given = " and ".join(re.findall(r"\d+\.?\d*", expression))
        answer = f"{expression} = <<{calculation}>>{result} m. #### {result}"
        batch = rows(question=[f"Ann has {given}."] * 20, answer=[answer] * 20)
        made = applied("numeric_variation", batch, variations=3)[0][20:]
        assert len(made) > 20
        for row in made:
            number = row["answer"].partition("#### ")[2]
            assert re.fullmatch(rf"\d+(\.\d{{1,{decimals}}})?" if decimals else r"\d+", number)
            assert "(" not in row["answer"] and "/1" not in row["question"]


def test_only_arithmetic_is_evaluated_in_time_proportional_to_its_length() -> None:
    for text, value in (
        *[("2*(3+4)/7", 2), (".5*20", 10), ("-3+5", 2), ("1e999", 10**999)],
        *((text, None) for text in ("1/0", "2**9", "x", "", "True+1", "(" * 500)),
    ):
        assert evaluate(text) == value
    answer = f"33 * 2 = <<33*2=66>>66, then {'9+' * 100_000} and {'9' * 100_000} #### 66"
    assert Problem.read("Ann has 33 eggs.", answer) is not None


def test_the_best_and_the_worst_of_a_group_are_a_pair_that_the_buffer_takes() -> None:
    batch = experiences([0.0, 1.0, 1.0, 0.0], [1.0, 1.0], [0.2, None, 0.9], [None, None])
    found, outcome = applied("best_against_worst", batch)
    sides = [(row["group_id"], row["chosen"], round(row["reward"], 4)) for row in found]
    assert sides == [("0", True, 1.0), ("0", False, 0.0), ("2", True, 0.9), ("2", False, 0.2)]
    assert [lineage(row).parents for row in found] == [("0/1",), ("0/0",), ("2/2",), ("2/0",)]
    assert all(row["source"] == "expert" and row["labels"]["quality"] == "good" for row in found)
    reasons = {each.row: each.reason for each in outcome.left_out}
    assert reasons["0/2"] == reasons["2/1"] == "replaced by a derived row" and len(reasons) == batch.num_rows
    assert reasons["1/0"] == reasons["3/1"] == "nothing was made of its group"
    found, _ = applied("best_against_worst", experiences([0.0, 1.0], [1.0, 0.0]))
    made = to_batch([experience_of(row) for row in found])
    check_schema(made.schema)
    assert demonstration_kind(made) == (2, False)
    assert len({row.experience_id for row in from_batch(made)}) == 4
    assert all(row.experience_id.startswith(f"{row.group_id}/") for row in from_batch(made))


def test_right_answers_to_hard_tasks_become_expert_rows() -> None:
    batch = experiences([0.0, 0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0], [None, 1.0, 0.0])
    found, _ = applied("expert_rows", batch, max_pass_rate=0.5)
    assert [lineage(row).parents for row in found] == [("0/2",), ("3/1",)]
    assert {row["source"] for row in found} == {"expert"}
    found, outcome = applied("expert_rows", batch, max_pass_rate=1.0, per_group=2, keep=True)
    assert outcome.made == 5 and outcome.left_out == []
    assert len(found) == batch.num_rows + 5
    batch = experiences([0.9, 0.4])
    assert len(applied("best_against_worst", batch, min_gap=0.5)[0]) == 2
    assert len(applied("expert_rows", experiences([0.7, 0.0]), min_reward=0.7)[0]) == 1
    hard = experiences([1.0] * 29 + [0.0] * 71)
    assert len(applied("expert_rows", hard, max_pass_rate=0.29)[0]) == 1, "0.29 * 100 is below 29"
