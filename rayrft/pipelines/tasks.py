"""What is done with the tasks of a run before any is held out, and what evaluations must not leak into."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from rayrft.config import RunConfig
from rayrft.config.pipelines import OperatorConfig
from rayrft.data.task_splits import TaskSplits, load_bench_tasks, load_tasks
from rayrft.errors import ConfigError, DataError
from rayrft.experience import Task, dedup_key
from rayrft.pipelines.chain import apply_link, build_chain
from rayrft.pipelines.operator import Context
from rayrft.pipelines.operator import operators as registered
from rayrft.pipelines.report import OperatorReport
from rayrft.pipelines.rows import lineage
from rayrft.pipelines.runner import Pipeline

SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "source": pa.string(),
        "question": pa.string(),
        "answer": pa.string(),
        "system": pa.string(),
        "difficulty": pa.float64(),
        "tries": pa.int64(),
        "pass_rate": pa.float64(),
        "priority": pa.float32(),
        "metadata": pa.string(),
    }
)
"""The columns of tasks that operators see; ``source`` is the name of the source, or its number."""
_KEPT = ("question", "answer", "system", "difficulty", "tries", "pass_rate", "priority")
"""What operators may change in a task."""
_BATCH_ROWS = 1000


@dataclass(frozen=True)
class ProcessedTasks:
    """The tasks of a run, the evaluation tasks of all sets, and what the operators did."""

    splits: TaskSplits
    evaluation: tuple[Task, ...]
    reports: list[OperatorReport]


def load_processed(config: RunConfig) -> ProcessedTasks:
    """Read the tasks of a run as `load_tasks` does, apply ``pipelines.tasks`` to those of all sources, and leave out
    training and demonstrated tasks that show an evaluation task.

    The same sources and config give the same tasks. Raises the errors of `load_tasks` and `Pipeline`, and DataError if
    nothing is left to train on.
    """
    bench = load_bench_tasks(config.bench, config.seed)
    splits, reports = load_splits(config, bench)
    evaluation = (*splits.evaluation, *bench)
    if config.pipelines.decontaminate and evaluation:
        splits, report = decontaminated(splits, evaluation)
        reports.append(report)
    return ProcessedTasks(splits, evaluation, reports)


def load_splits(config: RunConfig, bench: Sequence[Task]) -> tuple[TaskSplits, list[OperatorReport]]:
    """Read the tasks of a run and apply ``pipelines.tasks``; its evaluation tasks do not depend on what is left
    out afterwards. ``bench`` are the tasks of its bench. Raises the errors of `load_tasks` and `Pipeline`."""
    reports: list[OperatorReport] = []
    if config.tasks is None:
        return TaskSplits([], [], [], {}), reports
    names = source_names(config)

    def process(sources: list[list[Task]]) -> list[list[Task]]:
        if not config.pipelines.tasks:
            return sources
        processed, found = process_tasks(sources, names, config, bench)
        reports.extend(found)
        return processed

    splits = load_tasks(config.tasks, config.demonstrations, config.seed, process)
    skipped = [
        OperatorReport(f"read {each.origin}", each.rows, each.rows - len(each.skipped), reasons=each.skipped.counts)
        for each in splits.skipped
    ]
    return splits, [*skipped, *reports]


def source_names(config: RunConfig) -> list[str]:
    """Return the name of every source of tasks, or its number."""
    sources = config.tasks.sources if config.tasks is not None else []
    return [source.name or str(number) for number, source in enumerate(sources)]


def process_tasks(
    sources: Sequence[Sequence[Task]], names: Sequence[str], config: RunConfig, bench: Sequence[Task]
) -> tuple[list[list[Task]], list[OperatorReport]]:
    """Send the tasks of all sources, one after another, through the operators of ``pipelines.tasks``.

    A task keeps its id, whatever is changed; a made one gets the domain, workflow, images and metadata of its first
    parent. Raises the errors of `Pipeline`.
    """
    pipelines = config.pipelines
    _check_priorities(config)
    known = {(name, task.id): task for name, tasks in zip(names, sources, strict=True) for task in tasks}
    pipeline = Pipeline(
        pipelines.tasks,
        SCHEMA,
        field="pipelines.tasks",
        origin="tasks",
        context=Context(tuple(bench), config.model.path),
        plugins=config.plugins,
        deadline_s=pipelines.deadline_s,
        batch_rows=_BATCH_ROWS,
    )
    found: dict[str, list[Task]] = {name: [] for name in names}

    def take(batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist(maps_as_pydicts="lossy"):
            if row["source"] not in found:
                remedy = "leave the column as it is"
                raise DataError("an operator changed it", field="column source", value=row["source"], remedy=remedy)
            key = (row["source"], row["id"])
            base = known.get(key) or known[row["source"], lineage(row).parents[0]]
            changes = {name: row[name] for name in _KEPT}
            known[key] = task = replace(base, id=row["id"], **changes)
            if not task.question or task.answer is None:
                problem = f"an operator left task {task.id} without a question or an answer"
                raise DataError(problem, field="pipelines.tasks", remedy="add drop_broken after it")
            found[row["source"]].append(task)

    batches = (
        _to_batch(tasks[start : start + _BATCH_ROWS], name)
        for name, tasks in zip(names, sources, strict=True)
        for start in range(0, len(tasks), _BATCH_ROWS)
    )
    report = pipeline.run(batches, take)
    return [found[name] for name in names], report.operators


def decontaminated(splits: TaskSplits, evaluation: Sequence[Task]) -> tuple[TaskSplits, OperatorReport]:
    """Leave out training and demonstrated tasks that show one of the evaluation tasks, as operator ``decontaminate``
    does. Raises DataError if nothing is left to train on."""
    evaluation = [replace(task, question=task.dedup_key) for task in evaluation]
    [link] = build_chain(
        [OperatorConfig(name="decontaminate")],
        SCHEMA,
        field="pipelines",
        origin="tasks",
        context=Context(evaluation),
    )
    parts = {"": splits.train, **{name: tasks for name, tasks in splits.demonstrated.items()}}
    batches = {name: _to_batch(tasks, name, whole=True) for name, tasks in parts.items()}
    link.operator.prepare()
    for batch in batches.values():
        link.operator.observe(batch)
    link.operator.settle()
    report = OperatorReport("decontaminate")
    kept: dict[str, list[int]] = {}
    for name, batch in batches.items():
        numbered = batch.append_column("number", pa.array(range(batch.num_rows), pa.int64()))
        after, outcome = apply_link(replace(link, takes=numbered.schema, gives=numbered.schema), numbered, 3)
        report.add(outcome, 3)
        kept[name] = after.column("number").to_pylist()
    left = {splits.sources[index] for index in kept[""]}
    for source in sorted(set(splits.sources) - left):
        raise DataError(
            "every task to train on shows a task of an evaluation set",
            field=f"tasks.sources.{source}",
            remedy="give other tasks to train or to evaluate on, or pipelines.decontaminate: false",
        )
    return (
        replace(
            splits,
            train=[splits.train[index] for index in kept[""]],
            sources=[splits.sources[index] for index in kept[""]],
            demonstrated={name: [tasks[index] for index in kept[name]] for name, tasks in splits.demonstrated.items()},
        ),
        report,
    )


def _to_batch(tasks: Sequence[Task], source: str, *, whole: bool = False) -> pa.RecordBatch:
    """Return tasks as rows; ``whole``: with their images' paths in the questions."""
    rows = [
        {
            "id": task.id,
            "source": source,
            "question": dedup_key(task.question, task.images) if whole else task.question,
            "answer": task.answer,
            "system": task.system,
            "difficulty": task.difficulty,
            "tries": task.tries,
            "pass_rate": task.pass_rate,
            "priority": task.priority,
            "metadata": None if whole else json.dumps(task.metadata, ensure_ascii=False, default=str),
        }
        for task in tasks
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


_WITHOUT_PRIORITIES = ("sequential", "shuffled", "easy_to_hard", "failure", "near_half")


def _check_priorities(config: RunConfig) -> None:
    """Raise ConfigError if priorities are written that nothing reads: neither a filter nor the task sampler."""
    assert config.tasks is not None  # which are processed
    if config.tasks.sampler not in _WITHOUT_PRIORITIES:
        return
    operators = config.pipelines.tasks
    kinds = [getattr(registered.get(each.name, "pipelines.tasks"), "kind", None) for each in operators]
    for number, kind in enumerate(kinds):
        if kind == "prioritise" and "filter" not in kinds[number:]:
            raise ConfigError(
                f"writes priorities, which task sampler {config.tasks.sampler!r} does not use",
                field=f"pipelines.tasks.{number}",
                value=operators[number].name,
                remedy="draw by them, with tasks.sampler: priority, or add a filter after it, such as top_share",
            )
