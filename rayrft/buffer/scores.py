"""What a group is worth to a prioritised sampler, before age and use are counted.

A score function takes rows of :data:`rayrft.experience.SCHEMA` in which groups lie one after the other, and the
row at which each begins; it gives one finite number >= 0 per group. What is null counts as absent, and a group of which
nothing is known scores 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rayrft.errors import DataError
from rayrft.registry import Registry

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

FIELD = "buffer.sampler.score"

Score = Callable[[pa.RecordBatch, Ints], Floats]
"""Rows and ``starts`` (``[groups]`` int64, ascending from 0) to ``[groups]`` float64."""


class Scores(Registry[Score]):
    """Score functions by name. What :meth:`get` gives is checked at every call, own functions as well."""

    def get(self, name: str, field: str | None = None) -> Score:
        """The function of that name or at ``package.module:attribute``; it raises DataError, which names it, where it
        does not give one finite number >= 0 per group.

        Raises ConfigError where there is none.
        """
        function = super().get(name, field)

        def checked(batch: pa.RecordBatch, starts: Ints) -> Floats:
            values = np.asarray(function(batch, starts), dtype=np.float64)
            if values.shape != starts.shape:
                raise DataError(
                    f"score {name!r} must give one number per group, {len(starts)} in all",
                    field=FIELD,
                    value=values.shape,
                    remedy="return an array of shape [groups]",
                )
            check_scores(values, f"score {name!r}")
            return values

        return checked


def check_scores(values: Floats, giver: str) -> None:
    """Raises DataError, which names the giver, where one is negative or not finite."""
    if values.min(initial=0) >= 0 and values.max(initial=0) < np.inf:
        return
    raise DataError(
        f"{giver} holds a score that is negative or not finite",
        field=FIELD,
        value=float(values[~((values >= 0) & (values < np.inf))][0]),
        remedy="give finite numbers >= 0",
    )


scores = Scores("score")


@scores.register("abs_advantage")
def abs_advantage(batch: pa.RecordBatch, starts: Ints) -> Floats:
    """Mean over rows of the mean size of the advantages of their action tokens: how far the group moves the policy.
    Advantages from a critic are not known yet: all groups score 0, and the draw is uniform."""
    known = batch["advantages"].is_valid()
    rows = batch.select(["advantages", "action_mask"]).filter(known)
    action = rows["action_mask"].flatten().to_numpy().astype(bool)
    sizes = np.abs(rows["advantages"].flatten().to_numpy())
    row = np.repeat(np.arange(rows.num_rows), pc.list_value_length(rows["advantages"]).to_numpy())
    means = _means(row[action], sizes[action], rows.num_rows)
    return _means(_groups(batch, starts)[known.to_numpy(zero_copy_only=False)], means, len(starts))


@scores.register("reward_deviation")
def reward_deviation(batch: pa.RecordBatch, starts: Ints) -> Floats:
    """Standard deviation of the rewards with divisor n: 0 for one row, and where all are equal."""
    group, rewards = _rewards(batch, starts)
    means = _means(group, rewards, len(starts))
    return np.sqrt(_means(group, (rewards - means[group]) ** 2, len(starts)))


@scores.register("td_error")
def td_error(batch: pa.RecordBatch, starts: Ints) -> Floats:
    """By how much the critic missed the group, as the trainer reports it with each step (Schaul et al. 2016,
    arXiv:1511.05952). A group that was not trained yet has the greatest that was ever reported, at least the 1 given
    here, so that each is looked at."""
    return np.ones(len(starts))


@scores.register("failure")
def failure(batch: pa.RecordBatch, starts: Ints) -> Floats:
    """1 - mean reward, clipped to [0, 1]: what is not solved yet comes again."""
    group, rewards = _rewards(batch, starts)
    return np.clip(_means(group, 1 - rewards, len(starts)), 0, 1)


def _groups(batch: pa.RecordBatch, starts: Ints) -> Ints:
    """The number of its group, for every row."""
    return np.repeat(np.arange(len(starts)), np.diff(starts, append=batch.num_rows))


def _rewards(batch: pa.RecordBatch, starts: Ints) -> tuple[Ints, Floats]:
    """The rewards that are known, in float64, and the group of each."""
    known = batch["reward"].is_valid().to_numpy(zero_copy_only=False)
    rewards = batch["reward"].drop_null().to_numpy().astype(np.float64)
    return _groups(batch, starts)[known], rewards


def _means(where: Ints, values: NDArray[np.floating], size: int) -> Floats:
    """The mean of the values at each of ``size`` places; 0 where there is none."""
    counts = np.bincount(where, minlength=size)
    means: Floats = np.bincount(where, values, size) / np.maximum(counts, 1)
    return means
