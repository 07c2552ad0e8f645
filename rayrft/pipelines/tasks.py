"""What is done with the tasks of a run before any is held out, and what evaluations must not leak into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from rayrft.config import RunConfig
from rayrft.config.pipelines import OperatorConfig
from rayrft.data import task_files
from rayrft.data.task_sources import RowsRead
from rayrft.data.task_splits import TaskSplits, load_bench_tasks, load_tasks
from rayrft.errors import ConfigError, DataError
from rayrft.experience import Task, dedup_key
from rayrft.pipelines.chain import LeftOut, apply_link, build_chain
from rayrft.pipelines.operator import Context
from rayrft.pipelines.operator import operators as registered
from rayrft.pipelines.report import OperatorReport
from rayrft.pipelines.rows import lineage
from rayrft.pipelines.run.models import RunEngines, no_engines, open_models
from rayrft.pipelines.run.process import Pipeline

_IN_FILES = {each.name: each.type for each in task_files.TASK_SCHEMA if each.name not in ("workflow", "images")}
_SCHEMA = pa.schema({**_IN_FILES, "priority": pa.float32()})
"""Columns of tasks that operators see; ``source``, a name or number, and ``domain`` are only read."""
_KEPT = ("question", "answer", "system", "difficulty", "tries", "pass_rate", "priority")
"""What operators may change in a task."""
_BATCH_ROWS = 1000


@dataclass(frozen=True)
class ProcessedTasks:
    """The tasks of a run, the evaluation tasks of all sets, and what the operators did."""

    splits: TaskSplits
    evaluation: tuple[Task, ...]
    reports: list[OperatorReport]


def load_processed(config: RunConfig, engines: RunEngines | None = None) -> ProcessedTasks:
    """Read the tasks of a run as `load_tasks` does, apply ``pipelines.tasks`` to all, and leave out training and
    demonstrated tasks that show an evaluation task. ``engines`` has the auxiliary models that operators ask.

    The same sources and config give the same tasks. Raises the errors of `load_tasks` and `Pipeline`, and DataError if
    nothing is left to train on.
    """
    left_out: list[RowsRead] = []
    bench = load_bench_tasks(config.bench, config.seed, left_out.append)
    splits, reports = load_splits(config, bench, engines)
    reports = [*map(read_report, left_out), *reports]
    evaluation = (*splits.evaluation, *bench)
    if config.pipelines.decontaminate and evaluation:
        splits, report = decontaminated(splits, evaluation)
        reports.append(report)
    return ProcessedTasks(splits, evaluation, reports)


def load_splits(
    config: RunConfig, bench: Sequence[Task], engines: RunEngines | None = None
) -> tuple[TaskSplits, list[OperatorReport]]:
    """Read the tasks of a run and apply ``pipelines.tasks``; evaluation tasks do not depend on what is left out later.
    ``bench``: those of its bench; ``engines``: see `load_processed`. Raises as `load_tasks` and `Pipeline` do."""
    reports: list[OperatorReport] = []
    if config.tasks is None:
        return TaskSplits([], [], [], {}), reports

    def process(sources: list[list[Task]]) -> list[list[Task]]:
        processed, found = _processed(sources, config, bench, engines)
        reports.extend(found)
        if any(sources) and not any(processed):
            strictest = max(found, key=lambda each: each.taken - each.given)
            reason, count = strictest.reasons.most_common(1)[0]
            problem = f"no task is left: {strictest.name} left out {count} of {strictest.taken} ({reason})"
            raise DataError(problem, "change or remove an operator", field="pipelines.tasks")
        return [[task for task, _ in tasks] for tasks in processed]

    splits = load_tasks(config.tasks, config.demonstrations, config.seed, process)
    return splits, [*map(read_report, splits.skipped), *reports]


def read_report(read: RowsRead) -> OperatorReport:
    """Return the report of rows that were read or left out where tasks were read."""
    given = read.rows - read.left_out.total()
    return OperatorReport(f"read {read.origin}", read.rows, given, reasons=read.left_out, layouts=read.layouts)


def source_names(config: RunConfig) -> list[str]:
    """Return the name of every source of tasks, or its number."""
    sources = config.tasks.sources if config.tasks is not None else []
    return [source.name or str(number) for number, source in enumerate(sources)]


def _processed(
    sources: Sequence[Sequence[Task]],
    config: RunConfig,
    bench: Sequence[Task],
    engines: RunEngines | None,
    left_out: Callable[[str, list[LeftOut]], None] = lambda operator, rows: None,
) -> tuple[list[list[tuple[Task, str]]], list[OperatorReport]]:
    """Send the tasks of all sources, one after another, through the operators of ``pipelines.tasks``. Return the tasks
    of each source, each with the id of the task that it, or its first parent, began as.

    A task keeps its id, whatever is changed; a made one gets domain, workflow, images and metadata of its first parent.
    What models answer is kept in ``<storage>/answers.<name>.jsonl``, and not asked again. Raises as `Pipeline` does.
    """
    pipelines, names = config.pipelines, source_names(config)
    if not pipelines.tasks:
        return [[(task, task.id) for task in tasks] for tasks in sources], []
    _check_priorities(config)
    known = {(name, task.id): task for name, tasks in zip(names, sources, strict=True) for task in tasks}
    pipeline = Pipeline(
        pipelines.tasks,
        _SCHEMA,
        field="pipelines.tasks",
        origin="tasks",
        context=_context(config, bench, engines),
        plugins=config.plugins,
        deadline_s=pipelines.deadline_s,
        batch_rows=_BATCH_ROWS,
        workers=pipelines.task_workers,
    )
    kept: list[dict[str, Any]] = []
    made_of: dict[tuple[str, str], str] = {}
    """The first parent of each made row, also of rows that are left out: others may be made of these."""

    def see(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        made_of.update({(row["source"], row["id"]): lineage(row).parents[0] for row in rows if lineage(row).parents})
        return rows

    def note(operator: str, rows: list[LeftOut]) -> None:
        see([each.values for each in rows])
        left_out(operator, rows)

    batches = (
        _to_batch(tasks[start : start + _BATCH_ROWS], name)
        for name, tasks in zip(names, sources, strict=True)
        for start in range(0, len(tasks), _BATCH_ROWS)
    )
    models = partial(
        open_models,
        engines=engines or no_engines,
        endpoints=pipelines.endpoints,
        reward=config.scoring,
        plugins=config.plugins,
        answer_s=pipelines.answer_s,
        journal=config.storage / f"answers.{config.name}.jsonl",
    )
    reports = pipeline.run(
        batches, lambda batch: kept.extend(see(batch.to_pylist(maps_as_pydicts="lossy"))), left_out=note, models=models
    )
    found: dict[str, list[tuple[Task, str]]] = {name: [] for name in names}
    for row in kept:
        source, began = row["source"], row["id"]
        while (source, began) not in known:
            if (source, began) not in made_of:
                column = "id" if source in found else "source"
                remedy = "leave the column as it is"
                raise DataError("an operator changed it", remedy, field=f"column {column}", value=row[column])
            began = made_of[source, began]
        before = known[source, began]
        task = replace(before, id=row["id"], **{name: row[name] for name in _KEPT})
        if task.answer != before.answer:
            task = replace(task, other_answers=())
        if not task.question or task.answer is None:
            problem = f"an operator left task {task.id} without a question or an answer"
            raise DataError(problem, "add drop_broken after it", field="pipelines.tasks")
        found[source].append((task, began))
    return [found[name] for name in names], reports


@dataclass(frozen=True)
class AddedTasks:
    """The tasks to add to a run, with those that operators made, and the operator and reason of each left out."""

    tasks: list[Task]
    left_out: dict[str, str]


def process_added(
    config: RunConfig,
    tasks: Sequence[Task],
    source: int,
    earlier: Sequence[Task] = (),
    engines: RunEngines | None = None,
) -> AddedTasks:
    """Process tasks as if they stood at the end of a source, by index; ``earlier`` are those that were added before.

    Operators that look at single rows see the new tasks alone. If one looks at more, all operators see the tasks of all
    sources before them, so that existing tasks count. A near-duplicate of one is left out, and a share is one of all.
    New tasks are left out, too, that ask what another one asks, or show an evaluation task, as at the start of the run.
    The sources are read again. Raises the errors of `load_processed`.
    """
    assert config.tasks is not None  # it draws tasks
    bench = load_bench_tasks(config.bench, config.seed, lambda read: None)
    before: list[list[Task]] = []

    def process(sources: list[list[Task]]) -> list[list[Task]]:
        before.extend(sources)
        return [[task for task, _ in tasks] for tasks in _processed(sources, config, bench, engines)[0]]

    splits = load_tasks(config.tasks, config.demonstrations, config.seed, process)
    evaluation = (*splits.evaluation, *bench)
    there = {task.dedup_key for part in (*before, earlier, evaluation) for task in part}
    left_out, new = dict[str, str](), list[Task]()
    for task in tasks:
        if task.dedup_key in there:
            left_out[task.id] = "another task: the same question"
        else:
            there.add(task.dedup_key)
            new.append(task)
    if config.pipelines.tasks and new:
        ids = {task.id for task in new}

        def note(operator: str, rows: list[LeftOut]) -> None:
            left_out.update({each.row: f"{operator}: {each.reason}" for each in rows if each.row in ids})

        field, context = "pipelines.tasks", _context(config, bench, engines)
        links = build_chain(config.pipelines.tasks, _SCHEMA, field=field, origin="tasks", context=context)
        alone = all(link.operator.scope == "row" for link in links)
        sources = [[] if alone else list(tasks) for tasks in before]
        sources[source] += new if alone else [*earlier, *new]
        found, _ = _processed(sources, config, bench, engines, note)
        new = [task for task, began in found[source] if began in ids]
    if config.pipelines.decontaminate and evaluation and new:
        kept, report = _without_evaluation_tasks({"": splits.train, "new": new}, evaluation, len(new))
        for gone in report.left_out:
            left_out.setdefault(gone.row, f"decontaminate: {gone.reason}")
        new = [new[index] for index in kept["new"]]
    return AddedTasks(new, left_out)


def _context(config: RunConfig, bench: Sequence[Task], engines: RunEngines | None) -> Context:
    models = {*config.pipelines.endpoints, *(config.auxiliary if engines is not None else ())}
    return Context(tuple(bench), config.model.path, models, scores=not config.reward.stages)


def decontaminated(splits: TaskSplits, evaluation: Sequence[Task]) -> tuple[TaskSplits, OperatorReport]:
    """Leave out training and demonstrated tasks that show one of the evaluation tasks, as operator ``decontaminate``
    does. Raises DataError if nothing is left to train on."""
    kept, report = _without_evaluation_tasks({"": splits.train, **splits.demonstrated}, evaluation, 3)
    train, sources = [splits.train[index] for index in kept[""]], [splits.sources[index] for index in kept[""]]
    for source in sorted(set(splits.sources) - set(sources)):
        problem = "every task to train on shows a task of an evaluation set"
        remedy = "give other tasks to train or to evaluate on, or pipelines.decontaminate: false"
        raise DataError(problem, remedy, field=f"tasks.sources.{source}")
    demonstrated = {name: [tasks[index] for index in kept[name]] for name, tasks in splits.demonstrated.items()}
    return replace(splits, train=train, sources=sources, demonstrated=demonstrated), report


def _without_evaluation_tasks(
    parts: dict[str, list[Task]], evaluation: Sequence[Task], samples: int
) -> tuple[dict[str, list[int]], OperatorReport]:
    """Return the indices of the tasks of each part that show no evaluation task, and a report with so many examples."""
    evaluation = [replace(task, question=dedup_key(task.question, task.images)) for task in evaluation]
    episodes = {task.question for task in evaluation if "environment" in task.metadata}

    def shown(task: Task) -> Task:
        text = dedup_key(task.question, task.images)
        # Episodes of one question differ by their environment: by `Task.dedup_key`.
        text = "" if text in episodes and "environment" in task.metadata else text
        return replace(task, question=text, metadata={})

    operators, context = [OperatorConfig(name="decontaminate")], Context(evaluation)
    [link] = build_chain(operators, _SCHEMA, field="pipelines", origin="tasks", context=context)
    batches = {name: _to_batch([*map(shown, tasks)], name) for name, tasks in parts.items()}
    link.operator.prepare()
    for batch in batches.values():
        link.operator.observe(batch)
    link.operator.settle()
    report, kept = OperatorReport("decontaminate"), dict[str, list[int]]()
    for name, batch in batches.items():
        numbered = batch.append_column("number", pa.array(range(batch.num_rows), pa.int64()))
        after, outcome = apply_link(replace(link, takes=numbered.schema, gives=numbered.schema), numbered, samples)
        report.add(outcome, samples)
        kept[name] = after.column("number").to_pylist()
    return kept, report


def _to_batch(tasks: Sequence[Task], source: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([task_files.task_row(task, source) for task in tasks], schema=_SCHEMA)


_WITHOUT_PRIORITIES = ("sequential", "shuffled", "easy_to_hard", "failure", "near_half")


def _check_priorities(config: RunConfig) -> None:
    """Raise ConfigError if priorities are written that nothing reads: neither a filter nor the task sampler."""
    assert config.tasks is not None  # which are processed
    operators = config.pipelines.tasks if config.tasks.sampler in _WITHOUT_PRIORITIES else []
    kinds = [getattr(registered.get(each.name, "pipelines.tasks"), "kind", None) for each in operators]
    for number, kind in enumerate(kinds):
        if kind == "prioritise" and "filter" not in kinds[number:]:
            problem = f"writes priorities, which task sampler {config.tasks.sampler!r} does not use"
            remedy = "draw by them, with tasks.sampler: priority, or add a filter after it, such as top_share"
            raise ConfigError(problem, remedy, field=f"pipelines.tasks.{number}", value=operators[number].name)
