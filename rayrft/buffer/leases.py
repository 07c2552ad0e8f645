"""Leases: the batch of a step, split among the ranks, and the wait for its groups."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby

import numpy as np

from rayrft.buffer.events import GroupReport
from rayrft.buffer.expert_rows import ExpertBlocks
from rayrft.buffer.groups import group_key
from rayrft.buffer.ledger import Ledger
from rayrft.buffer.log.row_log import RowRef
from rayrft.buffer.samplers import draw, samplers
from rayrft.buffer.schedule import Draw, StagePlan
from rayrft.buffer.scores import check_scores
from rayrft.buffer.state import LeaseRecord
from rayrft.buffer.store import Store
from rayrft.buffer.transitions.leases import BatchLeased, VersionAdvanced
from rayrft.config.seeds import generator
from rayrft.errors import LeaseEnded, RayrftError
from rayrft.runtime.waits import Waits

_PIECES = 4
"""A share consists of at least so many pieces of groups."""


def balance(
    sizes: Sequence[float], parts: int, *, tokens: Sequence[int] | None = None, room: float = math.inf
) -> list[list[int]]:
    """Partition items into ``parts`` lists of nearly equal total size: every item, largest first, goes to the smallest
    part in which it fits (longest processing time first, Graham 1969). Returns the ascending indices by part, or
    nothing if an item fits into no part; deterministic.

    A part has ``room`` for so many ``tokens`` of its items. No part is empty if there are at least as many items as
    parts. Raises ValueError if ``parts`` < 1.
    """
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}")
    tokens = [0] * len(sizes) if tokens is None else tokens
    heap, left = [(0.0, part) for part in range(parts)], [room] * parts
    result: list[list[int]] = [[] for _ in range(parts)]
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        full = []
        while heap and left[heap[0][1]] < tokens[item]:
            full.append(heapq.heappop(heap))
        if not heap:
            return []
        total, part = heap[0]
        result[part].append(item)
        left[part] -= tokens[item]
        heapq.heapreplace(heap, (total + sizes[item], part))
        for each in full:
            heapq.heappush(heap, each)
    return [sorted(items) for items in result]


@dataclass(frozen=True)
class BlockRows:
    """Rows of one block to train, R in number; arrays of shape ``[R]`` unless stated."""

    ref: RowRef
    rows: np.ndarray
    groups: np.ndarray
    """``[R, 2]``: first row and number of rows of a row's group in the block, which its advantage compares it with;
    0 rows for a demonstration."""
    weights: np.ndarray
    """Importance weights."""
    alone: np.ndarray
    """Rows that get a micro-batch of their own, so that a failing step identifies the row it failed on."""


@dataclass(frozen=True)
class BatchShare:
    """One rank's part of a batch: the rows of its mini-batches, concatenated; ``rows`` counts them by mini-batch."""

    parts: tuple[BlockRows, ...]
    tokens: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Lease:
    """A step's batch, split among the ranks, with its statistics before training."""

    step: int
    draw: int
    """Distinguishes it from a returned lease of the same step."""
    shares: tuple[BatchShare, ...]
    usual_rows: int
    expert_rows: int
    staleness: tuple[int, ...]
    """Trainer version minus oldest token version, by group."""
    rollouts: GroupReport
    """Sum over all rows sampled since the last lease, kept or dropped."""
    waited_s: float
    attention: float = 0.0
    """See `StagePlan`."""
    ledger: Ledger = field(default_factory=Ledger)
    """Of all rows, with those of the batch as held."""

    def for_rank(self, rank: int) -> Lease:
        """Return the lease with the share of this rank only; the others are empty."""
        shares = [BatchShare((), 0, ())] * len(self.shares)
        shares[rank] = self.shares[rank]
        return replace(self, shares=tuple(shares), staleness=())


@dataclass(frozen=True)
class Unit:
    """Rows that must go to the same rank: one row, or a preference pair."""

    ref: RowRef
    row: int
    rows: int
    tokens: int
    weight: float = 1.0
    alone: bool = False
    group: tuple[int, int] = (0, 0)
    """First row and number of rows of its group in the block; no rows for demonstrations."""

    def cost(self, attention: float) -> float:
        """Return the cost of training it, in tokens; see `StagePlan.attention`."""
        return self.tokens + attention * self.tokens**2 / self.rows


def deal(batches: list[list[Unit]], world_size: int, attention: float = 0.0) -> tuple[BatchShare, ...]:
    """Split the units of the mini-batches into shares of nearly equal cost, keeping their order within a share.

    Every mini-batch is balanced separately. The rows of a group stay together as far as that keeps the shares even, for
    a rank computes the prompt of its rows once.
    """
    dealt: list[list[list[Unit]]] = [[] for _ in range(world_size)]
    for units in batches:
        pieces = _pieces(units, world_size, attention)
        parts = balance([sum(unit.cost(attention) for unit in piece) for piece in pieces], world_size)
        for rank, items in enumerate(parts):
            dealt[rank].append([unit for item in items for unit in pieces[item]])
    return tuple(_share(rank) for rank in dealt)


def _pieces(units: list[Unit], world_size: int, attention: float) -> list[list[Unit]]:
    """Cut the groups into pieces of at most 1 / `_PIECES` of a share's cost, or one unit."""
    most = sum(unit.cost(attention) for unit in units) / (world_size * _PIECES)
    pieces: list[list[Unit]] = []
    for (_, group), members in groupby(units, key=lambda unit: (unit.ref, unit.group)):
        cost = most
        for unit in members:
            if cost + unit.cost(attention) > most or not group[1]:
                pieces.append([])
                cost = 0
            pieces[-1].append(unit)
            cost += unit.cost(attention)
    return pieces if len(pieces) >= world_size else [[unit] for unit in units]


def _share(mini_batches: list[list[Unit]]) -> BatchShare:
    parts = []
    units = [unit for mini_batch in mini_batches for unit in mini_batch]
    for ref, run in groupby(units, key=lambda unit: unit.ref):
        block = list(run)
        rows = np.concatenate([np.arange(unit.row, unit.row + unit.rows, dtype=np.int32) for unit in block])
        counts = [unit.rows for unit in block]
        groups = np.repeat(np.array([unit.group for unit in block], np.int32), counts, axis=0)
        weights = np.repeat(np.array([unit.weight for unit in block], np.float32), counts)
        parts.append(BlockRows(ref, rows, groups, weights, np.repeat([unit.alone for unit in block], counts)))
    sizes = tuple(sum(unit.rows for unit in mini_batch) for mini_batch in mini_batches)
    return BatchShare(tuple(parts), sum(unit.tokens for unit in units), sizes)


_REMEDIES = {
    "deadline": "check why rollouts do not arrive: engines too slow, or every group filtered (no reward variance, "
    "prompts too long)",
    "end_of_data": "the tasks are exhausted or the producers have finished: raise tasks.epochs, or train fewer steps",
    "stage_closed": "the stage ended while a step waited",
    "resumed": "the run resumed while a step waited",
}


class Leasing:
    """Leases the batches of steps, one step at a time; a repeated request gets the same batch."""

    def __init__(self, store: Store, experts: ExpertBlocks) -> None:
        self._store = store
        self._experts = experts
        self._lock = asyncio.Lock()
        samplers.get(store.config.sampler.name, "buffer.sampler.name")  # raises for an unknown one
        self.waits = Waits("buffer")

    async def lease(self, step: int, world_size: int, deadline_s: float) -> Lease:
        """Return the batch of a step, once its groups have arrived; see `Buffer.lease`."""
        started = time.monotonic()
        async with self._lock:
            record = self._store.state.training.leases.get(step)
            if record is None:
                if step < self._store.state.training.checkpointed_step:
                    problem = "the batch of the step was deleted, because a checkpoint covers it"
                    remedy = f"resume from a checkpoint of step {self._store.state.training.checkpointed_step} or later"
                    raise RayrftError(problem, remedy, field="buffer.lease", value=step)
                await self._store.commit(await self._next(step, deadline_s))
                record = self._store.state.training.leases[step]
            else:
                await self._store.commit()
        return await self._deal(record, world_size, time.monotonic() - started)

    def scores(self, record: LeaseRecord, value_errors: dict[str, float]) -> dict[int, float]:
        """Return the new scores of the lease's groups by slot."""
        if self._store.config.sampler.score != "td_error":
            return {}
        check_scores(np.array(list(value_errors.values())), "the trainer's report")
        found = {self._store.state.groups.find(group_key(group)): error for group, error in value_errors.items()}
        return {slot: found[slot] for slot in record.slots if slot in found}

    async def _next(self, step: int, deadline_s: float) -> BatchLeased:
        """Wait for the groups of a new step, and draw its batch."""
        store, state = self._store, self._store.state
        if state.stage.plan is None:
            raise RayrftError("no stage is open", "open a stage first, as a run does", field="buffer.lease", value=step)
        if state.training.replaying:
            # A request for a step that was never leased shows that all leased steps have been repeated.
            await store.commit(VersionAdvanced(state.training.version))
        drawn: list[BatchLeased] = []
        seen, loop, attempts = self._ready(), asyncio.get_running_loop(), len(state.training.attempts)

        def end_reason() -> str | None:
            # The Master has died that asked, and its successor repeats steps, for which this one would wait.
            return "resumed" if len(state.training.attempts) > attempts else self._end_reason()

        def ready() -> bool:
            nonlocal seen
            if (now := self._ready()) != seen:  # groups that arrive and are dropped do not count as progress
                self.waits.progressed("groups")
                limit.reschedule(loop.time() + deadline_s)
                seen = now
            if (lease := self._draw(step)) is not None:
                drawn.append(lease)
            return bool(drawn) or end_reason() is not None

        try:
            # A wait without a deadline is not a stall.
            waiting = self.waits.on("groups", lambda: f"step {step}: {self._situation()}")
            with waiting if math.isfinite(deadline_s) else contextlib.nullcontext():
                async with asyncio.timeout(deadline_s) as limit:
                    await store.wait_for(ready)
        except TimeoutError:
            raise self._ended("deadline", step, f"none arrived for {deadline_s:g} s") from None
        if not drawn:
            raise self._ended(end_reason() or "deadline", step, "no more can arrive")
        return drawn[0]

    def _draw(self, step: int) -> BatchLeased | None:
        """Draw the batch of the step from the ready groups; None if it has to wait."""
        stage, experts = self._store.state.stage, self._store.state.contents.experts
        plan = stage.plan
        assert plan is not None  # checked by the caller
        slots, weights = list[int](), list[float]()
        if plan.groups:
            sample = partial(self._sample, plan.groups, step)
            if self._holds(plan) or (drawn := stage.schedule.choose(step, sample)) is None:
                return None
            slots, weights = drawn.slots.tolist(), drawn.weights.tolist()
        elif self._lacks_demonstrations():
            return None
        cursor = experts.get(plan.demonstrations or "")
        return BatchLeased(step, slots, weights, [] if cursor is None else cursor.peek(plan.expert_rows))

    def _holds(self, plan: StagePlan) -> bool:
        """Return whether the step waits for the groups of ``hold_steps`` further steps, while more can become ready."""
        state, stage = self._store.state, self._store.state.stage
        if not plan.hold_steps or self._ready() >= plan.groups * (1 + plan.hold_steps):
            return False
        return bool(stage.schedule.running or stage.parked or state.capacity)

    def _sample(self, count: int, step: int) -> Draw | None:
        """Draw groups from the pool; None if there are too few."""
        state = self._store.state
        rng = generator(state.seed, "batches", state.training.draws)
        return draw(samplers.get(state.config.name), state.groups, state.config, count, max(step, state.clock), rng)

    def _lacks_demonstrations(self) -> bool:
        """Whether the stage trains on demonstrations alone, and none is left that may be drawn."""
        plan, experts = self._store.state.stage.plan, self._store.state.contents.experts
        if plan is None or plan.groups or not plan.expert_rows:
            return False
        return not experts[plan.demonstrations or ""].peek(1)

    def _end_reason(self) -> str | None:
        """Return why no batch can be drawn any more; None if one still can."""
        state, stage = self._store.state, self._store.state.stage
        if not stage.open:
            return "stage_closed"
        if self._lacks_demonstrations():
            return "end_of_data"
        # Outstanding groups of an earlier stage, or too late ones, cannot fill a batch.
        awaited = state.outstanding.keys() & stage.schedule.running.keys()
        fed = any(held.ticket.feed for held in state.outstanding.values())
        jobs = state.jobs.values()
        ended = state.feeds[""].ended or (bool(jobs) and all(feed.ended for feed in jobs))
        return "end_of_data" if ended and not awaited and not stage.parked and not fed else None

    def _ended(self, reason: str, step: int, what: str) -> LeaseEnded:
        """Return the error of a step that gets no batch."""
        plan = self._store.state.stage.plan
        assert plan is not None
        problem, remedy = f"step {step} needs {plan.groups} groups, and {what}: {self._situation()}", _REMEDIES[reason]
        if self._lacks_demonstrations():
            problem = f"each of the demonstrations {plan.demonstrations!r} is withdrawn, or training failed on it"
            remedy = "add others: run.extend"
        return LeaseEnded(problem, remedy, field="buffer.lease", value=reason)

    def _ready(self) -> int:
        """Return the number of groups that are ready."""
        return self._store.state.stage.schedule.ready_count(self._store.state.eligible)

    def _situation(self) -> str:
        """Describe the groups available for the next step, and those that were dropped."""
        stage, ledger = self._store.state.stage, self._store.state.contents.ledger
        parked = f", {len(stage.parked)} parked" if stage.parked else ""
        dropped = f"rows dropped so far {dict(ledger.dropped)}, tasks {dict(ledger.dropped_tasks)}"
        return f"{self._ready()} ready, {len(stage.schedule.running)} running{parked}; {dropped}"

    async def _deal(self, record: LeaseRecord, world_size: int, waited_s: float) -> Lease:
        groups = self._store.state.groups
        weights = dict(zip(record.slots, record.weights, strict=True))
        # In order of their tickets, or else of arrival: the same when the store is reopened, groups are moved, or a
        # synchronous run is repeated, so that sums have the same last bits.
        slots = sorted(record.slots, key=lambda slot: (groups.sequence[slot], groups.order[slot]))
        parts = [
            [
                Unit(ref, first + row, 1, count, weights[slot], slot in record.blamed, (first, len(tokens)))
                for row, count in enumerate(tokens.tolist())
                if count
            ]
            for slot, (ref, first, tokens) in zip(slots, await self._store.blocks(slots), strict=True)
        ]
        usual_rows = sum(map(len, parts))
        if record.demonstrations is not None:
            rows = max(record.expert, default=-1) + 1
            expert = await self._experts.get(record.demonstrations, record.extent, rows)
            for row in record.expert[:: record.unit]:
                tokens = int(expert.tokens[row : row + record.unit].sum())
                parts.append([Unit(expert.ref, row, record.unit, tokens, alone=row in record.blamed_expert)])
        count = min(record.mini_batches, len(parts))
        plan = self._store.state.stage.plan
        attention = 0.0 if plan is None else plan.attention
        return Lease(
            record.step,
            record.draw,
            # Every count-th group or demonstration is in the same mini-batch.
            deal([list(chain.from_iterable(parts[number::count])) for number in range(count)], world_size, attention),
            usual_rows=usual_rows,
            expert_rows=len(record.expert),
            staleness=tuple(record.staleness),
            rollouts=record.rollouts,
            waited_s=waited_s,
            attention=attention,
            ledger=self._store.state.ledger(),
        )
