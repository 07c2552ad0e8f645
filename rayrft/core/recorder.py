"""The run's memory: records as they come, for the sinks and for whoever watches, and the summary at the end."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rayrft.config import RunConfig
from rayrft.monitor.records import EvaluationRecord, NoteRecord, Record, StepRecord, read_records, rewrite_records
from rayrft.monitor.report import save_plot
from rayrft.monitor.sinks import open_sinks


class Recorder:
    """Keeps every record, writes it to every sink, and wakes those who follow.

    A run that goes on keeps the first ``kept`` records that it had; steps after them are taken again.
    """

    def __init__(self, config: RunConfig, kept: int = 0) -> None:
        self._config = config
        had = read_records(config.folder)[:kept]
        rewrite_records(config.folder, had)
        self._sinks = open_sinks(config)
        self._changed = asyncio.Condition()
        self._started = time.time()
        self.records: list[Record] = had
        self.ended = False

    async def add(self, record: Record) -> None:
        async with self._changed:
            self.records.append(record)
            for sink in self._sinks:
                sink.write(record)
            self._changed.notify_all()

    async def note(self, text: str, stage: str = "", step: int = 0, **data: Any) -> None:
        await self.add(NoteRecord(stage, step, time.time(), text, data))

    async def after(self, count: int) -> list[Record]:
        """Records from the ``count``-th on, as soon as there are any; an empty list once the run has ended."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.ended or len(self.records) > count)
            return self.records[count:]

    async def close(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json`` and the plot, flush the sinks, and let the followers go."""
        if any(isinstance(record, StepRecord | EvaluationRecord) for record in self.records):
            save_plot(self.records, self._config.folder / "plot.png", self._config.name)
        write_summary(self._config.folder, summary)
        for sink in self._sinks:
            sink.close()
        async with self._changed:
            self.ended = True
            self._changed.notify_all()

    def seconds(self) -> dict[str, float]:
        """Wall time by part, summed over all steps, and in all."""
        sums: dict[str, float] = defaultdict(float)
        for record in self.records:
            if isinstance(record, StepRecord):
                for part in ("wait", "rollout", "reward", "train", "sync"):
                    sums[part] += getattr(record, f"{part}_s")
            elif isinstance(record, EvaluationRecord):
                sums["evaluation"] += record.seconds
        return {
            **{part: round(value, 3) for part, value in sums.items()},
            "total": round(time.time() - self._started, 3),
        }

    def accuracy(self) -> dict[str, Any]:
        """First and last evaluation per temperature, with counts."""
        result: dict[str, Any] = {}
        for record in self.records:
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


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """``summary.json``, whole or not at all."""
    temporary = folder / ".summary.json.partial"
    temporary.write_text(json.dumps(summary, indent=2) + "\n")
    os.replace(temporary, folder / "summary.json")


def read_summary(folder: Path) -> dict[str, Any]:
    """What `write_summary` wrote last; empty where a run there has not ended yet."""
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.is_file() else {}
