"""The Buffer's state. It changes by events alone, so that events read from the journal lead to where they led before.

No clock, no actor, no file: what is decided elsewhere comes in as an event. What each event means is said once, in
`rayrft.buffer.transitions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from rayrft.buffer.events import FeedbackNoted, GroupReport
from rayrft.buffer.groups import GroupStatus, GroupTable
from rayrft.buffer.log.segments import Extent
from rayrft.buffer.samplers import Pool, Sampler
from rayrft.buffer.schedule import ReplaySchedule, Schedule, StagePlan, Ticket
from rayrft.config.buffer import SamplerConfig
from rayrft.data.task_sampler import TaskSet
from rayrft.errors import StorageError


@dataclass
class Ledger:
    """Counts rows from the moment they reach the Buffer. A row used several times is trained when it leaves."""

    sampled: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_tasks: Counter[str] = field(default_factory=Counter)
    """Tasks that gave no rows at all, such as those with too long a prompt."""

    def drop(self, rows: int, reason: str) -> None:
        self.dropped[reason] += rows

    def check(self, held: int) -> dict[str, Any]:
        """The counters, after asserting that they close."""
        if self.sampled != self.trained + self.dropped.total() + held:
            raise AssertionError(
                f"rows are lost or doubled: sampled {self.sampled} != trained {self.trained} "
                f"+ dropped {self.dropped.total()} + held {held}"
            )
        return {
            "sampled": self.sampled,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "held": held,
            "dropped_tasks": dict(self.dropped_tasks),
        }


@dataclass
class ExpertCursor:
    """Draws demonstrations without replacement, in an order that is shuffled anew every epoch.

    ``unit`` rows that follow one another are drawn together: 2 for preference pairs.
    """

    extent: Extent
    seed: int
    unit: int = 1
    epoch: int = 0
    cursor: int = 0
    drawn: int = 0
    failed: list[int] = field(default_factory=list)
    """Rows on which training failed twice: they are passed over."""

    def peek(self, count: int) -> list[int]:
        """The next ``count`` row indices (whole units); an epoch that ends goes over into the next."""
        return self._walk(count)[0]

    def advance(self, count: int) -> None:
        """These rows are drawn."""
        self.drawn += count
        if self.failed:
            _, self.epoch, self.cursor = self._walk(count)
        else:
            epochs, self.cursor = divmod(self.cursor + count, self.extent.rows)
            self.epoch += epochs

    def _walk(self, count: int) -> tuple[list[int], int, int]:
        """The next ``count`` rows, and epoch and cursor behind them."""
        rows: list[int] = []
        epoch, cursor = self.epoch, self.cursor
        while len(rows) < count and len(self.failed) < self.extent.rows:
            units = np.random.default_rng([self.seed, epoch]).permutation(self.extent.rows // self.unit)
            order = (units[:, None] * self.unit + np.arange(self.unit)).ravel()[cursor:]
            places = np.flatnonzero(~np.isin(order, self.failed))[: count - len(rows)]
            rows += order[places].tolist()
            taken = int(places[-1]) + 1 if len(rows) == count else len(order)
            epoch, cursor = (epoch, cursor + taken) if taken < len(order) else (epoch + 1, 0)
        return rows, epoch, cursor


@dataclass
class LeaseRecord:
    """A step's batch: kept until a checkpoint covers the step, so that the same batch can be had again."""

    step: int
    draw: int
    version: int
    slots: list[int]
    weights: list[float]
    demonstrations: str | None
    extent: Extent
    """Of the demonstrations as they were."""
    expert: list[int]
    unit: int
    """Demonstrations that belong together."""
    mini_batches: int
    staleness: list[int]
    rollouts: GroupReport
    acked: bool = False
    blamed: list[int] = field(default_factory=list)
    """Slots of groups on one of which training failed, and"""
    blamed_expert: list[int] = field(default_factory=list)
    """rows of demonstrations; since"""
    blamed_in: str = ""
    """this life of the run."""


@dataclass(frozen=True)
class Outstanding:
    """A ticket that a producer has and has not reported on."""

    ticket: Ticket
    producer: str


@dataclass
class Metadata:
    """Everything but the groups. ``run`` is the run that the log belongs to, empty before it began."""

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="constants")  # rewards that were reported may be anything

    run: str = ""
    schema: str = ""
    version: int = 0
    step: int = 0
    """The latest that was leased."""
    plan: StagePlan | None = None
    schedule: Annotated[Schedule | ReplaySchedule, Field(discriminator="kind")] | None = None
    replaying: bool = False
    """Whether the trainer repeats steps that it had taken before: no new groups until its weights have caught up."""
    checkpointed_step: int = 0
    """Batches of steps before this one are not kept."""
    open: bool = False
    """Whether the stage takes groups."""
    ended: str | None = None
    """Why no more groups will come."""
    ledger: Ledger = field(default_factory=Ledger)
    leases: dict[int, LeaseRecord] = field(default_factory=dict)
    outstanding: dict[int, Outstanding] = field(default_factory=dict)
    reissued_tickets: list[Ticket] = field(default_factory=list)
    """Tickets of a producer that is gone."""
    calls: dict[str, tuple[int, list[Ticket]]] = field(default_factory=dict)
    """The last request for tickets of each producer, and what it got."""
    gone: set[str] = field(default_factory=set)
    """Producers that were given up."""
    lives: set[str] = field(default_factory=set)
    """Lives of the trainer and of the run that began with a rollback."""
    opened: dict[str, int] = field(default_factory=dict)
    """Stages that this life of the run opened, by name, with their first version."""
    next_sequence: int = 0
    rejected_keys: dict[int, int] = field(default_factory=dict)
    """Groups that came without a ticket and were refused: digests of what came last, by key."""
    experts: dict[str, ExpertCursor] = field(default_factory=dict)
    extents: dict[int, dict[int, Extent]] = field(default_factory=dict)
    """By shard and segment."""
    greatest_error: float = 0.0
    """Of the errors that the trainer reported of groups."""
    reports: GroupReport = field(default_factory=GroupReport)
    """Sum since the last lease."""
    arrivals: int = 0
    draws: int = 0
    late_feedback: list[FeedbackNoted] = field(default_factory=list)
    tasks: dict[str, Any] = field(default_factory=dict)
    """State of the task set; filled in for a snapshot."""


_metadata: TypeAdapter[Metadata] = TypeAdapter(Metadata)


class State:
    """`rayrft.buffer.transitions.apply` changes it; everything else looks. The pool follows what is applied."""

    def __init__(self, config: SamplerConfig, seed: int, tasks: TaskSet | None) -> None:
        self.config = config
        self.seed = seed
        self.tasks = tasks
        self.meta = Metadata()
        self.groups = GroupTable()
        self.pool = Pool()
        self.by_sequence: dict[int, int] = {}
        """Slots of the ready groups that the schedule chooses from."""

    @property
    def pooled(self) -> bool:
        """Whether the present stage draws from the pool."""
        return not isinstance(self.meta.schedule, Schedule)

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now."""
        meta = self.meta
        if not meta.open or meta.schedule is None or meta.replaying:
            return 0
        if isinstance(meta.schedule, Schedule):
            return meta.schedule.capacity + len(meta.reissued_tickets)
        return meta.schedule.capacity(self.eligible) + len(meta.reissued_tickets)

    @property
    def needs_admission(self) -> bool:
        """Whether a step of a stage that replays waits for new groups that nobody is asked for yet."""
        return isinstance(self.meta.schedule, ReplaySchedule) and self.meta.schedule.needs_admission

    @property
    def eligible(self) -> int:
        """Groups in the pool that the present step may draw."""
        return self.pool.eligible(self.clock)

    @property
    def clock(self) -> int:
        """The step that cooldown and ageing count from."""
        return max(self.meta.version, self.meta.step)

    @property
    def newest_version(self) -> int:
        """Of the weights that anybody can have sampled under: those of a step that is trained may be published before
        the Buffer is told."""
        meta = self.meta
        trained = [step + 1 for step, lease in meta.leases.items() if lease.acked]
        return max(meta.version, meta.checkpointed_step, *trained)

    def expects(self, key: int, sequence: int | None) -> bool:
        """Whether a group would be new: not one that came before and is sent again."""
        awaited = sequence is None or sequence in self.meta.outstanding
        return awaited and self.groups.find(key) is None

    def choose(self, step: int) -> list[int] | None:
        """Slots of the groups that the schedule gives a step, or None while it has to wait."""
        assert isinstance(self.meta.schedule, Schedule)
        sequences = self.meta.schedule.choose(step)
        return None if sequences is None else [self.by_sequence[sequence] for sequence in sequences]

    def check(self, *, recount: bool = False) -> dict[str, Any]:
        """The ledger, after asserting that it closes; with ``recount``, held rows are counted anew for it."""
        return self.meta.ledger.check(self.groups.rows_held() if recount else self.groups.held_rows)

    def set_score(self, slot: int, score: float) -> None:
        """Of a group that was not trained yet."""
        untold = self.config.score == "td_error"
        self.groups.score[slot] = max(score, self.meta.greatest_error) if untold else score

    def retire(self, slot: int, reason: str) -> None:
        """The group leaves: trained if it ever was, else dropped."""
        rows = int(self.groups.rows[slot])
        if self.groups.uses[slot]:
            self.meta.ledger.trained += rows
            self.groups.set_status(slot, GroupStatus.TRAINED)
        else:
            self.meta.ledger.drop(rows, reason)
            self.groups.set_status(slot, GroupStatus.DROPPED)

    def fill_pool(self, build: Callable[[], Sampler]) -> None:
        """Give the pool its sampler: after a journal was read, and when a stage opens."""
        if self.pooled:
            self.pool.fill(build, self.groups, self.clock)

    def to_snapshot(self) -> pa.Buffer:
        """The whole state as one Arrow file: the group table, and the book in its metadata."""
        self.meta.tasks = self.tasks.state() if self.tasks is not None else {}
        table = self.groups.to_table().replace_schema_metadata({"rayrft.meta": _metadata.dump_json(self.meta)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue()

    def restore(self, snapshot: pa.Buffer) -> None:
        """Stand where the snapshot was taken."""
        table = pa.ipc.open_file(snapshot).read_all()
        try:
            self.meta = _metadata.validate_json(table.schema.metadata[b"rayrft.meta"])
            self.groups = GroupTable.from_table(table)
        except (ValidationError, KeyError) as error:
            raise StorageError(
                f"this rayrft does not know what the snapshot says: {str(error).splitlines()[0]}",
                field="snapshot",
                remedy="go on with the rayrft that wrote it",
            ) from None
        if self.tasks is not None:
            self.tasks.restore(self.meta.tasks)
        if isinstance(self.meta.schedule, Schedule):
            ready = {int(self.groups.sequence[slot]): slot for slot in self.groups.where(GroupStatus.READY).tolist()}
            self.by_sequence = {sequence: slot for sequence, slot in ready.items() if sequence >= 0}


Rule = Callable[[State, Any], Any]
RULES: dict[type, Rule] = {}
"""What an event does to the state, by its type."""


def rule(kind: type) -> Callable[[Rule], Rule]:
    """Decorator: this is what events of that type do."""

    def add(function: Rule) -> Rule:
        RULES[kind] = function
        return function

    return add
