"""Filters, priorities and cleaning: what is changed and left out, and what looks like it and stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rayrft.errors import ConfigError
from tests.errors import about
from tests.pipelines.small import applied, reasons, rows, texts


def kept(name: str, column: str, values: list[Any], **options: Any) -> list[Any]:
    """What a filter on one column keeps."""
    found, _ = applied(name, rows(**{column: values}), **options)
    return [row[column] for row in found]


def priorities(name: str, batch: pa.RecordBatch, **options: Any) -> list[float | None]:
    found, _ = applied(name, batch, **options)
    return [None if row["priority"] is None else round(row["priority"], 4) for row in found]


def test_an_expression_keeps_rows_that_meet_it_and_reads_no_files() -> None:
    batch = rows(reward=[1.0, 0.2, None, 0.9], turns=[["a"], ["a"], ["a"], ["a"] * 7])
    found, outcome = applied("expression", batch, where="reward > 0.5 and len(turns) < 6")
    assert [row["reward"] for row in found] == [1.0]
    assert reasons(outcome) == ["not reward > 0.5 and len(turns) < 6"] * 3
    for where in ("read_text('/etc/passwd') is not null", "sum(reward) > 1", "reward > 1; drop table x"):
        with pytest.raises(ConfigError, check=about("operators.0.where", where)):
            applied("expression", rows(reward=[1.0]), where=where)


def test_a_band_includes_its_bounds_and_a_bound_is_met_up_to_rounding() -> None:
    values = [0.0, 0.125, 0.5, 0.875, 1.0, None]
    assert kept("difficulty_band", "pass_rate", values, min=0.125, max=0.875) == [0.125, 0.5, 0.875, None]
    assert kept("difficulty_band", "pass_rate", values, min=0.125, max=1, unknown="drop") == [0.125, 0.5, 0.875, 1.0]
    third = float(np.float32(0.3))
    assert kept("difficulty_band", "pass_rate", [0.1 * 3, third, 0.29, 0.31], min=0.3, max=0.3) == [0.1 * 3, third]
    repeating = " ".join(["one two"] * 4 + ["three", "four", "five"])  # 3 of its 10 pairs of words are new
    assert kept("repetition", "answer", [repeating], ngram=2, min_words=1, max_share=0.5) == [repeating]


def test_outliers_are_those_of_their_group_far_away_or_infinite_and_no_value_of_two() -> None:
    batch = rows(
        group_id=["a"] * 6 + ["b"] * 6 + ["c"] * 3,
        reward=[1.0, 1.1, 0.9, 1.0, 1.05, 9.0, 9.0, 9.1, 8.9, 9.0, 9.05, None, 0.0, 0.0, 50.0],
    )
    found, outcome = applied("outliers", batch)
    assert reasons(outcome) == ["reward is an outlier: 9"] and outcome.left_out[0].values["group_id"] == "a"
    assert len(found) == 14
    batch = rows(group_id=["a"] * 6, token_ids=[[1] * n for n in (10, 11, 12, 10, 11, 200)])
    assert reasons(applied("outliers", batch, column="token_ids")[1]) == ["token_ids is an outlier: 200"]
    for rewards, gone in (
        ([0.0] * 18 + [0.1, 1.0], ["1"]),
        ([0.0, 1.0] * 4, []),
        ([0.0] * 6 + [1.0] * 2, []),
        ([0.0] * 19 + [1.0], []),
        ([1.0] * 18 + [1 - 2**-24, 0.0], []),
        ([1.0] * 4 + [float("inf")], ["inf"]),
        ([0.0, 1.0, 2.0, 1.0, float("inf"), float("-inf")], ["inf", "-inf"]),
        ([1.0, 1.0, float("inf")], []),
    ):
        _, outcome = applied("outliers", rows(group_id=["a"] * len(rewards), reward=rewards))
        assert reasons(outcome) == [f"reward is an outlier: {each}" for each in gone]


def test_texts_that_repeat_themselves_or_mix_scripts_are_left_out() -> None:
    good = "She buys 3 apples and 4 pears, eats one of each, and then counts what is left: 2 apples and 3 pears."
    given = [good, "I think so. " * 20, "no " * 5, "a" * 60, "-" * 60, "=====\n" * 3 + good, "", None]
    assert kept("repetition", "answer", given) == [good, "no " * 5, given[5], "", None]
    english = "The answer is found by adding both of the numbers."
    given = [
        english,
        "首先我们把两个数字加起来然后得到最后的答案就是这样",
        "首先我们把两个数字 add them together and then 得到最后的答案 which is right",
        "Пусть x и y — два числа, тогда их сумма равна z, что и требовалось",
        "これは日本語の文章です。漢字とひらがなとカタカナが混ざっています",
        "答案是 $\\frac{abc}{def}$ 因为我们把两个数字加起来然后得到最后的答案",
        "Naïve café déjà vu à la crème brûlée",
        *("é 三", None),
        "\\(" * 200_000 + "\\[" * 200_000 + english,  # in time proportional to its length
    ]
    assert kept("language_mixing", "answer", given) == [text for text in given if text != given[2]]


def test_a_format_is_contained_the_whole_or_lacking() -> None:
    for must, expected in (("contain", [0, 2]), ("be", [2]), ("lack", [1, 3])):
        given = ["so \\boxed{3}\nindeed", "3", "\\boxed{3}", ""]
        assert kept("format", "answer", given, pattern=r"\\boxed\{.+?\}", must=must) == [
            given[index] for index in expected
        ]


def test_the_top_share_is_of_decimal_fractions_rounded_up_and_of_equal_scores_the_first() -> None:
    assert kept("top_share", "priority", [1.0, 3.0, None, 2.0, 3.0], share=0.5) == [3.0, 2.0, 3.0]
    assert kept("top_share", "priority", [1.0, 1.0, 1.0], share=0.34) == [1.0, 1.0]
    assert kept("top_share", "priority", [1.0, None, 0.0], share=1.0) == [1.0, 0.0]
    batch = rows(priority=[1.0, 2.0, 5.0, 6.0], group_id=["a", "a", "b", "b"])
    found, _ = applied("top_share", batch, share=0.5, by="group_id")
    assert [row["priority"] for row in found] == [2.0, 6.0]
    for share, count in ((0.07, 7), (0.55, 55), (0.071, 8), (1e-9, 1), (1.0, 100), (0.29, 29)):
        assert len(kept("top_share", "priority", [float(number) for number in range(100)], share=share)) == count


def test_a_row_without_a_group_is_a_group_of_its_own() -> None:
    for name, options, column, expected in (
        ("top_share", {"column": "reward", "share": 0.5, "by": "group_id"}, "reward", [5.0, 1.0, 2.0, 3.0, 9.0]),
        ("outliers", {"min_rows": 3}, "reward", [5.0, 4.0, 1.0, 2.0, 3.0, 9.0]),
        ("reward_deviation", {}, "priority", [0.5, 0.5, 0.0, 0.0, 0.0, 0.0]),
        ("pass_rate", {"by": "group_id", "right": 4.5}, "pass_rate", [0.5, 0.5, 0.0, 0.0, 0.0, 1.0]),
    ):
        batch = rows(group_id=["a", "a", None, None, None, None], reward=[5.0, 4.0, 1.0, 2.0, 3.0, 9.0])
        assert [row[column] for row in applied(name, batch, **options)[0]] == expected


def test_priorities_come_from_pass_rates_rewards_human_scores_and_what_no_other_row_says() -> None:
    batch = rows(pass_rate=[0.0, 0.25, 0.5, 1.0, None])
    assert priorities("difficulty", batch) == [1, 0.75, 0.5, 0, None]
    assert priorities("uncertainty", batch) == [0, 0.75, 1, 0, None]
    batch = rows(group_id=["a", "b", "a", "b", "c"], reward=[0.0, 1.0, 1.0, 1.0, None])
    assert priorities("reward_deviation", batch) == [0.5, 0, 0.5, 0, None]
    labels = pa.array([{"score": "4"}, {"score": "9"}, {"score": "good"}, {}, None], pa.map_(pa.string(), pa.string()))
    batch = rows(x=[1, 2, 3, 4, 5]).append_column("labels", labels)
    assert priorities("human_score", batch, scale=[1, 5]) == [0.75, 1, None, None, None]
    given = ["one two three four five six", "one two three four nine ten", "a b c d e f", "too short", "c c c c c c c"]
    assert priorities("novelty", rows(question=given)) == [0.5, 0.5, 1, None, 1]
    assert priorities("novelty", rows(question=["a b c d", "a b c d", "a b c d"])) == [0, 0, 0]


def test_a_sample_is_drawn_by_ids() -> None:
    batch = rows(question=[f"question {number}" for number in range(200)])
    backwards = batch.take(pa.array(range(199, -1, -1)))
    one, more, same, other = (
        {row["id"] for row in applied("sample", given, share=share, seed=seed)[0]}
        for given, share, seed in ((batch, 0.2, 0), (batch, 0.4, 0), (backwards, 0.2, 0), (batch, 0.2, 1))
    )
    assert 20 < len(one) < 60 and one < more
    assert same == one != other


# Cleaning


def test_text_is_normalised() -> None:
    for given, expected in (
        ("cafe\u0301", "café"),
        ("a\u00a0b\u2003c", "a b c"),
        ("a\u200bb\ufeff\u00ad", "ab"),
        ("e\u200b\u0301", "é"),
        ("é   \n  b  ", "é\n  b"),
        ("a\r\nb\rc\u2028d", "a\nb\nc\nd"),
        ("a\u202eb\u2066c\U000e0041d \x1b[1;31mred\x1b[0m [3]", "abcd red [3]"),
        ("a  \n\n\n\nb \n", "a\n\nb"),
        ("def f():\n\treturn 1  # two  spaces", "def f():\n    return 1  # two  spaces"),
        ("x²", "x²"),
        ("👩\u200d💻", "👩\u200d💻"),
        (None, None),
    ):
        assert texts("normalise", [given, "x"], columns=["question"]) == [expected, "x"]
    assert texts("normalise", ["３ ﬁ x²"], columns=["question"], form="NFKC") == ["3 fi x2"], "if it is asked for"


def test_html_is_stripped_and_formulas_and_code_are_not() -> None:
    for given, expected in (
        ("<p>Hello <b>you</b></p>", "Hello you\n"),
        ('<a href="x?a=1&amp;b=2" class=y>link</a>', "link"),
        ("a<br/>b<script>if (a<b) x()</script><!-- c -->", "a\nb"),
        ("a &lt; b &amp; c", "a < b & c"),
        ("if a < b and c > d: 168 < 182 and 224 > 182", "if a < b and c > d: 168 < 182 and 224 > 182"),
        ("<think>List<int> xs; i<p and q>r</think>", "<think>List<int> xs; i<p and q>r</think>"),
        ("<<3*4=12>>12", "<<3*4=12>>12"),
        ('f("%d",&degree); x = &copy; y = &reg[0] & &copycat;', 'f("%d",&degree); x = © y = &reg[0] & &copycat;'),
        ("&#65;&#x42;&lt;&unknown;&#;", "AB<&unknown;&#;"),
        ("a<!-- b <!-- c -->d<!--e", "ad<!--e"),
        ("a<!--b<STYLE x=y>c<!-- </style >d<script>e", "a<!--bde"),
        ("a<br / >b</p >c", "a\nb\nc"),
    ):
        assert texts("strip_markup", [given], columns=["question"]) == [expected]


def test_work_does_not_grow_with_the_square_of_a_text() -> None:
    """With it, these would take hours."""
    spaces, columns = " " * 1_000_000, ["question"]
    assert texts("normalise", [f"é{spaces}b"], columns=columns) == [f"é{spaces}b"]
    given = ["<!-- a" * 200_000, "<script> a" * 200_000 + "</style>", f"<br{spaces}b"]
    assert texts("strip_markup", given, columns=columns) == [given[0], " a" * 200_000, given[2]]


def test_rows_without_text_and_garbled_ones_are_left_out() -> None:
    batch = rows(
        question=["What?", None, " \n", "caf\ufffd\ufffd", "CafÃ© dâ€™or", "Ã la carte, à Paris, très bien, çela va"],
        answer=["a"] * 6,
    )
    found, outcome = applied("drop_broken", batch)
    assert [row["question"][:5] for row in found] == ["What?", "Ã la "]
    assert reasons(outcome)[:4] == ["no question", "no question", "garbled question", "garbled question"]


def test_lengths_are_those_of_lists_or_counted_in_tokens(tiny_model: Path) -> None:
    batch = rows(question=["1", "1 + 1 = 2", "1 + " * 50])
    found, outcome = applied("length", batch, tokenizer=str(tiny_model), min_tokens=2, max_tokens=20)
    assert [row["question"] for row in found] == ["1 + 1 = 2"]
    assert [reason.partition(":")[0] for reason in reasons(outcome)] == ["too short", "too long"]
    found, outcome = applied("length", rows(token_ids=[[1], [1, 2, 3], None]), column="token_ids", max_tokens=2)
    assert [row["token_ids"] for row in found] == [[1]]
    assert reasons(outcome) == ["too long: 3 tokens", "too short: 0 tokens"]


def test_other_languages_are_left_out() -> None:
    pytest.importorskip("lingua", reason="needs the extra `data`")
    given = [
        "How many apples does she have left at the end of the day?",
        "Wie viele Äpfel hat sie am Ende des Tages noch übrig?",
        "她在一天结束的时候还剩下多少个苹果，一共花了多少钱呢",
        *("Solve $\\frac{x}{2} + \\sqrt{y} = 3$.", "12 + 13?"),
    ]
    found, outcome = applied("language", rows(question=given), among=["en", "de", "zh", "fr"])
    assert [row["question"][:3] for row in found] == ["How", "Sol", "12 "]
    assert reasons(outcome) == ["language de", "language zh"]


def test_personal_data_is_masked_and_numbers_of_problems_are_not() -> None:
    for given, expected in (
        ("Mail ann.b+c@mail.example.org.", "Mail [email]."),
        ("Call +49 30 901820 or (212) 555-0123 or 212-555-0123.", "Call [phone] or [phone] or [phone]."),
        ("Card 4111 1111 1111 1111, not 4111 1111 1111 1112.", "Card [card], not 4111 1111 1111 1112."),
        ("IBAN DE89 3704 0044 0532 0130 00 or DE00370400440532013000", "IBAN [iban] or DE00370400440532013000"),
        ("From 192.168.0.17 to 999.1.1.1", "From [ip] to 999.1.1.1"),
        ("SSN 123-45-6789, not 000-45-6789", "SSN [ssn], not 000-45-6789"),
        ("14,000-3,920-1,000=<<14000-3920-1000=9080>>9,080", None),
        ("1000-200-300 = 500, 3.1.4, 2020-01-15, 123456789012345678", None),
        ("@user a@b 5 @ $3", None),
    ):
        assert texts("mask_personal", [given], columns=["question"]) == [expected or given]
    kinds = texts("mask_personal", ["a@b.org 192.168.0.1"], columns=["question"], kinds=["ip"])
    assert kinds == ["a@b.org [ip]"], "only those that are asked for"


def test_pass_rates_are_those_of_tasks() -> None:
    batch = rows(task_id=["a", "b", "a", "a", "c"], reward=[1.0, 0.2, 0.0, None, None])
    found, _ = applied("pass_rate", batch)
    assert [row["pass_rate"] for row in found] == [0.5, 0.0, 0.5, 0.5, None]
    batch = rows(task_id=["a"] * 3, reward=pa.array([0.3, 0.4, 0.2], pa.float32()))
    assert [row["pass_rate"] for row in applied("pass_rate", batch, right=0.3)[0]] == [1 / 3] * 3, "0.3 is not above"
