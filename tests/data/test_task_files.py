"""Files of tasks with what was measured of each: written, and read again as a source."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrft.config import TaskSourceConfig
from rayrft.data.task_files import measured, write_tasks
from rayrft.data.task_sources import read_source
from rayrft.errors import DataError
from rayrft.experience import Task
from tests.errors import about

TASKS = [
    Task.create("s", "What is 1 + 1?", "2", domain="math", metadata={"level": 3, "tests": [{"in": "1", "out": None}]}),
    Task.create("s", "Which colour?", "red", images=("/a/b.png",), workflow="tool_use", system="Be brief."),
    measured(Task.create("s", "Ünïcode \u2028?", "\n"), 8, 2.0),
    replace(measured(Task.create("t", "hard", "x", difficulty=4.0), 3, 1.5), priority=0.25),
    Task.create("s", "And?", "4", history=({"role": "user", "content": "2?"},), other_answers=("four", "IV")),
]


def read(path: Path, **more: object) -> list[Task]:
    return read_source(TaskSourceConfig.model_validate({"source": "tasks", "path": path, **more}), "tasks.sources.0")


@pytest.mark.parametrize("name", ["tasks.parquet", "tasks.jsonl"])
def test_tasks_are_read_as_they_were_written(name: str, tmp_path: Path) -> None:
    assert write_tasks(tmp_path / name, (("one", task) for task in TASKS)) == 5
    assert read(tmp_path / name) == TASKS
    changes = {"system": "Think.", "workflow": "w"}
    assert read(tmp_path / name, size=1, **changes) == [replace(TASKS[0], **changes)]


def test_more_tasks_than_a_batch_are_written(tmp_path: Path) -> None:
    tasks = [Task.create("s", str(number), "1") for number in range(2500)]
    assert write_tasks(tmp_path / "tasks.parquet", (("s", task) for task in tasks)) == 2500
    assert read(tmp_path / "tasks.parquet") == tasks


def test_what_was_measured_gives_a_difficulty_where_there_is_none() -> None:
    assert (TASKS[2].tries, TASKS[2].pass_rate, TASKS[2].difficulty, TASKS[2].passes) == (8, 0.25, 0.75, 2.0)
    assert (TASKS[3].pass_rate, TASKS[3].difficulty) == (0.5, 4.0), "one that was given stays"
    assert measured(TASKS[2], 0, 0.0).pass_rate is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("", "no row can be read"),
        ('{"question": "a", "answer": "b"}\n', "no column 'id'.*source: file"),
    ],
)
def test_another_file_is_refused_with_its_config_key(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, check=about("tasks.sources.0.path", str(path)), match=message):
        read(path)


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, [("one", task) for task in TASKS])
    path.write_text(path.read_text()[:-20])
    with pytest.raises(DataError, check=about("tasks.sources.0.path"), match="line 5"):
        read(path)
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match="no column 'source'"):
        read(tmp_path / "other.parquet")


@pytest.mark.parametrize("answer", [5, ["5"], {"text": "5"}])
def test_a_task_whose_answer_is_no_text_is_refused(tmp_path: Path, answer: Any) -> None:
    path = tmp_path / "tasks.jsonl"
    write_tasks(path, [("a", TASKS[0])])
    path.write_text(json.dumps({**json.loads(path.read_text()), "answer": answer}) + "\n")
    with pytest.raises(DataError, match="column 'answer' holds", check=about("tasks.sources.0.path")):
        read(path)
    with pytest.raises(DataError, match="the answer of a task is", check=about("answer", answer)):
        Task.create("mine", "How much is 2 + 3?", answer)
    with pytest.raises(DataError, match="the system of a task is", check=about("system", answer)):
        Task("id", "How much is 2 + 3?", "5", system=answer)
