"""Measures of a model on tasks, with their uncertainty: accuracy, pass@k and majority@k."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rayrft.experience import ROUNDING, reaches


@dataclass(frozen=True)
class Attempt:
    """One attempt at a task. It is right with full reward; a ``reward`` of None is unknown, which is not wrong."""

    task_id: str
    repeat: int
    """Number of the attempt among those at the task, from 0."""
    reward: float | None
    answer: str | None = None
    """What it votes for; an attempt without one votes for nothing."""
    response: str = ""
    """The model's last turn."""
    tokens: int = 0
    """Tokens that the model produced."""
    cut: bool = False
    """Whether an answer was cut, for its length or for repetition."""
    problem: str | None = None
    """Why the reward is unknown."""
    versions: tuple[int, ...] = ()
    """Versions of the weights that its tokens were sampled under."""
    error: str | None = None
    """The error of the workflow or environment, of an attempt that failed."""

    @property
    def right(self) -> bool:
        return self.reward is not None and reaches(self.reward)


@dataclass(frozen=True)
class Estimate:
    """A mean over ``tasks`` tasks, with its 95 % interval. It is NaN over none."""

    value: float
    low: float
    high: float
    tasks: int


@dataclass(frozen=True)
class Evaluation:
    """What was measured. ``right`` of ``count`` attempts have full reward; the unknown ones do not count."""

    samples: int
    """Attempts per task."""
    tasks: int
    right: int
    count: int
    accuracy: Estimate
    """mean@k: the share of right attempts, of every task and then over tasks. It has the same value for every k."""
    passed: dict[int, Estimate]
    """pass@k by k: whether one of k attempts is right."""
    majority: dict[int, Estimate]
    """majority@k by k: whether the answer that most of k attempts give is right."""
    mean_reward: float
    """Over attempts."""
    unknown: dict[str, int] = field(default_factory=dict)
    """Attempts without a reward, by reason."""
    error: str | None = None
    """The error of the first of these attempts that has one."""
    mean_tokens: float = math.nan
    """Tokens that the model produced, per attempt."""
    cut_share: float = math.nan
    """Share of the attempts that were cut."""
    versions: tuple[int, ...] = ()
    """Versions of the weights that any token was sampled under."""


def measure(attempts: Iterable[Attempt], ks: Sequence[int] = (), *, seed: int = 0) -> Evaluation:
    """Measure a model by its attempts at tasks; at each of ``ks`` also by pass@k and majority@k.

    Attempts of unknown reward do not count, nor at k a task with fewer than k others. ``seed`` is for the intervals.
    """
    by_task: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_task[attempt.task_id].append(attempt)
    every = [attempt for group in by_task.values() for attempt in group]
    known = [k for group in by_task.values() if (k := [attempt for attempt in group if attempt.reward is not None])]
    rewards = [attempt.reward for group in known for attempt in group if attempt.reward is not None]
    rights = [sum(attempt.right for attempt in group) for group in known]
    ran = [attempt for attempt in every if attempt.tokens]
    return Evaluation(
        samples=max(map(len, by_task.values()), default=0),
        tasks=len(by_task),
        right=sum(rights),
        count=len(rewards),
        accuracy=over_tasks([right / len(group) for right, group in zip(rights, known, strict=True)], seed),
        passed={
            k: over_tasks([pass_at(len(g), c, k) for g, c in zip(known, rights, strict=True) if len(g) >= k], seed)
            for k in ks
        },
        majority={
            k: over_tasks([majority_at([(a.answer, a.right) for a in g], k) for g in known if len(g) >= k], seed)
            for k in ks
        },
        mean_reward=sum(rewards) / len(rewards) if rewards else math.nan,
        unknown=dict(Counter(attempt.problem or "no reason given" for attempt in every if attempt.reward is None)),
        error=next((attempt.error for attempt in every if attempt.error), None),
        mean_tokens=sum(attempt.tokens for attempt in ran) / len(ran) if ran else math.nan,
        cut_share=sum(attempt.cut for attempt in ran) / len(ran) if ran else math.nan,
        versions=tuple(sorted({version for attempt in every for version in attempt.versions})),
    )


def pass_at(n: int, right: int, k: int) -> float:
    """Estimate without bias the chance that one of k attempts is right, from n attempts of which ``right`` are. It is
    ``1 - C(n - right, k) / C(n, k)`` (Chen et al. 2021, arXiv:2107.03374, eq. 1), as a product that cannot overflow.

    Raises ValueError if k is more than n.
    """
    _check(n, k)
    if n - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - right + 1, n + 1))


def majority_at(votes: Sequence[tuple[str | None, bool]], k: int) -> float:
    """Compute the expected value of a majority vote among k of n attempts, over all subsets of k, exactly.

    ``votes`` are answer and whether it is right; equal answers that were judged differently are right by their share.
    Answers with equal numbers of votes share the outcome; those of None vote for nothing, and without any vote the
    outcome is wrong. Raises ValueError if k is more than n.
    """
    _check(len(votes), k)
    sizes, rights = Counter(answer for answer, _ in votes), Counter(answer for answer, right in votes if right)
    silent = sizes.pop(None, 0)
    won = 0.0
    for answer in rights.keys() - {None}:
        others = Counter(sizes.values())
        others[sizes[answer]] -= 1
        won += rights[answer] / sizes[answer] * _chance_to_win(sizes[answer], others, silent, k)
    return won


def _chance_to_win(size: int, others: Mapping[int, int], silent: int, k: int) -> float:
    """Return the chance of an answer of ``size`` attempts to have most votes among k, one that is tied with t others
    counting 1 / (t + 1). ``others`` are the number of other answers by size, ``silent`` attempts vote for nothing."""
    n = size + silent + sum(number * count for number, count in others.items())
    ways = 0.0
    for votes in range(1, min(size, k) + 1):
        # Ways to draw the other k - votes attempts, by the number of attempts drawn and of answers that are tied.
        drawn = {(j, 0): math.comb(silent, j) for j in range(min(silent, k - votes) + 1)}
        for other, count in others.items():
            for _ in range(count):
                more: dict[tuple[int, int], int] = defaultdict(int)
                for (taken, tied), number in drawn.items():
                    for j in range(min(other, votes, k - votes - taken) + 1):
                        more[taken + j, tied + (j == votes)] += number * math.comb(other, j)
                drawn = more
        total = sum(
            number / (tied + 1) / math.comb(n, k) for (taken, tied), number in drawn.items() if taken == k - votes
        )
        ways += math.comb(size, votes) * total
    return ways


def _check(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k must be from 1 to the number of attempts, {n}, not {k}")


_RESAMPLES = 1000


def over_tasks(values: Sequence[float], seed: int = 0) -> Estimate:
    """Return the mean of one value per task, with its 95 % interval.

    Attempts at one task are not independent, so the bootstrap (percentile, by ``seed``) resamples tasks. If every value
    is 0 or 1, or all values are equal, it is the Wilson interval, whose width is not 0. No variable in [0, 1] varies
    more than one of 0 and 1 with the same mean.
    """
    if not values:
        return Estimate(math.nan, 0.0, 1.0, 0)
    array = np.asarray(values, float)
    mean = float(array.mean())
    if np.isin(array, (0.0, 1.0)).all() or np.ptp(array) <= ROUNDING:
        return Estimate(mean, *wilson_interval(float(array.sum()), len(array)), len(array))
    rng = np.random.default_rng(seed)
    means = [array[rng.integers(len(array), size=len(array))].mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(mean, float(low), float(high), len(array))


def wilson_interval(right: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Compute the Wilson score interval of a proportion (Wilson 1927); ``z`` 1.96 gives 95 %."""
    if count == 0:
        return 0.0, 1.0
    share, square = right / count, z * z / count
    centre = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / count + square / (4 * count))
    # Rounding must not push an end past the proportion itself.
    return min(max(0.0, centre - half), share), max(min(1.0, centre + half), share)
