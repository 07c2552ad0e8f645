"""The numbers of a run as Ray's metrics."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from typing import Any

from rayrft.config import RunConfig
from rayrft.monitor.records import (
    EvaluationRecord,
    NoteRecord,
    PairsRecord,
    Record,
    RestartRecord,
    RolloutRecord,
    StepRecord,
    flat,
)

_PARTS: dict[type, str] = {StepRecord: "train", RolloutRecord: "rollout", EvaluationRecord: "eval", PairsRecord: "pair"}
_COUNTED = "rows", "tokens", "groups", "updates"
"""Ends of the names of numbers that count since the previous record."""
_LIMITS = {"max_staleness": "rayrft_limit_staleness", "monitor.stall_s": "rayrft_limit_stall_seconds"}
"""Gauges of the limits that may change while a run is running, by key."""
_PROGRESS = "rayrft_progress_timestamp_seconds"
_EXPORT_S = 5.0
"""Seconds between exports of all gauges: Ray forgets a gauge that was not set for two of its intervals, of 10 s."""


def measurements(record: Record) -> Iterator[tuple[str, float, dict[str, str]]]:
    """Iterate over the numbers of a record as Ray's metrics: name, value, and tags besides ``run``. The names of
    counters, which the values increase, end in ``_total``; the README lists all names."""
    if isinstance(record, RestartRecord):
        tags = {"part": record.part}
        yield from (("rayrft_restarts_total", 1, tags), ("rayrft_restart_seconds_total", record.seconds, tags))
    elif part := _PARTS.get(type(record)):
        tags = {"temperature": f"{record.temperature:g}"} if isinstance(record, EvaluationRecord) else {}
        for name, value in flat(record).items():
            if isinstance(value, int | float) and name not in ("time", "temperature"):
                yield _metric(part, name, total=part in ("train", "rollout") and name.endswith(_COUNTED)), value, tags
    if isinstance(record, StepRecord | RolloutRecord):
        by_name = ("domain", "reward", record.timings.rewards), ("operator", "operator", record.timings.operators)
        for tag, part, stats in by_name:
            for key, name, value in ((key, *each) for key, numbers in stats.items() for each in vars(numbers).items()):
                yield _metric(part, name, total=name not in ("slowest_s", "pending")), value, {tag: key}
    if isinstance(record, StepRecord):
        yield "rayrft_train_steps_total", 1, {}
        for name, value in vars(record.ledger).items() if record.ledger else ():
            metric = f"rayrft_ledger_{name}" + "_rows" * (name != "dropped_tasks")
            numbers = value.items() if isinstance(value, dict) else [(None, value)]
            yield from ((metric, number, {} if reason is None else {"reason": reason}) for reason, number in numbers)


def _metric(part: str, name: str, *, total: bool) -> str:
    unit = re.sub("_s$", "_seconds", re.sub("_per_s$", "_per_second", name))
    return f"rayrft_{part}_{unit}" + "_total" * total


class RayMetrics:
    """Gauges and counters of a run through ``ray.util.metrics`` (Prometheus, Grafana), and the limits that alerts
    compare them with. Gauges are exported until ``close``, or until the process ends."""

    def __init__(self, config: RunConfig) -> None:
        limits = {
            "rayrft_limit_staleness": config.buffer.max_age if config.mode == "train" else config.max_staleness,
            "rayrft_limit_stall_seconds": None if config.mode == "serve" else config.monitor.stall_s,
            "rayrft_limit_logprob_gap": config.probe_bounds.mean,
            "rayrft_limit_restarts_per_hour": config.restarts.per_hour,
        }
        self._run, self._known = config.name, dict[str, Any]()
        self._gauges = dict[tuple[str, tuple[tuple[str, str], ...]], float]()
        """By name and tags."""
        self._gauges |= {(name, ()): value for name, value in limits.items() if value is not None}
        self._closed = threading.Event()

    def write(self, record: Record) -> None:
        from ray.util.metrics import Counter

        if (_PROGRESS, ()) not in self._gauges:
            threading.Thread(target=self._export, name="ray-metrics", daemon=True).start()
            self._gauges[_PROGRESS, ()] = record.time
        if not isinstance(record, NoteRecord):
            self._gauges[_PROGRESS, ()] = record.time
        elif limit := _LIMITS.get(record.data.get("key", "")):
            self._gauges[limit, ()] = record.data["new"]
        for name, value, tags in measurements(record):
            if not math.isfinite(value):  # Ray does not export it
                self._gauges.pop((name, tuple(tags.items())), None)
                name, value, tags = "rayrft_not_finite_total", 1, {"metric": name}
            if not name.endswith("_total"):
                self._gauges[name, tuple(tags.items())] = value
            elif value > 0:
                self._get(Counter, name, tags).inc(value, tags)

    def close(self, failed: bool) -> None:
        """End the gauges."""
        self._closed.set()

    def _export(self) -> None:
        from ray.util.metrics import Gauge

        while not self._closed.wait(_EXPORT_S):
            for (name, tags), value in self._gauges.copy().items():
                self._get(Gauge, name, dict(tags)).set(value, dict(tags))

    def _get(self, kind: type, name: str, tags: dict[str, str]) -> Any:
        if name not in self._known:
            text = "see rayrft/monitor/README.md"
            self._known[name] = kind(name, text, ("run", *tags)).set_default_tags({"run": self._run})
        return self._known[name]
