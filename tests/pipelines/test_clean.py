"""Cleaning: what is changed and left out, and what looks like it and stays."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tests.pipelines.small import applied, reasons, rows, texts


@pytest.mark.parametrize(
    ("given", "expected"),
    [
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
    ],
)
def test_text_is_normalised(given: str | None, expected: str | None) -> None:
    assert texts("normalise", [given, "x"], columns=["question"]) == [expected, "x"]
    assert texts("normalise", ["３ ﬁ x²"], columns=["question"], form="NFKC") == ["3 fi x2"], "if it is asked for"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("<p>Hello <b>you</b></p>", "Hello you\n"),
        ('<a href="x?a=1&amp;b=2" class=y>link</a>', "link"),
        ("a<br/>b<script>if (a<b) x()</script><!-- c -->", "a\nb"),
        ("a &lt; b &amp; c", "a < b & c"),
        ("if a < b and c > d: 168 < 182 and 224 > 182", "if a < b and c > d: 168 < 182 and 224 > 182"),
        ("<think>List<int> xs; i<p and q>r</think>", "<think>List<int> xs; i<p and q>r</think>"),
        ("<<3*4=12>>12", "<<3*4=12>>12"),
        (
            'scanf("%d",&degree); x = &copy; y = &reg[0] & &copycat;',
            'scanf("%d",&degree); x = © y = &reg[0] & &copycat;',
        ),
        ("&#65;&#x42;&lt;&unknown;&#;", "AB<&unknown;&#;"),
        ("a<!-- b <!-- c -->d<!--e", "ad<!--e"),
        ("a<!--b<STYLE x=y>c<!-- </style >d<script>e", "a<!--bde"),
        ("a<br / >b</p >c", "a\nb\nc"),
    ],
)
def test_html_is_stripped_and_formulas_and_code_are_not(given: str, expected: str) -> None:
    assert texts("strip_markup", [given], columns=["question"]) == [expected]


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("normalise", "é" + " " * 1_000_000 + "b", "é" + " " * 1_000_000 + "b"),
        ("strip_markup", "<!-- a" * 200_000, "<!-- a" * 200_000),
        ("strip_markup", "<script> a" * 200_000 + "</style>", " a" * 200_000),
        ("strip_markup", "<br" + " " * 1_000_000 + "b", "<br" + " " * 1_000_000 + "b"),
    ],
    ids=["spaces", "comments", "scripts", "breaks"],
)
def test_work_does_not_grow_with_the_square_of_a_text(name: str, given: str, expected: str) -> None:
    """With it, these would take hours."""
    assert texts(name, [given], columns=["question"]) == [expected]


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
    batch = rows(
        question=[
            "How many apples does she have left at the end of the day?",
            "Wie viele Äpfel hat sie am Ende des Tages noch übrig?",
            "她在一天结束的时候还剩下多少个苹果，一共花了多少钱呢",
            "Solve $\\frac{x}{2} + \\sqrt{y} = 3$.",
            "12 + 13?",
        ]
    )
    found, outcome = applied("language", batch, among=["en", "de", "zh", "fr"])
    assert [row["question"][:3] for row in found] == ["How", "Sol", "12 "]
    assert reasons(outcome) == ["language de", "language zh"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("Mail ann.b+c@mail.example.org.", "Mail [email]."),
        ("Call +49 30 901820 or (212) 555-0123 or 212-555-0123.", "Call [phone] or [phone] or [phone]."),
        ("Card 4111 1111 1111 1111, not 4111 1111 1111 1112.", "Card [card], not 4111 1111 1111 1112."),
        ("IBAN DE89 3704 0044 0532 0130 00 or DE00370400440532013000", "IBAN [iban] or DE00370400440532013000"),
        ("From 192.168.0.17 to 999.1.1.1", "From [ip] to 999.1.1.1"),
        ("SSN 123-45-6789, not 000-45-6789", "SSN [ssn], not 000-45-6789"),
        ("14,000-3,920-1,000=<<14000-3920-1000=9080>>9,080", "14,000-3,920-1,000=<<14000-3920-1000=9080>>9,080"),
        (
            "1000-200-300 = 500, 3.1.4, 2020-01-15, 123456789012345678",
            "1000-200-300 = 500, 3.1.4, 2020-01-15, 123456789012345678",
        ),
        ("@user a@b 5 @ $3", "@user a@b 5 @ $3"),
    ],
)
def test_personal_data_is_masked_and_numbers_of_problems_are_not(given: str, expected: str) -> None:
    assert texts("mask_personal", [given], columns=["question"]) == [expected]
    kinds = texts("mask_personal", ["a@b.org 192.168.0.1"], columns=["question"], kinds=["ip"])
    assert kinds == ["a@b.org [ip]"], "only those that are asked for"


def test_pass_rates_are_those_of_tasks() -> None:
    batch = rows(task_id=["a", "b", "a", "a", "c"], reward=[1.0, 0.2, 0.0, None, None])
    found, _ = applied("pass_rate", batch)
    assert [row["pass_rate"] for row in found] == [0.5, 0.0, 0.5, 0.5, None]
    batch = rows(task_id=["a"] * 3, reward=pa.array([0.3, 0.4, 0.2], pa.float32()))
    assert [row["pass_rate"] for row in applied("pass_rate", batch, right=0.3)[0]] == [1 / 3] * 3, "0.3 is not above"
