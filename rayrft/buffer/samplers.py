"""Samplers, which draw batches from a pool of groups.

A group is identified by its slot, a small number that is reused after the group has left. A sampler holds no rows, and
its owner removes groups that are too old. A draw depends only on the seed, the number of earlier draws, and the groups
held with their scores, versions and uses, not on the history: a rebuilt sampler continues identically. Steps and policy
versions both count optimiser steps.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rayrft.buffer.groups import GroupStatus, GroupTable
from rayrft.buffer.schedule import Draw
from rayrft.buffer.scores import check_scores
from rayrft.config.buffer import SamplerConfig
from rayrft.registry import Registry

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Groups = NDArray[np.void]

MIN_SCORE = 1e-6
"""Lower bound of scores, so that a group of score 0 can still be drawn (epsilon of Schaul et al. 2016)."""
_SPAN = 512
_RANGE = 960
_NEVER = np.iinfo(np.int64).max
_GROUP = np.dtype([("score", np.float64), ("version", np.int64), ("uses", np.int64), ("due", np.int64)])
"""Record of a group; ``due`` is the first step at which it may be drawn."""


class Sampler(Protocol):
    """Protocol of samplers. Arrays have shape ``[k]``, one entry per group; the slots of a call are distinct.

    Raises DataError for scores that are negative or not finite, if it uses them.
    """

    def add(self, slots: Ints, scores: Floats, versions: Ints) -> None:
        """Add groups to the pool, in this order; ``versions`` are their oldest policy versions."""

    def update(self, slots: Ints, scores: Floats) -> None:
        """Change scores; slots without a group are ignored."""

    def remove(self, slots: Ints) -> None:
        """Remove groups from the pool; slots without a group are ignored."""

    def used(self, slots: Ints, uses: Ints, steps: Ints | int) -> None:
        """Set the steps of the groups' last draws and their total uses; 0 uses undo a draw."""

    def draw(self, count: int, step: int, number: int) -> Draw | None:
        """Draw ``count`` >= 1 groups for this step; None, and nothing has changed, if fewer are eligible. ``number``
        draws were made before."""

    def eligible(self, step: int) -> int:
        """Return the number of groups that may be drawn at this step.

        Steps never decrease until :meth:`rebuild`: an earlier step counts as the latest one.
        """

    def rebuild(self, slots: Ints, scores: Floats, versions: Ints, uses: Ints, last_steps: Ints, step: int) -> None:
        """Replace all groups by these, in order of arrival, with their records at this step.

        ``last_steps`` of unused groups may be any number.
        """


samplers: Registry[Callable[[SamplerConfig, int], Sampler]] = Registry("sampler")
"""Name to class, which is called with the config and a seed >= 0."""


@samplers.register("fifo")
class Fifo:
    """Draws every group once, in order of arrival, for producers without tickets."""

    def __init__(self, config: SamplerConfig, seed: int) -> None:
        # A plain dict is slow to iterate after many deletions at its front.
        self._groups: OrderedDict[int, None] = OrderedDict()
        self._used: set[int] = set()

    def add(self, slots: Ints, scores: Floats, versions: Ints) -> None:
        self._groups.update(dict.fromkeys(slots.tolist()))

    def update(self, slots: Ints, scores: Floats) -> None:
        pass

    def remove(self, slots: Ints) -> None:
        self._used.difference_update(slots.tolist())
        for slot in slots.tolist():
            self._groups.pop(slot, None)

    def used(self, slots: Ints, uses: Ints, steps: Ints | int) -> None:
        self._used.update(slots[uses > 0].tolist())
        self._used.difference_update(slots[uses == 0].tolist())

    def draw(self, count: int, step: int, number: int) -> Draw | None:
        if self.eligible(step) < count:
            return None
        oldest = islice((slot for slot in self._groups if slot not in self._used), count)
        return Draw(np.fromiter(oldest, np.int64, count), np.ones(count, dtype=np.float32))

    def eligible(self, step: int) -> int:
        return len(self._groups) - len(self._used)

    def rebuild(self, slots: Ints, scores: Floats, versions: Ints, uses: Ints, last_steps: Ints, step: int) -> None:
        self._groups.clear()
        self._used.clear()
        self.add(slots, scores, versions)
        self.used(slots, uses, last_steps)


@samplers.register("uniform")
class Uniform:
    """Draws eligible groups uniformly, up to ``max_uses`` times per group, with ``cooldown`` steps between uses."""

    def __init__(self, config: SamplerConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._clear()

    def add(self, slots: Ints, scores: Floats, versions: Ints) -> None:
        check_scores(scores, "what was added")
        self._reserve(slots)
        for name, values in (("score", scores), ("version", versions), ("uses", 0), ("due", 0)):
            self._groups[name][slots] = values
        self._weigh(slots)

    def update(self, slots: Ints, scores: Floats) -> None:
        check_scores(scores, "an update")
        self._reserve(slots)
        self._groups["score"][slots] = scores
        self._weigh(slots)

    def remove(self, slots: Ints) -> None:
        self._reserve(slots)
        self._groups["due"][slots] = _NEVER
        self._weigh(slots)

    def used(self, slots: Ints, uses: Ints, steps: Ints | int) -> None:
        due = np.where(uses > 0, np.add(steps, self._config.cooldown + 1), 0)
        due[uses >= self._config.max_uses] = _NEVER
        self._groups["uses"][slots], self._groups["due"][slots] = uses, due
        for step in np.unique(due[(due > self._step) & (due < _NEVER)]).tolist():
            self._resting[step].append(slots[due == step])
        self._weigh(slots)

    def draw(self, count: int, step: int, number: int) -> Draw | None:
        if np.count_nonzero(self._groups["due"] <= max(step, self._step)) < count:
            return None  # it is still the step of the latest draw: this one is in no log
        self._advance(step)
        # One generator per draw, so that no generator state has to be saved.
        slots = self._tree.draw_distinct(count, np.random.default_rng([self._seed, number]))
        return Draw(slots, self._correction(slots))

    def eligible(self, step: int) -> int:
        self._advance(step)
        return self._tree.positive

    def rebuild(self, slots: Ints, scores: Floats, versions: Ints, uses: Ints, last_steps: Ints, step: int) -> None:
        self._clear()
        self._advance(step)
        self.add(slots, scores, versions)
        self.used(slots, uses, last_steps)

    def _clear(self) -> None:
        from rayrft.buffer.sum_tree import SumTree  # compiled code, not needed to look up sampler names

        self._tree = SumTree()
        self._step = 0
        self._resting: defaultdict[int, list[Ints]] = defaultdict(list)
        self._groups = np.zeros(0, dtype=_GROUP)

    def _reserve(self, slots: Ints) -> None:
        held, size = len(self._groups), int(slots.max(initial=-1)) + 1
        if size > held:
            self._groups = np.append(self._groups, np.zeros(max(size - held, held), dtype=_GROUP))
            self._groups["due"][held:] = _NEVER

    def _advance(self, step: int) -> None:
        self._step = max(step, self._step)
        for due in [due for due in self._resting if due <= self._step]:
            # Slots may have been freed or reused meanwhile: `_weigh` checks their records.
            for slots in self._resting.pop(due):
                self._weigh(slots)

    def _weigh(self, slots: Ints) -> None:
        """Update the tree's weights of these slots from their records. Groups with a weight above 0 are eligible."""
        groups = self._groups.take(slots)
        self._tree.set(slots, np.where(groups["due"] <= self._step, self._weights(groups), 0.0))

    def _weights(self, groups: Groups) -> Floats:
        return np.ones(len(groups))

    def _correction(self, slots: Ints) -> NDArray[np.float32]:
        return np.ones(len(slots), dtype=np.float32)


@samplers.register("priority")
class Priority(Uniform):
    """Prioritised replay (Schaul et al. 2016, arXiv:1511.05952) whose priorities age and fall with use.

    ``P(i) ~ score_i^alpha * use_decay^uses_i * exp(-(now - version_i) / tau)``. Stored is
    ``exp((version_i - base) / tau)``, so that no weight changes as ``now`` grows. The base follows the step in strides
    of 512 powers of two, which keeps exponents in range; moving it scales all weights by exactly the same factor and
    changes no draw. Weights below 2**-960 of the base are clamped to that.

    The correction is ``w_i = (N P(i))^-beta / max_j w_j`` over the groups drawn, with P before any was drawn and beta
    rising linearly from ``beta`` at step 0 to 1 at step ``beta_steps``.
    """

    def __init__(self, config: SamplerConfig, seed: int) -> None:
        # In powers of two, so that a shift of the base is exact.
        self._growth = 0.0 if config.tau is None else 1 / (config.tau * math.log(2))
        self._decay = math.log2(config.use_decay)
        self._base = 0
        super().__init__(config, seed)

    def _advance(self, step: int) -> None:
        super()._advance(step)
        base = int(self._growth * self._step // _SPAN) * _SPAN
        if base != self._base:
            self._base = base
            self._weigh(np.arange(len(self._groups)))

    def _weights(self, groups: Groups) -> Floats:
        power = self._config.alpha * np.log2(np.maximum(groups["score"], MIN_SCORE))
        power += self._decay * groups["uses"] + self._growth * groups["version"]
        whole = np.floor(power)
        exponent = np.minimum(np.maximum(whole - self._base, -_RANGE), _RANGE - 1).astype(np.int32)
        weights: Floats = np.ldexp(np.exp2(power - whole), exponent)
        return weights

    def _correction(self, slots: Ints) -> NDArray[np.float32]:
        config = self._config
        beta = config.beta + (1 - config.beta) * min(1.0, self._step / config.beta_steps)
        weights = self._tree.get(slots)
        # N and the total cancel in the ratio to the largest correction, that of the smallest weight.
        return ((weights.min() / weights) ** beta).astype(np.float32)


class Pool:
    """The ready groups of the group table in a sampler. Without one (while a journal is read, or if the schedule
    chooses) it is empty and does nothing."""

    def __init__(self) -> None:
        self._sampler: Sampler | None = None

    def close(self) -> None:
        """Remove the sampler."""
        self._sampler = None

    def fill(self, build: Callable[[], Sampler], groups: GroupTable, clock: int) -> None:
        """Create a sampler and add all ready groups, in order of arrival."""
        self._sampler = build()
        self.refill(groups, clock)

    def refill(self, groups: GroupTable, clock: int) -> None:
        """Rebuild the sampler from all ready groups, in order of arrival."""
        if self._sampler is not None:
            at = groups.where(GroupStatus.READY)
            uses = groups.uses[at].astype(np.int64)
            self._sampler.rebuild(at, groups.score[at], groups.version[at], uses, groups.last_step[at], clock)

    def add(self, slots: list[int], groups: GroupTable) -> None:
        """Add groups that have become ready."""
        if self._sampler is not None and slots:
            at = np.array(slots, dtype=np.int64)
            self._sampler.add(at, groups.score[at], groups.version[at])
            if groups.uses[at].any():
                self._sampler.used(at, groups.uses[at].astype(np.int64), groups.last_step[at])

    def leave(self, slots: list[int]) -> None:
        """Remove groups that are no longer ready."""
        if self._sampler is not None and slots:
            self._sampler.remove(np.array(slots, dtype=np.int64))

    def update(self, slot: int, score: float) -> None:
        """Change a group's score."""
        if self._sampler is not None:
            self._sampler.update(np.array([slot]), np.array([score]))

    def eligible(self, clock: int) -> int:
        """Return the number of groups that may be drawn now."""
        return 0 if self._sampler is None else self._sampler.eligible(clock)

    def draw(self, count: int, clock: int, number: int) -> Draw | None:
        """Make the ``number``-th draw; None if there are too few groups."""
        return None if self._sampler is None else self._sampler.draw(count, clock, number)
