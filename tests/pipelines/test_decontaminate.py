"""Decontamination: what an evaluation task shows is left out, and what shares a template or a calculation is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayrft.errors import ConfigError, DataError
from rayrft.experience import Task
from rayrft.pipelines import Context
from rayrft.pipelines.chain import apply_link
from tests.errors import about
from tests.pipelines.small import applied, linked, operator, reasons, rows, write

QUESTION = (
    "Janet's ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins for her friends "
    "every day with four. How much does she make?"
)
SOLUTION = (
    "Janet sells 16 - 3 - 4 = 9 duck eggs a day and so makes 18 dollars every single day at the farmers market. #### 18"
)
SHORT = "What is the capital city of the country France?"


def check(
    questions: list[str], answers: list[str] | None = None, evaluation: tuple[Task, ...] | None = None
) -> tuple[list[str], list[str]]:
    """What stays, and why the others do not."""
    tasks = evaluation or (Task.create("test", QUESTION, SOLUTION), Task.create("test", SHORT, "Paris"))
    batch = rows(question=questions, answer=answers or ["none"] * len(questions))
    found, outcome = applied("decontaminate", batch, context=Context(tasks))
    return [row["question"] for row in found], reasons(outcome)


def test_an_evaluation_task_is_left_out_whatever_its_case_and_white_space() -> None:
    kept, why = check([QUESTION.replace(" ", "\n "), QUESTION.upper(), "Something else entirely?"], ["1", "18", "2"])
    assert kept == ["Something else entirely?"]
    assert all(reason.startswith("is an evaluation task: evaluation task ") for reason in why) and len(why) == 2
    assert "Janet" in why[0]


def test_a_part_of_thirteen_words_within_another_text_is_a_hit_and_of_twelve_is_not() -> None:
    part = QUESTION.split()
    kept, why = check([f"Consider this. {' '.join(part[5:18])} Then go on.", f"So {' '.join(part[5:17])} it went."])
    assert len(kept) == 1 and kept[0].startswith("So ")
    assert why[0].startswith("shares 13 words with an evaluation task: ")


def test_the_solution_of_an_evaluation_task_is_a_hit() -> None:
    kept, why = check(["Another question?"], [f"We know this. {SOLUTION}"])
    assert kept == [] and len(why) == 1


def test_a_short_question_counts_within_another_text_if_the_answer_is_the_same() -> None:
    given = [f"Tell me: {SHORT} Be brief.", f"Is it Rome? {SHORT}", "What is the capital city of the country Peru?"]
    kept, _ = check(given, ["Paris.", "no", "Paris"])
    assert kept == given[1:]


def test_eight_words_are_a_hit_only_with_the_same_answer() -> None:
    eight = "bakes muffins for her friends every day with"
    given = [f"Ann {eight} her mother.", f"Bob {eight} his father."]
    kept, why = check(given, ["so #### 18", "so #### 19"])
    assert kept == [given[1]]
    assert why[0].startswith("shares 8 words and the answer with an evaluation task: ")


@pytest.mark.parametrize("order", [(0,), (1,), (0, 1), (1, 0)])
def test_eight_words_that_several_evaluation_tasks_have_count_with_the_answer_of_each(order: tuple[int, ...]) -> None:
    eight = "bakes muffins for her friends every day with"
    both = [Task.create("test", f"Ann {eight} Sue.", "18"), Task.create("test", f"Bob says she {eight} Jim.", "19")]
    kept, _ = check([f"Somebody {eight} Tom."], ["19"], tuple(both[each] for each in order))
    assert len(kept) == (1 not in order)


def test_a_tenth_of_the_rows_is_one_of_rows_and_not_of_texts() -> None:
    part = " ".join(QUESTION.split()[5:18])
    given = [f"{number}: {part}" for number in range(3)] + [f"other {number}" for number in range(17)]
    assert check(given)[0] == given, "three of twenty share it: it belongs to a template"


def test_calculations_are_no_evidence() -> None:
    numbers = "48/2 = <<48/2=24>>24 and 48+24 = <<48+24=72>>72 #### 72"
    task = Task.create("test", "How many clips did Natalia sell in all of the spring?", numbers)
    assert len(check(["Something else?"], [numbers.replace("####", "that is")], (task,))[0]) == 1


def test_a_template_is_no_evidence_though_its_copies_are() -> None:
    form = "State only the final result of the following sum, without any further words or signs at all: {} + {} = ?"
    tasks = tuple(Task.create("test", form.format(n, n + 1), "0") for n in range(3))
    given = [form.format(n, 2 * n) for n in range(100, 120)] + [tasks[1].question] * 20
    kept, why = check(given, None, tasks)
    assert kept == given[:20]
    assert all(reason.startswith("is an evaluation task") for reason in why)


def test_many_copies_of_one_leak_do_not_make_it_a_template() -> None:
    leak = f"Here is one more problem for you: {QUESTION}"
    kept, _ = check([leak] * 30)
    assert kept == []
    batch = rows(question=[leak] * 30, answer=["none"] * 30)
    context = Context((Task.create("test", QUESTION, SOLUTION),))
    [link] = linked(batch, operator("decontaminate"), context=context)
    link.operator.prepare()
    for start in range(30):
        link.operator.observe(batch.slice(start, 1))
    link.operator.settle()
    assert len(apply_link(link, batch, 0)[1].left_out) == 30


def test_evaluation_tasks_come_from_files_too(tmp_path: Path) -> None:
    file = write(tmp_path / "test.jsonl", [{"problem": QUESTION, "solution": SOLUTION}])
    against = [{"path": str(file), "question": "problem", "answer": "solution"}]
    found, outcome = applied("decontaminate", rows(question=[QUESTION, "Other?"], answer=["1", "2"]), against=against)
    assert [row["question"] for row in found] == ["Other?"]
    assert "test.jsonl 1 " in reasons(outcome)[0]


def test_answers_of_a_file_are_compared_whatever_their_kinds(tmp_path: Path) -> None:
    rows_of_file = [{"question": SHORT, "answer": "Paris"}, {"question": QUESTION, "answer": 18}]
    file = write(tmp_path / "test.jsonl", rows_of_file)
    given = [f"Tell me: {SHORT}", "She bakes muffins for her friends every day with joy."]
    batch = rows(question=given, answer=["Paris", "18"])
    assert applied("decontaminate", batch, against=[{"path": str(file)}])[0] == []


def test_an_evaluation_file_with_a_broken_row_is_an_error(tmp_path: Path) -> None:
    file = write(tmp_path / "test.jsonl", [{"question": QUESTION, "answer": SOLUTION}, "{broken"])
    with pytest.raises(DataError, match="line 2: not JSON", check=about("against", str(file))):
        applied("decontaminate", rows(question=["a"], answer=["b"]), against=[{"path": str(file)}])


def test_a_column_of_answers_that_is_not_there_is_refused_if_it_was_asked_for() -> None:
    context = Context((Task.create("test", QUESTION, SOLUTION),))
    options = {"columns": ["question"], "answer": "solutoin"}
    with pytest.raises(ConfigError, match="solution", check=about("operators.0.answer", "solutoin")):
        applied("decontaminate", rows(question=["a"], solution=["b"]), context=context, **options)
    assert len(applied("decontaminate", rows(question=["a"]), context=context, columns=["question"])[0]) == 1


def test_questions_of_signs_that_are_the_same_words_are_not_the_same() -> None:
    tasks = (Task.create("test", "Is this balanced: (()", "no"), Task.create("test", "12", "12"))
    given = ["Is this balanced: ()()", "is this balanced: (() ", "13"]
    assert check(given, ["yes", "no", "12"], tasks)[0] == [given[0], given[2]]
    given = ["is this balanced: (()", "IS THIS BALANCED: (()"]
    assert check(given, ["no", "NO"], tasks)[0] == given[1:]
