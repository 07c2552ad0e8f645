"""``summary.json``: how a run ended, and the ledger of its rows."""

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
_RESERVED, _RESERVED_BYTES = ".room", 1 << 16


def reserve_space(folder: Path) -> None:
    """Reserve disk space for the summary, so that it can be written on a full disk. Raises StorageError."""
    with _writing(folder / _RESERVED):
        (folder / _RESERVED).write_bytes(os.urandom(_RESERVED_BYTES))  # zeros may be stored sparsely


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write the summary atomically, also with concurrent writers. Raises StorageError."""
    (folder / _RESERVED).unlink(missing_ok=True)
    with _writing(folder / "summary.json"):
        descriptor, draft = tempfile.mkstemp(".partial", ".summary.", folder)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(json.dumps(summary, indent=2) + "\n")
            os.chmod(draft, 0o644)  # mkstemp's mode is for the owner only
            os.replace(draft, folder / "summary.json")
        except BaseException:
            os.unlink(draft)
            raise


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary; empty if the run has not ended yet."""
    try:
        return json.loads((folder / "summary.json").read_text())
    except FileNotFoundError:
        return {}


def remove_summary(folder: Path) -> None:
    """Delete the summary of a run that is being resumed."""
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
    """Build the summary from a run's records and the Buffer's ledger; ``more`` overrides or adds entries."""
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
    """Build the summary of a run whose Master did not write one, from its files."""
    records = read_records(folder)
    total_s = records[-1].time - records[0].time if records else 0.0
    return summarise(folder.name, status, error, records, ledger_in_log(folder), total_s)


def ledger_in_log(folder: Path) -> dict[str, Any]:
    """Return the ledger of a run's rows from the log of its Buffer; empty if the log is damaged."""
    try:
        if not Storage(load_config(folder / "config.yaml").buffer_location).files():  # it ended before its Buffer began
            return NO_ROWS
        stats = Archive.of_run(folder).stats()
    except (RayrftError, OSError):
        return {}
    stores = {name.removeprefix("expert/"): store for name, store in stats["stores"].items() if name != "usual"}
    expert = {name: {key: store[key] for key in ("rows", "drawn")} for name, store in stores.items()}
    return {**stats, "expert": expert}


def standing(summary: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the `Run.status` of a run that has ended."""
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
    """Sum the wall time by part over all steps."""
    sums: dict[str, float] = defaultdict(float)
    for record in records:
        if isinstance(record, StepRecord):
            for part in ("wait", "rollout", "reward", "train", "sync"):
                sums[part] += getattr(record, f"{part}_s")
        elif isinstance(record, EvaluationRecord):
            sums["evaluation"] += record.seconds
    return {part: round(value, 3) for part, value in sums.items()}


def _accuracy(records: Sequence[Record]) -> dict[str, Any]:
    """Return the first and last evaluation per temperature, with counts."""
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
            remedy="free disk space or fix the storage, then: rayrft resume RUN",
        ) from None
