"""Task order: deterministic interleaving of sources by weight, and samplers that choose a source's next task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np

from rayrft.errors import ConfigError, DataError
from rayrft.registry import Registry


class Interleave:
    """Weighted interleaving of sources; source i has at most ``limits[i]`` turns (None: unlimited).

    After any k turns a source has had its share of k rounded down or up: the quota method of Balinski and Young. Among
    sources below their share of the turns so far, the next is the one whose next turn is due first. When a source ends,
    the others continue in their proportions, counted from that point.

    Weights are scaled to the smallest whole numbers w; in every round of sum(w) turns a source has exactly w turns, and
    all rounds are equal.
    """

    def __init__(self, weights: Sequence[float], limits: Sequence[int | None] = ()) -> None:
        self._weights = _whole_numbers(weights)
        self._limits = list(limits) or [None] * len(weights)
        self.seek(0)

    @property
    def counts(self) -> list[int]:
        """Number of turns by source."""
        return list(self._counts)

    def next(self) -> int | None:
        """Advance; return the source of this turn, or None when all have ended."""
        if not self._open:
            return None
        self._turn += 1
        below = [i for i in self._open if self._taken[i] * self._round < self._weights[i] * self._turn]
        source = min(below, key=lambda i: (self._taken[i] + 1) / self._weights[i])
        self._taken[source] += 1
        self._counts[source] += 1
        if self._turn == self._round or self._counts[source] == self._limits[source]:
            self._begin_round()
        return source

    def extend(self, source: int, limit: int | None) -> None:
        """Set another limit for a source. If it had ended, it takes part again."""
        self._limits[source] = limit
        if source not in self._open:
            self._begin_round()

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as JSON."""
        return {
            "counts": self._counts,
            "limits": self._limits,
            "open": self._open,
            "taken": self._taken,
            "turn": self._turn,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self._counts, self._limits, self._open, self._taken = (
            list(state[name]) for name in ("counts", "limits", "open", "taken")
        )
        self._turn, self._round = state["turn"], sum(self._weights[i] for i in self._open)

    def seek(self, position: int) -> None:
        """Move to the state after ``position`` turns from the start, or to the end if it comes first.

        Whole rounds are skipped: the cost is at most (number of sources) * sum(w) turns, and at most ``position``.
        """
        self._counts = [0] * len(self._weights)
        self._begin_round()
        left = position
        while left > 0 and self._open:
            left -= self._skip_rounds(left) if self._turn == 0 else 0
            if left > 0:
                self.next()
                left -= 1

    def _begin_round(self) -> None:
        self._open = [i for i, limit in enumerate(self._limits) if limit is None or self._counts[i] < limit]
        self._round = sum(self._weights[i] for i in self._open)
        self._turn, self._taken = 0, [0] * len(self._weights)

    def _skip_rounds(self, most: int) -> int:
        """Skip the whole rounds within ``most`` turns in which no source ends; return the number of turns."""
        room = [(limit - self._counts[i] - 1) // self._weights[i] for i in self._open if (limit := self._limits[i])]
        rounds = min([most // self._round, *room])
        for i in self._open:
            self._counts[i] += rounds * self._weights[i]
        return rounds * self._round


def _whole_numbers(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers in proportion to the weights, which are read in decimal notation."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    return [weight // math.gcd(*whole) for weight in whole]


_FLOOR = 0.05
"""Smallest sampling weight: always or never solved tasks are still drawn at times, because the model changes."""


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
            raise DataError(
                "a priority is negative or infinite" if bad else "no task has a priority above 0",
                "have an operator of pipelines.tasks write it (difficulty, uncertainty, novelty …), or choose "
                "another tasks.sampler",
                field="tasks.sampler",
                value=bad[0] if bad else "priority",
            )
        return np.where(np.isnan(self.priorities), known.mean(), self.priorities)

    @cached_property
    def by_difficulty(self) -> np.ndarray:
        """Positions from the easiest task to the hardest, ties by index. Raises DataError if one is unknown."""
        if unknown := int(np.isnan(self.difficulties).sum()):
            raise DataError(
                f"{unknown} of {len(self)} tasks have no difficulty",
                "name a field that holds it, or choose another tasks.sampler",
                field=f"tasks.sources.{self.source}.difficulty",
            )
        return np.argsort(self.difficulties, kind="stable")


class TaskSampler(Protocol):
    """A function that returns the task of a source's draw number ``k = 0, 1, …``: a position in ``range(len(view))``.

    The result must depend only on the arguments; random numbers come from ``np.random.default_rng([seed, source, k])``.
    """

    def __call__(self, view: TaskView, k: int, /) -> int: ...


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
def failure(view: TaskView, k: int) -> int:
    """At random, in proportion to the failure rate."""
    return _choose(view, k, 1 - view.rates)


@task_samplers.register("near_half")
def near_half(view: TaskView, k: int) -> int:
    """At random by weight 4 p (1 - p): most often at success rate 1/2, where advantages are largest."""
    rates = view.rates
    return _choose(view, k, 4 * rates * (1 - rates))


@task_samplers.register("priority")
def priority(view: TaskView, k: int) -> int:
    """At random, in proportion to the tasks' priorities."""
    return _choose(view, k, view.shares, floor=0.0)


@dataclass
class _Source:
    """Tasks of one source with their statistics; arrays grow with it."""

    epochs: int | None
    """Epochs from ``began`` on; None: no end."""
    began: int = 0
    """Draws of the source before its present epochs."""
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    difficulties: np.ndarray = field(default_factory=lambda: np.zeros(0))
    priorities: np.ndarray = field(default_factory=lambda: np.zeros(0))
    tries: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    passes: np.ndarray = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True)
class TaskSetSpec:
    """The arguments of a `TaskSet`, which it makes when it is called; to be sent to other processes and kept."""

    ids: list[str]
    sources: list[int]
    weights: list[float]
    sampler: str
    seed: int
    epochs: int | None = None
    difficulties: list[float | None] = field(default_factory=list)
    priorities: list[float | None] = field(default_factory=list)
    tried: list[tuple[str, int, float]] = field(default_factory=list)
    """Tasks that were tried before, with their tries and passes: statistics begin with them."""

    def __call__(self) -> TaskSet:
        tasks = TaskSet(
            self.ids,
            self.sources,
            self.weights,
            sampler=self.sampler,
            seed=self.seed,
            epochs=self.epochs,
            difficulties=self.difficulties,
            priorities=self.priorities,
        )
        for id, tries, passes in self.tried:
            tasks.record(id, tries, passes)
        return tasks


class TaskSet:
    """Draws tasks by id and keeps their statistics; deterministic for equal seed and statistics. It may grow.

    ids: of the tasks, without duplicates. sources: source index by task. weights: share of the draws by source, exact
    to one draw at any time (see `Interleave`). epochs: a source of m tasks ends after ``epochs * m`` draws and the
    others continue; None: no end. difficulties, priorities: by task, None if unknown; empty if all are unknown.

    Raises ConfigError if there is no such sampler, DataError if a source has no task or the sampler needs unknown
    difficulties or priorities.
    """

    def __init__(
        self,
        ids: Sequence[str],
        sources: Sequence[int],
        weights: Sequence[float],
        *,
        sampler: str,
        seed: int,
        epochs: int | None = None,
        difficulties: Sequence[float | None] = (),
        priorities: Sequence[float | None] = (),
    ) -> None:
        self._pick = task_samplers.get(sampler, "tasks.sampler")
        self._seed = seed
        sizes = np.bincount(sources, minlength=len(weights)).tolist()
        if len(sizes) != len(weights) or not all(sizes):
            raise DataError(f"{len(weights)} sources hold {sizes} tasks", field="tasks.sources")
        self._ids: list[str] = []
        self._places: dict[str, tuple[int, int]] = {}
        self._sources = [_Source(epochs=epochs) for _ in weights]
        self._views: list[TaskView] = []
        self._added: list[tuple[str, int, float | None, float | None]] = []
        hard, prior = (list(known) or [None] * len(ids) for known in (difficulties, priorities))
        for source in range(len(weights)):
            numbers = [number for number, of in enumerate(sources) if of == source]
            self._insert([(number, ids[number], hard[number], prior[number]) for number in numbers], source)
        self._ids = list(ids)
        if len(self._places) < len(self._ids):
            twice = next(id for number, id in enumerate(ids) if id in ids[:number])
            raise DataError("two tasks have one id", "remove one of them", field="tasks.sources", value=twice)
        self._turns = Interleave(weights, [None if epochs is None else epochs * size for size in sizes])
        for view in self._views:
            # A sampler that does not support these tasks raises now, not at its first draw.
            self._choose(view, 0)

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
        return self._ids[self._choose(self._views[number], self._turns.counts[number] - 1 - source.began)]

    def check(self, source: int, difficulties: Sequence[float | None], priorities: Sequence[float | None] = ()) -> None:
        """Raise DataError if the sampler needs difficulties or priorities that are unknown."""
        held, more = self._sources[source], len(difficulties)
        hard = np.append(held.difficulties, np.array(difficulties, dtype=np.float64))
        prior = np.append(held.priorities, np.array(list(priorities) or [None] * more, dtype=np.float64))
        counts = np.append(held.tries, np.zeros(more, np.int64)), np.append(held.passes, np.zeros(more))
        arrays = map(_read_only, (np.arange(len(hard)), hard, *counts, prior))
        self._choose(TaskView(source, self._seed, *arrays), 0)

    def add(
        self,
        ids: Sequence[str],
        source: int,
        difficulties: Sequence[float | None],
        priorities: Sequence[float | None] = (),
    ) -> None:
        """Add tasks to a source; their ids must be new, and the rest pass `check`. A new epoch of the source begins,
        over all of its tasks, in place of the running one."""
        grown = self._sources[source]
        drawn = self._turns.counts[source]
        if grown.epochs is not None:
            grown.epochs = max(1, grown.epochs - (drawn - grown.began) // len(grown.tries))
        grown.began = drawn
        prior = list(priorities) or [None] * len(ids)
        self._append(list(zip(ids, [source] * len(ids), difficulties, prior, strict=True)))
        limit = None if grown.epochs is None else drawn + grown.epochs * len(grown.tries)
        self._turns.extend(source, limit)

    def record(self, id: str, tries: int, passes: float) -> None:
        """Count ``tries`` answers to a task, of which ``passes`` (or a sum of rewards in 0..1) were right.

        Raises DataError if passes are not within 0..tries.
        """
        if not 0 <= passes <= tries:
            raise DataError(f"{tries} tries cannot have {passes} passes", field=f"task {id}")
        number, position = self._places[id]
        self._sources[number].tries[position] += tries
        self._sources[number].passes[position] += passes

    def source(self, id: str) -> int:
        """Return the index of a task's source."""
        return self._places[id][0]

    def statistics(self, id: str) -> tuple[int, float]:
        """Return the number of tries of a task, and the sum of its successes."""
        number, position = self._places[id]
        return int(self._sources[number].tries[position]), float(self._sources[number].passes[position])

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as JSON: the turns, the tasks that were added, and the statistics of all that
        were tried."""
        tried = [
            [self._ids[source.numbers[position]], int(source.tries[position]), float(source.passes[position])]
            for source in self._sources
            for position in np.flatnonzero(source.tries).tolist()
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
        """Continue from a state with the same draws, in a set of the same tasks as the one that was saved was created
        with. Raises DataError if they have changed."""
        size = len(self._ids) - len(self._added)
        known = self._places.keys() | {id for id, *_ in state["added"]}
        if state["size"] != size or not {id for id, *_ in state["tried"]} <= known:
            raise DataError(
                f"the saved statistics are not of these tasks: of {state['size']}, where the task set holds {size}",
                "resume with the tasks that the run was started with",
                field="tasks.sources",
            )
        self._append([(id, source, hard, prior) for id, source, hard, prior in state["added"] if id not in self])
        self._turns.restore(state["turns"])
        for source, epochs, began in zip(self._sources, state["epochs"], state["began"], strict=True):
            source.epochs, source.began = epochs, began
            source.tries[:], source.passes[:] = 0, 0
        for id, tries, passes in state["tried"]:
            self.record(id, tries, passes)

    def _append(self, tasks: list[tuple[str, int, float | None, float | None]]) -> None:
        """Append tasks with their sources, difficulties and priorities."""
        for source in {source for _, source, *_ in tasks}:
            numbered = enumerate(tasks, start=len(self._ids))
            mine = [(number, id, hard, prior) for number, (id, of, hard, prior) in numbered if of == source]
            self._insert(mine, source)
        self._ids += [id for id, *_ in tasks]
        self._added += tasks

    def _insert(self, tasks: list[tuple[int, str, float | None, float | None]], source: int) -> None:
        """Append tasks, with their numbers in the set, to the statistics of a source."""
        grown = self._sources[source]
        for position, (_, id, *_) in enumerate(tasks, start=len(grown.tries)):
            self._places[id] = source, position
        grown.numbers = np.append(grown.numbers, [number for number, *_ in tasks]).astype(np.int64)
        grown.difficulties = np.append(grown.difficulties, np.array([hard for *_, hard, _ in tasks], dtype=np.float64))
        grown.priorities = np.append(grown.priorities, np.array([prior for *_, prior in tasks], dtype=np.float64))
        grown.tries = np.append(grown.tries, np.zeros(len(tasks), np.int64))
        grown.passes = np.append(grown.passes, np.zeros(len(tasks)))
        arrays = grown.numbers, grown.difficulties, grown.tries, grown.passes, grown.priorities
        view = TaskView(source, self._seed, *map(_read_only, arrays))
        self._views[source : source + 1] = [view]

    def _choose(self, view: TaskView, k: int) -> int:
        position = self._pick(view, k)
        if not 0 <= position < len(view):
            raise ConfigError(
                f"the sampler chose position {position} of {len(view)} tasks", field="tasks.sampler", value=self._pick
            )
        return int(view.indices[position])


def _choose(view: TaskView, k: int, weights: np.ndarray, floor: float = _FLOOR) -> int:
    ends = np.cumsum(np.maximum(weights, floor))
    point = np.random.default_rng([view.seed, view.source, k]).random() * ends[-1]
    return int(np.searchsorted(ends, point, side="right"))


# One order per source is in use at a time.
@lru_cache(maxsize=32)
def _permutation(seed: int, source: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, source, epoch]).permutation(size)


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view
