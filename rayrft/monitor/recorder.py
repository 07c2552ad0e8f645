"""Recorder of a run: writes its records to the sinks and streams them to followers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from rayrft.config import RunConfig
from rayrft.errors import NoRoom
from rayrft.files import Room
from rayrft.monitor.records import (
    EvaluationRecord,
    NoteRecord,
    Record,
    RecordFile,
    RecordKey,
    RestartRecord,
    StepRecord,
    record_key,
)
from rayrft.monitor.report import save_plot
from rayrft.monitor.sinks import Sinks
from rayrft.monitor.summary import Summary, Totals, reserve_space, write_summary

_PAGE = 200
"""Most records that a follower gets at a time, so that the Master's event loop is free again soon."""


class Recorder:
    """Writes every record to the run's file and to every sink, and wakes the followers. A resumed run, which repeats
    the steps after ``step``, keeps its first ``kept`` records (None: all) and later evaluations of earlier steps. A
    sink that cannot be opened ends the run only if it was not ``taken_over``."""

    def __init__(self, config: RunConfig, kept: int | None = 0, step: int = 0, *, taken_over: bool = False) -> None:
        self.config = config
        self.file = RecordFile(config.folder)
        kept = len(self.file) if kept is None else kept
        rest = self.file.read(kept)
        late = [r for r in rest if isinstance(r, EvaluationRecord) and r.stage_step and r.step <= step]
        if kept + len(late) < len(self.file):
            self.file = self.file.cut(kept, late)
        self.totals = Totals(self.file.read())
        self._sinks = Sinks(config, started=taken_over)
        reserve_space(config.folder)
        self._changed, self._saving = asyncio.Condition(), asyncio.Lock()
        self.ended = False
        self.repeated = set[RecordKey]()
        """Keys of the records of steps that are repeated after a rewind. They are not written again."""

    def rewind(self, step: int) -> None:
        """Take the records of later steps, and the evaluations of this step, for those of steps that are repeated."""
        records = (each for each in self.file.read() if each.step > step or isinstance(each, EvaluationRecord))
        self.repeated = {record_key(each) for each in records if not isinstance(each, NoteRecord | RestartRecord)}

    def count(self, step: int) -> int:
        """Return the number of records in the file that a run keeps which resumes from this step."""
        if not any(kind == StepRecord.kind and repeated > step for kind, _, repeated in self.repeated):
            return len(self.file) - len(self.file.late)
        return next(n for n, each in enumerate(self.file.read()) if isinstance(each, StepRecord) and each.step > step)

    def restarts(self) -> list[RestartRecord]:
        return [each for each in self.file.read() if isinstance(each, RestartRecord)]

    async def add(self, record: Record) -> None:
        """Append a record, unless its step is repeated; followers see it while it waits for room, and a note is written
        later. Raises StorageError if it cannot be written."""
        if record_key(record) in self.repeated:
            return
        await self._note_failed_sinks(record.stage, record.step)
        async with self._changed:
            try:
                self.file.append(record)
            except NoRoom as error:
                Room.waits.setdefault(error.field, (time.monotonic(), error.problem))
            self.totals.add(record)
            self._sinks.write(record)
            self._changed.notify_all()
        waited = 0.0
        while self.file.late and not isinstance(record, NoteRecord | RestartRecord):
            await asyncio.sleep(Room.poll_s)
            waited += Room.poll_s
            with contextlib.suppress(NoRoom) if waited < Room.limit_s else contextlib.nullcontext():
                self.file.append()

    async def note(self, text: str, stage: str = "", step: int = 0, **data: Any) -> None:
        await self.add(NoteRecord(stage, step, time.time(), text, data))

    async def _note_failed_sinks(self, stage: str = "", step: int = 0) -> None:
        for failure in self._sinks.failures():
            await self.note(f"a sink failed and gets no more records: {failure}", stage, step)

    async def after(self, count: int) -> list[Record]:
        """Wait for records after the first ``count`` and return the next ones; an empty list once there are no more."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.ended or len(self.file) > count)
            return [*self.file.read(count, count + _PAGE)]

    async def close(self, summary: Summary) -> None:
        """Write ``summary.json`` and the plot, close the sinks within ``monitor.stall_s``, and always release the
        followers. Raises StorageError if the summary cannot be written."""
        try:
            await self.save(summary)
            await asyncio.to_thread(self._sinks.close, summary.status == "failed", self.config.monitor.stall_s)
            await self._note_failed_sinks(step=self.totals.step)
            self.file.append()  # what is late
        finally:
            async with self._changed:
                self.ended = True
                self._changed.notify_all()

    async def save(self, summary: Summary) -> None:
        """Write ``summary.json`` and the plot. Raises StorageError if the summary cannot be written."""
        async with self._saving:
            write_summary(self.config.folder, summary)
            if self.totals.step or self.totals.accuracy:
                plot = self.config.folder / "plot.png"
                with contextlib.suppress(OSError):  # full disk: the plot can be drawn again from the records
                    await asyncio.to_thread(save_plot, self.file.read(), plot, self.config.name)
