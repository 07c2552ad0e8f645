"""Task sets from files: JSONL and Parquet through Ray Data, ground truth after a mark, splits without overlap."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrft.buffer.tasksets import load_tasks
from rayrft.config.data import DemonstrationsConfig, TasksConfig
from rayrft.errors import DataError

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    rows = [{"problem": f"What is {i} + 1?", "solution": f"Add.\n#### {i + 1}", "level": i} for i in range(20)]
    path = tmp_path / "tasks.parquet"
    pq.write_table(pa.Table.from_pylist([*rows, rows[3]]), path)
    return path


def config(path: Path, **changes: object) -> TasksConfig:
    values = {"source": "file", "path": path, "question": "problem", "answer": "solution", "eval_size": 5}
    return TasksConfig(**{**values, **changes})  # type: ignore[arg-type]


def test_parquet_rows_become_tasks_without_duplicates(parquet: Path) -> None:
    splits = load_tasks(config(parquet, answer_after="####"), {"gold": DemonstrationsConfig(size=4)}, seed=0)
    assert (len(splits.evaluation), len(splits.demonstrated["gold"]), len(splits.train)) == (5, 4, 11)
    tasks = [*splits.evaluation, *splits.demonstrated["gold"], *splits.train]
    assert len({task.question for task in tasks}) == len({task.id for task in tasks}) == 20
    for task in tasks:
        assert task.question == f"What is {task.metadata['level']} + 1?"
        assert task.answer == str(task.metadata["level"] + 1)


def test_splits_follow_from_the_seed(parquet: Path) -> None:
    first, again, other = (load_tasks(config(parquet), {}, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.train != other.train


def test_held_out_tasks_from_a_file_of_their_own_never_reach_training(parquet: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "test.jsonl"
    held_out.write_text(
        '{"problem": "What is 3 + 1?", "solution": "#### 4"}\n{"problem": "new", "solution": "#### 1"}\n'
    )
    splits = load_tasks(config(parquet, eval_path=held_out), {}, seed=0)
    assert {task.question for task in splits.evaluation} == {"What is 3 + 1?", "new"}
    assert "What is 3 + 1?" not in {task.question for task in splits.train}
    assert len(splits.train) == 19


def test_real_word_problems_load_with_their_ground_truth(gsm8k: Path) -> None:
    tasks = TasksConfig(source="file", path=gsm8k / "train.jsonl", eval_path=gsm8k / "test.jsonl", answer_after="####")
    splits = load_tasks(tasks, {}, seed=0)
    assert len(splits.train) > 7000 and len(splits.evaluation) == 300
    natalia = next(task for task in splits.train if task.question.startswith("Natalia sold clips to 48"))
    assert natalia.answer == "72"


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("these are not rows\n")
    with pytest.raises(DataError, match=r"tasks\.path: cannot be read"):
        load_tasks(config(path), {}, seed=0)


def test_sizes_that_leave_nothing_to_train_on_are_refused(parquet: Path) -> None:
    with pytest.raises(DataError, match="no task is left to train on"):
        load_tasks(config(parquet), {"gold": DemonstrationsConfig(size=15)}, seed=0)
