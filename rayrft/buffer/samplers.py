"""Samplers, which draw the groups of a step from the ready groups.

A draw keeps nothing: it depends only on the seed, the number of earlier draws and the columns of the group table, so a
restarted Buffer draws the same. Steps and policy versions both count optimiser steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rayrft.buffer.groups import GroupStatus, GroupTable
from rayrft.buffer.schedule import Draw
from rayrft.buffer.scores import Floats, Ints
from rayrft.config.buffer import SamplerConfig
from rayrft.errors import DataError
from rayrft.registry import Registry

MIN_SCORE = 1e-6
"""Lower bound of scores, so that a group of score 0 can still be drawn (epsilon of Schaul et al. 2016)."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """The groups that a step may draw, k in number, by ascending slot; arrays of shape ``[k]``."""

    slots: Ints
    arrivals: Ints
    """Numbers in order of arrival."""
    scores: Floats
    versions: Ints
    """Oldest policy versions."""
    uses: Ints


class Sampler(Protocol):
    """Function that draws ``count`` of the candidates, at most k, for a step.

    It takes its random numbers from ``rng``, which is the same when a draw is repeated.
    """

    def __call__(
        self, groups: Candidates, count: int, step: int, config: SamplerConfig, rng: np.random.Generator
    ) -> Draw: ...


samplers: Registry[Sampler] = Registry("sampler", alike=True)


def eligible(groups: GroupTable, config: SamplerConfig, step: int) -> NDArray[np.bool_]:
    """Return whether a step may draw the group of a slot: it is ready, was used fewer than ``max_uses`` times, and not
    in the last ``cooldown`` steps; ``[slots]``."""
    rested = (groups.last_step < step - config.cooldown) | (groups.uses == 0)
    return (groups.status == GroupStatus.READY) & (groups.uses < config.max_uses) & rested


def draw(
    sampler: Sampler, groups: GroupTable, config: SamplerConfig, count: int, step: int, rng: np.random.Generator
) -> Draw | None:
    """Draw ``count`` >= 1 groups for a step; None if fewer are eligible.

    Raises DataError unless the sampler draws so many different candidates.
    """
    ready = eligible(groups, config, step)
    slots = np.flatnonzero(ready)
    if len(slots) < count:
        return None
    columns = groups.order[slots], groups.score[slots], groups.version[slots], groups.uses[slots].astype(np.int64)
    drawn = sampler(Candidates(slots, *columns), count, step, config, rng)
    counts = {len(drawn.slots), len(drawn.weights), len(np.unique(drawn.slots))}
    if counts != {count} or not ready[drawn.slots].all():
        problem = f"the sampler must draw {count} different candidates, with a weight for each"
        raise DataError(problem, "return their slots", field="buffer.sampler.name", value=config.name)
    return drawn


@samplers.register("fifo")
def draw_oldest(groups: Candidates, count: int, step: int, config: SamplerConfig, rng: np.random.Generator) -> Draw:
    """Draw in order of arrival, for producers without tickets."""
    return _unweighted(groups.slots[_smallest(groups.arrivals, count)])


@samplers.register("uniform")
def draw_uniformly(groups: Candidates, count: int, step: int, config: SamplerConfig, rng: np.random.Generator) -> Draw:
    """Draw with equal probabilities."""
    return _unweighted(rng.choice(groups.slots, count, replace=False))


@samplers.register("priority")
def draw_by_priority(
    groups: Candidates, count: int, step: int, config: SamplerConfig, rng: np.random.Generator
) -> Draw:
    """Draw by priorities (Schaul et al. 2016, arXiv:1511.05952) that age and fall with use:
    ``P(i) ~ score_i^alpha * use_decay^uses_i * exp(-(now - version_i) / tau)``.

    Drawing one after another without replacement gives the groups of smallest E_i / P(i), with E_i exponentially
    distributed (Efraimidis and Spirakis 2006); the logs of these are compared.

    The importance weight is ``w_i = (N P(i))^-beta / max_j w_j`` over the groups drawn, with P before any was drawn and
    beta rising linearly from ``beta`` at step 0 to 1 at step ``beta_steps``.
    """
    weights = log_priorities(config, groups.scores, groups.versions, groups.uses)
    places = _smallest(np.log(rng.standard_exponential(len(weights))) - weights, count)
    beta = config.beta + (1 - config.beta) * min(1.0, step / config.beta_steps)
    # N and the total cancel in the ratio to the largest correction, that of the smallest weight.
    corrections = np.exp(beta * (weights[places].min() - weights[places]))
    return Draw(groups.slots[places], corrections.astype(np.float32))


def log_priorities(config: SamplerConfig, scores: Floats, versions: Ints, uses: Ints) -> Floats:
    """Compute the logs of priorities, up to ``now / tau``, which is the same for all groups."""
    logs = config.alpha * np.log(np.maximum(scores, MIN_SCORE)) + np.log(config.use_decay) * uses
    return logs if config.tau is None else logs + versions / config.tau


def _unweighted(slots: Ints) -> Draw:
    return Draw(slots, np.ones(len(slots), np.float32))


def _smallest(keys: NDArray[np.int64 | np.float64], count: int) -> Ints:
    """Return the indices of the ``count`` smallest keys, ascending by key."""
    # No key above the count-th smallest minimum of blocks is among them: sorting the others is cheap.
    minima = np.minimum.reduceat(keys, np.arange(0, len(keys), max(1, len(keys) // (4 * count))))
    places = np.flatnonzero(keys <= np.partition(minima, count - 1)[count - 1])
    return places[np.argsort(keys[places], kind="stable")[:count]]
