"""The Buffer's state. It changes by events alone, so that events read from the journal lead to where they led before.

No clock, no actor, no file: what is decided elsewhere comes in as an event. What each event means is said once, in
`rayrft.buffer.rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter

from rayrft.buffer.book import Book
from rayrft.buffer.groups import Fate, GroupTable
from rayrft.buffer.log.events import Event
from rayrft.buffer.pool import Pool
from rayrft.buffer.replay import ReplaySchedule
from rayrft.buffer.rules import RULES
from rayrft.buffer.samplers import Sampler
from rayrft.buffer.schedule import Schedule
from rayrft.buffer.tasks.sampler import TaskSet
from rayrft.config.buffer import SamplerConfig

_book: TypeAdapter[Book] = TypeAdapter(Book)


class State:
    """``apply`` changes it; everything else looks. The pool follows what is applied."""

    def __init__(self, config: SamplerConfig, seed: int, tasks: TaskSet | None) -> None:
        self.config = config
        self.seed = seed
        self.tasks = tasks
        self.book = Book()
        self.groups = GroupTable()
        self.pool = Pool()
        self.by_sequence: dict[int, int] = {}
        """Slots of the ready groups that the schedule chooses from."""

    def apply(self, event: Event) -> Any:
        """The only way to change the state; gives what the event's rule gives, such as the tickets of an admission."""
        return RULES[type(event)](self, event)

    @property
    def pooled(self) -> bool:
        """Whether the present stage draws from the pool."""
        return not isinstance(self.book.schedule, Schedule)

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now."""
        book = self.book
        if not book.open or book.schedule is None or book.behind:
            return 0
        if isinstance(book.schedule, Schedule):
            return book.schedule.capacity + len(book.returned)
        return book.schedule.capacity(self.eligible) + len(book.returned)

    @property
    def starved(self) -> bool:
        """Whether a step of a stage that replays waits for new groups that nobody is asked for yet."""
        return isinstance(self.book.schedule, ReplaySchedule) and self.book.schedule.starved

    @property
    def eligible(self) -> int:
        """Groups in the pool that the present step may draw."""
        return self.pool.eligible(self.clock)

    @property
    def clock(self) -> int:
        """The step that cooldown and ageing count from."""
        return max(self.book.version, self.book.step)

    @property
    def newest_version(self) -> int:
        """Of the weights that anybody can have sampled under: those of a step that is trained may be published before
        the Buffer is told."""
        book = self.book
        trained = [step + 1 for step, lease in book.leases.items() if lease.acked]
        return max(book.version, book.covered, *trained)

    def expects(self, key: int, sequence: int | None) -> bool:
        """Whether a group would be new: not one that came before and is sent again."""
        awaited = sequence is None or sequence in self.book.outstanding
        return awaited and self.groups.find(key) is None

    def choose(self, step: int) -> list[int] | None:
        """Slots of the groups that the schedule gives a step, or None while it has to wait."""
        assert isinstance(self.book.schedule, Schedule)
        sequences = self.book.schedule.choose(step)
        return None if sequences is None else [self.by_sequence[sequence] for sequence in sequences]

    def check(self, *, recount: bool = False) -> dict[str, Any]:
        """The ledger, after asserting that it closes; with ``recount``, held rows are counted anew for it."""
        return self.book.ledger.check(self.groups.rows_held() if recount else self.groups.held_rows)

    def set_score(self, slot: int, score: float) -> None:
        """Of a group that was not trained yet."""
        untold = self.config.score == "td_error"
        self.groups.score[slot] = max(score, self.book.greatest_error) if untold else score

    def retire(self, slot: int, reason: str) -> None:
        """The group leaves: trained if it ever was, else dropped."""
        rows = int(self.groups.rows[slot])
        if self.groups.uses[slot]:
            self.book.ledger.trained += rows
            self.groups.settle(slot, Fate.TRAINED)
        else:
            self.book.ledger.drop(rows, reason)
            self.groups.settle(slot, Fate.DROPPED)

    def fill_pool(self, build: Callable[[], Sampler]) -> None:
        """Give the pool its sampler: after a journal was read, and when a stage opens."""
        if self.pooled:
            self.pool.fill(build, self.groups, self.clock)

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
            ready = {int(self.groups.sequence[slot]): slot for slot in self.groups.where(Fate.READY).tolist()}
            self.by_sequence = {sequence: slot for sequence, slot in ready.items() if sequence >= 0}
