"""Scores of groups for the prioritised sampler, before discounts for age and use.

A score function takes rows of :data:`rayrft.experience.SCHEMA`, with contiguous groups, and the first row of every
group; it returns one finite number >= 0 per group. Nulls count as missing; a group without data scores 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rayrft.errors import DataError
from rayrft.registry import Registry

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_FIELD = "buffer.sampler.score"

ScoreFunction = Callable[[pa.RecordBatch, Ints], Floats]
"""Map rows and ``starts`` (``[groups]`` int64, ascending from 0) to ``[groups]`` float64."""


scores: Registry[ScoreFunction] = Registry("score")


def score_groups(name: str, batch: pa.RecordBatch, starts: Ints) -> Floats:
    """Return the scores of groups by the function of that name or at ``package.module:attribute``.

    Raises ConfigError if there is none, and DataError with its name unless it gives one finite number >= 0 per group.
    """
    values = np.asarray(scores.get(name, _FIELD)(batch, starts), dtype=np.float64)
    if values.shape != starts.shape:
        problem = f"score {name!r} must give one number per group, {len(starts)} in all"
        raise DataError(problem, "return an array of shape [groups]", field=_FIELD, value=values.shape)
    check_scores(values, f"score {name!r}")
    return values


def check_scores(values: Floats, giver: str) -> None:
    """Raise DataError, which names ``giver``, if a score is negative or not finite."""
    if values.min(initial=0) >= 0 and values.max(initial=0) < np.inf:
        return
    problem, remedy = f"{giver} has a score that is negative or not finite", "give finite numbers >= 0"
    raise DataError(problem, remedy, field=_FIELD, value=float(values[~((values >= 0) & (values < np.inf))][0]))


@scores.register("reward_deviation")
def reward_deviation(batch: pa.RecordBatch, starts: Ints) -> Floats:
    """Compute the standard deviation of the rewards with divisor n, which is 0 for one row."""
    group, rewards = _known(batch, starts, "reward")
    means = _means(group, rewards, len(starts))
    return np.sqrt(_means(group, (rewards - means[group]) ** 2, len(starts)))


@scores.register("td_error")
def td_error(batch: pa.RecordBatch, starts: Ints) -> Floats:
    """Return 1 for new groups; the trainer later reports the critic's error as the score (Schaul et al. 2016,
    arXiv:1511.05952). Until then a group has the largest error ever reported, at least 1, so that it is drawn once."""
    return np.ones(len(starts))


@scores.register("failure")
def mean_failure(batch: pa.RecordBatch, starts: Ints) -> Floats:
    """Compute 1 - mean reward, clipped to [0, 1], so that unsolved tasks are replayed."""
    group, rewards = _known(batch, starts, "reward")
    return np.clip(_means(group, 1 - rewards, len(starts)), 0, 1)


@scores.register("priority")
def mean_priority(batch: pa.RecordBatch, starts: Ints) -> Floats:
    """Compute the mean `priority` of the rows, which operators on experiences write."""
    return _means(*_known(batch, starts, "priority"), len(starts))


def _known(batch: pa.RecordBatch, starts: Ints, column: str) -> tuple[Ints, Floats]:
    """Return the group indices and values (float64) of a column where it is not null."""
    known = batch[column].is_valid().to_numpy(zero_copy_only=False)
    groups = np.repeat(np.arange(len(starts)), np.diff(starts, append=batch.num_rows))
    return groups[known], batch[column].drop_null().to_numpy().astype(np.float64)


def _means(where: Ints, values: NDArray[np.floating], size: int) -> Floats:
    """Compute the mean of the values by index ``where``, ``[size]``; 0 for an index without values."""
    counts = np.bincount(where, minlength=size)
    return np.bincount(where, values, size) / np.maximum(counts, 1)
