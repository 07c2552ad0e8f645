"""Read-only access to a Buffer's log; nothing is locked, truncated or written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rayrft.buffer.events import FeedbackNoted
from rayrft.buffer.expert_rows import expert_file
from rayrft.buffer.groups import GroupStatus, GroupTable, unknown_row
from rayrft.buffer.ledger import ArchiveStats
from rayrft.buffer.log.journal import EventJournal, Position, Recovery
from rayrft.buffer.log.segments import read_log_rows, segment_name, segment_sizes
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.state import State
from rayrft.config import FolderConfig, load_folder_config
from rayrft.config.buffer import SamplerConfig
from rayrft.data.selection import Selection
from rayrft.data.task_sampler import TaskSet
from rayrft.errors import DataError, StorageError
from rayrft.experience import SCHEMA, Experience, Task, from_batch

_ATTEMPTS = 5


class StateReader:
    """Reads a log's state, with its run's ``sampler``, ``seed`` and initial ``tasks``, which get the run's statistics;
    again and again, each time only the events since."""

    def __init__(self, storage: Storage, sampler: SamplerConfig, seed: int, tasks: TaskSet | None = None) -> None:
        self._storage, self._new = storage, partial(State, sampler, seed, tasks)
        self._state = self._new()
        self._position = Position()
        """End of the events that the state has."""
        self.torn_bytes = 0
        """Uncommitted bytes in the log's files when it was read: from a crash, or of a live Buffer."""

    def read(self) -> State:
        """Return the state as it is now, which the next call changes.

        Raises StorageError if there is no log, it has another schema version, or its journal is damaged.
        """
        try:
            recovered, position = _read_journal(self._storage, self._position)
        except StorageError:  # the log of a new run may be in its place
            recovered, position = _read_journal(self._storage, Position())
        if not recovered.start:
            self._state = self._new()
            if recovered.snapshot is not None:
                self._state.restore(recovered.snapshot)
        state, self._position = self._state, Position()  # read from the start again if an event cannot be applied
        for event in recovered.events:
            event.apply(state)
        self._position = position
        if not state.meta.run:
            problem, remedy = "no Buffer has written here", "give the folder of a started run"
            raise StorageError(problem, remedy, field=str(self._storage.folder))
        committed = {number: extent.nbytes for number, extent in state.contents.extents.items()}
        torn = sum(max(0, size - committed.get(number, 0)) for number, size in segment_sizes(self._storage).items())
        self.torn_bytes = recovered.torn_bytes + torn
        return state


def _read_journal(storage: Storage, after: Position) -> tuple[Recovery, Position]:
    """Read the journal, and return the end of its events, too; retry if a live Buffer starts a new one and deletes the
    old one meanwhile."""
    for _ in range(_ATTEMPTS):
        before = _snapshots(storage)
        try:
            journal = EventJournal(storage)
            recovered = journal.read(after)
            if _snapshots(storage) == before:
                return recovered, journal.position
        except FileNotFoundError:
            pass
        except StorageError:
            if _snapshots(storage) == before:
                raise
    problem = f"a new journal was begun each of the {_ATTEMPTS} times that it was read"
    raise StorageError(problem, "read it again", field=str(storage.folder))


def _snapshots(storage: Storage) -> list[str]:
    return [name for name in storage.files() if name.startswith("snapshot")]


ARCHIVE_SCHEMA = pa.schema(
    [
        *SCHEMA,
        pa.field("group_status", pa.string()),
        pa.field("trained_step", pa.int64()),
        pa.field("segment", pa.string(), nullable=False),
    ],
    SCHEMA.metadata,
)
"""An experience, its group's status (ready, leased, trained or dropped; of demonstrations null, or excluded if they are
drawn no more), the step that last trained on it (null if none), and its file. ``uses`` counts the steps that trained on
it."""


@dataclass(frozen=True)
class Found:
    """A row, its additional columns of :data:`ARCHIVE_SCHEMA`, and the feedback that came after it was trained."""

    experience: Experience
    store: str
    group_status: str | None
    trained_step: int | None
    segment: str
    late_feedback: tuple[FeedbackNoted, ...]


def log_folder(folder: Path, config: FolderConfig) -> Path:
    """Return where the log of the run in this folder is, which may have been moved."""
    return config.buffer_folder if config.buffer.storage or config.buffer.name else folder / "buffer"


class Archive:
    """The contents of the log in ``folder`` at the latest `refresh`; nothing in it is changed or locked.

    ``sampler`` and ``seed`` are those in the run's config. Raises StorageError as `StateReader.read` does.
    """

    def __init__(self, folder: Path, sampler: SamplerConfig, seed: int = 0) -> None:
        self._storage = Storage(folder)
        self._reader = StateReader(self._storage, sampler, seed)
        self.refresh()
        self.damaged: dict[str, int] = {}
        """Number of rows skipped in unreadable files, by file."""

    @classmethod
    def of_run(cls, folder: Path) -> Archive:
        """Open the log of the run in this folder, which may have been moved. Raises ConfigError, too."""
        config = load_folder_config(folder)
        return cls(log_folder(folder, config), config.buffer.sampler, config.seed)

    def refresh(self) -> None:
        """Read the events that were written meanwhile. Raises StorageError as `StateReader.read` does."""
        self._state = self._reader.read()

    @property
    def stores(self) -> list[str]:
        """Names of the stores, for `rows`."""
        return self._state.contents.stores

    @property
    def added_tasks(self) -> list[Task]:
        """The tasks that were added to the run while it was running, in order."""
        return self._state.meta.added_tasks

    def stats(self) -> ArchiveStats:
        """Return the ledger of usual rows, the rows and bytes by store, and the uncommitted bytes."""
        state, contents, groups = self._state, self._state.contents, self._state.groups
        rows = np.bincount(groups.status, groups.rows, len(GroupStatus)).astype(int).tolist()
        counted = {each.name.lower(): rows[each] for each in GroupStatus if each and rows[each]}
        experts = {
            f"expert/{name}": {"rows": cursor.extent.rows, "bytes": cursor.extent.nbytes, "drawn": cursor.drawn}
            for name, cursor in contents.experts.items()
        }
        usual = {"rows": sum(counted.values()), "bytes": contents.log_bytes, "groups": len(groups), **counted}
        return ArchiveStats(
            ledger=state.ledger(recount=True),
            expert=state.expert_draws(),
            run=state.meta.run,
            version=state.training.version,
            step=state.training.step,
            stores={"usual": usual, **experts},
            late_feedback=contents.late_feedback_count,
            torn_bytes=self._reader.torn_bytes,
        )

    def rows(
        self,
        store: str = "usual",
        *,
        columns: Sequence[str] | None = None,
        where: str | None = None,
        skip_damaged: bool = False,
        newest: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Iterate over the rows of a store on disk, with any status, file by file. ``newest`` limits usual rows to so
        many complete groups, those that wait for training and then the latest, and reads no other files.

        ``columns`` are some of :data:`ARCHIVE_SCHEMA`; ``where`` is a condition in SQL: see `Selection`.
        Raises DataError for an unknown store or column and an invalid condition, and StorageError, which names the
        file, if one is missing or damaged; with ``skip_damaged`` it is skipped and recorded in `damaged`.
        """
        selection = Selection(ARCHIVE_SCHEMA, columns, where)
        if store not in self.stores:
            raise DataError("no such store", f"one of {self.stores}", field="store", value=store)
        parts = self._usual(skip_damaged, newest) if store == "usual" else self._expert(store, skip_damaged)
        return (selected for batch in parts if (selected := selection.apply(batch)).num_rows)

    def find(self, experience_id: str) -> Found:
        """Find a row by its id in any store. Raises DataError if there is none, StorageError as `rows` does."""
        notes = chain.from_iterable(self._state.contents.late_feedback.values())
        late = tuple(note for note in notes if note.experience_id == experience_id)
        for store, batch in self._candidates(experience_id):
            for row, found in enumerate(batch.column("experience_id").to_pylist()):
                if found == experience_id:
                    one = batch.slice(row, 1)
                    group_status, step, segment = (one.column(name)[0].as_py() for name in ARCHIVE_SCHEMA.names[-3:])
                    return Found(from_batch(one)[0], store, group_status, step, segment, late)
        raise unknown_row(experience_id)

    def group(self, row_id: str) -> list[Experience]:
        """Return the rows of the group of usual rows that has this id, or a row with it, or the one demonstration of
        this id. Raises DataError if there is none, StorageError as `rows` does."""
        for slot in self._state.groups.of_row(row_id):
            batch = self._segment(self._state, int(self._state.groups.segment[slot]), np.array([slot]))
            return from_batch(batch)
        return [self.find(row_id).experience]

    def _usual(self, skip_damaged: bool, newest: int | None) -> Iterator[pa.RecordBatch]:
        """Iterate by segment; every group is read once, even if a live Buffer moves it meanwhile."""
        given = set[int]() if newest is None else _older(self._state.groups, newest)
        while True:
            state = self._state
            for segment, slots in _by_segment(state.groups, given):
                try:
                    batch = self._segment(state, segment, slots)
                except StorageError as error:
                    self.refresh()
                    if segment not in self._state.contents.extents:
                        break  # deleted by a live Buffer, which has moved the groups it kept
                    self._pass_over(error, int(state.groups.rows[slots].sum()), skip_damaged)
                else:
                    yield batch
                given.update(state.groups.key[slots].tolist())
            else:
                return

    def _segment(self, state: State, segment: int, slots: np.ndarray) -> pa.RecordBatch:
        groups, name = state.groups, segment_name(segment)
        batch = read_log_rows(self._storage, name, state.contents.extents[segment])
        counts = groups.rows[slots]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        batch = batch.take(pa.array(np.repeat(groups.row[slots], counts) + within))
        uses = np.repeat(groups.uses[slots], counts)
        statuses = np.array([status.name.lower() for status in GroupStatus], dtype=object)[groups.status[slots]]
        steps = pa.array(np.repeat(groups.last_step[slots], counts), mask=uses == 0)
        return _extended(batch, name, np.repeat(statuses, counts), steps, uses)

    def _expert(self, store: str, skip_damaged: bool) -> Iterator[pa.RecordBatch]:
        name = store.removeprefix("expert/")
        while True:
            extent = self._state.contents.experts[name].extent
            try:
                batch = read_log_rows(self._storage, expert_file(name, extent), extent)
            except StorageError as error:
                self.refresh()
                if self._state.contents.experts[name].extent != extent:
                    continue  # replaced by a later load
                self._pass_over(error, extent.rows, skip_damaged)
            else:
                excluded = {*self._state.contents.experts[name].excluded}
                statuses = ["excluded" if row in excluded else None for row in range(batch.num_rows)]
                never = pa.nulls(batch.num_rows)
                yield _extended(batch, expert_file(name, extent), statuses, never, batch.column("uses"))
            return

    def _candidates(self, experience_id: str) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Iterate over batches that may contain the row: its group's, found by id prefix, then demonstrations."""
        state = self._state
        for slot in state.groups.of_row(experience_id):
            yield "usual", self._segment(state, int(state.groups.segment[slot]), np.array([slot]))
        for store in self.stores[1:]:
            for batch in self._expert(store, skip_damaged=False):
                yield store, batch

    def _pass_over(self, error: StorageError, rows: int, skip: bool) -> None:
        if not skip:
            raise error
        self.damaged[error.field] = rows


def _older(groups: GroupTable, newest: int) -> set[int]:
    """Return the keys of parked groups, and of all but the ``newest`` others, of which waiting ones count as newest."""
    order = np.lexsort((groups.order, groups.status == GroupStatus.READY))
    known = groups.status[order] != GroupStatus.FREE
    complete = known & (groups.status[order] != GroupStatus.PARKED)
    chosen = order[complete][-newest:]
    return {*groups.key[order[known]].tolist()} - {*groups.key[chosen].tolist()}


def _by_segment(groups: GroupTable, given: set[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Iterate over the slots of groups whose keys are not in ``given``, by segment, ordered by row."""
    left = (groups.status != GroupStatus.FREE) & ~np.isin(groups.key, np.fromiter(given, np.uint64))
    slots = np.flatnonzero(left)
    slots = slots[np.lexsort((groups.row[slots], groups.segment[slots]))]
    for part in np.split(slots, np.flatnonzero(np.diff(groups.segment[slots])) + 1):
        if len(part):
            yield int(groups.segment[part[0]]), part


def _extended(batch: pa.RecordBatch, segment: str, group_status: Any, trained_step: Any, uses: Any) -> pa.RecordBatch:
    """Extend rows to the columns of :data:`ARCHIVE_SCHEMA`."""
    more = {
        "uses": uses,
        "group_status": group_status,
        "trained_step": trained_step,
        "segment": pa.repeat(pa.scalar(segment), batch.num_rows),
    }
    columns = [
        pa.array(more[field.name], field.type) if field.name in more else batch.column(field.name)
        for field in ARCHIVE_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(columns, schema=ARCHIVE_SCHEMA)
