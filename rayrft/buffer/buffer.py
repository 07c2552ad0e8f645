"""The Buffer actor: admits groups, keeps them, and leases every step its batch.

It decides on metadata; rows are passed by reference, and read and written in a thread. All calls are idempotent: a
caller that lost the connection, or whose Buffer died, repeats them. So every call names its subject (a producer and its
request, a group, a ticket, a step's draw, an attempt of the run, a stage), and a call about an outdated subject changes
nothing. Every wait is woken by a change of state, has a deadline, and reports what it waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rayrft.buffer.events import Event, GroupReport
from rayrft.buffer.expert_cursor import DemonstrationKind
from rayrft.buffer.expert_rows import ExpertBlocks, check_kind, demonstration_kind, in_units
from rayrft.buffer.feedback import give_feedback
from rayrft.buffer.groups import GroupStatus, group_key
from rayrft.buffer.ingest import Arrivals, GroupEntry, read_message
from rayrft.buffer.leases import Lease, Leasing
from rayrft.buffer.ledger import Ledger, RowStats
from rayrft.buffer.log.journal import Position
from rayrft.buffer.log.row_log import RowRef
from rayrft.buffer.retention import Retention
from rayrft.buffer.schedule import StagePlan, Ticket
from rayrft.buffer.store import Store
from rayrft.buffer.transitions import admission, contents, leases
from rayrft.buffer.validation import Fault, Limits, find_faults
from rayrft.config.buffer import BufferConfig
from rayrft.data.task_sampler import TaskSet
from rayrft.errors import DataError, StorageError
from rayrft.experience import Task, pack, unpack
from rayrft.files import Room
from rayrft.registry import load_plugins
from rayrft.runtime.handle import Watched
from rayrft.runtime.waits import WaitReport


class Buffer(Watched):
    """Stores ``usual`` rows in whole groups and ``expert`` rows (demonstrations, by name), and the task cursor.

    ``run`` is the id of the run whose log is in ``folder``. ``tasks`` creates the task set; ``limits`` are the model's.
    ``logged`` is the result of `flush` in the checkpoint to resume from. Writes wait ``room_s`` on a full disk.
    ``plugins`` may register samplers and scores.
    """

    def __init__(
        self,
        run: str,
        folder: Path,
        config: BufferConfig,
        seed: int,
        tasks: Callable[[], TaskSet] | None = None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        logged: Sequence[int] = (0, 0),
        room_s: float = 0.0,
        plugins: Sequence[Path] = (),
    ) -> None:
        load_plugins(plugins)
        self.store = Store(run, folder, config, seed, tasks() if tasks else None, Position(*logged))
        self.state = self.store.state
        self._experts = ExpertBlocks(self.store.storage, self.state)
        self._leasing = Leasing(self.store, self._experts)
        self.retention = Retention(self.store)
        self._arrivals = Arrivals(self.store, self.retention, limits)
        Room.limit_s = room_s  # opening the log has not waited

    # Stages and admission.

    async def open_stage(self, plan: StagePlan) -> None:
        """Open a stage. Groups left over from the previous one are dropped and counted.

        If a resumed run opens the stage that was opened last (same name and first version), it continues from its old
        state. A stage that this attempt of the run has opened before is not opened again: the call is a late repeat.
        """
        if plan.name and plan.version == self.state.stage.opened.get(plan.name):
            return await self.store.commit()
        if plan.expert_rows:
            cursor = self.state.contents.experts.get(plan.demonstrations or "")
            if cursor is None and not (plan.grows and plan.groups):
                problem = "no such demonstrations were loaded"
                remedy = "load them first; there are " + (", ".join(sorted(self.state.contents.experts)) or "none")
                raise DataError(problem, remedy, field="demonstrations", value=plan.demonstrations)
            if cursor is not None:
                check_kind(plan.demonstrations or "", cursor.kind, plan.kind)
        bound, rows = self.store.config.max_rows, plan.groups * plan.group_size * (1 + plan.hold_steps)
        if rows > bound:
            problem = f"a step needs {rows} rows, more than the Buffer may hold"
            raise DataError(problem, "raise it, or lower the stage's batch_size", field="buffer.max_rows", value=bound)
        last = self.state.stage.plan
        if last is not None and last.name and (last.name, last.version) == (plan.name, plan.version):
            return await self.store.commit(admission.StageResumed(plan))
        await self.store.commit(admission.StageOpened(plan))

    async def adjust_stage(self, plan: StagePlan) -> None:
        """Continue the open stage with other numbers: steps, ``max_staleness`` and those of the sampler. Groups that
        are too old then are dropped as ``stale``. The plan of another stage changes nothing."""
        last = self.state.stage.plan
        current = last is not None and (last.name, last.version) == (plan.name, plan.version)
        await self.store.commit(*([admission.StageResumed(plan)] if current and self.state.stage.open else []))

    async def flush(self) -> list[int]:
        """Flush acknowledged writes to disk; return the journal position that a resumed run's journal must reach."""
        return [*astuple(await self.store.flush())]

    async def resume(self, step: int, attempt: str) -> tuple[Ledger, int]:
        """Resume the run from a checkpoint of ``step``: outstanding tickets are reissued, and leases from that step on
        are trained again, with the same rows in the same order. Returns the ledger, and the bytes of unfinished writes
        that were truncated from the log.

        ``attempt`` identifies this attempt of the run, which resumes once: a late repeat of the call changes nothing.

        Raises StorageError if the log ends before the checkpoint: it lost its end, or belongs to another run.
        """
        known = self.state.newest_version
        if known < step:
            problem = (
                f"the log ends after {known} steps, before the checkpoint of step {step} that the run resumes from"
            )
            remedy = "restore the log from a backup, or resume from an older checkpoint"
            raise StorageError(problem, remedy, field=str(self.store.storage.folder), value=known)
        gone: list[Event] = [admission.ProducerAbandoned(producer) for producer in self.state.producers("")]
        new = attempt not in self.state.training.attempts
        # The engines have the checkpoint's weights, also if the run was killed before it had recorded that.
        resumed = [*gone, leases.StepsRolledBack(step, attempt), leases.VersionAdvanced(step)]
        await self.store.commit(*(resumed if new else []))
        return self.state.ledger(), self.store.torn_bytes

    async def close_stage(self, name: str | None = None) -> None:
        """Admit no more groups; pending `admit` calls return none. ``name`` restricts it to the stage of that name."""
        plan = self.state.stage.plan
        current = plan is not None and name in (None, plan.name)
        await self.store.commit(*([admission.StageClosed()] if current else []))

    async def abandon(self, producer: str) -> None:
        """Issue the tickets of a producer that has died to the others; its later calls are refused."""
        await self.store.commit(*([] if producer in self.state.meta.gone else [admission.ProducerAbandoned(producer)]))

    async def leased(self, after: int) -> int:
        """Wait until a step later than ``after`` is leased, and return the newest: groups whose tickets have no later
        deadline come too late. Returns ``after`` once the stage is closed; waits without a deadline, like `admit`."""

        def newest() -> int:
            return max(self.state.training.leases, default=after)

        await self.store.wait_for(lambda: newest() > after or not self.state.stage.open)
        return max(newest(), after)

    async def admit(self, producer: str, call: int, count: int, feed: str = "") -> list[Ticket]:
        """Wait for room and return up to ``count`` tickets; none if the stage is closed or the tasks are exhausted.

        ``producer`` identifies one process of a producer, and ``call`` is the increasing number of its request. A
        repeated request gets the same tickets; one that arrives after a later one gets none. ``feed`` is that of an
        explore job; by default tickets are those of the stage. Waits without a deadline: the trainer's wait has one.

        Raises DataError for an abandoned producer: its tickets were reissued.
        """
        state = self.state

        def answered() -> bool:
            return producer in state.meta.gone or state.feeds[feed].calls.get(producer, (-1, []))[0] >= call

        while True:
            await self.store.wait_for(lambda: answered() or state.exhausted(feed) or self.retention.room(feed) > 0)
            if producer in state.meta.gone:
                problem = "the producer was abandoned because it died or its job was resumed"
                raise DataError(problem, "restart it under another name", field="producer", value=producer)
            if answered():
                await self.store.commit()
                number, given = state.feeds[feed].calls[producer]
                return given if number == call else []
            wanted = 0 if state.exhausted(feed) else min(count, self.retention.room(feed))
            event = admission.TicketsIssued(producer, call, wanted, None, feed)
            await self.store.record(replace(event, tasks=[ticket.task for ticket in event.apply(state)]))

    async def add_tasks(self, tasks: list[Task], source: int) -> int:
        """Add tasks to a source of the task set, by index; return how many are new by their id, the others are skipped.
        A stage that has ended because its tasks were exhausted does not continue.

        Raises DataError if there is no such source of tasks, or the sampler needs a difficulty or priority they lack.
        """
        known = self.state.tasks.get("")
        if known is None or not 0 <= source < known.sources:
            remedy = "the sources are those of tasks.sources, counted from 0"
            raise DataError("the run has no such source of tasks", remedy, field="source", value=source)
        new = list({task.id: task for task in tasks if task.id not in known}.values())
        known.check(source, [task.difficulty for task in new], [task.priority for task in new])
        await self.store.commit(*([admission.TasksAdded(new, source)] if new else []))
        return len(new)

    async def added_tasks(self, after: int) -> list[Task]:
        """Return the tasks by which the task set has grown, in order, without the first ``after``."""
        return self.state.meta.added_tasks[after:]

    async def finish(self) -> None:
        """Record that no more groups will be put: a lease that cannot be filled then ends with ``end_of_data``."""
        await self.store.commit(admission.ProducersEnded())

    # Results of a ticket.

    async def put(self, entries: list[GroupEntry], payload: list[Any]) -> list[list[Fault]]:
        """Store groups: one entry per group of the packed message in ``payload`` (or its reference).

        Returns when they are in the log, with the faults of rejected rows by group. Invalid rows are rejected and
        counted by reason, together with their whole group if it has no ticket. A group that was stored before is
        skipped; if it has no ticket and its rows differ, it is rejected and counted. A group after its deadline or its
        stage is dropped. Called by `BufferWriter`.
        """
        return await self._arrivals.put(entries, payload)

    async def park(self, entry: GroupEntry, payload: list[Any]) -> None:
        """Store the calls of a group's unfinished attempts; its ticket will be issued again, before others."""
        await self._arrivals.park(entry, payload)

    async def parked(self, ticket: Ticket) -> pa.Buffer | None:
        """Return the calls from which a parked group is continued, packed; None if there are none."""
        async with self.store.move_lock:
            if (begun := self.state.stage.begun.get(ticket.sequence)) is None:
                return None
            return pack(await self.store.in_row_thread(self.store.rows.read_group, self.store.span(begun)))

    async def drop(self, ticket: Ticket, dropped: dict[str, int], report: GroupReport) -> None:
        """Record that a whole group was filtered, with its rows by reason; its place becomes free."""
        await self.store.commit(contents.GroupDropped(ticket.sequence, dropped, report))

    async def discard(self, call: str, dropped: dict[str, int]) -> None:
        """Record rows, by reason, that were sampled without a ticket and will not be put; once per unique ``call``."""
        await self.store.commit(contents.GroupDropped(None, dropped, GroupReport(), group_key(call)))

    async def fail(self, ticket: Ticket, reason: str) -> None:
        """Record that a task gave no rows at all; its place becomes free."""
        await self.store.commit(contents.TaskFailed(ticket.sequence, reason))

    async def feedback(
        self, experience_id: str, reward: float | None = None, labels: dict[str, str] | None = None
    ) -> None:
        """Change a row before it is trained: its reward, and with it its group's priority, and its labels.

        Raises DataError for an unknown id. If the row was trained already, records the feedback and raises
        FeedbackRefused, whose value is the version that consumed the row.
        """
        await give_feedback(self.store, experience_id, reward, labels or {})

    async def forget(self, ids: list[str], before: float = 0.0) -> tuple[int, int]:
        """Erase the rows of these experience, session or response ids from the log, with the groups that have them. The
        same holds for all sessions that were finished before this time. Held groups are dropped as ``forgotten``.

        Returns the number of erased rows, and of those that can be erased later: a checkpoint must cover their step.
        """
        found = await self.retention.forget(ids, before)
        if found[0]:  # the journal may have late feedback on them
            await self.store.renew()
        return found

    # Leases.

    async def lease(self, step: int, world_size: int, deadline_s: float) -> Lease:
        """Return the batch of a step of whole groups, their rows dealt to ranks balanced by tokens; idempotent by step.

        Raises LeaseEnded, with what was missing, if the groups do not arrive within ``deadline_s`` or cannot arrive.
        """
        return await self._leasing.lease(step, world_size, deadline_s)

    async def ack(self, step: int, value_errors: dict[str, float] | None = None) -> Ledger:
        """Record that the step is trained; return the ledger.

        ``value_errors`` are the critic's errors by group id, which become the groups' scores if the sampler's score is
        ``td_error``.

        Raises DataError if an error is negative or not finite.
        """
        record = self.state.training.leases.get(step)
        if record is None or record.acked:
            await self.store.commit()
            return self.state.ledger()
        await self.store.commit(leases.StepAcked(step, self._leasing.scores(record, value_errors or {})))
        ledger = self.state.ledger()
        await self.retention.release(record.slots)
        return ledger

    async def blame(self, step: int, attempt: str, experience_ids: list[str]) -> None:
        """Record that training of the step failed on one of these rows, in this attempt of the run.

        When the batch is leased again, these rows are in micro-batches of their own. A row blamed in a second attempt
        is removed: a demonstration for good, a row of a group with its group, which is dropped as ``failed_twice``.
        """
        record, groups = self.state.training.leases.get(step), self.state.groups
        if record is None or record.acked:
            return await self.store.commit()
        slots = {slot for name in experience_ids for slot in groups.of_row(name)} & {*record.slots}
        expert = np.array(record.expert, np.int64)
        if record.demonstrations is not None:
            names, _ = await self._experts.names(record.demonstrations, record.extent)
            expert = expert[in_units([names[row] for row in record.expert], record.unit, {*experience_ids})]
        await self.store.commit(leases.RowsBlamed(step, attempt, sorted(slots), np.unique(expert).tolist()))

    async def discard_batch(self, step: int) -> None:
        """Drop the batch of a step that was not trained: its groups count as ``not_finite``, unless an earlier step has
        trained them. The step leases another batch."""
        record = self.state.training.leases.get(step)
        await self.store.commit(*([] if record is None or record.acked else [leases.BatchDiscarded(step)]))

    async def cover(self, step: int) -> None:
        """Record that a checkpoint covers all steps before ``step``: their batches will not be leased again."""
        await self.store.commit(leases.StepsCovered(step))
        await self.retention.trim()

    async def requeue(self, step: int, draw: int) -> None:
        """Return a lease, identified by its step and `Lease.draw`: its groups become ready for another step."""
        record = self.state.training.leases.get(step)
        await self.store.commit(*([leases.LeaseRequeued(step)] if record is not None and record.draw == draw else []))

    async def advance(self, version: int) -> None:
        """Record that weights of this version are published, which admits new groups."""
        await self.store.commit(leases.VersionAdvanced(version))
        await self.retention.trim()

    # Demonstrations and inspection.

    async def load(self, name: str, payload: list[Any]) -> int:
        """Store demonstrations (one packed message, or its reference) under ``name``, replacing previous ones.

        Returns the number of rows; raises DataError on the first invalid one.
        """
        batch, kind = await self._demonstrations(name, payload)
        async with self.store.move_lock:
            extent = await self._experts.write(name, batch)
            await self.store.commit(contents.DemonstrationsLoaded(name, extent, *kind))
            await self.store.flush()
            await self._experts.sweep()
        return batch.num_rows

    async def extend(self, name: str, payload: list[Any]) -> int:
        """Add demonstrations (one packed message, or its reference) to those of this name, which may not exist yet;
        they join when the current epoch of its draws has ended.

        Returns how many are new by their experience ids: others are skipped, with the other side of their pair. Raises
        DataError on the first invalid row, or if the existing ones are of another kind.
        """
        batch, kind = await self._demonstrations(name, payload)
        async with self.store.move_lock:
            known = self.state.contents.experts.get(name)
            if known is not None:
                check_kind(name, kind, known.kind)
            _, there = ([], set()) if known is None else await self._experts.names(name, known.extent)
            batch = batch.take(np.flatnonzero(~in_units(batch.column("experience_id").to_pylist(), kind[0], there)))
            if batch.num_rows:
                extent = await self._experts.append(name, None if known is None else known.extent, batch)
                await self.store.commit(contents.DemonstrationsExtended(name, extent, *kind))
        return batch.num_rows

    async def withdraw(self, name: str, experience_ids: list[str]) -> int:
        """Stop drawing these demonstrations and the other sides of their pairs; existing leases keep them.

        Returns the number of rows that are withdrawn; unknown ids are ignored.
        """
        async with self.store.move_lock:
            if (known := self.state.contents.experts.get(name)) is None:
                return 0
            names, _ = await self._experts.names(name, known.extent)
            rows = np.flatnonzero(in_units(names, known.unit, {*experience_ids})).tolist()
            await self.store.commit(contents.DemonstrationsWithdrawn(name, rows))
        return len(rows)

    async def _demonstrations(self, name: str, payload: list[Any]) -> tuple[pa.RecordBatch, DemonstrationKind]:
        """Return demonstrations and their kind; raise DataError if a row is invalid, or if the stage needs others."""
        batch = unpack(await read_message(payload))
        for row, fault in find_faults(batch, self._arrivals.limits).items():
            remedy = "fix the row and load again; no rows were stored"
            raise DataError(f"row {row} is invalid: {fault}", remedy, field=f"demonstrations.{name}")
        kind, stage = demonstration_kind(batch), self.state.stage
        if stage.plan is not None and stage.open and stage.plan.expert_rows and stage.plan.demonstrations == name:
            check_kind(name, kind, stage.plan.kind)
        return batch, kind

    async def partition(self, store: str) -> list[tuple[RowRef, np.ndarray]]:
        """Return the blocks of a store with the indices of its rows: held usual rows (``usual``), or demonstrations
        (``expert/<name>``). Raises DataError for an unknown store."""
        if store == "usual":
            async with self.store.move_lock:  # rows must not move before their blocks are known
                held = self.state.groups.where(GroupStatus.READY, GroupStatus.LEASED).tolist()
                return await self.store.rows_by_block(held)
        return [await self._experts.whole(store)]

    async def stats(self) -> RowStats:
        """Return the ledger of usual rows, and the draws of demonstrations."""
        return RowStats(self.state.ledger(recount=True), self.state.expert_draws())

    async def waiting(self) -> WaitReport:
        """Report what a lease waits for, and the time without progress."""
        return self._leasing.waits.report()
