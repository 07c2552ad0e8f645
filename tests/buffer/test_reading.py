"""What a live Buffer does between two looks at its log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from rayrft.buffer import events as e
from rayrft.buffer.log.journal import EventJournal
from rayrft.buffer.log.segments import segment_name
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.reader import Archive, read_state
from rayrft.buffer.state import State
from rayrft.buffer.transitions import apply
from rayrft.config.buffer import SamplerConfig
from rayrft.errors import StorageError
from rayrft.experience import SCHEMA_VERSION
from tests.buffer.in_process import LocalBuffer
from tests.buffer.rows import group, plan


class Writer:
    """Writes a journal whose events say the version, and begins a new one on request."""

    def __init__(self, folder: Path) -> None:
        self.version = 0
        self._state = State(SamplerConfig(), 0, None)
        self._journal = EventJournal(Storage(folder))
        self._journal.open()
        self._write(e.Began("run", SCHEMA_VERSION))
        self.compact()

    def compact(self) -> None:
        self._journal.begin(self._state.to_snapshot())
        self.version += 1
        self._write(e.VersionAdvanced(self.version))

    def _write(self, event: e.Event) -> None:
        apply(self._state, event)
        self._journal.append([event])


class Interrupted(Storage):
    """Something happens before a look at the files, counted from 1, and before every later one, up to ``times``."""

    def __init__(self, folder: Path, before: int, happens: Callable[[], None], times: int = 1) -> None:
        super().__init__(folder)
        self._before, self._happens, self._times = before, happens, times
        self._looks = 0
        self.interruptions = 0

    def files(self) -> dict[str, int]:
        self._look()
        return super().files()

    def read(self, name: str) -> pa.Buffer:
        self._look()
        return super().read(name)

    def _look(self) -> None:
        self._looks += 1
        if self._looks >= self._before and self.interruptions < self._times:
            self.interruptions += 1
            self._happens()


@pytest.mark.parametrize("before", range(1, 6))
def test_a_journal_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path, before: int) -> None:
    writer = Writer(tmp_path)
    reader = Interrupted(tmp_path, before, writer.compact)
    reading = read_state(reader, SamplerConfig(), 0)
    assert (reading.state.training.version, reading.state.meta.run) == (writer.version, "run")
    assert reader.interruptions == 1


def test_a_journal_that_is_always_replaced_is_given_up(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    reader = Interrupted(tmp_path, 1, writer.compact, times=100)
    with pytest.raises(StorageError, match="each of the 5 times"):
        read_state(reader, SamplerConfig(), 0)


def test_groups_are_read_once_wherever_they_are_moved(opened: Callable[..., LocalBuffer]) -> None:
    buffer = opened(segment_bytes=400_000, log_bytes=1 << 20)
    for number in range(8):
        buffer.put([(group(number, length=5800), None)])
    reading = Archive(buffer.folder, SamplerConfig()).rows(columns=["group_id", "segment"])
    before = next(reading).to_pylist()
    assert {row["group_id"] for row in before} == {"0", "1", "2", "3"}
    buffer.do("open_stage", plan(7, scheduled=False))
    buffer.trained(0)
    for number in range(8, 16):
        buffer.put([(group(number, length=5800), None)])
    buffer.do("cover", 1)  # nothing needs the first two segments any more, but for group 7
    after = [row for batch in reading for row in batch.to_pylist()]
    found = [row["group_id"] for row in [*before, *after]]
    assert {number: found.count(number) for number in found} == dict.fromkeys(found, 2)
    assert {"7", "8", "15"} <= set(found)
    moved = {row["segment"] for row in after if row["group_id"] == "7"}
    assert moved and not moved & {segment_name(number) for number in (0, 1)}
