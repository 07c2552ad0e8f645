"""The status of a run, and its summary in ``summary.json``."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from rayrft.buffer.ledger import ExpertDraws, Ledger, RowStats
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.reader import Archive
from rayrft.config import load_folder_config
from rayrft.errors import RayrftError
from rayrft.files import atomic_file, storage_errors
from rayrft.markup import facts
from rayrft.monitor.records import (
    EvaluationRecord,
    NoteRecord,
    PairsRecord,
    Record,
    RestartRecord,
    StepRecord,
    accuracy_text,
    read_records,
)


@dataclass(frozen=True)
class AccuracyChange:
    """The first and the last evaluation at a temperature."""

    before: EvaluationRecord
    after: EvaluationRecord


@dataclass(frozen=True)
class RestartCount:
    """Restarts of a kind of actor: how many, and the seconds without an actor in all."""

    count: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Summary:
    """How a run ended; ``summary.json`` has the same fields."""

    name: str
    status: str
    """``finished``, ``stopped``, ``failed`` or ``killed``."""
    error: str | None
    accuracy: dict[str, AccuracyChange]
    """By temperature."""
    ledger: Ledger | None
    """None if the Buffer's log is damaged."""
    expert: dict[str, ExpertDraws] | None
    seconds: dict[str, float]
    """Wall time by part, and in ``total``."""
    steps: int
    weight_version: int
    stages: dict[str, int] = field(default_factory=dict)
    """Steps taken in every stage that has ended."""
    checkpoint: str | None = None
    """Folder of the last weights of a finished or stopped run, in Hugging Face format."""
    pairs: dict[str, PairsRecord] = field(default_factory=dict)
    """By stage, the last ranking of held-out preference pairs."""
    restarts: dict[str, RestartCount] = field(default_factory=dict)
    """By kind of actor."""

    def _repr_html_(self) -> str:
        accuracy = {
            f"at temperature {name}:": f"{accuracy_text(change.before)} → {accuracy_text(change.after)}"
            for name, change in self.accuracy.items()
        }
        pairs = {stage: accuracy_text(record) for stage, record in self.pairs.items()}
        return facts({**vars(self), "accuracy": accuracy, "pairs": pairs, "expert": None})


@dataclass(frozen=True)
class RunStatus:
    """State of a run: ``starting``, ``running``, ``paused`` or as in `Summary`."""

    name: str
    status: str
    error: str | None
    step: int
    version: int
    folder: Path | None
    """None while its config is checked."""
    waiting: list[str] = field(default_factory=list)
    """Overdue waits, one line per wait."""
    ledger: Ledger | None = None
    paused_since: str | None = None

    @property
    def ended(self) -> bool:
        return self.status not in ("starting", "running", "paused")

    def _repr_html_(self) -> str:
        return facts(vars(self))

    def to_json(self) -> str:
        """Format the status as ``rayrft status`` prints it, with the ledger's entries beside the others."""
        fields = asdict(self)
        ledger = fields.pop("ledger") or {}
        return json.dumps({**fields, **ledger}, indent=2, default=str)


_summaries: TypeAdapter[Summary] = TypeAdapter(Summary)
_RESERVED, _RESERVED_BYTES = ".room", 1 << 16


def reserve_space(folder: Path) -> None:
    """Reserve disk space for the summary, so that it can be written on a full disk. Raises StorageError."""
    with storage_errors(folder / _RESERVED):
        (folder / _RESERVED).write_bytes(os.urandom(_RESERVED_BYTES))  # zeros may be stored sparsely


def write_summary(folder: Path, summary: Summary) -> None:
    """Write the summary atomically, also with concurrent writers. Raises StorageError."""
    (folder / _RESERVED).unlink(missing_ok=True)
    file = folder / "summary.json"
    with storage_errors(file), atomic_file(file, shared=True) as draft:
        draft.write_text(json.dumps(asdict(summary), indent=2) + "\n")


def read_summary(folder: Path) -> Summary | None:
    """Return the summary; None if the run has not ended yet."""
    try:
        return _summaries.validate_json((folder / "summary.json").read_bytes())
    except FileNotFoundError:
        return None


class Totals:
    """What a summary says of a run's records: each is added once, in order, and none is kept."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.accuracy: dict[str, AccuracyChange] = {}
        """The first and last evaluation by temperature."""
        self.pairs: dict[str, PairsRecord] = {}
        """The last ranking by stage."""
        self.restarts: defaultdict[str, RestartCount] = defaultdict(RestartCount)
        """By kind of actor."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Wall time by part over all steps."""
        self.step = self.version = 0
        """Of the latest step."""
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Add the next record."""
        if isinstance(record, StepRecord):
            self.step, self.version = record.step, record.version
            for part, seconds in record.seconds.items():
                self.seconds[part] += seconds
        elif isinstance(record, NoteRecord):
            if "paused_s" in record.data:
                self.seconds["paused"] += record.data["paused_s"]
        elif isinstance(record, RestartRecord):
            known = self.restarts[record.part]
            self.restarts[record.part] = RestartCount(known.count + 1, round(known.seconds + record.seconds, 3))
        elif isinstance(record, PairsRecord):
            self.seconds["evaluation"] += record.seconds
            self.pairs[record.stage] = record
        elif isinstance(record, EvaluationRecord):
            self.seconds["evaluation"] += record.seconds
            first = self.accuracy.get(temperature := f"{record.temperature:g}")
            self.accuracy[temperature] = AccuracyChange(first.before if first else record, record)


def summarise(
    name: str, status: str, error: str | None, totals: Totals, rows: RowStats | None, total_s: float
) -> Summary:
    """Build the summary from a run's records and rows, which do not tell of its stages and its last weights."""
    return Summary(
        name,
        status,
        error,
        accuracy=totals.accuracy,
        ledger=rows.ledger if rows else None,
        expert=rows.expert if rows else None,
        seconds={**{part: round(value, 3) for part, value in totals.seconds.items()}, "total": round(total_s, 3)},
        steps=totals.step,
        weight_version=totals.version,
        pairs=totals.pairs,
        restarts=dict(totals.restarts),
    )


def summarise_from_folder(folder: Path, status: str, error: str) -> Summary:
    """Build the summary of a run whose Master did not write one, from its files."""
    records = read_records(folder)
    total_s = records[-1].time - records[0].time if records else 0.0
    return summarise(folder.name, status, error, Totals(records), rows_in_log(folder), total_s)


def rows_in_log(folder: Path) -> RowStats | None:
    """Return the statistics of a run's rows from the log of its Buffer; None if the log is damaged."""
    try:
        if not Storage(load_folder_config(folder).buffer_folder).files():  # it ended before its Buffer began
            return RowStats(Ledger(), {})
        return Archive.of_run(folder).stats()
    except (RayrftError, OSError):
        return None


def status_at_end(summary: Summary, folder: Path) -> RunStatus:
    """Return the status of a run that has ended."""
    return RunStatus(
        summary.name,
        summary.status,
        summary.error,
        step=summary.steps,
        version=summary.weight_version,
        folder=folder,
        ledger=summary.ledger,
    )
