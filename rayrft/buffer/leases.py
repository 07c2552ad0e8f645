"""Leases: the rows of a step, dealt to the ranks, and who waits for them."""

from __future__ import annotations

import asyncio
import heapq
import time
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rayrft.buffer import events as e
from rayrft.buffer.client import group_key
from rayrft.buffer.events import GroupReport
from rayrft.buffer.expert_rows import ExpertBlocks
from rayrft.buffer.log.shard import Ref
from rayrft.buffer.schedule import ReplaySchedule, Schedule
from rayrft.buffer.scores import check_scores
from rayrft.buffer.state import LeaseRecord
from rayrft.buffer.store import Store
from rayrft.errors import LeaseEnded, RayrftError
from rayrft.waits import Waits


def balance(sizes: list[int], parts: int) -> list[list[int]]:
    """Partition items into ``parts`` lists of nearly equal total size, by the largest differencing method
    (Karmarkar and Karp 1982). Returns the indices of each part; deterministic.

    Where there are at least as many items as parts, no part is empty. Raises ValueError for fewer parts than one.
    """
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}")
    # An entry is a partial partition, its parts sorted from largest to smallest; the two entries of the widest spread
    # are merged, large with small, until one is left.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, size in enumerate(sizes):
        heap.append((-size, index, [(size, [index])] + [(0, []) for _ in range(parts - 1)]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
    result = [sorted(indices) for _, indices in heap[0][2]] if heap else [[] for _ in range(parts)]
    return _fill_empty(result)


def _fill_empty(parts: list[list[int]]) -> list[list[int]]:
    """A part can stay empty beside one huge item: it gets an item of the part that has most."""
    for part in parts:
        if not part:
            donor = max(parts, key=len)
            if len(donor) > 1:
                part.append(donor.pop())
    return parts


@dataclass(frozen=True)
class Part:
    """Rows of one block; ``weights`` are the importance weights of these rows, and ``alone`` says which of them are to
    stand in a micro-batch by themselves, so that it is known which one a step fails on."""

    ref: Ref
    rows: np.ndarray
    weights: np.ndarray
    alone: np.ndarray


@dataclass(frozen=True)
class BatchShare:
    """One rank's part of a batch: the rows of its mini-batches, one after the other; ``rows`` counts those of each."""

    parts: tuple[Part, ...]
    tokens: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Lease:
    """A step's batch, dealt to ranks, and what is known of it before it is trained."""

    step: int
    draw: int
    """By which it is told from another lease of the same step, where that was given back."""
    shares: tuple[BatchShare, ...]
    usual_rows: int
    expert_rows: int
    staleness: tuple[int, ...]
    """Of each group: trainer version less its oldest token version."""
    rollouts: GroupReport
    """Everything that was sampled since the last lease, kept or dropped."""
    waited_s: float


@dataclass(frozen=True)
class Unit:
    """What goes to one rank as a whole: a group, a demonstration, or a preference pair."""

    ref: Ref
    row: int
    rows: int
    tokens: int
    weight: float = 1.0
    alone: bool = False


def deal(units: list[Unit], world_size: int, mini_batches: int = 1) -> tuple[BatchShare, ...]:
    """Shares of nearly equal tokens, each in the order in which the units are given, however these lie in blocks.

    Every ``mini_batches``-th unit belongs to the same mini-batch, and each mini-batch is balanced by itself.
    """
    dealt: list[list[list[Unit]]] = [[] for _ in range(world_size)]
    for number in range(mini_batches):
        some = units[number::mini_batches]
        for rank, items in enumerate(balance([unit.tokens for unit in some], world_size)):
            dealt[rank].append([some[item] for item in items])
    return tuple(_share(each) for each in dealt)


def _share(mini_batches: list[list[Unit]]) -> BatchShare:
    parts = []
    units = [unit for each in mini_batches for unit in each]
    for ref, run in groupby(units, key=lambda unit: unit.ref):
        block = list(run)
        rows = np.concatenate([np.arange(unit.row, unit.row + unit.rows, dtype=np.int32) for unit in block])
        counts = [unit.rows for unit in block]
        weights = np.repeat(np.array([unit.weight for unit in block], np.float32), counts)
        parts.append(Part(ref, rows, weights, np.repeat([unit.alone for unit in block], counts)))
    sizes = tuple(sum(unit.rows for unit in each) for each in mini_batches)
    return BatchShare(tuple(parts), sum(unit.tokens for unit in units), sizes)


_WHY = {
    "deadline": "look at why rollouts do not arrive: engines too slow, or every group filtered (no variance of reward, "
    "prompts too long)",
    "end_of_data": "the tasks or the producers came to their end: raise tasks.epochs, or train fewer steps",
    "producer_died": "start it again; what it had put is kept",
    "stage_closed": "the stage ended while a step waited",
}


class Leasing:
    """Hands out each step's batch, one step at a time, and the same one whenever it is asked for again."""

    def __init__(self, store: Store, experts: ExpertBlocks) -> None:
        self._store = store
        self._experts = experts
        self._lock = asyncio.Lock()
        self.waits = Waits("buffer")

    async def lease(self, step: int, world_size: int, deadline_s: float) -> Lease:
        """See `Buffer.lease`."""
        started = time.monotonic()
        async with self._lock:
            record = self._store.state.meta.leases.get(step)
            if record is None:
                if step < self._store.state.meta.checkpointed_step:
                    raise RayrftError(
                        "the batch of the step is gone, for a checkpoint holds its work",
                        field="buffer.lease",
                        value=step,
                        remedy=f"go on from a checkpoint of step {self._store.state.meta.checkpointed_step} or later",
                    )
                await self._store.commit(await self._next(step, deadline_s))
                record = self._store.state.meta.leases[step]
            else:
                await self._store.commit()
        return await self._deal(record, world_size, time.monotonic() - started)

    def scores(self, record: LeaseRecord, value_errors: dict[str, float]) -> dict[int, float]:
        """New scores of groups of the lease, by slot."""
        if self._store.config.sampler.score != "td_error":
            return {}
        check_scores(np.array(list(value_errors.values())), "the trainer's report")
        found = {self._store.state.groups.find(group_key(group)): error for group, error in value_errors.items()}
        return {slot: found[slot] for slot in record.slots if slot in found}

    async def blame(self, step: int, life: str, experience_ids: list[str]) -> None:
        """See `Buffer.blame`."""
        record = self._store.state.meta.leases.get(step)
        if record is None or record.acked:
            return await self._store.commit()
        keys = {int(self._store.state.groups.key[slot]): slot for slot in record.slots}
        slots = {keys[key] for name in experience_ids for key in map(group_key, _beginnings(name)) if key in keys}
        expert: list[int] = []
        if record.demonstrations is not None:
            names = await self._experts.names(record.demonstrations, record.extent)
            sides = [record.expert[at : at + record.unit] for at in range(0, len(record.expert), record.unit)]
            expert = [row for unit in sides for row in unit if any(names[each] in experience_ids for each in unit)]
        await self._store.commit(e.Blamed(step, life, sorted(slots), sorted(set(expert))))

    async def _next(self, step: int, deadline_s: float) -> e.Leased:
        store, meta = self._store, self._store.state.meta
        if meta.plan is None:
            raise RayrftError(
                "no stage is open", field="buffer.lease", value=step, remedy="open one first: a run does so itself"
            )
        if meta.replaying:
            # Who asks for a step that was never leased has repeated all that were, whatever weights it published.
            await store.commit(e.Advanced(meta.version))
        drawn: list[e.Leased] = []
        seen, loop = self._ready(), asyncio.get_running_loop()

        def ready() -> bool:
            nonlocal seen
            if (now := self._ready()) != seen:  # groups that come and are dropped bring the step no nearer
                self.waits.progressed("groups")
                limit.reschedule(loop.time() + deadline_s)
                seen = now
            if (lease := self._draw(step)) is not None:
                drawn.append(lease)
            return bool(drawn) or self._hopeless() is not None

        try:
            with self.waits.on("groups", lambda: f"step {step}: {self._have()}; {self._lost()}"):
                async with asyncio.timeout(deadline_s) as limit:
                    await store.wait_for(ready)
        except TimeoutError:
            raise self._ended("deadline", step, f"for {deadline_s:g} s none came of") from None
        if not drawn:
            raise self._ended(self._hopeless() or "deadline", step, "no more can come of")
        return drawn[0]

    def _draw(self, step: int) -> e.Leased | None:
        """The batch of the step from what is there, or None where it has to wait."""
        state, meta = self._store.state, self._store.state.meta
        plan = meta.plan
        assert plan is not None  # checked by the caller
        slots: list[int] | None = []
        weights: list[float] = []
        if plan.groups and isinstance(meta.schedule, Schedule):
            slots = state.choose(step)
            weights = [1.0] * len(slots or [])
        elif plan.groups:
            if isinstance(meta.schedule, ReplaySchedule) and not meta.schedule.may_draw(state.eligible):
                return None
            draw = state.pool.draw(plan.groups, max(step, state.clock), meta.draws)
            slots = None if draw is None else draw.slots.tolist()
            weights = [] if draw is None else draw.weights.tolist()
        if slots is None:
            return None
        expert = meta.experts[plan.demonstrations].peek(plan.expert_rows) if plan.demonstrations else []
        return e.Leased(step, slots, weights, expert)

    def _hopeless(self) -> str | None:
        """Why a batch that is not there will not come, where that is certain."""
        meta = self._store.state.meta
        if not meta.open:
            return "stage_closed"
        # What an earlier stage left under way, or came too late, fills no batch.
        awaited = meta.outstanding.keys() & meta.schedule.running.keys() if meta.schedule is not None else ()
        return None if awaited else meta.ended

    def _ended(self, reason: str, step: int, what: str) -> LeaseEnded:
        meta = self._store.state.meta
        assert meta.plan is not None
        return LeaseEnded(
            f"{what} {meta.plan.groups} groups for step {step}: {self._have()}; {self._lost()}",
            field="buffer.lease",
            value=reason,
            remedy=_WHY[reason],
        )

    def _ready(self) -> int:
        """So many groups can be drawn now, or wait for those before them."""
        state = self._store.state
        return len(state.meta.schedule.ready) if isinstance(state.meta.schedule, Schedule) else state.eligible

    def _have(self) -> str:
        """What there is of groups for the next step."""
        meta = self._store.state.meta
        if isinstance(meta.schedule, Schedule):
            return f"{self._ready()} ready, {len(meta.schedule.running)} running"
        return f"{self._ready()} in the pool, {len(meta.outstanding)} running"

    def _lost(self) -> str:
        ledger = self._store.state.meta.ledger
        return f"rows dropped so far {dict(ledger.dropped)}, tasks {dict(ledger.dropped_tasks)}"

    async def _deal(self, record: LeaseRecord, world_size: int, waited_s: float) -> Lease:
        groups = self._store.state.groups
        weights = dict(zip(record.slots, record.weights, strict=True))
        # In order of arrival: then it is the same after a restart, however blocks were cut and groups were moved.
        slots = sorted(record.slots, key=lambda slot: int(groups.order[slot]))
        blocks = await self._store.blocks(slots)
        units = [
            Unit(
                *blocks[slot],
                int(groups.rows[slot]),
                int(groups.tokens[slot]),
                weights[slot],
                alone=slot in record.blamed,
            )
            for slot in slots
        ]
        if record.demonstrations is not None:
            expert = await self._experts.get(record.demonstrations, record.extent)
            for row in record.expert[:: record.unit]:
                tokens = int(expert.tokens[row : row + record.unit].sum())
                units.append(Unit(expert.ref, row, record.unit, tokens, alone=row in record.blamed_expert))
        return Lease(
            record.step,
            record.draw,
            deal(units, world_size, min(record.mini_batches, len(units))),
            usual_rows=int(groups.rows[slots].sum()),
            expert_rows=len(record.expert),
            staleness=tuple(record.staleness),
            rollouts=record.rollouts,
            waited_s=waited_s,
        )


def _beginnings(experience_id: str) -> list[str]:
    """What may be the id of the row's group."""
    parts = experience_id.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
