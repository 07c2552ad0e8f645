"""The status of a run, and its summary in ``summary.json``."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from rayrft.buffer.ledger import ExpertDraws, Ledger, RowStats
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.reader import Archive
from rayrft.config import load_config
from rayrft.errors import RayrftError, StorageError
from rayrft.monitor.records import EvaluationRecord, PairsRecord, Record, StepRecord, read_records


@dataclass(frozen=True)
class AccuracyPoint:
    """An evaluation: ``right`` of ``count`` tasks, and the confidence interval of the accuracy."""

    stage: str
    step: int
    accuracy: float
    right: int
    count: int
    interval: tuple[float, float]


@dataclass(frozen=True)
class AccuracyChange:
    """The first and the last evaluation at a temperature."""

    before: AccuracyPoint
    after: AccuracyPoint


@dataclass(frozen=True)
class PairsPoint:
    """A ranking of held-out preference pairs: ``right`` of ``count``, by how much on average, and the confidence
    interval of the accuracy."""

    step: int
    accuracy: float
    right: int
    count: int
    margin: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class StageDone:
    """A stage that has ended: the steps taken in it, and the run's step at its end."""

    name: str
    steps: int
    final_step: int


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
    stages: list[StageDone]
    checkpoint: str | None
    """Folder of the final weights of a finished run."""
    pairs: dict[str, PairsPoint] = field(default_factory=dict)
    """By stage, the last ranking of held-out preference pairs."""


@dataclass(frozen=True)
class RunStatus:
    """State of a run: ``starting``, ``running`` or as in `Summary`."""

    name: str
    status: str
    error: str | None
    step: int
    version: int
    folder: Path
    waiting: list[str]
    """Overdue waits, one line per wait."""
    ledger: Ledger | None

    def to_json(self) -> str:
        """Format the status as ``rayrft status`` prints it, with the ledger's entries beside the others."""
        fields = asdict(self)
        ledger = fields.pop("ledger") or {}
        return json.dumps({**fields, **ledger}, indent=2, default=str)


_summaries: TypeAdapter[Summary] = TypeAdapter(Summary)
_RESERVED, _RESERVED_BYTES = ".room", 1 << 16


def reserve_space(folder: Path) -> None:
    """Reserve disk space for the summary, so that it can be written on a full disk. Raises StorageError."""
    with _writing(folder / _RESERVED):
        (folder / _RESERVED).write_bytes(os.urandom(_RESERVED_BYTES))  # zeros may be stored sparsely


def write_summary(folder: Path, summary: Summary) -> None:
    """Write the summary atomically, also with concurrent writers. Raises StorageError."""
    (folder / _RESERVED).unlink(missing_ok=True)
    with _writing(folder / "summary.json"):
        descriptor, draft = tempfile.mkstemp(".partial", ".summary.", folder)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(json.dumps(asdict(summary), indent=2) + "\n")
            os.chmod(draft, 0o644)  # mkstemp's mode is for the owner only
            os.replace(draft, folder / "summary.json")
        except BaseException:
            os.unlink(draft)
            raise


def read_summary(folder: Path) -> Summary | None:
    """Return the summary; None if the run has not ended yet."""
    try:
        return _summaries.validate_json((folder / "summary.json").read_bytes())
    except FileNotFoundError:
        return None


def remove_summary(folder: Path) -> None:
    """Delete the summary of a run that is being resumed."""
    (folder / "summary.json").unlink(missing_ok=True)


def summarise(
    name: str,
    status: str,
    error: str | None,
    records: Sequence[Record],
    rows: RowStats | None,
    total_s: float,
    *,
    step: int | None = None,
    version: int | None = None,
    stages: Sequence[StageDone] = (),
    checkpoint: str | None = None,
) -> Summary:
    """Build the summary from a run's records and the Buffer's statistics; ``step`` and ``version`` are those of the
    latest step record by default."""
    last = next((record for record in reversed(records) if isinstance(record, StepRecord)), None)
    return Summary(
        name,
        status,
        error,
        accuracy=_accuracy(records),
        ledger=rows.ledger if rows else None,
        expert=rows.expert if rows else None,
        seconds={**_seconds(records), "total": round(total_s, 3)},
        steps=step if step is not None else last.step if last else 0,
        weight_version=version if version is not None else last.version if last else 0,
        stages=list(stages),
        checkpoint=checkpoint,
        pairs={
            each.stage: PairsPoint(each.step, each.accuracy, each.right, each.count, each.margin, (each.low, each.high))
            for each in records
            if isinstance(each, PairsRecord)
        },
    )


def summarise_from_folder(folder: Path, status: str, error: str) -> Summary:
    """Build the summary of a run whose Master did not write one, from its files."""
    records = read_records(folder)
    total_s = records[-1].time - records[0].time if records else 0.0
    return summarise(folder.name, status, error, records, rows_in_log(folder), total_s)


def rows_in_log(folder: Path) -> RowStats | None:
    """Return the statistics of a run's rows from the log of its Buffer; None if the log is damaged."""
    try:
        if not Storage(load_config(folder / "config.yaml").buffer_folder).files():  # it ended before its Buffer began
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
        summary.steps,
        summary.weight_version,
        folder,
        waiting=[],
        ledger=summary.ledger,
    )


def _seconds(records: Sequence[Record]) -> dict[str, float]:
    """Sum the wall time by part over all steps."""
    sums: dict[str, float] = defaultdict(float)
    for record in records:
        if isinstance(record, StepRecord):
            for part in ("wait", "rollout", "reward", "train", "sync"):
                sums[part] += getattr(record, f"{part}_s")
        elif isinstance(record, EvaluationRecord | PairsRecord):
            sums["evaluation"] += record.seconds
    return {part: round(value, 3) for part, value in sums.items()}


def _accuracy(records: Sequence[Record]) -> dict[str, AccuracyChange]:
    """Return the first and last evaluation by temperature."""
    result: dict[str, AccuracyChange] = {}
    for record in records:
        if isinstance(record, EvaluationRecord):
            point = AccuracyPoint(
                record.stage, record.step, record.accuracy, record.right, record.count, (record.low, record.high)
            )
            temperature = f"{record.temperature:g}"
            before = result[temperature].before if temperature in result else point
            result[temperature] = AccuracyChange(before, point)
    return result


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot be written: {error.strerror}",
            field=str(file),
            remedy="free disk space or fix the storage, then: rayrft resume RUN",
        ) from None
