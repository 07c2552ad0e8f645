"""Task order: deterministic interleaving of sources by weight, and samplers that choose a source's next task."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from rayrft.config.seeds import generator
from rayrft.errors import ConfigError, DataError
from rayrft.registry import Registry


class Interleave:
    """Weighted interleaving of sources; source i has at most ``limits[i]`` turns (None: unlimited).

    After any k turns a source has had its share of k rounded down or up: the quota method of Balinski and Young. Among
    sources below their share of the turns so far, the next is the one whose next turn is due first. When a source ends
    or returns, the shares are counted from that point.
    """

    def __init__(self, weights: Sequence[float], limits: Sequence[int | None] = ()) -> None:
        exact = [Fraction(repr(float(weight))) for weight in weights]  # as decimal numbers
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * scale) for weight in exact]
        self._limits = list(limits) or [None] * len(weights)
        self._counts = [0] * len(weights)
        self._restart()

    @property
    def counts(self) -> list[int]:
        """Number of turns by source."""
        return list(self._counts)

    def next(self) -> int | None:
        """Advance; return the source of this turn, or None when all have ended."""
        if not self._open:
            return None
        turn, total = sum(self._taken) + 1, sum(self._weights[i] for i in self._open)
        below = [i for i in self._open if self._taken[i] * total < self._weights[i] * turn]
        source = min(below, key=lambda i: (self._taken[i] + 1) / self._weights[i])
        self._taken[source] += 1
        self._counts[source] += 1
        if self._counts[source] == self._limits[source]:
            self._restart()
        return source

    def extend(self, source: int, limit: int | None) -> None:
        """Set another limit for a source. If it had ended, it takes part again."""
        self._limits[source] = limit
        if source not in self._open:
            self._restart()

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as JSON."""
        return {"counts": self._counts, "limits": self._limits, "taken": self._taken}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self._counts, self._limits = list(state["counts"]), list(state["limits"])
        self._restart()
        self._taken = list(state["taken"])

    def _restart(self) -> None:
        """Count the shares of the sources that have turns left from here."""
        self._open = [i for i, limit in enumerate(self._limits) if limit is None or self._counts[i] < limit]
        self._taken = [0] * len(self._weights)


@dataclass(frozen=True, eq=False)
class TaskView:
    """A sampler's view of one source of n tasks. Arrays have shape ``[n]``, are read-only and always up to date."""

    source: int
    seed: int
    indices: np.ndarray
    """Indices of the tasks in the whole set, ascending."""
    difficulties: np.ndarray
    """NaN where unknown."""
    tries: np.ndarray
    passes: np.ndarray
    priorities: np.ndarray
    """NaN where unknown."""

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def rates(self) -> np.ndarray:
        """Success rates with one success and one failure added (Laplace smoothing): 1/2 for an untried task."""
        return (self.passes + 1) / (self.tries + 2)

    @cached_property
    def shares(self) -> np.ndarray:
        """Priorities, where one that is unknown is the mean of the others. Raises DataError if all are unknown or zero,
        or one is negative or infinite."""
        known = self.priorities[~np.isnan(self.priorities)]
        if not np.isfinite(known).all() or (known < 0).any() or not known.any():
            bad = [value for value in known.tolist() if not 0 <= value < math.inf][:1]
            problem = "a priority is negative or infinite" if bad else "no task has a priority above 0"
            remedy = "write it by an operator of pipelines.tasks (such as difficulty), or choose another tasks.sampler"
            raise DataError(problem, remedy, field="tasks.sampler", value=bad[0] if bad else "priority")
        return np.where(np.isnan(self.priorities), known.mean(), self.priorities)

    @cached_property
    def by_difficulty(self) -> np.ndarray:
        """Positions from the easiest task to the hardest, ties by index. Raises DataError if one is unknown."""
        if unknown := int(np.isnan(self.difficulties).sum()):
            problem = f"{unknown} of {len(self)} tasks have no difficulty"
            remedy = "name a field that holds it, or choose another tasks.sampler"
            raise DataError(problem, remedy, field=f"tasks.sources.{self.source}.difficulty")
        return np.argsort(self.difficulties, kind="stable")


TaskSampler = Callable[[TaskView, int], int]
"""Returns the task of a source's draw number ``k = 0, 1, …``: a position in ``range(len(view))``.

The result must depend only on the arguments; random numbers come from
``generator(view.seed, "my sampler", view.source, k)`` of `rayrft.config.seeds`.
"""
task_samplers: Registry[TaskSampler] = Registry("task sampler")


@task_samplers.register("sequential")
def sequential(view: TaskView, k: int) -> int:
    """In the source's own order."""
    return k % len(view)


@task_samplers.register("shuffled")
def shuffled(view: TaskView, k: int) -> int:
    """In an order reshuffled every epoch."""
    epoch, position = divmod(k, len(view))
    return int(_permutation(view.seed, view.source, epoch, len(view))[position])


@task_samplers.register("easy_to_hard")
def easy_to_hard(view: TaskView, k: int) -> int:
    """From the easiest to the hardest, then again."""
    return int(view.by_difficulty[k % len(view)])


@task_samplers.register("failure")
def by_failure(view: TaskView, k: int) -> int:
    """At random, in proportion to the failure rate."""
    return _choose(view, k, 1 - view.rates)


@task_samplers.register("near_half")
def near_half(view: TaskView, k: int) -> int:
    """At random by weight 4 p (1 - p): most often at success rate 1/2, where advantages are largest."""
    rates = view.rates
    return _choose(view, k, 4 * rates * (1 - rates))


@task_samplers.register("priority")
def by_priority(view: TaskView, k: int) -> int:
    """At random, in proportion to the tasks' priorities."""
    return _choose(view, k, view.shares, floor=0.0)


_Known = Sequence[float | None]
"""Numbers by task, None if unknown."""
_TASKS = np.dtype([("indices", "i8"), ("difficulties", "f8"), ("tries", "i8"), ("passes", "f8"), ("priorities", "f8")])
"""What is known of a task: see `TaskView`."""


@dataclass
class _Source:
    """Tasks of one source with their statistics, which grow with it."""

    epochs: int | None
    """Epochs from ``began`` on; None: no end."""
    view: TaskView
    tasks: np.ndarray = field(default_factory=lambda: np.zeros(0, _TASKS))
    began: int = 0
    """Draws of the source before its present epochs."""


@dataclass(frozen=True)
class TaskSetSpec:
    """The arguments of a `TaskSet`, which it makes when it is called; to be sent to other processes and kept."""

    ids: list[str]
    """Without duplicates."""
    sources: list[int]
    """Source index by task."""
    weights: list[float]
    """Share of the draws by source, exact to one draw at any time (see `Interleave`)."""
    sampler: str
    seed: int
    epochs: int | None = None
    """A source of m tasks ends after ``epochs * m`` draws, and the others continue; None: no end."""
    difficulties: list[float | None] = field(default_factory=list)
    priorities: list[float | None] = field(default_factory=list)
    """By task, None if unknown; empty if all are unknown."""
    tried: list[tuple[str, int, float]] = field(default_factory=list)
    """Tasks that were tried before, with their tries and passes: statistics begin with them."""

    def __call__(self) -> TaskSet:
        return TaskSet(self)


class TaskSet:
    """Draws tasks by id and keeps their statistics; deterministic for equal seed and statistics. It may grow.

    Raises ConfigError if there is no such sampler, DataError if a source has no task or lacks what the sampler needs.
    """

    def __init__(self, spec: TaskSetSpec) -> None:
        self._pick = task_samplers.get(spec.sampler, "tasks.sampler")
        self._seed = spec.seed
        sizes = np.bincount(spec.sources, minlength=len(spec.weights)).tolist()
        if len(sizes) != len(spec.weights) or not all(sizes):
            raise DataError(f"{len(spec.weights)} sources hold {sizes} tasks", field="tasks.sources")
        self._ids: list[str] = []
        self._places: dict[str, tuple[int, int]] = {}
        nothing = np.zeros(0, _TASKS)
        self._sources = [_Source(spec.epochs, self._view(source, nothing)) for source in range(len(sizes))]
        hard, prior = (known or [None] * len(spec.ids) for known in (spec.difficulties, spec.priorities))
        self._append(list(zip(spec.ids, spec.sources, hard, prior, strict=True)))
        self._added: list[tuple[str, int, float | None, float | None]] = []
        if len(self._places) < len(self._ids):
            twice = next(id for number, id in enumerate(self._ids) if id in self._ids[:number])
            raise DataError("two tasks have one id", "remove one of them", field="tasks.sources", value=twice)
        self._turns = Interleave(spec.weights, [None if spec.epochs is None else spec.epochs * size for size in sizes])
        for source in self._sources:
            # A sampler that does not support these tasks raises now, not at its first draw.
            self._choose(source.view, 0)
        for id, tries, passes in spec.tried:
            self.record(id, tries, passes)

    def __contains__(self, id: str) -> bool:
        return id in self._places

    @property
    def sources(self) -> int:
        """Number of sources."""
        return len(self._sources)

    @property
    def position(self) -> int:
        """Draws so far."""
        return sum(self._turns.counts)

    def draw(self) -> str | None:
        """Return the id of the next task; None at the end of the last epoch."""
        number = self._turns.next()
        if number is None:
            return None
        source = self._sources[number]
        return self._ids[self._choose(source.view, self._turns.counts[number] - 1 - source.began)]

    def check(self, source: int, difficulties: _Known, priorities: _Known) -> None:
        """Raise DataError if the sampler needs difficulties or priorities that are unknown."""
        new = _tasks(range(len(difficulties)), difficulties, priorities)
        self._choose(self._view(source, np.concatenate([self._sources[source].tasks, new])), 0)

    def add(self, ids: list[str], source: int, difficulties: _Known, priorities: _Known) -> None:
        """Add tasks with new ids, which pass `check`. A new epoch of the source begins, over all of its tasks."""
        grown, drawn = self._sources[source], self._turns.counts[source]
        if grown.epochs is not None:
            grown.epochs = max(1, grown.epochs - (drawn - grown.began) // len(grown.tasks))
        grown.began = drawn
        added = list(zip(ids, [source] * len(ids), difficulties, priorities, strict=True))
        self._append(added)
        self._added += added
        self._turns.extend(source, None if grown.epochs is None else drawn + grown.epochs * len(grown.tasks))

    def record(self, id: str, tries: int, passes: float) -> None:
        """Count ``tries`` answers to a task, of which ``passes`` (or a sum of rewards in 0..1) were right.

        Raises DataError if passes are not within 0..tries.
        """
        if not 0 <= passes <= tries:
            raise DataError(f"{tries} tries cannot have {passes} passes", field=f"task {id}")
        number, position = self._places[id]
        self._sources[number].tasks["tries"][position] += tries
        self._sources[number].tasks["passes"][position] += passes

    def source(self, id: str) -> int:
        """Return the index of a task's source."""
        return self._places[id][0]

    def statistics(self, id: str) -> tuple[int, float]:
        """Return the number of tries of a task, and the sum of its successes."""
        number, position = self._places[id]
        task = self._sources[number].tasks[position]
        return int(task["tries"]), float(task["passes"])

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as JSON: the turns, the added tasks, and the statistics of tried ones."""
        tried = [
            [self._ids[task["indices"]], int(task["tries"]), float(task["passes"])]
            for source in self._sources
            for task in source.tasks[source.tasks["tries"] > 0]
        ]
        return {
            "size": len(self._ids) - len(self._added),
            "added": [list(task) for task in self._added],
            "turns": self._turns.state(),
            "epochs": [source.epochs for source in self._sources],
            "began": [source.began for source in self._sources],
            "tried": tried,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue with the draws of a saved set that began with the same tasks. Raises DataError if they differ."""
        size = len(self._ids) - len(self._added)
        known = self._places.keys() | {id for id, *_ in state["added"]}
        if state["size"] != size or not {id for id, *_ in state["tried"]} <= known:
            problem = "the saved statistics are not of these tasks: "
            problem += f"of {state['size']}, where the task set holds {size}"
            raise DataError(problem, "resume with the tasks that the run was started with", field="tasks.sources")
        added = [(id, source, hard, prior) for id, source, hard, prior in state["added"] if id not in self]
        self._append(added)
        self._added += added
        self._turns.restore(state["turns"])
        for source, epochs, began in zip(self._sources, state["epochs"], state["began"], strict=True):
            source.epochs, source.began = epochs, began
            source.tasks["tries"], source.tasks["passes"] = 0, 0
        for id, tries, passes in state["tried"]:
            self.record(id, tries, passes)

    def _append(self, tasks: list[tuple[str, int, float | None, float | None]]) -> None:
        """Append tasks with their sources, difficulties and priorities."""
        numbered = list(enumerate(tasks, start=len(self._ids)))
        for number in {source for _, source, *_ in tasks}:
            grown = self._sources[number]
            mine = [(index, id, hard, prior) for index, (id, source, hard, prior) in numbered if source == number]
            indices, ids, hard, prior = zip(*mine, strict=True)
            self._places.update((id, (number, place)) for place, id in enumerate(ids, start=len(grown.tasks)))
            grown.tasks = np.concatenate([grown.tasks, _tasks(indices, hard, prior)])
            grown.view = self._view(number, grown.tasks)
        self._ids += [id for id, *_ in tasks]

    def _view(self, source: int, tasks: np.ndarray) -> TaskView:
        tasks = tasks.view()
        tasks.flags.writeable = False
        return TaskView(source, self._seed, **{name: tasks[name] for name in _TASKS.fields or ()})

    def _choose(self, view: TaskView, k: int) -> int:
        position = self._pick(view, k)
        if not 0 <= position < len(view):
            problem = f"the sampler chose position {position} of {len(view)} tasks"
            raise ConfigError(problem, field="tasks.sampler", value=self._pick)
        return int(view.indices[position])


def _choose(view: TaskView, k: int, weights: np.ndarray, floor: float = 0.05) -> int:
    """``floor``: always or never solved tasks are still drawn at times, because the model changes."""
    ends = np.cumsum(np.maximum(weights, floor))
    point = generator(view.seed, "tasks", view.source, k).random() * ends[-1]
    return int(np.searchsorted(ends, point, side="right"))


# One order per source is in use at a time.
@lru_cache(maxsize=32)
def _permutation(seed: int, source: int, epoch: int, size: int) -> np.ndarray:
    return generator(seed, "tasks", source, epoch).permutation(size)


def _tasks(indices: Sequence[int], difficulties: _Known, priorities: _Known) -> np.ndarray:
    """Return untried tasks as an array of `_TASKS`."""
    found = np.zeros(len(indices), _TASKS)
    found["indices"] = indices
    found["difficulties"], found["priorities"] = (np.array(each, float) for each in (difficulties, priorities))
    return found
