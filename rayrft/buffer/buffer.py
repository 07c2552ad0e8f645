"""The Buffer actor: admits groups, keeps them, and leases each step its batch.

It decides on metadata; rows travel by reference and lie in shards. Every call may be executed twice, and late: a caller
that lost the connection, or whose Buffer died, calls again without knowing what became of the first time. So each call
names what it is about (a producer's life and request, a group, a ticket, a step's draw, a life of the trainer or of the
run, a stage), and one that is about something past changes nothing. Every wait is woken by a change of state, has a
deadline, and says what it waited for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from rayrft.buffer import events as e
from rayrft.buffer.client import Entry, Receipt
from rayrft.buffer.expert_rows import ExpertBlocks, are_pairs, check_pairs
from rayrft.buffer.feedback import Feedback
from rayrft.buffer.groups import GroupStatus
from rayrft.buffer.ingest import Arrivals, Producers
from rayrft.buffer.leases import Lease, Leasing
from rayrft.buffer.log.journal import Position
from rayrft.buffer.log.shard import Ref
from rayrft.buffer.retention import Retention
from rayrft.buffer.schedule import StagePlan, Ticket
from rayrft.buffer.store import Store
from rayrft.buffer.transitions import apply
from rayrft.buffer.validation import Limits, find_faults
from rayrft.config.buffer import BufferConfig
from rayrft.data.task_sampler import TaskSet
from rayrft.errors import DataError, StorageError
from rayrft.experience import unpack
from rayrft.waits import WaitReport


class Buffer:
    """Stores ``usual`` (own rows, in whole groups) and ``expert`` (demonstrations, by name), and the task cursor.

    ``run`` names the run whose log is at ``location``; ``tasks`` makes the task set; ``others`` are the actors of the
    shards besides the first; ``limits`` are those of the run's model; ``logged`` is what `flush` gave for the
    checkpoint that the run goes on from.
    """

    def __init__(
        self,
        run: str,
        location: str,
        config: BufferConfig,
        seed: int,
        tasks: Callable[[], TaskSet] | None = None,
        others: list[Any] | None = None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        logged: Sequence[int] = (0, 0),
    ) -> None:
        self._store = Store(run, location, config, seed, tasks() if tasks else None, others or [], Position(*logged))
        self._state = self._store.state
        self._experts = ExpertBlocks(self._store.storage, self._state.meta)
        self._leasing = Leasing(self._store, self._experts)
        self._retention = Retention(self._store)
        self._feedback = Feedback(self._store)
        self._limits = limits
        self._arrivals = Arrivals(self._store, self._retention, limits)
        self._producers = Producers(self._store)

    # Stages and admission.

    async def open_stage(self, plan: StagePlan) -> None:
        """Begin a stage. Groups left over from the one before are dropped and counted.

        The stage that was opened last, by name and first version, goes on where it stood when a resumed run opens it.
        One that this life of the run opened before is not opened again: the call is a late repeat.
        """
        if plan.name and plan.version == self._state.meta.opened.get(plan.name):
            return await self._store.commit()
        if plan.expert_rows:
            if plan.demonstrations not in self._state.meta.experts:
                raise DataError(
                    "no such demonstrations were loaded",
                    field="demonstrations",
                    value=plan.demonstrations,
                    remedy="load them first; there are " + (", ".join(sorted(self._state.meta.experts)) or "none"),
                )
            check_pairs(plan.demonstrations, self._state.meta.experts[plan.demonstrations].unit, plan.pairs)
        bound = self._store.config.max_rows
        if plan.groups * plan.group_size > bound:
            raise DataError(
                f"a step takes {plan.groups * plan.group_size} rows and the Buffer may hold fewer",
                field="buffer.max_rows",
                value=bound,
                remedy="raise it, or lower the stage's batch_size",
            )
        last = self._state.meta.plan
        if last is not None and last.name and (last.name, last.version) == (plan.name, plan.version):
            return await self._store.commit(e.StageResumed(plan))
        self._state.pool.close()
        await self._store.commit(e.StageOpened(plan))
        self._state.fill_pool(self._store.new_pool)

    async def flush(self) -> list[int]:
        """Returns when all that was acknowledged is on the disk, with how far the journal must reach from now on: a
        checkpoint keeps that, for its steps cannot be gone on from without."""
        position = await self._store.flush()
        return [position.number, position.nbytes]

    async def resume(self, step: int, life: str) -> int:
        """Resume the run from a checkpoint of ``step``: what producers had under way goes to others, and leases from
        there on are to be trained again, with the same rows in the same order. Gives the bytes of writes that a crash
        had left unfinished in the log, which were cut off.

        ``life`` names this life of the run, which is resumed once: a late repeat of the call changes nothing.

        Raises StorageError when the log knows less than the checkpoint: it lost its end, or is another one.
        """
        meta, known = self._state.meta, self._state.newest_version
        if known < step:
            raise StorageError(
                f"the log ends after {known} steps, and the run goes on from a checkpoint of step {step}",
                field=self._store.storage.location,
                value=known,
                remedy="restore the log from a copy, or go on from an older checkpoint",
            )
        gone = sorted({each.producer for each in meta.outstanding.values()} | set(meta.calls))
        events: list[e.Event] = [
            *(e.Abandoned(producer) for producer in gone),
            e.RolledBack(step, life, whole_run=True),
        ]
        await self._store.commit(*([] if life in meta.lives else events))
        torn: int = (await self._store.sizes())["torn_bytes"]
        return torn

    async def close_stage(self, name: str | None = None) -> None:
        """Admit no more groups: whoever waits for a ticket gets none. With a name, no other stage than that."""
        plan = self._state.meta.plan
        here = plan is not None and name in (None, plan.name)
        await self._store.commit(*([e.StageClosed()] if here else []))

    async def closed(self) -> None:
        """Returns when the stage is closed."""
        await self._store.wait_for(lambda: not self._state.meta.open)

    async def leased(self, after: int) -> int:
        """Return the newest step that was leased, once it is later than ``after``: groups whose tickets' deadline is no
        later come too late. Waits without a deadline, as `admit` does."""
        newest = after

        def later() -> bool:
            nonlocal newest
            newest = max(self._state.meta.leases, default=after)
            return newest > after

        await self._store.wait_for(later)
        return newest

    async def admit(self, producer: str, call: int, count: int) -> list[Ticket]:
        """Up to ``count`` tickets as soon as there is room; an empty list when the stage is closed or the tasks end.

        ``producer`` names one life of a producer, and ``call`` numbers its requests, upwards. A request that is made
        again gets what it got before; one that arrives after a later one gets nothing: nobody waits for its answer, and
        its tickets would be lost. The one wait without a deadline: it is idle, not stuck, while the trainer has all it
        may get, and the trainer's own wait is bounded.

        Raises DataError for a producer that was given up: its tickets went to others.
        """
        meta = self._state.meta

        def answered() -> bool:
            return producer in meta.gone or (producer in meta.calls and meta.calls[producer][0] >= call)

        await self._store.wait_for(lambda: answered() or not meta.open or bool(meta.ended) or self._may_admit())
        if producer in meta.gone:
            raise DataError(
                "the producer was given up, for it died or the run was resumed",
                field="producer",
                value=producer,
                remedy="one that begins again takes another name",
            )
        if answered():
            number, given = meta.calls[producer]
            tickets = given if number == call else []
            await self._store.commit()
        else:
            wanted = min(count, self._state.capacity) if meta.open and not meta.ended else 0
            event = e.Admitted(producer, call, wanted, [])
            tickets = apply(self._state, event)
            await self._store.record(replace(event, tasks=[ticket.task for ticket in tickets]))
        return tickets

    async def attach(self, producer: str, actor: list[Any]) -> None:
        """Watch a producer (its handle, in a list). When it dies its tickets go to others; when it was the last one, a
        lease that cannot be filled ends with ``producer_died``. A Buffer that was started again knows of none."""
        self._producers.attach(producer, actor[0])

    async def detach(self, producer: str) -> None:
        """The producer is done. After the last one, a lease that cannot be filled ends with ``end_of_data``."""
        await self._producers.detach(producer)

    # What comes of a ticket.

    async def put(self, entries: list[Entry], payload: list[Any]) -> list[Receipt]:
        """Take groups: one entry for each group of the one packed message in ``payload`` (or its reference).

        Returns when they are in the log, and says what is not and why. Faulty rows are rejected and counted by reason,
        and a group that came without a ticket with them. A group that was taken before is passed over; where it comes
        without a ticket and with other rows than then, it is refused and counted. One that comes after its deadline or
        its stage is dropped. `BufferWriter` makes this call.
        """
        return await self._arrivals.put(entries, payload)

    async def drop(self, ticket: Ticket, dropped: dict[str, int], report: e.GroupReport) -> None:
        """A whole group was filtered; ``dropped`` counts its rows by reason. Its place goes to another."""
        await self._store.commit(e.Dropped(ticket.sequence, dropped, report))

    async def fail(self, ticket: Ticket, reason: str) -> None:
        """A task gave no rows at all. Its place goes to another."""
        await self._store.commit(e.TaskFailed(ticket.sequence, reason))

    async def feedback(
        self, experience_id: str, reward: float | None = None, labels: dict[str, str] | None = None
    ) -> None:
        """Change a row before it is trained: its reward, with its group's advantages and priority, and its labels.

        Raises DataError for an unknown id, and FeedbackRefused, after recording it, when the row was trained already:
        the error's value is the version that consumed it.
        """
        await self._feedback.give(experience_id, reward, labels or {})

    # Leases.

    async def lease(self, step: int, world_size: int, deadline_s: float) -> Lease:
        """The batch of a step, as shares of whole groups balanced by tokens; the same whenever it is asked for again.

        Raises LeaseEnded, with what was missing, when the groups do not come within ``deadline_s`` or cannot come.
        """
        return await self._leasing.lease(step, world_size, deadline_s)

    async def ack(self, step: int, value_errors: dict[str, float] | None = None) -> None:
        """The step is trained. ``value_errors``: how far a critic missed its groups, by their ids, which becomes their
        score where ``td_error`` is what they are drawn by.

        Raises DataError where such an error is negative or not finite.
        """
        record = self._state.meta.leases.get(step)
        if record is None or record.acked:
            return await self._store.commit()
        await self._store.commit(e.Acked(step, self._leasing.scores(record, value_errors or {})))
        self._state.check()
        await self._retention.release(record.slots)

    async def blame(self, step: int, life: str, experience_ids: list[str]) -> None:
        """Note that training of the step failed on one of these rows, in the life of the run of that name.

        When the batch is asked for again, they stand by themselves. One that is blamed in a second life leaves it: a
        demonstration for good, and a row of a group with its group, which is counted as dropped for ``failed_twice``.
        """
        await self._leasing.blame(step, life, experience_ids)

    async def cover(self, step: int) -> None:
        """A checkpoint holds the work of all steps before ``step``: their batches will not be asked for again."""
        await self._store.commit(e.Covered(step))
        await self._retention.trim()

    async def requeue(self, step: int, draw: int) -> None:
        """Give a lease back, by its step and its `Lease.draw`: its groups wait for another step."""
        record = self._state.meta.leases.get(step)
        await self._store.commit(*([e.Requeued(step)] if record is not None and record.draw == draw else []))

    async def rollback(self, step: int, life: str) -> None:
        """Start the trainer again at ``step``: leases from there on are to be trained again, with the same rows.

        ``life`` names the trainer's new life: a late repeat of the call changes nothing.
        """
        await self._store.commit(*([] if life in self._state.meta.lives else [e.RolledBack(step, life)]))

    async def advance(self, version: int) -> None:
        """Weights of this version are published: there is room for new groups."""
        await self._store.commit(e.Advanced(version))
        if self._store.log_bytes > self._store.config.log_bytes:
            await self._retention.trim()

    # Other rows, and looking.

    async def load(self, name: str, payload: list[Any]) -> int:
        """Take demonstrations (one packed message, or its reference) under ``name``, in place of what was there.

        Returns the number of rows; raises DataError on the first faulty one.
        """
        batch = unpack(payload[0] if isinstance(payload[0], pa.Buffer) else await payload[0])
        for row, fault in find_faults(batch, self._limits).items():
            raise DataError(
                f"row {row} is faulty: {fault}",
                field=f"demonstrations.{name}",
                remedy="mend the row; nothing of the load was taken",
            )
        unit, plan = 2 if are_pairs(batch) else 1, self._state.meta.plan
        if plan is not None and self._state.meta.open and plan.expert_rows and plan.demonstrations == name:
            check_pairs(name, unit, plan.pairs)
        async with self._store.moving:
            extent = await self._experts.write(name, batch)
            await self._store.commit(e.Loaded(name, extent, unit))
            await self._store.flush()
            await self._experts.sweep()
        return batch.num_rows

    async def partition(self, store: str) -> list[tuple[Ref, np.ndarray]]:
        """Blocks with the rows that count: of held own rows (``usual``), or of demonstrations (``expert/<name>``).

        Raises DataError for a store that there is not.
        """
        if store == "usual":
            async with self._store.moving:  # from the look at where rows lie to their blocks
                return await self._store.rows_by_block(
                    self._state.groups.where(GroupStatus.READY, GroupStatus.LEASED).tolist()
                )
        return [await self._experts.whole(store)]

    async def stats(self) -> dict[str, Any]:
        """The ledger of own rows, how often demonstrations were drawn, and what memory and disk hold."""
        meta = self._state.meta
        return {
            **self._state.check(recount=True),
            "expert": {
                name: {"rows": each.extent.rows, "drawn": each.drawn, "epoch": each.epoch}
                for name, each in meta.experts.items()
            },
            "tasks_drawn": self._state.tasks.position if self._state.tasks is not None else None,
            "late_feedback": len(meta.late_feedback),
            **await self._store.sizes(),
        }

    async def waiting(self) -> WaitReport:
        """What a lease waits for, and for how long nothing changed."""
        return self._leasing.waits.report()

    async def pid(self) -> int:
        """Process id of the actor."""
        return os.getpid()

    async def watch(self) -> None:
        """Never returns: a caller that awaits it learns at once when this actor dies."""
        await asyncio.Event().wait()

    def _may_admit(self) -> bool:
        # A step that waits for new groups makes room once it has them.
        full = self._store.config.when_full == "wait" and self._retention.full and not self._state.needs_admission
        return self._state.capacity > 0 and not full
