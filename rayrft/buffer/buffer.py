"""The Buffer actor: admits groups, keeps them, and leases each step its batch.

Every wait is on a condition that a put, a drop or a new version wakes; every wait has a deadline and says what it
waited for. A lease is idempotent by step: asked again, it gives the same rows, until ``ack``.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

from rayrft.buffer.experience import SCHEMA, find_fault, from_batch
from rayrft.buffer.lease import Lease, deal
from rayrft.buffer.schedule import Schedule, Ticket
from rayrft.buffer.store import ExpertStore, GroupReport, Ref, StoredGroup, UsualStore
from rayrft.errors import DataError, RayrftError


@dataclass(frozen=True)
class StagePlan:
    """What a stage asks of the Buffer."""

    groups: int
    expert_rows: int
    demonstrations: str | None
    max_staleness: int
    over_sampling: float
    version: int


class Buffer:
    """Stores ``usual`` (own rows, leased in whole groups) and ``expert`` (demonstrations, by name)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._usual = UsualStore()
        self._expert: dict[str, ExpertStore] = {}
        self._plan: StagePlan | None = None
        self._schedule: Schedule | None = None
        self._first_sequence = 0
        self._leases: dict[int, Lease] = {}
        self._reports: list[GroupReport] = []
        self._changed = asyncio.Condition()

    async def load(self, name: str, refs: list[Ref]) -> int:
        """Take demonstrations (one record batch, inside a list so that it travels by reference) under ``name``.

        Returns the number of rows; raises DataError on the first faulty one.
        """
        batch: pa.RecordBatch = await refs[0]
        _check_schema(batch)
        rows = from_batch(batch)
        for index, row in enumerate(rows):
            if fault := find_fault(row):
                raise DataError(f"row {index} is faulty: {fault}", field=f"demonstrations.{name}")
        tokens = batch.column("token_ids").value_lengths().to_numpy()
        self._expert[name] = ExpertStore(refs[0], tokens, self._seed)
        return len(rows)

    async def open_stage(self, plan: StagePlan) -> None:
        """Begin a stage. Groups left over from the one before are dropped and counted."""
        async with self._changed:
            if plan.expert_rows and plan.demonstrations not in self._expert:
                raise DataError("no such demonstrations were loaded", field="demonstrations", value=plan.demonstrations)
            self._usual.discard(list(self._usual.ready), "stage_ended")
            self._plan = plan
            self._schedule = (
                Schedule(
                    plan.groups,
                    plan.max_staleness,
                    over_sampling=plan.over_sampling,
                    version=plan.version,
                    first_sequence=self._first_sequence,
                )
                if plan.groups
                else None
            )
            self._changed.notify_all()

    async def close_stage(self) -> None:
        """No more groups are admitted; whoever waits for a ticket gets none."""
        async with self._changed:
            if self._schedule is not None:
                # A group of this stage that comes late must not be taken for one of the next.
                self._first_sequence = self._schedule.next_sequence
            self._schedule = None
            self._changed.notify_all()

    async def admit(self, count: int) -> list[Ticket]:
        """Up to ``count`` tickets as soon as there is room; an empty list once the stage is closed.

        The one wait without a deadline: it is idle, not stuck, while the trainer has all it may get, and the trainer's
        own wait is bounded.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._schedule is None or self._schedule.capacity > 0)
            return self._schedule.admit(count) if self._schedule else []

    async def put(
        self, ticket: Ticket, refs: list[Ref], report: GroupReport, dropped: dict[str, int] | None = None
    ) -> None:
        """Take a finished group (one record batch, inside a list so that it travels by reference).

        ``dropped`` counts, by reason, rows of the group that were sampled but are not in the batch. Faulty rows are
        rejected and counted by reason; a group that comes after its deadline or its stage is dropped.
        """
        batch: pa.RecordBatch = await refs[0]
        _check_schema(batch)
        rows = from_batch(batch)
        faults = {index: fault for index, row in enumerate(rows) if (fault := find_fault(row))}
        good = [index for index in range(len(rows)) if index not in faults]
        async with self._changed:
            self._reports.append(report)
            for reason, count in (dropped or {}).items():
                self._usual.drop(count, reason)
            for fault in faults.values():
                self._usual.drop(1, f"rejected: {fault}")
            if not good:
                self._release(ticket)
            elif self._schedule is None or not self._schedule.finish(ticket):
                self._usual.drop(len(good), "late")
            else:
                kept = [rows[index] for index in good]
                ref = refs[0] if len(good) == len(rows) else _store(batch.take(good))
                self._usual.add(
                    StoredGroup(
                        ticket,
                        ref,
                        rows=len(kept),
                        tokens=sum(len(row.token_ids) for row in kept),
                        oldest_version=min(row.oldest_version for row in kept),
                    )
                )
            self._changed.notify_all()

    async def drop(self, ticket: Ticket, dropped: dict[str, int], report: GroupReport) -> None:
        """A whole group was filtered; ``dropped`` counts its rows by reason. Its place goes to another."""
        async with self._changed:
            self._reports.append(report)
            for reason, count in dropped.items():
                self._usual.drop(count, reason)
            self._release(ticket)
            self._changed.notify_all()

    async def fail(self, ticket: Ticket, reason: str) -> None:
        """A task gave no rows at all. Its place goes to another."""
        async with self._changed:
            self._usual.dropped_tasks[reason] += 1
            self._release(ticket)
            self._changed.notify_all()

    async def lease(self, step: int, world_size: int, deadline_s: float) -> Lease:
        """The batch of a step, as shares of whole groups balanced by tokens.

        Raises RayrftError, with what was missing, when the groups do not come within ``deadline_s``.
        """
        if step in self._leases:
            return self._leases[step]
        started = asyncio.get_running_loop().time()
        plan = self._plan
        if plan is None:
            raise RayrftError("no stage is open", field="buffer.lease", value=step)
        groups = await self._take_groups(step, plan, deadline_s) if plan.groups else []
        store = self._expert[plan.demonstrations] if plan.demonstrations else None
        expert = store.draw(plan.expert_rows) if store else []
        version = self._schedule.version if self._schedule else plan.version
        self._leases[step] = Lease(
            step,
            deal(groups, store, expert, world_size),
            usual_rows=sum(group.rows for group in groups),
            expert_rows=len(expert),
            staleness=tuple(version - group.oldest_version for group in groups),
            rollouts=_total(self._reports),
            waited_s=asyncio.get_running_loop().time() - started,
        )
        self._reports.clear()
        return self._leases[step]

    async def ack(self, step: int) -> None:
        """The step is trained."""
        self._leases.pop(step)
        if step in self._usual.leased:
            self._usual.ack(step)

    async def advance(self, version: int) -> None:
        """Weights of this version are published: there is room for new groups."""
        async with self._changed:
            if self._schedule is not None:
                self._usual.discard(self._schedule.advance(version), "stale")
            self._changed.notify_all()

    async def stats(self) -> dict[str, Any]:
        """The ledger of own rows, and how often demonstrations were drawn."""
        expert = {
            name: {"rows": len(store.tokens), "drawn": store.drawn, "epoch": store.epoch}
            for name, store in self._expert.items()
        }
        return {**self._usual.ledger(), "expert": expert}

    async def watch(self) -> None:
        """Never returns: a caller that awaits it learns at once when this actor dies."""
        await asyncio.Event().wait()

    async def _take_groups(self, step: int, plan: StagePlan, deadline_s: float) -> list[StoredGroup]:
        taken: list[list[int]] = []

        def take() -> bool:
            if self._schedule is None:
                return True
            sequences = self._schedule.take(step)
            if sequences is not None:
                taken.append(sequences)
            return sequences is not None

        async with self._changed:
            await self._wait(take, deadline_s, f"{plan.groups} groups for step {step}")
            if not taken:
                raise RayrftError("the stage was closed while a lease waited", field="buffer.lease", value=step)
            return self._usual.lease(step, taken[0])

    async def _wait(self, ready: Callable[[], bool], deadline_s: float, what: str) -> None:
        try:
            await asyncio.wait_for(self._changed.wait_for(ready), deadline_s)
        except TimeoutError:
            schedule = self._schedule
            have = f"{schedule.ready} ready, {schedule.running} running" if schedule else "stage closed"
            raise RayrftError(
                f"waited {deadline_s:g} s for {what}: {have}; dropped so far {dict(self._usual.dropped)}, "
                f"tasks dropped {dict(self._usual.dropped_tasks)}",
                field="buffer.lease",
                remedy="look at why rollouts do not arrive: engines too slow, or every group filtered "
                "(no variance of reward, prompts too long)",
            ) from None

    def _release(self, ticket: Ticket) -> None:
        if self._schedule is not None:
            self._schedule.release(ticket)


def _total(reports: list[GroupReport]) -> GroupReport:
    sums: dict[str, Any] = defaultdict(int)
    for report in reports:
        for each in fields(report):
            sums[each.name] += getattr(report, each.name)
    return GroupReport(**sums) if sums else GroupReport(rows=0)


def _check_schema(batch: pa.RecordBatch) -> None:
    if not batch.schema.equals(SCHEMA):
        raise DataError(
            "rows are not of the experience schema",
            field="schema",
            value=batch.schema.names,
            remedy="use to_batch()",
        )


def _store(batch: pa.RecordBatch) -> Ref:
    import ray

    return ray.put(batch)
