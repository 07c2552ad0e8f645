"""Readers of tasks: reasoning-gym data sets, JSONL or Parquet files, hub data sets, generated squares."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rayrft.config.tasks import TaskSourceConfig
from rayrft.data.episodes import read_gymnasium, read_verifiers
from rayrft.data.images import image_paths
from rayrft.data.squares import draw_squares
from rayrft.errors import DataError, nearest
from rayrft.experience import Task
from rayrft.registry import Registry

task_sources: Registry[Callable[[TaskSourceConfig, str], list[Task]]] = Registry("task source")
"""Readers take a source's config and its config key (``tasks.sources.0``), which errors name."""


def read_source(config: TaskSourceConfig, field: str) -> list[Task]:
    """Read all tasks of a source, in its order, with duplicates.

    Raises DataError if it is missing, empty or broken, ConfigError if there is no such reader.
    """
    return _acted_on(config, task_sources.get(config.source, f"{field}.source")(config, field))


@task_sources.register("reasoning_gym")
def read_reasoning_gym(config: TaskSourceConfig, field: str) -> list[Task]:
    """Generate procedural tasks with verifiers; always with one seed, because sets of neighbouring seeds overlap."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if config.dataset not in DATASETS:
        raise DataError(
            "reasoning-gym has no such data set",
            field=f"{field}.dataset",
            value=config.dataset,
            remedy=nearest(str(config.dataset), DATASETS),
        )
    try:
        entries = reasoning_gym.create_dataset(config.dataset, size=config.size, seed=0, **config.options)
    except (TypeError, AssertionError, ValueError) as error:
        raise DataError(
            f"reasoning-gym refuses the options: {error}",
            field=f"{field}.options",
            remedy="see the dataset's own options in reasoning-gym",
        ) from None
    return [
        Task.create(
            f"reasoning_gym/{config.dataset}",
            entry["question"],
            str(entry["answer"]),
            difficulty=_difficulty(entry["metadata"], config, f"task {number} of {config.dataset}", field),
            system=config.system,
            metadata=entry["metadata"],
        )
        for number, entry in enumerate(entries, start=1)
    ]


task_sources.register("squares")(draw_squares)
task_sources.register("gymnasium")(read_gymnasium)
task_sources.register("verifiers")(read_verifiers)


@task_sources.register("file")
def read_task_file(config: TaskSourceConfig, field: str) -> list[Task]:
    """Read tasks from JSONL or Parquet."""
    assert config.path is not None  # checked by the config
    return _read_file(config.path, config, field, f"{field}.path", config.size)


@task_sources.register("datasets")
def read_dataset(config: TaskSourceConfig, field: str) -> list[Task]:
    """Read tasks from a data set of the Hugging Face hub, or from a folder with a copy of one."""
    return _read_split(config, field, "split", config.size)


def read_held_out(config: TaskSourceConfig, field: str) -> list[Task]:
    """Read a source's held-out tasks from its file or split for them; none if it has neither."""
    if config.eval_path is not None:
        return _acted_on(config, _read_file(config.eval_path, config, field, f"{field}.eval_path"))
    return _acted_on(config, _read_split(config, field, "eval_split")) if config.eval_split is not None else []


def _acted_on(config: TaskSourceConfig, tasks: list[Task]) -> list[Task]:
    """The tasks with the workflow that the source names."""
    return [replace(task, workflow=config.workflow) for task in tasks] if config.workflow else tasks


def _read_file(
    path: Path, config: TaskSourceConfig, field: str, path_field: str, size: int | None = None
) -> list[Task]:
    rows = _read_rows(path, path_field)[:size]
    return _to_tasks(rows, config, field, rows_field=path_field, source=path.name, origin=str(path), base=path)


def _read_split(config: TaskSourceConfig, field: str, key: str, size: int | None = None) -> list[Task]:
    assert config.dataset is not None  # checked by the config
    name, split = config.dataset, getattr(config, key)
    splits = _load_dataset(config, field)
    if split not in splits:
        raise DataError(f"{name} has no such split", field=f"{field}.{key}", value=split, remedy=nearest(split, splits))
    # As Arrow, so that features such as images and audio are not decoded.
    rows = splits[split].with_format("arrow")[:size].to_pylist()
    origin = f"split {split!r} of {name}"
    if not rows:
        raise DataError(
            f"{origin} holds no rows", field=f"{field}.{key}", value=split, remedy="name a split with tasks"
        )
    return _to_tasks(rows, config, field, rows_field=f"{field}.{key}", source=name, origin=origin, base=Path(name))


def _load_dataset(config: TaskSourceConfig, field: str) -> dict[str, Any]:
    """Load all splits by name, from the cache if they are in it."""
    import datasets

    try:
        return datasets.load_dataset(config.dataset, config.config)
    except ValueError as error:  # several configs and none named, or an unknown one
        raise DataError(
            f"{config.dataset}: {' '.join(str(error).split())}",
            field=f"{field}.config",
            value=config.config,
            remedy="name one of them",
        ) from None
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"the data set cannot be loaded: {' '.join(str(error.__cause__ or error).split())}",
            field=f"{field}.dataset",
            value=config.dataset,
            remedy="give its id on the Hugging Face hub (log in if it is gated), or a folder with a copy; without a "
            "network it must be in the cache (HF_HOME)",
        ) from None


def _to_tasks(
    rows: list[dict[str, Any]],
    config: TaskSourceConfig,
    field: str,
    *,
    rows_field: str,
    source: str,
    origin: str,
    base: Path,
) -> list[Task]:
    """Convert rows to tasks. ``rows_field`` is the config key of the rows' origin, ``origin`` its name in messages;
    image paths are relative to ``base``."""
    for key, name in (("question", config.question), ("answer", config.answer)):
        if name not in rows[0]:
            remedy = nearest(name, rows[0])
            raise DataError(f"no field {name!r} in {origin}", field=f"{field}.{key}", value=name, remedy=remedy)
    tasks = []
    for number, row in enumerate(rows, start=1):
        question, answer = row[config.question], row[config.answer]
        if not question or answer is None:
            raise DataError(
                f"row {number} of {origin} has no question or no answer",
                field=rows_field,
                value=number,
                remedy="fill it in, or remove the row",
            )
        truth = str(answer)
        if config.answer_after is not None:
            truth = truth.rpartition(config.answer_after)[2].strip()
        try:
            images = image_paths(row.get(config.images), base, config.images_folder)
        except DataError as error:
            problem = f"row {number} of {origin}: {error.problem}"
            raise DataError(problem, field=rows_field, value=number, remedy=error.remedy) from None
        tasks.append(
            Task.create(
                source,
                str(question),
                truth,
                images=images,
                difficulty=_difficulty(row, config, f"row {number} of {origin}", field),
                system=config.system,
                metadata={name: value for name, value in row.items() if name != config.question},
            )
        )
    return tasks


def _difficulty(values: dict[str, Any], config: TaskSourceConfig, origin: str, field: str) -> float | None:
    if config.difficulty is None:
        return None
    difficulty = values.get(config.difficulty)
    if isinstance(difficulty, bool) or not isinstance(difficulty, int | float) or not math.isfinite(difficulty):
        raise DataError(
            f"{origin} has no number in {config.difficulty!r}",
            field=f"{field}.difficulty",
            value=difficulty,
            remedy=f"name one of the fields {sorted(values)} that holds a number in every row",
        )
    return float(difficulty)


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Let it tell only errors: plans and progress of a read say nothing to who starts a run."""
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _read_rows(path: Path, field: str) -> list[dict[str, Any]]:
    import ray.data
    from pyarrow import ArrowInvalid
    from ray.exceptions import RayTaskError

    if not path.exists():
        raise DataError("no such file", field=field, value=str(path), remedy="give a JSONL or Parquet file")
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    # The newer reader stalls for seconds on small files.
    context.use_datasource_v2 = False
    # Statistics and cursors of a resumed run refer to tasks by number.
    context.execution_options.preserve_order = True
    parquet = path.suffix == ".parquet" or any(path.glob("*.parquet"))
    read = ray.data.read_parquet if parquet else ray.data.read_json
    try:
        with ray.data.DataContext.current(context), _quiet(logging.getLogger("ray.data")):
            rows = read(str(path.absolute())).take_all() if path.is_dir() or path.stat().st_size else []
    except (RayTaskError, ArrowInvalid, ValueError) as error:
        cause = getattr(error, "cause", None) or error
        raise DataError(
            f"cannot be read: {str(cause).splitlines()[-1]}",
            field=field,
            value=str(path),
            remedy="check the file: it must be valid JSONL, Parquet or a saved dataset",
        ) from None
    if not rows:
        raise DataError("the file holds no rows", field=field, value=str(path), remedy="give a file with tasks")
    return rows
