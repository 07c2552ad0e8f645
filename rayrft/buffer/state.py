"""The Buffer's state. It changes by events alone, so that replaying the journal's events restores it exactly.

It uses no clock, actor or file: decisions made elsewhere arrive as events, which are in `rayrft.buffer.transitions`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from rayrft.buffer.events import Extent, FeedbackNoted, GroupReport, ModelTerms, check_version
from rayrft.buffer.expert_cursor import ExpertCursor
from rayrft.buffer.groups import HELD, GroupStatus, GroupTable
from rayrft.buffer.ledger import ExpertDraws, Ledger
from rayrft.buffer.samplers import eligible
from rayrft.buffer.schedule import AnySchedule, PoolSchedule, StagePlan, Ticket
from rayrft.config.buffer import SamplerConfig
from rayrft.data.task_sampler import TaskSet
from rayrft.errors import StorageError, first_line
from rayrft.experience import Task


@dataclass
class RowCounts:
    """Counts rows from their arrival in the Buffer. A row used several times counts as trained when it leaves."""

    sampled: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_tasks: Counter[str] = field(default_factory=Counter)


@dataclass
class LeaseRecord:
    """A step's batch, kept until a checkpoint covers the step, so that it can be leased again."""

    step: int
    draw: int
    version: int
    slots: list[int]
    weights: list[float]
    demonstrations: str | None
    extent: Extent
    """Extent of the demonstrations at the time of the lease."""
    expert: list[int]
    unit: int
    """Demonstrations per unit: 2 for preference pairs."""
    mini_batches: int
    staleness: list[int]
    rollouts: GroupReport
    acked: bool = False
    blamed: list[int] = field(default_factory=list)
    """Slots of groups on one of which training failed."""
    blamed_expert: list[int] = field(default_factory=list)
    """Demonstrations on one of which training failed."""
    blamed_in: str = ""
    """Attempt of the run that reported it last."""


@dataclass(frozen=True)
class Outstanding:
    """A ticket that a producer holds and has not reported on."""

    ticket: Ticket
    producer: str


@dataclass(frozen=True)
class ParkedTicket:
    """The ticket of a parked group. It may be issued again once there are newer weights than ``version``."""

    ticket: Ticket
    version: int


@dataclass
class Feed:
    """Producers with the same tasks: a run's stages, under the empty id, or an explore job, whose Buffer is of no run.

    No stage closes the tickets of a job: at most ``in_flight`` outstanding ones, for groups of ``group_size`` answers.
    """

    job: str = ""
    in_flight: int = 0
    group_size: int = 1
    calls: dict[str, tuple[int, list[Ticket]]] = field(default_factory=dict)
    """Number and tickets of the last request by producer."""
    reissued: list[Ticket] = field(default_factory=list)
    """Tickets of abandoned producers, to be issued again."""
    ended: bool = False
    """Whether no more groups will arrive: the tasks are exhausted, or the producers have finished."""
    groups: int = 0
    """Groups that were stored, dropped, or gave no rows."""
    report: GroupReport = field(default_factory=GroupReport)
    """Sum over these groups."""
    tasks: dict[str, Any] = field(default_factory=dict)
    """State of its task set; set only in a snapshot."""


@dataclass
class Stage:
    """The stage that was opened last."""

    plan: StagePlan | None = None
    schedule: Annotated[AnySchedule, Field(discriminator="kind")] = field(default_factory=PoolSchedule)
    open: bool = False
    """Whether the stage admits groups."""
    first_sequence: int = 0
    """Of its tickets."""
    parked: dict[int, ParkedTicket] = field(default_factory=dict)
    """Parked groups whose tickets are to be issued again, by sequence number."""
    begun: dict[int, int] = field(default_factory=dict)
    """Slots of the calls of groups that were parked, until the group has ended, by sequence number."""
    opened: dict[str, int] = field(default_factory=dict)
    """First version of the stages that this attempt of the run opened, by name."""


@dataclass
class Training:
    """Steps of the trainer."""

    run: str = ""
    """Id of the run that takes the batches, if the Buffer belongs to none."""
    job: str = ""
    """Its name."""
    version: int = 0
    step: int = 0
    """The latest leased step."""
    replaying: bool = False
    """Whether the trainer repeats earlier steps: no groups are admitted until its weights have caught up."""
    checkpointed_step: int = 0
    """Batches of steps before this one are deleted."""
    leases: dict[int, LeaseRecord] = field(default_factory=dict)
    draws: int = 0
    reports: GroupReport = field(default_factory=GroupReport)
    """Sum since the last lease."""
    greatest_error: float = 0.0
    """Largest value error of a group that the trainer has reported."""
    attempts: set[str] = field(default_factory=set)
    """Attempts of the jobs that have joined or resumed."""


@dataclass
class Contents:
    """Rows in the log."""

    ledger: RowCounts = field(default_factory=RowCounts)
    arrivals: int = 0
    extents: dict[int, Extent] = field(default_factory=dict)
    """By segment."""
    experts: dict[str, ExpertCursor] = field(default_factory=dict)
    rejected_keys: dict[int, int] = field(default_factory=dict)
    """Digests of the latest 10,000 rejected groups without a ticket, by key: their producers may put them again."""
    late_feedback: dict[int, list[FeedbackNoted]] = field(default_factory=dict)
    """By segment."""
    late_feedback_count: int = 0

    @property
    def stores(self) -> list[str]:
        """Names of the stores of rows."""
        return ["usual", *(f"expert/{name}" for name in self.experts)]

    @property
    def log_bytes(self) -> int:
        """Bytes of all segments."""
        return sum(extent.nbytes for extent in self.extents.values())


@dataclass
class Metadata:
    """All state except the groups. ``run`` is the id of the run that the log belongs to, empty for a new log."""

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="constants")  # reported rewards may be NaN or infinite

    run: str = ""
    schema: str = ""
    model: ModelTerms | None = None
    """Known once a job has joined a Buffer that belongs to no run."""
    feeds: dict[str, Feed] = field(default_factory=lambda: {"": Feed()})
    """By id."""
    outstanding: dict[int, Outstanding] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    """Abandoned producers."""
    added_tasks: list[Task] = field(default_factory=list)
    """Tasks by which the task set has grown, in order."""
    stage: Stage = field(default_factory=Stage)
    training: Training = field(default_factory=Training)
    contents: Contents = field(default_factory=Contents)


_metadata: TypeAdapter[Metadata] = TypeAdapter(Metadata)


class State:
    """The Buffer's state, which only events change (`rayrft.buffer.transitions`)."""

    def __init__(self, config: SamplerConfig, seed: int, tasks: TaskSet | None) -> None:
        self._config = config
        self.seed = seed
        self.tasks = {} if tasks is None else {"": tasks}
        """Task sets of the feeds by their ids; a reader of the log has none."""
        self.groups = GroupTable()
        self._adopt(Metadata())

    def _adopt(self, meta: Metadata) -> None:
        self.meta = meta
        self.feeds, self.outstanding = meta.feeds, meta.outstanding
        self.stage, self.training, self.contents = meta.stage, meta.training, meta.contents

    @property
    def config(self) -> SamplerConfig:
        """How groups are drawn."""
        return (self.stage.plan and self.stage.plan.sampler) or self._config

    @property
    def jobs(self) -> dict[str, Feed]:
        """The feeds of explore jobs by their ids."""
        return {id: feed for id, feed in self.feeds.items() if id}

    @property
    def capacity(self) -> int:
        """Number of groups that the open stage may admit now."""
        stage, feed = self.stage, self.feeds[""]
        if not stage.open or self.training.replaying:
            return 0
        room = stage.schedule.capacity(self.eligible)
        return (min(room, len(self.resumable)) if feed.ended else room) + len(feed.reissued)

    @property
    def resumable(self) -> list[ParkedTicket]:
        """Parked groups that may be continued now, the oldest first: under new weights, unless so many are parked that
        none is started, or there is no other."""
        stage = self.stage
        waiting = [stage.parked[sequence] for sequence in sorted(stage.parked)]
        if self.feeds[""].ended or (stage.plan is not None and len(waiting) >= stage.plan.most_parked):
            return waiting
        return [each for each in waiting if each.version < self.training.version]

    def exhausted(self, feed: str) -> bool:
        """Return whether no more tickets will be issued to the producers of a feed."""
        stage, ended = self.stage, self.feeds[feed].ended
        if feed:
            return ended
        parks = stage.plan is not None and stage.plan.parks is not None
        return not stage.open or (
            ended and not stage.parked and not (parks and self.outstanding.keys() & stage.schedule.running.keys())
        )

    def producers(self, feed: str) -> list[str]:
        """Return the producers of a feed that hold tickets or have asked for some."""
        held = {held.producer for held in self.outstanding.values() if held.ticket.feed == feed}
        return sorted(held | self.feeds[feed].calls.keys())

    @property
    def eligible(self) -> int:
        """Number of ready groups that the current step may draw, if its schedule draws from a pool."""
        if not self.stage.schedule.pooled:
            return 0
        return int(np.count_nonzero(eligible(self.groups, self.config, self.clock)))

    @property
    def clock(self) -> int:
        """The current step for cooldown and ageing."""
        return max(self.training.version, self.training.step)

    @property
    def newest_version(self) -> int:
        """Newest version that rows can have been sampled under: weights may be published before `advanced` arrives."""
        training = self.training
        trained = [step + 1 for step, lease in training.leases.items() if lease.acked]
        return max(training.version, training.checkpointed_step, *trained)

    def expects(self, key: int, sequence: int | None) -> bool:
        """Return whether a group is new, not a repeat of one that arrived before."""
        if sequence is None:
            return self.groups.find(key) is None
        return sequence in self.outstanding and self.groups.find(key) == self.stage.begun.get(sequence)

    def in_flight(self, feed: str) -> int:
        """Return the number of groups of a feed that are in flight."""
        return sum(held.ticket.feed == feed for held in self.outstanding.values())

    def ledger(self, *, recount: bool = False) -> Ledger:
        """Return the ledger, with held rows counted again if ``recount``. Raises AssertionError unless it closes."""
        counts, groups = self.contents.ledger, self.groups
        held = groups.trainable(np.isin(groups.status, HELD)) if recount else groups.held_rows
        ledger = Ledger(counts.sampled, counts.trained, dict(counts.dropped), held, dict(counts.dropped_tasks))
        if not ledger.closes:
            raise AssertionError(f"rows are lost or counted twice: {ledger}")
        return ledger

    def expert_draws(self) -> dict[str, ExpertDraws]:
        """Return the draws of demonstrations by name."""
        experts = self.contents.experts.items()
        return {name: ExpertDraws(cursor.extent.rows, cursor.drawn, cursor.epoch) for name, cursor in experts}

    def set_score(self, slot: int, score: float) -> None:
        """Set the score of a group that was not trained yet, for ``td_error`` to at least the largest error so far."""
        unknown = self.config.score == "td_error"
        self.groups.score[slot] = max(score, self.training.greatest_error) if unknown else score

    def retire(self, reason: str, *slots: int) -> None:
        """Remove groups: each counts as trained if it was ever used, else as dropped."""
        for slot in slots:
            rows = self.groups.trainable(slot)
            if self.groups.uses[slot]:
                self.contents.ledger.trained += rows
                self.groups.set_status(slot, GroupStatus.TRAINED)
            else:
                dropped = self.contents.ledger.dropped
                dropped[reason] += rows
                self.groups.reason[slot] = list(dropped).index(reason)
                self.groups.set_status(slot, GroupStatus.DROPPED)

    def discard_calls(self, sequence: int | None) -> None:
        """Remove the calls of a group that was parked: it was continued, or has ended."""
        if sequence is not None and (slot := self.stage.begun.pop(sequence, None)) is not None:
            self.contents.ledger.sampled -= self.groups.trainable(slot)
            self.groups.set_status(slot, GroupStatus.DROPPED)
            self.groups.forget(np.array([slot]))

    def to_snapshot(self) -> pa.Buffer:
        """Serialise the state as an Arrow file: the group table, with the metadata in its schema."""
        for id, tasks in self.tasks.items():
            if id in self.feeds:  # else its job has not joined yet
                self.feeds[id].tasks = tasks.state()
        table = self.groups.to_table().replace_schema_metadata({"rayrft.meta": _metadata.dump_json(self.meta)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue()

    def restore(self, snapshot: pa.Buffer) -> None:
        """Restore the state of a snapshot. Raises StorageError if another version wrote it."""
        table = pa.ipc.open_file(snapshot).read_all()
        try:
            meta = _metadata.validate_json(table.schema.metadata[b"rayrft.meta"])
            check_version(meta.schema, "snapshot")
            self._adopt(meta)
            self.groups = GroupTable.from_table(table)
        except (ValidationError, KeyError) as error:
            problem = f"this version of rayrft cannot read the snapshot: {first_line(error)}"
            raise StorageError(problem, "continue with the version of rayrft that wrote it", field="snapshot") from None
        for id, tasks in self.tasks.items():
            if id in self.feeds:
                tasks.restore(self.feeds[id].tasks)
