"""Task files with pass rates, measured by engines or taken from a run's log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayrft.benchmark.bench import attempt_all, check_attempts, find_weights
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.reader import StateReader, log_folder
from rayrft.config import RunConfig, load_config, load_run_config
from rayrft.core.cluster import connect
from rayrft.core.services import task_engines
from rayrft.data.inputs import task_set_spec
from rayrft.data.tables import check_suffix
from rayrft.data.task_files import measured, write_tasks
from rayrft.errors import ConfigError, DataError
from rayrft.experience import Task
from rayrft.pipelines.tasks import load_processed, source_names

_MODEL = "model"
_TASKS = "tasks"


@dataclass(frozen=True)
class MeasuredTasks:
    """A file of tasks. ``tried`` of them were answered, ``solved`` at least once, ``mean`` is their mean pass rate."""

    path: Path
    tasks: int
    tried: int
    solved: int
    mean: float | None


def measure_difficulty(
    config: str | Path | dict[str, Any] | RunConfig,
    out: Path | None = None,
    *,
    tries: int = 8,
    model: str | None = None,
    say: Callable[[str], None] = print,
    **overrides: Any,
) -> MeasuredTasks:
    """Answer every task that a run's config trains on ``tries`` times, by its workflow, reward, engines and sampling,
    and write the tasks with their pass rates to ``out``, by default ``<storage>/<name>-difficulty/tasks.parquet``.

    ``model`` is as in ``bench.models``; by default ``model.path``. Every answer is written as it comes. A killed
    measurement resumes; answers made with the same settings are reused.
    Raises the errors of `bench`, ConfigError if there is no model, and DataError if ``out`` cannot be written.
    """
    given = load_config(config, overrides)
    if given.tasks is None:
        raise ConfigError("there are no tasks", "name sources of tasks", field="tasks")
    if model is None and given.model.path is None:
        remedy = "name the weights to measure with: --model RUN@start, a folder, or an id on the hub"
        raise ConfigError("the model is made when the run starts", remedy, field="model.path")
    weights = model or str(given.model.path)
    bench: dict[str, Any] = {"bench.samples": tries, "bench.k": [1], "bench.models": {_MODEL: weights}}
    bench["bench.temperature"] = given.explorer.sampling.temperature
    checked = load_config(config, {**overrides, "mode": "bench", **bench})
    assert checked.tasks is not None
    folder = checked.storage / f"{checked.name}-difficulty"
    out = out or folder / "tasks.parquet"
    check_suffix(out)
    connect()  # sources may be read by Ray
    splits = load_processed(checked, task_engines(checked)).splits
    check_attempts(checked, list(zip(splits.train, splits.sources, strict=True)), say)
    found = find_weights(_MODEL, weights, checked.storage, folder, "model")
    tasksets = {_TASKS: (splits.train, checked.tasks.sources)}
    attempts = attempt_all(checked, folder.name, folder, [found], tasksets, say)
    rewards: dict[str, list[float]] = defaultdict(list)
    for attempt in attempts[_MODEL, _TASKS]:
        if attempt.reward is not None:
            rewards[attempt.task_id].append(min(max(attempt.reward, 0.0), 1.0))
    names = source_names(checked)
    tasks = [
        (names[source], measured(task, len(rewards[task.id]), sum(rewards[task.id])))
        for task, source in zip(splits.train, splits.sources, strict=True)
    ]
    return _written(out, tasks)


def write_solved(folder: Path, out: Path) -> MeasuredTasks:
    """Write the tasks that the run in this folder trains on, added ones included, with tries and pass rates so far.
    Dropped rows and tries recorded in the sources are included.

    The run may be running or have ended in any way; its sources are read again. Raises DataError if they cannot be
    read, have changed, or the run draws no tasks of its own, and StorageError if its log cannot be read.
    """
    check_suffix(out)
    config = load_run_config(folder)
    splits = load_processed(config, task_engines(config)).splits
    spec = task_set_spec(config, splits)
    if spec is None or config.buffer.name is not None:
        problem = "it draws no tasks" if spec is None else f"its tasks are in the Buffer {config.buffer.name!r}"
        raise DataError(f"the run has no task statistics: {problem}", field="run", value=str(folder))
    state = StateReader(Storage(log_folder(folder, config)), config.buffer.sampler, config.seed, spec()).read()
    drawn, names = state.tasks[""], source_names(config)
    tasks = [*splits.train, *state.meta.added_tasks]
    return _written(out, [(names[drawn.source(task.id)], measured(task, *drawn.statistics(task.id))) for task in tasks])


def _written(out: Path, tasks: list[tuple[str, Task]]) -> MeasuredTasks:
    out.parent.mkdir(parents=True, exist_ok=True)
    rates = [task.pass_rate for _, task in tasks if task.pass_rate is not None]
    mean = sum(rates) / len(rates) if rates else None
    return MeasuredTasks(out, write_tasks(out, tasks), len(rates), sum(rate > 0 for rate in rates), mean)
