"""The run's memory: records as they come, for the sinks and for whoever watches."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from rayrft.config import RunConfig
from rayrft.core.summary import keep_room, write_summary
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
        keep_room(config.folder)
        self._changed = asyncio.Condition()
        self._started = time.time()
        self.records: list[Record] = had
        self.ended = False

    async def add(self, record: Record) -> None:
        """Raises StorageError when the record cannot be written."""
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
        """Write ``summary.json`` and the plot, flush the sinks, and let the followers go, whatever happens.

        Raises StorageError when the summary cannot be written.
        """
        try:
            write_summary(self._config.folder, summary)
            if any(isinstance(record, StepRecord | EvaluationRecord) for record in self.records):
                with contextlib.suppress(OSError):  # of a full disk: a picture can be drawn again from the records
                    save_plot(self.records, self._config.folder / "plot.png", self._config.name)
            for sink in self._sinks:
                sink.close()
        finally:
            async with self._changed:
                self.ended = True
                self._changed.notify_all()

    @property
    def seconds(self) -> float:
        """Since the run began, or went on."""
        return time.time() - self._started
