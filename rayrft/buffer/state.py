"""The Buffer's state. It changes by events alone, so that events read from the journal lead to where they led before.

No clock, no actor, no file: what is decided elsewhere comes in as an event, and what an event means is said here, once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from rayrft.buffer.book import Book, ExpertCursor, LeaseRecord, Outstanding
from rayrft.buffer.groups import Fate, GroupTable
from rayrft.buffer.log import events as e
from rayrft.buffer.replay import ReplaySchedule
from rayrft.buffer.samplers import Sampler
from rayrft.buffer.schedule import Schedule, Ticket
from rayrft.buffer.tasks.sampler import TaskSet
from rayrft.config.buffer import SamplerConfig
from rayrft.errors import StorageError

_book: TypeAdapter[Book] = TypeAdapter(Book)


class State:
    """``apply`` changes it; everything else looks. ``tasks`` and ``pool`` follow what is applied."""

    def __init__(self, config: SamplerConfig, seed: int, tasks: TaskSet | None) -> None:
        self._config = config
        self._seed = seed
        self.tasks = tasks
        self.book = Book()
        self.groups = GroupTable()
        self.pool: Sampler | None = None
        """Groups that a sampler may draw; None while a journal is read and where the schedule itself chooses."""
        self._by_sequence: dict[int, int] = {}
        """Slots of the ready groups that the schedule chooses from."""

    @property
    def pooled(self) -> bool:
        """Whether the present stage draws from a pool."""
        return not isinstance(self.book.schedule, Schedule)

    @property
    def behind(self) -> bool:
        """Whether the trainer repeats steps that it had taken before: no new groups until it has caught up."""
        return any(not lease.acked and lease.version < self.book.version for lease in self.book.leases.values())

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now."""
        book = self.book
        if not book.open or book.schedule is None or self.behind:
            return 0
        if isinstance(book.schedule, Schedule):
            return book.schedule.capacity + len(book.returned)
        return book.schedule.capacity(self.eligible) + len(book.returned)

    @property
    def eligible(self) -> int:
        """Groups in the pool that the present step may draw."""
        return self.pool.eligible(self.clock) if self.pool is not None else 0

    @property
    def clock(self) -> int:
        """The step that cooldown and ageing count from."""
        return max(self.book.version, self.book.step)

    def apply(self, event: e.Event) -> Any:
        """The only way to change the state; gives what the event's kind gives, such as the tickets of an admission."""
        return getattr(self, f"_{event.event}")(event)

    # Stages and admission.

    def _began(self, event: e.Began) -> None:
        self.book.run, self.book.schema = event.run, event.schema

    def _stage_opened(self, event: e.StageOpened) -> None:
        plan, book = event.plan, self.book
        for slot in self.groups.where(Fate.READY).tolist():
            if self.groups.sequence[slot] >= 0:
                self._retire(slot, "stage_ended")
        book.plan, book.version, book.open, book.ended = plan, plan.version, True, None
        book.returned, book.calls = [], {}
        fresh = math.ceil(plan.groups / self._config.replay_ratio)
        common = {"over_sampling": plan.over_sampling, "version": plan.version, "next_sequence": book.next_sequence}
        if not plan.groups or not plan.scheduled:
            book.schedule = None
        elif self._config.name == "fifo":
            book.schedule = Schedule(plan.groups, plan.max_staleness, **common)  # type: ignore[arg-type]
        else:
            book.schedule = ReplaySchedule(plan.groups, fresh, plan.max_staleness, **common)  # type: ignore[arg-type]
        self._by_sequence = {}

    def _stage_closed(self, event: e.StageClosed) -> None:
        if self.book.schedule is not None:
            # A group of this stage that comes late must not be taken for one of the next.
            self.book.next_sequence = self.book.schedule.next_sequence
        self.book.open = False

    def _admitted(self, event: e.Admitted) -> list[Ticket]:
        book = self.book
        tickets, book.returned = book.returned[: event.count], book.returned[event.count :]
        schedule = book.schedule
        assert schedule is not None  # there is room only with one
        for ticket in schedule.admit(event.count - len(tickets)):
            task = self.tasks.draw() if self.tasks is not None else None
            if self.tasks is not None and task is None:
                schedule.release(ticket.sequence)
                continue
            tickets.append(dataclasses.replace(ticket, task=task))
        for ticket in tickets:
            book.outstanding[ticket.sequence] = Outstanding(ticket, event.producer)
        book.calls[event.producer] = (event.call, tickets)
        if event.tasks and event.tasks != [ticket.task for ticket in tickets]:
            raise StorageError(
                "the tasks drawn then are not those drawn now",
                field="tasks",
                remedy="the task set or its sampler changed since the run began: start it with the tasks it had",
            )
        return tickets

    def _abandoned(self, event: e.Abandoned) -> None:
        gone = [each.ticket for each in self.book.outstanding.values() if each.producer == event.producer]
        schedule = self.book.schedule
        for ticket in gone:
            del self.book.outstanding[ticket.sequence]
            if schedule is not None and ticket.sequence in schedule.running:
                self.book.returned.append(ticket)
        self.book.calls.pop(event.producer, None)

    def _producers_ended(self, event: e.ProducersEnded) -> None:
        self.book.ended = event.reason

    # What comes of a ticket.

    def _stored(self, event: e.Stored) -> None:
        book = self.book
        book.extents.setdefault(event.shard, {})[event.extent.segment] = event.extent
        for group in event.groups:
            if not self.expects(group.key, group.sequence):
                continue
            slot = self.groups.add(group, event.shard, event.extent.segment, book.arrivals)
            book.arrivals += 1
            book.ledger.sampled += group.rows
            ticket = self._report(group.sequence, group.dropped, group.report)
            if ticket is not None and not self._in_time(ticket, group.version):
                self._retire(slot, "late")
            elif ticket is not None and not self.pooled:
                self._by_sequence[ticket.sequence] = slot
            elif self.pool is not None:
                self._add_to_pool([slot])

    def _dropped(self, event: e.Dropped) -> None:
        if event.sequence is not None and event.sequence not in self.book.outstanding:
            return
        self._report(event.sequence, event.dropped, event.report)
        if event.sequence is not None and self.book.schedule is not None:
            self.book.schedule.release(event.sequence)

    def _task_failed(self, event: e.TaskFailed) -> None:
        if self.book.outstanding.pop(event.sequence, None) is not None:
            self.book.ledger.dropped_tasks[event.reason] += 1
            if self.book.schedule is not None:
                self.book.schedule.release(event.sequence)

    def expects(self, key: int, sequence: int | None) -> bool:
        """Whether a group would be new: not one that came before and is sent again."""
        return self.groups.find(key) is None and (sequence is None or sequence in self.book.outstanding)

    def _report(self, sequence: int | None, dropped: dict[str, int], report: e.GroupReport) -> Ticket | None:
        """Count what a producer says of a group; gives the ticket."""
        book = self.book
        for reason, rows in dropped.items():
            book.ledger.sampled += rows
            book.ledger.drop(rows, reason)
        book.reports = book.reports + report
        if sequence is None:
            return None
        ticket = book.outstanding.pop(sequence).ticket
        if self.tasks is not None and ticket.task is not None and report.scored:
            self.tasks.record(ticket.task, report.scored, min(max(report.reward_sum, 0.0), report.scored))
        return ticket

    def _in_time(self, ticket: Ticket, version: int) -> bool:
        book = self.book
        if book.schedule is None or book.plan is None or not book.open:
            return False
        # A token older than the ticket promised makes the group due earlier.
        deadline = min(ticket.deadline, version + book.plan.max_staleness)
        return book.schedule.finish(dataclasses.replace(ticket, deadline=deadline))

    # Leases.

    def _leased(self, event: e.Leased) -> LeaseRecord:
        book, groups = self.book, self.groups
        for slot in event.slots:
            groups.settle(slot, Fate.LEASED)
            groups.pending[slot] += 1
            groups.last_step[slot] = event.step
        if isinstance(book.schedule, Schedule):
            sequences = groups.sequence[event.slots].tolist()
            book.schedule.take(sequences)
            for sequence in sequences:
                del self._by_sequence[sequence]
        else:
            if book.schedule is not None:
                book.schedule.drawn()
            self._leave_pool(event.slots)
        book.draws += 1
        book.step = max(book.step, event.step)
        name = book.plan.demonstrations if book.plan and event.expert else None
        if name is not None:
            book.experts[name].advance(len(event.expert))
        staleness = [book.version - version for version in groups.version[event.slots].tolist()]
        record = LeaseRecord(
            event.step, book.version, event.slots, event.weights, name, event.expert, staleness, book.reports
        )
        book.leases[event.step] = record
        book.reports = e.GroupReport()
        return record

    def _acked(self, event: e.Acked) -> None:
        record, groups = self.book.leases[event.step], self.groups
        if record.acked:
            return
        record.acked = True
        for slot in record.slots:
            groups.pending[slot] -= 1
            groups.uses[slot] += 1
            if groups.pending[slot] == 0:
                if groups.uses[slot] >= self._config.max_uses:
                    self._retire(slot, "")
                else:
                    groups.settle(slot, Fate.READY)
                    self._add_to_pool([slot])

    def _covered(self, event: e.Covered) -> None:
        self.book.leases = {s: lease for s, lease in self.book.leases.items() if s >= event.step or not lease.acked}

    def _requeued(self, event: e.Requeued) -> None:
        record = self.book.leases.pop(event.step)
        if record.acked:
            return
        tickets = []
        for slot in record.slots:
            self.groups.pending[slot] -= 1
            if self.groups.pending[slot]:
                continue
            self.groups.settle(slot, Fate.READY)
            if self.pooled:
                self._add_to_pool([slot])
            else:
                assert self.book.plan is not None
                sequence, version = int(self.groups.sequence[slot]), int(self.groups.version[slot])
                self._by_sequence[sequence] = slot
                tickets.append(Ticket(sequence, version, version + self.book.plan.max_staleness))
        if isinstance(self.book.schedule, Schedule):
            self.book.schedule.give_back(tickets)

    def _rolled_back(self, event: e.RolledBack) -> None:
        for record in self.book.leases.values():
            if record.step < event.step or not record.acked:
                continue
            record.acked = False
            for slot in record.slots:
                if self.groups.fate[slot] == Fate.TRAINED:
                    self.book.ledger.trained -= int(self.groups.rows[slot])
                elif self.groups.fate[slot] == Fate.READY:
                    self._leave_pool([slot])
                self.groups.settle(slot, Fate.LEASED)
                self.groups.pending[slot] += 1
                self.groups.uses[slot] -= 1

    def _advanced(self, event: e.Advanced) -> None:
        book = self.book
        if event.version <= book.version:
            return  # a step that is repeated publishes what was published before
        book.version = event.version
        if isinstance(book.schedule, Schedule):
            for sequence in book.schedule.advance(event.version):
                self._retire(self._by_sequence.pop(sequence), "stale")
        elif book.plan is not None and book.schedule is not None:
            book.schedule.advance(event.version)
            ready = self.groups.where(Fate.READY)
            old = ready[self.groups.version[ready] < event.version - book.plan.max_staleness]
            self._leave_pool(old.tolist())
            for slot in old.tolist():
                self._retire(slot, "stale")

    # Where rows lie.

    def _evicted(self, event: e.Evicted) -> None:
        for slot in event.slots:
            sequence = int(self.groups.sequence[slot])
            if isinstance(self.book.schedule, Schedule):
                self.book.schedule.ready.pop(sequence, None)
                self._by_sequence.pop(sequence, None)
            else:
                self._leave_pool([slot])
            self._retire(slot, event.reason)

    def _moved(self, event: e.Moved) -> None:
        self.book.extents.setdefault(event.shard, {})[event.extent.segment] = event.extent
        row = event.row
        for slot in event.slots:
            self.groups.move(slot, event.shard, event.extent.segment, row)
            row += int(self.groups.rows[slot])
            if event.score is not None:
                self.groups.score[slot] = event.score
                if self.pool is not None:
                    self.pool.update(np.array([slot]), np.array([event.score]))

    def _deleted(self, event: e.Deleted) -> None:
        groups = self.groups
        for segment in event.segments:
            del self.book.extents[event.shard][segment]
        there = (groups.shard == event.shard) & np.isin(groups.segment, event.segments) & (groups.fate != Fate.FREE)
        groups.forget(np.flatnonzero(there))

    def _feedback_noted(self, event: e.FeedbackNoted) -> None:
        self.book.late_feedback.append(event)

    def _loaded(self, event: e.Loaded) -> None:
        self.book.experts[event.name] = ExpertCursor(event.extent, self._seed)

    def _retire(self, slot: int, reason: str) -> None:
        """The group leaves: trained if it ever was, else dropped."""
        rows = int(self.groups.rows[slot])
        if self.groups.uses[slot]:
            self.book.ledger.trained += rows
            self.groups.settle(slot, Fate.TRAINED)
        else:
            self.book.ledger.drop(rows, reason)
            self.groups.settle(slot, Fate.DROPPED)

    # The pool, and snapshots.

    def _add_to_pool(self, slots: list[int]) -> None:
        if self.pool is not None:
            at, groups = np.array(slots, dtype=np.int64), self.groups
            self.pool.add(at, groups.score[at], groups.version[at])
            if groups.uses[at].any():
                self.pool.used(at, groups.uses[at].astype(np.int64), groups.last_step[at])

    def _leave_pool(self, slots: list[int]) -> None:
        if self.pool is not None and slots:
            self.pool.remove(np.array(slots, dtype=np.int64))

    def fill_pool(self, build: Callable[[], Sampler]) -> None:
        """Make the pool anew from the columns: after a journal was read, and when a stage opens."""
        self.pool = build() if self.pooled else None
        if self.pool is not None:
            at, groups = self.groups.where(Fate.READY), self.groups
            uses = groups.uses[at].astype(np.int64)
            self.pool.rebuild(at, groups.score[at], groups.version[at], uses, groups.last_step[at], self.clock)

    def to_snapshot(self) -> pa.Buffer:
        """The whole state as one Arrow file: the group table, and the book in its metadata."""
        self.book.tasks = self.tasks.state() if self.tasks is not None else {}
        table = self.groups.to_table().replace_schema_metadata({"rayrft.book": _book.dump_json(self.book)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue()

    def restore(self, snapshot: pa.Buffer) -> None:
        """Stand where the snapshot was taken."""
        table = pa.ipc.open_file(snapshot).read_all()
        self.book = _book.validate_json(table.schema.metadata[b"rayrft.book"])
        self.groups = GroupTable.from_table(table)
        if self.tasks is not None:
            self.tasks.restore(self.book.tasks)
        if isinstance(self.book.schedule, Schedule):
            ready = self.groups.where(Fate.READY).tolist()
            self._by_sequence = {int(self.groups.sequence[slot]): slot for slot in ready}

    def check(self, *, recount: bool = False) -> dict[str, Any]:
        """The ledger, after asserting that it closes; with ``recount``, held rows are counted anew for it."""
        return self.book.ledger.check(self.groups.rows_held() if recount else self.groups.held_rows)

    def choose(self, step: int) -> list[int] | None:
        """Slots of the groups that the schedule gives a step, or None while it has to wait."""
        assert isinstance(self.book.schedule, Schedule)
        sequences = self.book.schedule.choose(step)
        return None if sequences is None else [self._by_sequence[sequence] for sequence in sequences]
