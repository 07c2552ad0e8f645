"""How a batch is drawn from a pool of groups.

A group is known by its slot, a small number that is used again after the group has left. A sampler holds no rows and
does not know why groups come and go: too old ones are removed by its owner. What it draws depends on its seed, on the
number of draws before, and on the groups it holds, but not on the way it came to hold them: rebuilt from what is known
of each group, it goes on as if it had never stopped. Steps and policy versions both count optimiser steps.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rayrft.buffer.groups import GroupStatus, GroupTable
from rayrft.buffer.scores import check_scores
from rayrft.config.buffer import SamplerConfig
from rayrft.registry import Registry

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Groups = NDArray[np.void]

MIN_SCORE = 1e-6
"""Scores below count as this, so that a group of score 0 can still be drawn (epsilon of Schaul et al. 2016)."""
_SPAN = 512
_RANGE = 960
_NEVER = np.iinfo(np.int64).max
_GROUP = np.dtype([("score", np.float64), ("version", np.int64), ("uses", np.int64), ("due", np.int64)])
"""What is known of a group; ``due`` is the first step at which it may be drawn."""


@dataclass(frozen=True, eq=False)
class Draw:
    """The groups of one batch. ``slots``: ``[n]`` int64, all different. ``weights``: ``[n]`` float32, at most 1: factor
    on the loss of each group that corrects for how it was drawn."""

    slots: Ints
    weights: NDArray[np.float32]


class Sampler(Protocol):
    """Arrays have shape ``[k]``, one entry per group; the slots of a call are all different.

    Raises DataError on scores that are negative or not finite, where it uses them.
    """

    def add(self, slots: Ints, scores: Floats, versions: Ints) -> None:
        """Groups came into the pool, in this order; ``versions``: the oldest policy version of each."""

    def update(self, slots: Ints, scores: Floats) -> None:
        """Scores have changed. A slot without a group stays as it is."""

    def remove(self, slots: Ints) -> None:
        """Groups have left the pool. A slot without a group stays as it is."""

    def used(self, slots: Ints, uses: Ints, steps: Ints | int) -> None:
        """Groups were last drawn at these steps, and this often in all; 0 times takes a draw back."""

    def draw(self, count: int, step: int, number: int) -> Draw | None:
        """``count`` >= 1 groups for this step, or None while fewer are eligible; ``number`` draws were made before."""

    def eligible(self, step: int) -> int:
        """How many groups may be drawn at this step.

        Steps run forward until :meth:`rebuild`: an earlier one than was asked of before counts as that one.
        """

    def rebuild(self, slots: Ints, scores: Floats, versions: Ints, uses: Ints, last_steps: Ints, step: int) -> None:
        """Hold exactly these groups, given in the order in which they came, as they are known at this step.

        ``last_steps`` of a group that was not used yet may be any number.
        """


samplers: Registry[Callable[[SamplerConfig, int], Sampler]] = Registry("sampler")
"""Name to class; it is called with the config and a seed >= 0."""


@samplers.register("fifo")
class Fifo:
    """Every group once, in the order in which they came: for producers that come without a schedule's tickets."""

    def __init__(self, config: SamplerConfig, seed: int) -> None:
        # Ordered, for a plain dict is slow to iterate once much was deleted at its front.
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
    """Every eligible group alike, up to ``max_uses`` times each, with a rest of ``cooldown`` steps after each use."""

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
        if self.eligible(step) < count:
            return None
        # A generator of its own for every draw, so that none has to be saved.
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
        from rayrft.buffer.sum_tree import SumTree  # compiled code: names of samplers are needed without it

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
            # Some may have left meanwhile, or rest again in another group's place: `_weigh` sees it.
            for slots in self._resting.pop(due):
                self._weigh(slots)

    def _weigh(self, slots: Ints) -> None:
        """Make the tree say of these slots what is known of them. A weight above 0 is what makes a group eligible."""
        groups = self._groups.take(slots)
        self._tree.set(slots, np.where(groups["due"] <= self._step, self._weights(groups), 0.0))

    def _weights(self, groups: Groups) -> Floats:
        return np.ones(len(groups))

    def _correction(self, slots: Ints) -> NDArray[np.float32]:
        return np.ones(len(slots), dtype=np.float32)


@samplers.register("priority")
class Priority(Uniform):
    """Prioritised replay (Schaul et al. 2016, arXiv:1511.05952) whose priorities age and fall with use.

    ``P(i) ~ score_i^alpha * use_decay^uses_i * exp(-(now - version_i) / tau)``. What is kept is
    ``exp((version_i - base) / tau)``, so that no weight changes as ``now`` grows. The base follows the step in strides
    of 512 powers of two, so exponents stay in range, and moving it scales every weight by exactly the same factor: it
    changes no draw. Weights below 2**-960 of the base count as that much.

    The correction is ``w_i = (N P(i))^-beta / max_j w_j`` over the groups drawn, with P before any was drawn and beta
    rising linearly from ``beta`` at step 0 to 1 at step ``beta_steps``.
    """

    def __init__(self, config: SamplerConfig, seed: int) -> None:
        # Both in powers of two, for in these a shift of the base is exact.
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
        # N and the total cancel against those of the largest correction, which the smallest weight has.
        return ((weights.min() / weights) ** beta).astype(np.float32)


class Pool:
    """Follows the group table. Without a sampler (while a journal is read, and where the schedule chooses) it is empty
    and does nothing."""

    def __init__(self) -> None:
        self._sampler: Sampler | None = None

    def close(self) -> None:
        """No sampler from here on."""
        self._sampler = None

    def fill(self, build: Callable[[], Sampler], groups: GroupTable, clock: int) -> None:
        """Begin with a new sampler and every group that is ready, in order of arrival."""
        self._sampler = build()
        self.refill(groups, clock)

    def refill(self, groups: GroupTable, clock: int) -> None:
        """Hold what is ready now, in order of arrival."""
        if self._sampler is not None:
            at = groups.where(GroupStatus.READY)
            uses = groups.uses[at].astype(np.int64)
            self._sampler.rebuild(at, groups.score[at], groups.version[at], uses, groups.last_step[at], clock)

    def add(self, slots: list[int], groups: GroupTable) -> None:
        """These groups are ready."""
        if self._sampler is not None and slots:
            at = np.array(slots, dtype=np.int64)
            self._sampler.add(at, groups.score[at], groups.version[at])
            if groups.uses[at].any():
                self._sampler.used(at, groups.uses[at].astype(np.int64), groups.last_step[at])

    def leave(self, slots: list[int]) -> None:
        """These groups are not ready any more."""
        if self._sampler is not None and slots:
            self._sampler.remove(np.array(slots, dtype=np.int64))

    def update(self, slot: int, score: float) -> None:
        """The group's score changed."""
        if self._sampler is not None:
            self._sampler.update(np.array([slot]), np.array([score]))

    def eligible(self, clock: int) -> int:
        """Groups that may be drawn now."""
        return 0 if self._sampler is None else self._sampler.eligible(clock)

    def draw(self, count: int, clock: int, number: int) -> Draw | None:
        """The ``number``-th draw; None while there are too few."""
        return None if self._sampler is None else self._sampler.draw(count, clock, number)
