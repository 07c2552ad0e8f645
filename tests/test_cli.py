"""Ctrl-C while a run is followed: the first asks it to stop, the second ends it; the exit status says so."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rayrft.cli import follow
from rayrft.core.summary import Summary, Totals, summarise
from rayrft.errors import ActorDied

SUMMARY = summarise("run", "stopped", None, Totals(), None, 1.0)


class ScriptedRun:
    """A run that is interrupted while it is watched, by so many signals; it ends when it was told to as often."""

    def __init__(self, folder: Path, *signals: int) -> None:
        self.folder = folder
        self._signals = signals
        self._told = threading.Semaphore(0)
        self.calls: list[str] = []

    def watch(self, say: Callable[[str], None]) -> None:
        for number in self._signals:
            os.kill(os.getpid(), number)
        for _ in self._signals:
            assert self._told.acquire(timeout=20)
        if "kill" in self.calls:
            raise ActorDied("the run was killed")

    def stop(self) -> None:
        self.calls.append("stop")
        self._told.release()

    def kill(self) -> None:
        self.calls.append("kill")
        self._told.release()

    def result(self) -> Summary:
        self.calls.append("result")
        return SUMMARY


def test_a_run_that_is_not_interrupted_gives_its_summary(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path)
    assert follow(run) == SUMMARY  # type: ignore[arg-type]
    assert run.calls == ["result"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_stops_the_run_and_its_end_is_waited_for(tmp_path: Path, number: int, status: int) -> None:
    run = ScriptedRun(tmp_path, number)
    with pytest.raises(SystemExit) as exit:
        follow(run)  # type: ignore[arg-type]
    assert exit.value.code == status and run.calls == ["stop", "result"]


def test_the_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    run = ScriptedRun(tmp_path, signal.SIGINT, signal.SIGINT)
    with pytest.raises(SystemExit) as exit:
        follow(run)  # type: ignore[arg-type]
    assert exit.value.code == 130 and run.calls == ["stop", "kill"]


def test_signals_mean_afterwards_what_they_meant_before(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    follow(ScriptedRun(tmp_path))  # type: ignore[arg-type]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
