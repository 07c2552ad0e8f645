"""Task sets: where tasks come from, without duplicates, cut into held-out, demonstrated and trainable ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayrft.buffer.experience import Task
from rayrft.config.data import DemonstrationsConfig, TasksConfig
from rayrft.errors import DataError, nearest
from rayrft.registry import Registry

task_sources: Registry[Callable[[TasksConfig], list[Task]]] = Registry("task source")


@dataclass(frozen=True)
class TaskSplits:
    """Disjoint lists of tasks: no question stands in two of them."""

    train: list[Task]
    evaluation: list[Task]
    demonstrated: dict[str, list[Task]]


def load_tasks(config: TasksConfig, demonstrations: dict[str, DemonstrationsConfig], seed: int) -> TaskSplits:
    """Read, de-duplicate, shuffle by seed, and split.

    Raises DataError when the source is missing or empty, or too small for the splits asked for.
    """
    tasks = _distinct(task_sources.get(config.source)(config))
    held_out: list[Task] = []
    if config.eval_path is not None:
        held_out = _distinct(read_file(config.eval_path, config, "tasks.eval_path"))[: config.eval_size]
        kept = {task.question for task in held_out}
        tasks = [task for task in tasks if task.question not in kept]
    order = np.random.default_rng(seed).permutation(len(tasks))
    shuffled = iter([tasks[index] for index in order])
    if config.eval_path is None:
        held_out = _cut(shuffled, config.eval_size, "tasks.eval_size", len(tasks))
    demonstrated = {
        name: _cut(shuffled, each.size, f"demonstrations.{name}.size", len(tasks))
        for name, each in demonstrations.items()
        if each.path is None and each.size is not None
    }
    train = list(shuffled)
    if not train:
        raise DataError(
            "no task is left to train on",
            field="tasks",
            value=len(tasks),
            remedy="lower eval_size or the sizes of the demonstrations, or take more tasks",
        )
    return TaskSplits(train, held_out, demonstrated)


def _distinct(tasks: list[Task]) -> list[Task]:
    return list({task.question: task for task in tasks}.values())


def _cut(tasks: Iterator[Task], count: int, field: str, total: int) -> list[Task]:
    part = [task for _, task in zip(range(count), tasks, strict=False)]
    if len(part) < count:
        raise DataError(
            f"only {len(part)} of {count} tasks are left ({total} distinct tasks in all)",
            field=field,
            value=count,
            remedy="ask for fewer, or enlarge tasks.size",
        )
    return part


@task_sources.register("reasoning_gym")
def read_reasoning_gym(config: TasksConfig) -> list[Task]:
    """Procedural tasks with verifiers; the whole set is made with one seed, for sets of neighbouring seeds overlap."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if config.dataset not in DATASETS:
        raise DataError(
            "reasoning-gym has no such data set",
            field="tasks.dataset",
            value=config.dataset,
            remedy=nearest(str(config.dataset), DATASETS),
        )
    try:
        entries = reasoning_gym.create_dataset(config.dataset, size=config.size, seed=0, **config.options)
    except (TypeError, AssertionError, ValueError) as error:
        raise DataError(f"reasoning-gym refuses the options: {error}", field="tasks.options") from None
    return [
        Task.create(
            f"reasoning_gym/{config.dataset}",
            entry["question"],
            str(entry["answer"]),
            system=config.system,
            metadata=entry["metadata"],
        )
        for entry in entries
    ]


@task_sources.register("file")
def read_task_file(config: TasksConfig) -> list[Task]:
    """Tasks from JSONL or Parquet."""
    assert config.path is not None  # the config's own rule
    return read_file(config.path, config, "tasks.path")


def read_file(path: Path, config: TasksConfig, field: str) -> list[Task]:
    """Read a JSONL or Parquet file (or a folder of them) through Ray Data."""
    rows = _read_rows(path, field)
    for name in (config.question, config.answer):
        if name not in rows[0]:
            raise DataError(f"no field {name!r} in {path}", field=field, value=name, remedy=nearest(name, rows[0]))
    tasks = []
    for number, row in enumerate(rows[: config.size], start=1):
        question, answer = row[config.question], row[config.answer]
        if not question or answer is None:
            raise DataError(f"row {number} of {path} has no question or no answer", field=field, value=number)
        truth = str(answer)
        if config.answer_after is not None:
            truth = truth.rpartition(config.answer_after)[2].strip()
        rest = {name: value for name, value in row.items() if name != config.question}
        tasks.append(Task.create(path.name, str(question), truth, system=config.system, metadata=rest))
    return tasks


def _read_rows(path: Path, field: str) -> list[dict[str, Any]]:
    import ray.data
    from pyarrow import ArrowInvalid
    from ray.exceptions import RayTaskError

    if not path.exists():
        raise DataError("no such file", field=field, value=str(path), remedy="give a JSONL or Parquet file")
    # The newer reader stalls for seconds on small files.
    ray.data.DataContext.get_current().use_datasource_v2 = False
    ray.data.DataContext.get_current().enable_progress_bars = False
    parquet = path.suffix == ".parquet" or any(path.glob("*.parquet"))
    read = ray.data.read_parquet if parquet else ray.data.read_json
    try:
        rows = read(str(path.absolute())).take_all() if path.is_dir() or path.stat().st_size else []
    except (RayTaskError, ArrowInvalid, ValueError) as error:
        cause = getattr(error, "cause", None) or error
        raise DataError(f"cannot be read: {str(cause).splitlines()[-1]}", field=field, value=str(path)) from None
    if not rows:
        raise DataError("the file holds no rows", field=field, value=str(path), remedy="give a file with tasks")
    return rows
