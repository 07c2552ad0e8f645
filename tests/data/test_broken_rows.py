"""Rows and files of expert data that cannot be understood: named by line, or skipped and counted; never in silence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayrft.config import TaskSourceConfig
from rayrft.data.task_sources import read_source
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import DataError
from tests.data.expert_data import MULTI_TURN, jsonl, load


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> ChatTokenizer:
    return ChatTokenizer(tiny_model)


BROKEN: dict[str, tuple[str, str]] = {
    "no object": ("[1, 2]", "not a JSON object"),
    "a bare text": ('"prompt"', "not a JSON object"),
    "nested too deeply": ("[" * 200_000, "not JSON"),
    "objects nested too deeply": ('{"a": ' * 100_000, "not JSON"),
    "too many digits": ('{"a": ' + "1" * 5000 + "}", "not JSON"),
    "cut off": ('{"prompt": "p", "resp', "not JSON"),
    "no response": ('{"prompt": "p"}', "no known layout (columns: prompt)"),
    "an empty response": ('{"prompt": "p", "response": ""}', "needs text or messages in 'response'"),
    "an object": ('{"prompt": "p", "response": {"text": "r"}}', "'response' is an object"),
    "an endless number": ('{"prompt": "p", "response": NaN}', "'response' is a number"),
    "a key twice": ('{"prompt": "p", "response": "r", "prompt": "q"}', "the key 'prompt' twice"),
    "half a surrogate pair": ('{"prompt": "p", "response": "\\ud800"}', "not valid Unicode"),
    "no messages": ('{"messages": []}', "needs text or messages in 'messages'"),
    "texts for messages": ('{"messages": ["hello"]}', "messages[0] is not a message"),
    "no content": ('{"messages": [{"role": "user"}]}', "messages[0] needs 'role' and 'content'"),
    "tools": (
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": [1]}]}',
        "messages[1].tool_calls[0] is not a call of a function",
    ),
    "a silent assistant": (
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]}',
        "messages[1]: the assistant says nothing",
    ),
    "tools that are no list": ('{"prompt": "p", "response": "r", "tools": "all"}', "'tools' is not a list of JSON"),
    "tools for a template without": ('{"prompt": "p", "response": "r", "tools": [{}]}', "shows no tools"),
    "text for messages": ('{"messages": "a"}', "not a list of messages"),
    "no question": ('{"messages": [{"role": "assistant", "content": "a"}]}', "begins with the assistant"),
    "no answer": ('{"messages": [{"role": "user", "content": "q"}]}', "does not end with the assistant"),
    "half a pair": ('{"prompt": "p", "chosen": "a"}', "'TRL preference', which needs rejected"),
    "a pair of the same": ('{"prompt": "p", "chosen": "a", "rejected": "a"}', "'chosen' and 'rejected' are the same"),
    "a margin that is no number": (
        '{"prompt": "p", "chosen": "a", "rejected": "b", "margin": "wide"}',
        "'margin' is not a finite number",
    ),
    "an endless margin": (
        '{"prompt": "p", "chosen": "a", "rejected": "b", "margin": NaN}',
        "'margin' is not a finite number",
    ),
    "a pair of messages without prompt": (
        '{"chosen": [{"role": "assistant", "content": "a"}], "rejected": [{"role": "assistant", "content": "b"}]}',
        "needs text or messages in 'prompt'",
    ),
}
GOOD = '{"prompt": "p", "response": "r"}'


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_row_is_named_by_its_line_or_skipped_and_counted(
    tokenizer: ChatTokenizer, tmp_path: Path, kind: str
) -> None:
    line, why = BROKEN[kind]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([GOOD, "", line, GOOD]))
    with pytest.raises(DataError) as raised:
        load(path, tokenizer)
    assert raised.value.problem.startswith("1 broken rows of 3: line 3: ") and why in raised.value.problem
    assert "on_broken" in raised.value.remedy and raised.value.field == "demonstrations.gold.path"
    rows, left_out = load(path, tokenizer, on_broken="skip")
    assert [row.experience_id for row in rows] == ["gold/1", "gold/4"]
    assert why in left_out.broken[3]
    assert left_out.counts == {"broken (lines 3)": 1}


ASK = {"role": "user", "content": "q"}
SHARED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "system": lambda value: {"system": value, "instruction": "i", "output": "o"},
    "instruction": lambda value: {"instruction": value, "output": "o"},
    "input": lambda value: {"instruction": "i", "input": value, "output": "o"},
}
DEMONSTRATED = SHARED | {
    "prompt": lambda value: {"prompt": value, "response": "r"},
    "response": lambda value: {"prompt": "p", "response": value},
    "completion": lambda value: {"prompt": "p", "completion": value},
    "chosen": lambda value: {"prompt": "p", "chosen": value, "rejected": "r"},
    "text": lambda value: {"text": value},
    "completions": lambda value: {"prompt": "p", "completions": [value], "labels": [True]},
    "messages[1].content": lambda value: {"messages": [ASK, {"role": "assistant", "content": value}]},
    "messages[0].content[0].text": lambda value: {"messages": [{**ASK, "content": [{"type": "text", "text": value}]}]},
}
ASKED = SHARED | {
    "question": lambda value: {"question": value, "answer": "a"},
    "prompt": lambda value: {"prompt": value, "data_source": "d", "reward_model": {"ground_truth": "a"}},
    "messages[0].content": lambda value: {"messages": [{**ASK, "content": value}], "answer": "a"},
}
ROWS = {"demonstrations": DEMONSTRATED, "tasks": ASKED}


@pytest.mark.parametrize("value", [7, 0.5, True])
@pytest.mark.parametrize("column", [f"{kind} {name}" for kind, rows in ROWS.items() for name in rows])
def test_a_number_in_the_place_of_a_text_is_refused_by_row_and_column(
    tokenizer: ChatTokenizer, tmp_path: Path, column: str, value: Any
) -> None:
    kind, _, name = column.partition(" ")
    path = jsonl([ROWS[kind][name](value)], tmp_path)
    with pytest.raises(DataError, match=f"line 1: '?{re.escape(name)}'? is .*not (a )?text"):
        load(path, tokenizer) if kind == "demonstrations" else read_source(TaskSourceConfig(path=path), "s")


def test_a_number_in_csv_which_has_no_types_is_the_text_that_is_written(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("question,answer,level\n2024,0.5,3\nWhat is 1.50?,1.50,4\n")
    tasks = read_source(TaskSourceConfig(path=path), "s")
    assert [(task.question, task.answer) for task in tasks] == [("2024", "0.5"), ("What is 1.50?", "1.50")]
    assert [task.metadata["level"] for task in tasks] == [3, 4]
    rows, _ = load(path, tokenizer)
    assert [[turn["content"] for turn in row.turns] for row in rows] == [["2024", "0.5"], ["What is 1.50?", "1.50"]]


def test_line_numbers_are_those_of_an_editor_and_a_line_that_is_not_utf_8_is_broken_alone(
    tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    # JSON may hold these two as they are; they end no line.
    good = '{"prompt": "a\u2028b\u0085c", "response": "r"}'.encode()
    path.write_bytes(good + b'\n{"prompt": "\xff", "response": "r"}\n' + good)
    rows, left_out = load(path, tokenizer, on_broken="skip")
    assert len(rows) == 2 and left_out.broken == {2: "not UTF-8"}


def test_only_the_first_broken_lines_are_told(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([GOOD, *["broken"] * 12]))
    with pytest.raises(DataError, match=r"12 broken rows of 13: line 2: not JSON .*; line 6: ") as raised:
        load(path, tokenizer)
    assert "line 7" not in raised.value.problem
    _, left_out = load(path, tokenizer, on_broken="skip")
    assert left_out.counts == {"broken (lines 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, …)": 12}


def test_a_template_that_cannot_hold_a_conversation_makes_the_row_broken_and_tells_the_remedy(
    tiny_model: Path, tmp_path: Path
) -> None:
    strips, shown = ChatTokenizer(tiny_model), "{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
    strips.hf.chat_template = f"{{% for m in messages %}}{shown}{{% endfor %}}"
    with pytest.raises(DataError, match=r"line 1: message 5 does not continue .*give one row per turn"):
        load(jsonl([{"messages": MULTI_TURN}], tmp_path), strips)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", None, r"demonstrations\.gold\.path: no such file .*saved Hugging Face data set"),
        ("rows.jsonl", "", r"no usable row"),
        ("rows.parquet", "not Parquet", r"cannot be read: .*Parquet"),
        ("saved/state.json", "{}", r"state\.json is not that of a saved data set \(KeyError"),
        ("saved/state.json", '{"_data_files": [{"filename": "gone.arrow"}]}', r"cannot be read: .*gone\.arrow"),
        ("saved/notes.txt", "hello", r"the folder holds no files of rows"),
        ("saved/train/state.json", "{}", r"holds the splits \['train'\] .*Give one of them: .*train"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tokenizer: ChatTokenizer, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True, parents=True)
    if content is not None:
        path.write_text(content)
    if path.parent.name == "train":  # as `DatasetDict.save_to_disk` writes it
        (path.parent.parent / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(DataError, match=message):
        load(tmp_path / name.split("/")[0], tokenizer)
