"""Task order: deterministic interleaving of sources by weight, and samplers that choose a source's next task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def rates(self) -> np.ndarray:
        """Success rates with one success and one failure added (Laplace smoothing): 1/2 for an untried task."""
        return (self.passes + 1) / (self.tries + 2)

    @cached_property
    def by_difficulty(self) -> np.ndarray:
        """Positions from the easiest task to the hardest, ties by index. Raises DataError if one is unknown."""
        if unknown := int(np.isnan(self.difficulties).sum()):
            raise DataError(
                f"{unknown} of {len(self)} tasks have no difficulty",
                field=f"tasks.sources.{self.source}.difficulty",
                remedy="name a field that holds it, or choose another tasks.sampler",
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


class TaskSet:
    """Draws tasks 0..n-1 and keeps their statistics; deterministic for equal seed and statistics.

    sources: source index by task. weights: share of the draws by source, exact to one draw at any time (see
    `Interleave`). epochs: a source of m tasks ends after ``epochs * m`` draws and the others continue; None: no end.
    difficulties: by task, None if unknown; empty if all are unknown.

    Raises ConfigError if there is no such sampler, DataError if a source has no task or the sampler needs unknown
    difficulties.
    """

    def __init__(
        self,
        sources: Sequence[int],
        weights: Sequence[float],
        *,
        sampler: str,
        seed: int,
        epochs: int | None = None,
        difficulties: Sequence[float | None] = (),
    ) -> None:
        self._pick = task_samplers.get(sampler, "tasks.sampler")
        sizes = np.bincount(sources, minlength=len(weights))
        if len(sizes) != len(weights) or not sizes.all():
            raise DataError(f"{len(weights)} sources hold {sizes.tolist()} tasks", field="tasks.sources")
        # Statistics are ordered by source, so that a view is a slice of them.
        order = np.argsort(sources, kind="stable")
        self._slots = np.argsort(order)
        self._tries, self._passes = np.zeros(len(order), dtype=np.int64), np.zeros(len(order))
        known = np.array(difficulties or [None] * len(order), dtype=np.float64)[order]
        ends = np.cumsum(sizes)
        self._views = [
            TaskView(source, seed, *(_read_only(array[part]) for array in (order, known, self._tries, self._passes)))
            for source, part in enumerate(map(slice, ends - sizes, ends))
        ]
        self._turns = Interleave(weights, [None if epochs is None else epochs * int(size) for size in sizes])
        for view in self._views:
            # A sampler that does not support these tasks raises now, not at its first draw.
            self._choose(view, 0)

    @property
    def position(self) -> int:
        """Draws so far."""
        return sum(self._turns.counts)

    @property
    def tries(self) -> np.ndarray:
        """Number of tries by task, ``[n]``."""
        return self._tries[self._slots]

    @property
    def passes(self) -> np.ndarray:
        """Sum of successes by task, ``[n]``."""
        return self._passes[self._slots]

    def draw(self) -> int | None:
        """Return the index of the next task; None at the end of the last epoch."""
        source = self._turns.next()
        if source is None:
            return None
        return self._choose(self._views[source], self._turns.counts[source] - 1)

    def record(self, index: int, tries: int, passes: float) -> None:
        """Count ``tries`` answers to a task, of which ``passes`` (or a sum of rewards in 0..1) were right.

        Raises DataError if passes are not within 0..tries.
        """
        if not 0 <= passes <= tries:
            raise DataError(f"{tries} tries cannot have {passes} passes", field=f"task {index}")
        self._tries[self._slots[index]] += tries
        self._passes[self._slots[index]] += passes

    def pass_rate(self, index: int) -> float | None:
        """Return passes / tries; None for an untried task."""
        tries = self._tries[self._slots[index]]
        return float(self._passes[self._slots[index]] / tries) if tries else None

    def seek(self, position: int) -> None:
        """Move to the state after ``position`` draws from the start, or to the end if it comes first.

        Statistics stay unchanged; for the cost see `Interleave.seek`.
        """
        self._turns.seek(position)

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as JSON: the position, and statistics of the tasks that were tried."""
        tries, passes = self.tries, self.passes
        tried = np.flatnonzero(tries)
        return {
            "size": len(tries),
            "position": self.position,
            "tasks": tried.tolist(),
            "tries": tries[tried].tolist(),
            "passes": passes[tried].tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state with the same draws. Raises DataError if the task set has changed."""
        if state["size"] != len(self._slots):
            raise DataError(
                f"the saved statistics are of {state['size']} tasks and the task set holds {len(self._slots)}",
                field="tasks.sources",
                remedy="resume with the tasks that the run was started with",
            )
        slots = self._slots[np.array(state["tasks"], dtype=np.int64)]
        self._tries[:], self._passes[:] = 0, 0
        self._tries[slots], self._passes[slots] = state["tries"], state["passes"]
        self.seek(state["position"])

    def _choose(self, view: TaskView, k: int) -> int:
        position = self._pick(view, k)
        if not 0 <= position < len(view):
            raise ConfigError(
                f"the sampler chose position {position} of {len(view)} tasks", field="tasks.sampler", value=self._pick
            )
        return int(view.indices[position])


def _choose(view: TaskView, k: int, weights: np.ndarray) -> int:
    ends = np.cumsum(np.maximum(weights, _FLOOR))
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
