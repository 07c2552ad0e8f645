"""Task splits: the deduplicated tasks of all sources, split into held-out, demonstrated and training tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from rayrft.config.demonstrations import DemonstrationsConfig
from rayrft.config.seeds import generator
from rayrft.config.tasks import BenchConfig, TasksConfig, TasksetConfig
from rayrft.data.task_sampler import Interleave
from rayrft.data.task_sources import Note, RowsRead, read_held_out, read_source
from rayrft.errors import DataError
from rayrft.experience import Task

TASKS_FILE = "tasks.json"
"""In a run folder: the ids of the run's tasks in their order (`TaskSplits.ids`)."""
COUNTS = "training tasks by source"
_SHOWN = "shows a held-out task"


@dataclass(frozen=True)
class TaskSplits:
    """Disjoint lists of tasks. No task of the others shows what a task of ``evaluation`` shows (`Task.dedup_key`)."""

    train: list[Task]
    """Ordered by source, and within a source as read."""
    sources: list[int]
    """Index in ``tasks.sources`` of every task in ``train``."""
    evaluation: list[Task]
    demonstrated: dict[str, list[Task]]
    skipped: list[RowsRead] = field(default_factory=list)
    """Rows that were read, and where some were left out: broken, the same task again, a held-out task's question."""

    @property
    def all(self) -> list[Task]:
        """Training, evaluation and demonstrated tasks."""
        return [*self.train, *self.evaluation, *chain.from_iterable(self.demonstrated.values())]

    @property
    def ids(self) -> dict[str, list[str]]:
        """The ids of the tasks, by what they are for, and the numbers of training tasks of the sources."""
        parts = {"training": self.train, "held-out": self.evaluation, **self.demonstrated}
        counts = Counter(self.sources)
        return {
            **{name: [task.id for task in tasks] for name, tasks in parts.items()},
            COUNTS: [str(counts[number]) for number in range(max(counts, default=-1) + 1)],
        }


_Process = Callable[[list[list[Task]]], list[list[Task]]]
"""Works on the tasks of each source, before any of them are held out."""


def load_tasks(
    config: TasksConfig,
    demonstrations: dict[str, DemonstrationsConfig],
    seed: int,
    process: _Process = lambda sources: sources,
) -> TaskSplits:
    """Read all sources, drop repeated tasks, ``process`` the others, and split them by seed.

    Held-out and demonstrated tasks are taken from the sources in proportion to their weights; a source with a file or a
    split of held-out tasks takes its share from there. What is dropped is counted. Raises DataError if a source is
    missing, empty, broken or too small for the splits, and ConfigError if there is no reader of a name.
    """
    skipped: list[RowsRead] = []
    note = skipped.append
    seen = set[str]()
    fields = [f"tasks.sources.{number}" for number in range(len(config.sources))]
    shares = _shares(config, config.eval_size)
    held_out = [
        _distinct(read_held_out(source, field, note), f"held-out tasks of {field}", seen, note)[:share]
        for source, field, share in zip(config.sources, fields, shares, strict=True)
    ]
    apart = {task.dedup_key for part in held_out for task in part}
    seen = set()
    read = [
        _distinct(read_source(source, field, note), field, seen, note, apart)
        for source, field in zip(config.sources, fields, strict=True)
    ]
    seen = set()
    pools = [
        _Pool(_distinct(tasks, f"processed {field}", seen, note), generator(seed, "training tasks", number))
        for number, (tasks, field) in enumerate(zip(process(read), fields, strict=True))
    ]
    for source, pool, part, share in zip(config.sources, pools, held_out, shares, strict=True):
        if not source.has_held_out:
            part += pool.cut(share, "tasks.eval_size")
    apart = {task.dedup_key for part in held_out for task in part}
    for place, pool in zip(fields, pools, strict=True):
        pool.leave_out(apart, place, note)
    demonstrated = {
        name: [
            task
            for pool, share in zip(pools, _shares(config, demonstration.size), strict=True)
            for task in pool.cut(share, f"demonstrations.{name}.size")
        ]
        for name, demonstration in demonstrations.items()
        if not demonstration.origins and demonstration.size is not None
    }
    train = [pool.rest(field) for pool, field in zip(pools, fields, strict=True)]
    return TaskSplits(
        train=[task for part in train for task in part],
        sources=[number for number, part in enumerate(train) for _ in part],
        evaluation=[task for part in held_out for task in part],
        demonstrated=demonstrated,
        skipped=skipped,
    )


def load_bench_tasks(config: BenchConfig, seed: int, note: Note) -> list[Task]:
    """Read the tasks of all task sets of a bench. Raises the errors of `load_taskset`."""
    return [
        task
        for name, taskset in config.tasksets.items()
        for task in load_taskset(taskset, f"bench.tasksets.{name}", seed, note)
    ]


def load_taskset(config: TasksetConfig, field: str, seed: int, note: Note) -> list[Task]:
    """Read a set of tasks to evaluate on; drop repeated tasks, and take ``size`` of the others by seed.

    Raises DataError, for keys below ``field``, if a source is missing, empty, broken or too small, and ConfigError if
    there is no reader of a name.
    """
    seen: set[str] = set()
    tasks: list[Task] = []
    for number, source in enumerate(config.sources):
        read, place = read_held_out if source.has_held_out else read_source, f"{field}.sources.{number}"
        tasks += _distinct(read(source, place, note), place, seen, note)
    if config.size is None:
        return tasks
    return _Pool(tasks, generator(seed, "held-out tasks")).cut(config.size, f"{field}.size")


class _Pool:
    """The tasks of one source, taken in a shuffled order."""

    def __init__(self, tasks: list[Task], rng: np.random.Generator) -> None:
        self._tasks = tasks
        self._left: list[int] = rng.permutation(len(tasks)).tolist()

    def leave_out(self, shown: Set[str], origin: str, note: Note) -> None:
        """Leave out the tasks that show one of these; note how many."""
        before = len(self._left)
        self._left = [index for index in self._left if self._tasks[index].dedup_key not in shown]
        if len(self._left) < before:
            note(RowsRead(origin, before, Counter({_SHOWN: before - len(self._left)})))

    def cut(self, count: int, field: str) -> list[Task]:
        if count > len(self._left):
            left, distinct = len(self._left), len(self._tasks)
            problem = f"only {left} of {count} tasks are left ({distinct} distinct tasks in the source)"
            raise DataError(problem, "request fewer, or provide more tasks", field=field, value=count)
        part, self._left = self._left[:count], self._left[count:]
        return [self._tasks[index] for index in part]

    def rest(self, field: str) -> list[Task]:
        """Return the remaining tasks, in the source's order."""
        if not self._left:
            problem = f"no task is left to train on ({len(self._tasks)} in the source that no earlier one holds)"
            remedy = "lower eval_size or the sizes of the demonstrations, or provide more tasks; where all have one "
            remedy += "question, let metadata 'environment' say what differs"
            raise DataError(problem, remedy, field=field)
        return [self._tasks[index] for index in sorted(self._left)]


def _shares(config: TasksConfig, total: int) -> list[int]:
    """Divide ``total`` tasks between the sources, by weight."""
    turns = Interleave([source.weight for source in config.sources])
    for _ in range(total):
        turns.next()
    return turns.counts


def _distinct(tasks: list[Task], origin: str, seen: set[str], note: Note, apart: Set[str] = frozenset()) -> list[Task]:
    """Return the tasks whose `key` is not among those ``seen``, and which show none of ``apart``; note the others."""
    kept, left_out = list[Task](), Counter[str]()
    for task in tasks:
        key = task.key
        if key in seen or task.dedup_key in apart:
            left_out["the same task again" if key in seen else _SHOWN] += 1
        else:
            seen.add(key)
            kept.append(task)
    if left_out:
        note(RowsRead(origin, len(tasks), left_out))
    return kept
