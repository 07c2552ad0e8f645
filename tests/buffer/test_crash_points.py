"""A Buffer that is killed, or whose disk fails, at every single change that it makes to the disk, one after another; at
every third one where time is short."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rayrft.buffer.events import GroupReport
from rayrft.buffer.log import journal
from rayrft.buffer.schedule import Ticket
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.errors import StorageError
from rayrft.experience import Experience
from tests.buffer.disk import Disk, Killed
from tests.buffer.in_process import InlineLoop, LocalBuffer, ObjectTable, small
from tests.buffer.rows import expert_rows, group, packed, plan

Made = tuple[str, tuple[Any, ...], Any]
"""A call of `LocalBuffer`, its arguments, and what came of it."""


class Script:
    """Calls of a run, made for the first time, and remembered."""

    def __init__(self, buffer: LocalBuffer) -> None:
        self._buffer = buffer
        self.made: list[Made] = []

    def __call__(self, method: str, *arguments: Any) -> Any:
        came = getattr(self._buffer, method)(*arguments)
        self.made.append((method, arguments, came))
        return came


def with_tickets(script: Script) -> None:
    """A trainer, a producer with tickets, and what can happen to these, to the end of the tasks."""
    script("do", "load", "gold", packed(expert_rows(3)))
    script("do", "open_stage", plan(2, max_staleness=1, expert_rows=2, demonstrations="gold"))
    a, b, c, d = script("do", "admit", "producer", 1, 10)
    script("put", [(rows(a), a), (rows(b), b)])
    script("do", "load", "gold", packed(expert_rows(4)))
    script("lease", 0)
    script("do", "fail", c, "workflow_error")
    script("put", [(broken_rows(d.sequence), d)])
    script("do", "ack", 0)
    script("do", "advance", 1)
    script("do", "cover", 1)
    e, f, g, late = script("do", "admit", "producer", 2, 10)
    script("put", [(rows(e), e), ([rows(f)[0], broken_rows(f.sequence)[1]], f)])
    script("put", [(rows(g), g)])
    script("do", "drop", late, {"zero_variance": 2}, GroupReport(rows=2))
    script("do", "feedback", f"{e.sequence}/0", 9.0, {"said": "good"})
    script("lease", 1)
    script("do", "requeue", 1, 1)
    script("lease", 2)
    assert script("do", "feedback", f"{e.sequence}/0", 1.0) == ("FeedbackRefused", 2)
    script("do", "ack", 2)
    script("do", "advance", 3)
    script("put", [(rows(late), late)])
    h, i, j = script("do", "admit", "producer", 3, 10)
    script("do", "fail", j, "prompt_too_long")
    script("put", [(rows(h), h), (rows(i), i)])
    script("lease", 3)
    script("do", "ack", 3)
    script("resume", 3, "second")
    script("lease", 3)
    script("do", "ack", 3)
    script("do", "cover", 4)
    script("do", "advance", 4)
    assert script("do", "admit", "another", 1, 10) == []
    assert script("lease", 4) == ("LeaseEnded", "end_of_data")
    script("do", "close_stage")
    script("do", "open_stage", plan(1, version=4))


def from_a_pool(script: Script, groups: int = 3) -> None:
    """Producers without tickets, groups that come back, and a log so small that it is always being compacted."""
    for first in range(0, 12, 4):
        script("put", [(group(number), None) for number in range(first, first + 4)])
    script("put", [(broken_rows(30), None), (group(31), None)])
    script("do", "open_stage", plan(groups, scheduled=False))
    for step in range(6):
        script("lease", step)
        if step != 3:
            script("do", "ack", step)
        if step == 5:
            script("resume", 4, "second")
            script("do", "ack", 4)
            script("do", "ack", 5)
        script("put", [(group(40 + step), None)])
        script("do", "feedback", f"{40 + step}/1", 5.0)
        script("do", "advance", step + 1)
        script("do", "cover", step)


def rows(ticket: Ticket) -> list[Experience]:
    return group(ticket.sequence, version=ticket.version)


def broken_rows(number: int) -> list[Experience]:
    return [row.with_fields(reward=None) for row in group(number)]


SIZES = {"segment_bytes": 6000, "log_bytes": 12000, "memory_bytes": 8000, "max_bytes": 1 << 30}
FULL = {**SIZES, "max_rows": 24, "when_full": "evict_oldest"}
ROOMY = small(**SIZES, max_rows=1000, fsync="always")
TASKS = TaskSetSpec([str(number) for number in range(11)], [0] * 11, [1.0], sampler="shuffled", seed=0, epochs=1)
BAD_DISK = partial(OSError, errno.EIO, "Input/output error")
REPLAYED = small(**FULL, sampler={"name": "priority", "max_uses": 3})


class Mortal(LocalBuffer):
    """Whose calls end when the disk says that the process is gone."""

    make_loop = InlineLoop

    def __init__(self, disk: Disk, *arguments: Any) -> None:
        self._disk = disk
        super().__init__(*arguments)

    def open(self) -> None:
        while True:
            try:
                super().open()
                return self.loop.set_exception_handler(lambda *_: None)  # nobody waits for what was killed
            except (Killed, StorageError):
                self._disk.close_all()
                self._disk.stop(None)

    def run(self, work: Awaitable[Any]) -> Any:
        async def race() -> Any:
            gone = self.loop.create_future()
            self._disk.on_failure = lambda: self.loop.call_soon_threadsafe(gone.set_result, None)
            made = asyncio.ensure_future(work)
            await asyncio.wait({made, gone}, return_when=asyncio.FIRST_COMPLETED)
            if self._disk.killed:
                raise Killed
            return await made

        return super().run(race())

    def call(self, method: str, arguments: tuple[Any, ...], again: int) -> Any:
        """Make a call as often as it takes: once more where it failed, and to a Buffer that was started again; which is
        killed as well, after so many changes."""
        for attempt in range(10):
            try:
                return getattr(self, method)(*arguments)
            except (Killed, StorageError) as error:
                if attempt == 0 and isinstance(error, StorageError):
                    continue
                self.kill()
                self._disk.close_all()
                self._disk.stop(again if attempt < 2 else None)
                self.open()
        raise AssertionError(f"{method} failed again and again")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    ObjectTable(monkeypatch)
    monkeypatch.setattr(journal, "SNAPSHOT_BYTES", 2000)
    monkeypatch.setattr(journal, "SNAPSHOT_RATIO", 0)
    return Disk(monkeypatch)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("failure", "play", "config", "tasks"),
    [
        (Killed, with_tickets, ROOMY, TASKS),
        (Killed, from_a_pool, REPLAYED, None),
        (BAD_DISK, with_tickets, ROOMY, TASKS),
        # A failure that the Buffer survives leaves rows in a segment that nobody speaks of. So segments are deleted at
        # other times, and a draw by chance is another one; in order of arrival it must be the same.
        (BAD_DISK, partial(from_a_pool, groups=2), small(**FULL), None),
    ],
    ids=["killed, with tickets", "killed, from a pool", "bad disk, with tickets", "bad disk, from a pool"],
)
def test_a_run_goes_on_as_if_nothing_had_been(
    failure: Callable[[], BaseException],
    play: Callable[[Script], None],
    config: Any,
    tasks: Any,
    every: int,
    tmp_path: Path,
    disk: Disk,
) -> None:
    twin = LocalBuffer(tmp_path / "twin", config, tasks)
    script = Script(twin)
    play(script)
    twin.restart()
    standing, changes = twin.standing(), disk.calls.copy()
    kinds = {(call, file.split("-")[0]) for call, file in changes}
    assert kinds >= {("write", "segment"), ("unlink", "segment"), ("replace", ".snapshot"), ("unlink", "journal")}
    for number, change in [*enumerate(changes)][::every]:
        disk.stop(number, failure())
        buffer = Mortal(disk, tmp_path / str(number), config, tasks)
        for method, arguments, came in script.made:
            assert buffer.call(method, arguments, number % 7) == came, f"{method}{arguments} after {change}, {number}"
        disk.stop(None)
        buffer.restart()
        assert buffer.standing() == standing, f"after {change}, {number}"
        buffer.kill()
