"""Recorder of a run: writes its records to the sinks and streams them to followers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from rayrft.config import RunConfig
from rayrft.core.summary import Summary, reserve_space, write_summary
from rayrft.monitor.records import EvaluationRecord, NoteRecord, Record, StepRecord, read_records, rewrite_records
from rayrft.monitor.report import save_plot
from rayrft.monitor.sinks import open_sinks


class Recorder:
    """Keeps every record, writes it to every sink, and wakes the followers.

    A resumed run keeps its first ``kept`` records, and what evaluation beside the steps told later of steps up to
    ``step``; the steps after them are repeated. None keeps all.
    """

    def __init__(self, config: RunConfig, kept: int | None = 0, step: int = 0) -> None:
        self._config = config
        before = read_records(config.folder)
        kept = len(before) if kept is None else kept
        late = [r for r in before[kept:] if isinstance(r, EvaluationRecord) and r.stage_step and r.step <= step]
        previous = before[:kept] + late
        rewrite_records(config.folder, previous)
        self._sinks = open_sinks(config)
        reserve_space(config.folder)
        self._changed = asyncio.Condition()
        self._started = time.time()
        self.records: list[Record] = previous
        self.ended = False

    async def add(self, record: Record) -> None:
        """Append a record. Raises StorageError if it cannot be written."""
        async with self._changed:
            self.records.append(record)
            for sink in self._sinks:
                sink.write(record)
            self._changed.notify_all()

    async def note(self, text: str, stage: str = "", step: int = 0, **data: Any) -> None:
        await self.add(NoteRecord(stage, step, time.time(), text, data))

    async def after(self, count: int) -> list[Record]:
        """Wait for records after the first ``count`` and return them; an empty list once the run has ended."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.ended or len(self.records) > count)
            return self.records[count:]

    async def close(self, summary: Summary) -> None:
        """Write ``summary.json`` and the plot, close the sinks, and always release the followers.

        Raises StorageError if the summary cannot be written.
        """
        try:
            write_summary(self._config.folder, summary)
            if any(isinstance(record, StepRecord | EvaluationRecord) for record in self.records):
                with contextlib.suppress(OSError):  # full disk: the plot can be drawn again from the records
                    save_plot(self.records, self._config.folder / "plot.png", self._config.name)
            for sink in self._sinks:
                sink.close()
        finally:
            async with self._changed:
                self.ended = True
                self._changed.notify_all()

    @property
    def seconds(self) -> float:
        """Seconds since the run was started or resumed."""
        return time.time() - self._started
