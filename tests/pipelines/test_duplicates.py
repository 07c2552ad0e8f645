"""Duplicates: each but the first is left out, whatever the batches, and what only looks alike stays."""

from __future__ import annotations

import random
import tracemalloc
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rayrft.config.pipelines import OperatorConfig
from rayrft.errors import ConfigError, DataError
from rayrft.experience import Task
from rayrft.pipelines import Context
from rayrft.pipelines.chain import apply_link
from rayrft.pipelines.operators import hashing
from rayrft.pipelines.run.host import OperatorHost, packed
from tests.errors import about
from tests.pipelines.small import applied, linked, operator, reasons, rows, texts, write

WORDS = [f"word{number}" for number in range(3000)]


def made_up(count: int, length: int = 40, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=length)) for _ in range(count)]


def in_batches(name: str, given: list[str], size: int, **options: object) -> list[str | None]:
    """The reasons for all rows, observed and applied in batches of this size."""
    batch = rows(question=given)
    [link] = linked(batch, OperatorConfig(name=name, **options))
    parts = [batch.slice(start, size) for start in range(0, len(given), size)]
    for part in parts:
        link.operator.observe(part)
    link.operator.settle()
    gone = {row.row: row.reason for part in parts for row in apply_link(link, part, 0)[1].left_out}
    return [gone.get(name) for name in batch.column("id").to_pylist()]


def test_exact_duplicates_are_left_out_but_for_the_first_and_null_is_not_the_text_none() -> None:
    found, outcome = applied(
        "exact_duplicates", rows(question=["a", "b", "a ", "A", "b"], answer=["1", "2", "1", "1", "3"])
    )
    assert [(row["question"], row["answer"]) for row in found] == [("a", "1"), ("b", "2"), ("A", "1"), ("b", "3")]
    assert reasons(outcome) == [f"duplicate: of {found[0]['id']}"]
    assert texts("exact_duplicates", [None, "None", None], columns=["question"]) == [None, "None"]


def edited(text: str, words: int, rng: random.Random) -> str:
    parts = text.split()
    for place in rng.sample(range(len(parts)), words):
        parts[place] = "edited"
    return " ".join(parts)


def jaccard(one: str, other: str, n: int = 3) -> float:
    sets = [set(zip(*(text.split()[start:] for start in range(n)), strict=False)) for text in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_signatures_estimate_the_similarity_and_bands_fit_the_threshold() -> None:
    rng = random.Random(1)
    originals = made_up(300)
    for edits in (0, 1, 2, 4, 8):
        others = [edited(text, edits, rng) for text in originals]
        low, _ = hashing.signatures(*hashing.words(pa.array([*originals, *others])), 3, 4)
        agree = (low[:300] == low[300:]).mean(1)
        estimated = (agree - 1 / 256) / (1 - 1 / 256)
        true = np.array([jaccard(one, other) for one, other in zip(originals, others, strict=True)])
        assert abs(np.mean(estimated - true)) < 0.01
        assert np.std(estimated - true) < 0.06
    for threshold, rows_of_a_band in ((0.99, 16), (0.9, 8), (0.7, 4), (0.4, 2), (0.1, 1)):
        assert hashing.band_rows(threshold) == rows_of_a_band


def test_near_duplicates_are_found_and_others_are_not() -> None:
    rng = random.Random(2)
    originals = made_up(500)
    near, far = [edited(text, 1, rng) for text in originals], [edited(text, 12, rng) for text in originals]
    found = in_batches("near_duplicates", [*originals, *near, *far], 100)
    assert found[:500] == [None] * 500
    assert sum(reason is not None for reason in found[500:1000]) >= 495
    assert sum(reason is not None for reason in found[1000:]) <= 5


@pytest.mark.parametrize("name", ["exact_duplicates", "near_duplicates"])
def test_batches_make_no_difference(name: str) -> None:
    rng = random.Random(3)
    originals = made_up(60)
    given = [*originals, *(edited(text, rng.randint(0, 3), rng) for text in originals), "", "short", "short"]
    rng.shuffle(given)
    results = [in_batches(name, given, size, columns=["question"]) for size in (1, 7, 1000)]
    assert all(one == other for one, other in pairwise(results))
    assert any(results[0])


def test_near_duplicates_are_compared_by_their_words_signs_and_numbers() -> None:
    base = "Natalia sold 1,000 well-known clips in May. How many did she sell?"
    other = "natalia sold 1000 well known  clips in may -- how many did she sell"
    assert texts("near_duplicates", [base, other]) == [base]
    found = texts("near_duplicates", ["2 + 2", "2 + 3", "2 - 2", "2 +  2", "", "", None])
    assert found == ["2 + 2", "2 + 3", "2 - 2", "", "", None]
    base = "小明有三个苹果，小红给了他五个苹果，后来他又吃掉了两个，请问小明现在一共还有多少个苹果呢"
    other = "一列火车以每小时六十公里的速度从甲地开往乙地，全程三百公里，请问需要几个小时才能到达"
    assert texts("near_duplicates", [base, base.replace("小红", "小兰"), other]) == [base, other]
    base = "Maisie has 33 flyers and Donna has twice as many, how many flyers do they have together in the end?"
    given = [base, base.replace("33", "34"), base.replace("Donna", "Jane"), base.replace("33", "33.0")]
    assert texts("near_duplicates", given) == [given[0], given[1], given[3]]
    assert texts("near_duplicates", given, same_numbers=False) == [base]
    given = [
        f"A farmer sells {n} eggs at {n % 97} cents each and buys {n % 89} hens, how much is left of {n * 3}?"
        for n in range(1000)
    ]
    assert len(texts("near_duplicates", given, threshold=0.95, same_numbers=False)) > 900


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("exact_duplicates", {"columns": ["question"]}),
        ("near_duplicates", {}),
        ("top_share", {"column": "score", "share": 0.5}),
    ],
)
def test_what_is_kept_of_all_rows_does_not_keep_their_texts(name: str, options: dict[str, Any]) -> None:
    def batch(number: int) -> pa.RecordBatch:
        return rows(question=[f"{number} {row} " + "x" * 100_000 for row in range(10)], score=[float(number)] * 10)

    build = partial(linked, batch(0), OperatorConfig(name=name, **options))
    host, messages = OperatorHost(build, 0), map(packed, map(batch, range(21)))
    host.observe(0, next(messages))  # compiles
    tracemalloc.start()
    try:
        for message in messages:
            host.observe(0, message)
        del message
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 3 << 20, "of 20 MB of messages the last one"


# Decontamination: what an evaluation task shows

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


def test_a_hit_is_thirteen_words_or_a_solution_or_less_with_the_same_answer() -> None:
    part = QUESTION.split()
    kept, why = check([f"Consider this. {' '.join(part[5:18])} Then go on.", f"So {' '.join(part[5:17])} it went."])
    assert len(kept) == 1 and kept[0].startswith("So ")
    assert why[0].startswith("shares 13 words with an evaluation task: ")
    kept, why = check(["Another question?"], [f"We know this. {SOLUTION}"])
    assert kept == [] and len(why) == 1
    given = [f"Tell me: {SHORT} Be brief.", f"Is it Rome? {SHORT}", "What is the capital city of the country Peru?"]
    kept, _ = check(given, ["Paris.", "no", "Paris"])
    assert kept == given[1:]
    eight = "bakes muffins for her friends every day with"
    given = [f"Ann {eight} her mother.", f"Bob {eight} his father."]
    kept, why = check(given, ["so #### 18", "so #### 19"])
    assert kept == [given[1]]
    assert why[0].startswith("shares 8 words and the answer with an evaluation task: ")
    for order in ((0,), (1,), (0, 1), (1, 0)):
        eight = "bakes muffins for her friends every day with"
        both = [Task.create("test", f"Ann {eight} Sue.", "18"), Task.create("test", f"Bob says she {eight} Jim.", "19")]
        kept, _ = check([f"Somebody {eight} Tom."], ["19"], tuple(both[each] for each in order))
        assert len(kept) == (1 not in order)


def test_templates_and_calculations_are_no_evidence_though_copies_are() -> None:
    part = " ".join(QUESTION.split()[5:18])
    given = [f"{number}: {part}" for number in range(3)] + [f"other {number}" for number in range(17)]
    assert check(given)[0] == given, "three of twenty share it: it belongs to a template"
    numbers = "48/2 = <<48/2=24>>24 and 48+24 = <<48+24=72>>72 #### 72"
    task = Task.create("test", "How many clips did Natalia sell in all of the spring?", numbers)
    assert len(check(["Something else?"], [numbers.replace("####", "that is")], (task,))[0]) == 1
    form = "State only the final result of the following sum, without any further words or signs at all: {} + {} = ?"
    tasks = tuple(Task.create("test", form.format(n, n + 1), "0") for n in range(3))
    given = [form.format(n, 2 * n) for n in range(100, 120)] + [tasks[1].question] * 20
    kept, why = check(given, None, tasks)
    assert kept == given[:20]
    assert all(reason.startswith("is an evaluation task") for reason in why)
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


def test_evaluation_tasks_come_from_files_too_whatever_the_kinds_of_their_answers(tmp_path: Path) -> None:
    file = write(tmp_path / "test.jsonl", [{"problem": QUESTION, "solution": SOLUTION}])
    against = [{"path": str(file), "question": "problem", "answer": "solution"}]
    found, outcome = applied("decontaminate", rows(question=[QUESTION, "Other?"], answer=["1", "2"]), against=against)
    assert [row["question"] for row in found] == ["Other?"]
    assert "test.jsonl 1 " in reasons(outcome)[0]
    rows_of_file = [{"question": SHORT, "answer": "Paris"}, {"question": QUESTION, "answer": 18}]
    file = write(tmp_path / "test.jsonl", rows_of_file)
    given = [f"Tell me: {SHORT}", "She bakes muffins for her friends every day with joy."]
    batch = rows(question=given, answer=["Paris", "18"])
    assert applied("decontaminate", batch, against=[{"path": str(file)}])[0] == []
    file = write(tmp_path / "test.jsonl", [{"question": QUESTION, "answer": SOLUTION}, "{broken"])
    with pytest.raises(DataError, match="line 2: not JSON", check=about("against", str(file))):
        applied("decontaminate", rows(question=["a"], answer=["b"]), against=[{"path": str(file)}])
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
