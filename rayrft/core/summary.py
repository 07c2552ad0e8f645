"""``summary.json``: how a run ended, and what became of its rows."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rayrft.buffer.log.storage import Storage
from rayrft.buffer.reader import Archive
from rayrft.config import load_config
from rayrft.errors import RayrftError, StorageError
from rayrft.monitor.records import EvaluationRecord, Record, StepRecord, read_records

NO_ROWS: dict[str, Any] = {"sampled": 0, "trained": 0, "dropped": {}, "held": 0}
"""The ledger of a run before its first row."""
_ROOM, _ROOM_BYTES = ".room", 1 << 16


def keep_room(folder: Path) -> None:
    """Take the room that the summary will need: then a disk that is full meanwhile does not keep it from being written.

    Raises StorageError.
    """
    with _writing(folder / _ROOM):
        (folder / _ROOM).write_bytes(os.urandom(_ROOM_BYTES))  # what is written as zeros may take no room


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write it whole or not at all, whoever else does so at the same time. Raises StorageError."""
    (folder / _ROOM).unlink(missing_ok=True)
    with _writing(folder / "summary.json"):
        descriptor, draft = tempfile.mkstemp(".partial", ".summary.", folder)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(json.dumps(summary, indent=2) + "\n")
            os.chmod(draft, 0o644)  # mkstemp's is for the owner alone
            os.replace(draft, folder / "summary.json")
        except BaseException:
            os.unlink(draft)
            raise


def read_summary(folder: Path) -> dict[str, Any]:
    """What `write_summary` wrote last; empty where a run there has not ended yet."""
    try:
        return json.loads((folder / "summary.json").read_text())
    except FileNotFoundError:
        return {}


def remove_summary(folder: Path) -> None:
    """The run goes on: how it ended before holds no longer."""
    (folder / "summary.json").unlink(missing_ok=True)


def summarise(
    name: str,
    status: str,
    error: str | None,
    records: Sequence[Record],
    ledger: dict[str, Any],
    total_s: float,
    **more: Any,
) -> dict[str, Any]:
    """How a run ended, from its records and the Buffer's ledger; ``more`` is what only the run itself knows."""
    steps = [record for record in records if isinstance(record, StepRecord)]
    return {
        "name": name,
        "status": status,
        "error": error,
        "accuracy": _accuracy(records),
        "counters": {key: ledger.get(key) for key in NO_ROWS},
        "dropped_tasks": ledger.get("dropped_tasks"),
        "expert": ledger.get("expert"),
        "seconds": {**_seconds(records), "total": round(total_s, 3)},
        "steps": steps[-1].step if steps else 0,
        "weight_version": steps[-1].version if steps else 0,
        "checkpoint": None,
        **more,
    }


def summarise_from_folder(folder: Path, status: str, error: str) -> dict[str, Any]:
    """How a run ended that could not say so itself, from what it left on the disk."""
    records = read_records(folder)
    total_s = records[-1].time - records[0].time if records else 0.0
    return summarise(folder.name, status, error, records, ledger_in_log(folder), total_s)


def ledger_in_log(folder: Path) -> dict[str, Any]:
    """What became of the rows of a run, by the log of its Buffer; empty where that is damaged."""
    try:
        if not Storage(load_config(folder / "config.yaml").buffer_location).files():  # it ended before its Buffer began
            return NO_ROWS
        stats = Archive.of_run(folder).stats()
    except (RayrftError, OSError):
        return {}
    stores = {name.removeprefix("expert/"): each for name, each in stats["stores"].items() if name != "usual"}
    return {**stats, "expert": {name: {key: each[key] for key in ("rows", "drawn")} for name, each in stores.items()}}


def standing(summary: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What `Run.status` says of a run that has ended."""
    return {
        "name": summary["name"],
        "status": summary["status"],
        "error": summary["error"],
        "step": summary["steps"],
        "version": summary["weight_version"],
        "folder": str(folder),
        "waiting": [],
        **summary["counters"],
    }


def _seconds(records: Sequence[Record]) -> dict[str, float]:
    """Wall time by part, summed over all steps."""
    sums: dict[str, float] = defaultdict(float)
    for record in records:
        if isinstance(record, StepRecord):
            for part in ("wait", "rollout", "reward", "train", "sync"):
                sums[part] += getattr(record, f"{part}_s")
        elif isinstance(record, EvaluationRecord):
            sums["evaluation"] += record.seconds
    return {part: round(value, 3) for part, value in sums.items()}


def _accuracy(records: Sequence[Record]) -> dict[str, Any]:
    """First and last evaluation per temperature, with counts."""
    result: dict[str, Any] = {}
    for record in records:
        if isinstance(record, EvaluationRecord):
            point = {
                "stage": record.stage,
                "step": record.step,
                "accuracy": record.accuracy,
                "right": record.right,
                "count": record.count,
                "interval": [record.low, record.high],
            }
            entry = result.setdefault(f"{record.temperature:g}", {"before": point})
            entry["after"] = point
    return result


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot be written: {error.strerror}",
            field=str(file),
            remedy="make room or mend the storage, then: rayrft resume RUN",
        ) from None
