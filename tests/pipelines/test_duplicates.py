"""Duplicates: each but the first is left out, whatever the batches, and what only looks alike stays."""

from __future__ import annotations

import random
import tracemalloc
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rayrft.config.pipelines import OperatorConfig
from rayrft.pipelines.chain import apply_link
from rayrft.pipelines.operators import hashing
from rayrft.pipelines.run.host import OperatorHost, packed
from tests.pipelines.small import applied, linked, reasons, rows, texts

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


def test_exact_duplicates_are_left_out_but_for_the_first() -> None:
    found, outcome = applied(
        "exact_duplicates", rows(question=["a", "b", "a ", "A", "b"], answer=["1", "2", "1", "1", "3"])
    )
    assert [(row["question"], row["answer"]) for row in found] == [("a", "1"), ("b", "2"), ("A", "1"), ("b", "3")]
    assert reasons(outcome) == [f"duplicate: of {found[0]['id']}"]


def test_null_is_not_the_text_none() -> None:
    assert texts("exact_duplicates", [None, "None", None], columns=["question"]) == [None, "None"]


def edited(text: str, words: int, rng: random.Random) -> str:
    parts = text.split()
    for place in rng.sample(range(len(parts)), words):
        parts[place] = "edited"
    return " ".join(parts)


def jaccard(one: str, other: str, n: int = 3) -> float:
    sets = [set(zip(*(text.split()[start:] for start in range(n)), strict=False)) for text in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_signatures_estimate_the_similarity() -> None:
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


def test_case_punctuation_and_white_space_do_not_count() -> None:
    base = "Natalia sold 1,000 well-known clips in May. How many did she sell?"
    other = "natalia sold 1000 well known  clips in may -- how many did she sell"
    assert texts("near_duplicates", [base, other]) == [base]


def test_short_texts_are_compared_by_all_their_words() -> None:
    found = texts("near_duplicates", ["2 + 2", "2 + 3", "2 - 2", "2 +  2", "", "", None])
    assert found == ["2 + 2", "2 + 3", "2 - 2", "", "", None]


def test_chinese_is_compared_by_characters() -> None:
    base = "小明有三个苹果，小红给了他五个苹果，后来他又吃掉了两个，请问小明现在一共还有多少个苹果呢"
    other = "一列火车以每小时六十公里的速度从甲地开往乙地，全程三百公里，请问需要几个小时才能到达"
    assert texts("near_duplicates", [base, base.replace("小红", "小兰"), other]) == [base, other]


def test_problems_with_other_numbers_are_others_unless_asked_for() -> None:
    base = "Maisie has 33 flyers and Donna has twice as many, how many flyers do they have together in the end?"
    given = [base, base.replace("33", "34"), base.replace("Donna", "Jane"), base.replace("33", "33.0")]
    assert texts("near_duplicates", given) == [given[0], given[1], given[3]]
    assert texts("near_duplicates", given, same_numbers=False) == [base]


def test_rows_of_one_template_stay_apart_at_a_high_threshold() -> None:
    given = [
        f"A farmer sells {n} eggs at {n % 97} cents each and buys {n % 89} hens, how much is left of {n * 3}?"
        for n in range(1000)
    ]
    assert len(texts("near_duplicates", given, threshold=0.95, same_numbers=False)) > 900


@pytest.mark.parametrize(("threshold", "rows_of_a_band"), [(0.99, 16), (0.9, 8), (0.7, 4), (0.4, 2), (0.1, 1)])
def test_bands_fit_the_threshold(threshold: float, rows_of_a_band: int) -> None:
    assert hashing.band_rows(threshold) == rows_of_a_band


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
    host.load(next(messages))
    host.observe(0)  # compiles
    tracemalloc.start()
    try:
        for message in messages:
            host.load(message)
            host.observe(0)
        del message
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 3 << 20, "of 20 MB of messages the last one"
