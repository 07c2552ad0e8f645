"""The records of a run as columns, read on where the file has grown."""

from __future__ import annotations

import json
import math
import threading
from array import array
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from rayrft.json_lines import read_lines
from rayrft.monitor.records import StepRecord, record_from_json
from rayrft.monitor.verdict import Bottleneck

_JUDGED = 50
"""Latest steps of which the verdict is made."""
_GAPS = 200
"""Latest rows with a widest gap that are kept."""


class RecordTable:
    """The records in a run folder. Steps are columns of numbers by field, as they are named in ``metrics.jsonl``, and
    ``lost: <reason>``; a number that a step does not have is NaN. Evaluations and marks are a few, and kept whole."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._file: tuple[int, int] = (0, 0)
        self._end = self.steps = 0
        self._columns: dict[str, array[float]] = {}
        self._latest: deque[bytes] = deque(maxlen=_JUDGED)
        self.stage_starts: list[tuple[str, float]] = []
        """Stages with their first steps."""
        self.evaluations: list[dict[str, Any]] = []
        self.marks: list[dict[str, Any]] = []
        """In order: notes, restarts, changed keys and checkpoints, by ``kind``; with step, stage, time and text."""
        self.gaps: dict[str, dict[str, Any]] = {}
        """Rows with the widest gap of a step, which is ``step``: see `RowGap`."""

    def update(self) -> None:
        """Read the lines that were appended since the last call; all, if the run was resumed and wrote the file again.

        Raises StorageError, which names the file and the byte, if a line is damaged.
        """
        if not self._path.exists():
            return
        about = self._path.stat()
        with self._lock:
            if (about.st_dev, about.st_ino) != self._file or about.st_size < self._end:
                self._clear()
                self._file = about.st_dev, about.st_ino
            for end, (values, line) in read_lines(self._path, _parsed, self._end):
                self._add(values, line)
                self._end = end

    def _add(self, values: dict[str, Any], line: bytes) -> None:
        kind = values["kind"]
        if kind in ("step", "rollout"):
            if self.stage != values["stage"]:
                self.stage_starts.append((values["stage"], values["step"]))
            self._latest.append(line)
            numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
            numbers |= {f"lost: {reason}": rows for reason, rows in values.get("lost", {}).items()}
            for name, value in numbers.items():
                column = self._columns.setdefault(name, array("d"))
                column.extend([math.nan] * (self.steps - len(column)))
                column.append(value)
            self.steps += 1
            if gap := values.get("widest_gap"):
                self.gaps.pop(gap["row"], None)
                self.gaps[gap["row"]] = {**gap, "step": values["step"]}
                if len(self.gaps) > _GAPS:
                    del self.gaps[next(iter(self.gaps))]
        elif kind in ("evaluation", "pairs"):
            self.evaluations.append(values)
        else:
            data = values.get("data", {})
            told = "change" if "key" in data else "checkpoint" if "checkpoint" in data else kind
            text = values.get("text") or "{actor} restarted after {seconds:.1f} s: {cause}".format(**values)
            about = {name: values[name] for name in ("step", "stage", "time")}
            self.marks.append({**about, "kind": told, "text": text})

    def columns(self, *names: str) -> dict[str, np.ndarray]:
        """Return these columns, by default all, and those by which runs are compared beside ``step``: ``samples`` and
        ``tokens``, sampled so far, and ``hours``. They are float64 of one length, NaN where a step does not have the
        number."""
        with self._lock:
            wanted = {"step", "time", "sampled_rows", "sampled_tokens", *(names or self._columns)}
            found = {name: np.full(self.steps, np.nan) for name in wanted}
            for name, into in found.items():
                column = self._columns.get(name, array("d"))
                into[: len(column)] = np.frombuffer(column.tobytes())
            times = [*found["time"][:1].tolist(), *(each["time"] for each in self.marks[:1])]
        samples, tokens = (np.nancumsum(found[f"sampled_{name}"]) for name in ("rows", "tokens"))
        hours = (found["time"] - min(times, default=0.0)) / 3600
        return {**found, "samples": samples, "tokens": tokens, "hours": hours}

    def widest(self, count: int) -> list[dict[str, Any]]:
        """Return the widest of the latest gaps, as in `gaps`."""
        return sorted([*self.gaps.values()][-_JUDGED:], key=lambda gap: -gap["mean"])[:count]

    @property
    def stage(self) -> str:
        """The stage of the latest step."""
        return self.stage_starts[-1][0] if self.stage_starts else ""

    def latest(self, name: str) -> float | None:
        """Return the last number of a column, if the latest step has it."""
        column = self._columns.get(name, array("d"))
        return column[-1] if len(column) == self.steps and column and not math.isnan(column[-1]) else None

    def verdict(self, max_staleness: int, *, explores: bool) -> str:
        """Return the verdict on the latest steps; empty if they trained without usual rows."""
        bottleneck = Bottleneck()
        for record in map(record_from_json, self._latest):
            if isinstance(record, StepRecord):
                bottleneck.add(record)
        return bottleneck.verdict(max_staleness, explores=explores)


def _parsed(line: bytes) -> tuple[dict[str, Any], bytes]:
    values = json.loads(line)
    if not isinstance(values, dict) or "kind" not in values:
        raise ValueError("not a record")
    return values, line


def thin(columns: dict[str, np.ndarray], most: int) -> tuple[dict[str, np.ndarray], int]:
    """Return columns of at most ``most`` points, each the mean of so many consecutive ones, and how many these are."""
    count = len(next(iter(columns.values()), ()))
    share = -(-count // most) or 1
    if share == 1:
        return columns, 1
    starts, thinned = np.arange(0, count, share), {}
    for name, column in columns.items():
        there = ~np.isnan(column)
        sums = np.add.reduceat(np.where(there, column, 0.0), starts)
        counts = np.add.reduceat(there.astype(float), starts)
        thinned[name] = np.divide(sums, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    return thinned, share
