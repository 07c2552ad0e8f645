"""Commands and signals: the first asks a run to stop, the second ends it; the exit status says how it ended."""

from __future__ import annotations

import errno
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rayrft.cli.follow import exit_on_signals, follow, signals
from rayrft.cli.main import app
from rayrft.core import launch
from rayrft.errors import ActorDied, ConfigError
from rayrft.monitor.summary import RestartCount, RunStatus, Summary, Totals, summarise
from tests.errors import about

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGHUP, 129)]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The signals mean what they mean by default, also where the tests themselves run under nohup."""
    before = {number: signal.getsignal(number) for number, _ in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class ScriptedRun:
    """A run that is interrupted while it is watched, by so many signals; it ends when it was told to as often."""

    def __init__(self, folder: Path, *signals: int, status: str = "stopped") -> None:
        self.folder = folder
        self.summary = summarise("run", status, None, Totals(), None, 1.0)
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
        return self.summary


def test_a_run_that_is_not_interrupted_gives_its_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ScriptedRun(tmp_path, status="finished")
    assert follow(run) == run.summary  # type: ignore[arg-type]
    assert run.calls == ["result"] and "restarted" not in capsys.readouterr().out
    run.summary = replace(run.summary, restarts={"engines": RestartCount(3, 41.26), "master": RestartCount(1, 2.0)})
    follow(run)  # type: ignore[arg-type]
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["engines", "3", "41.3"] in printed and ["master", "1", "2.0"] in printed


def test_a_run_that_is_stopped_from_elsewhere_does_not_end_as_a_finished_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        follow(ScriptedRun(tmp_path))  # type: ignore[arg-type]
    assert exit.value.code == 130 and f"rayrft resume {tmp_path}" in capsys.readouterr().out


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("stopped", 130), ("failed", 1), ("killed", 1)])
def test_commands_for_a_run_elsewhere_tell_how_it_ended(
    monkeypatch: pytest.MonkeyPatch, status: str, code: int, running: bool
) -> None:
    error = "engine-0: died" if code == 1 else None
    ended = RunStatus("r", status, error, 7, 7, Path("runs/r"), [], None)
    now = replace(ended, status="running", error=None) if running else ended
    run = SimpleNamespace(watch=lambda say: say("a record"), status=lambda: ended, stop=lambda: None)
    monkeypatch.setattr(launch, "find_status", lambda name: now)
    monkeypatch.setattr(launch, "attach", lambda name: run)
    watched = CliRunner().invoke(app, ["watch", "r"])
    assert watched.exit_code == code and f"r: {status} after 7 steps" in watched.output
    assert ("a record" in watched.output) is running
    assert (error or "") in watched.output and ("rayrft resume runs/r" in watched.output) is (code != 0)
    stopped = CliRunner().invoke(app, ["stop", "r"])
    assert stopped.exit_code == (not running and code == 1)
    assert stopped.output.startswith("r: stopping" if running else f"r: {status} after 7 steps")


ADDRESS = "s3://bucket/out.jsonl"
WITH_PATHS = [
    ["export", "run", "--to", ADDRESS],
    ["trace", "run", "--to", ADDRESS],
    ["bench", "config.yaml", "--json", ADDRESS],
    ["bench", "config.yaml", "--plot", ADDRESS],
    ["view", ADDRESS],
    ["serve", "view", ADDRESS],
    ["data", "export", "run", ADDRESS],
    ["data", "import", "run", ADDRESS, "--name", "gold"],
    ["data", "forget", "run", "--file", ADDRESS],
    ["data", "process", "rows.jsonl", ADDRESS, "--pipeline", "pipeline.yaml"],
    ["data", "process", "rows.jsonl", "out.jsonl", "--pipeline", ADDRESS],
    ["data", "process", "rows.jsonl", "out.jsonl", "--pipeline", "pipeline.yaml", "--left-out", ADDRESS],
    ["data", "difficulty", "config.yaml", "--out", ADDRESS],
    ["data", "tasks", "run", ADDRESS],
    ["data", "lineage", "1", ADDRESS],
    ["data", "feedback", "export", "run", ADDRESS],
    ["data", "feedback", "import", "run", ADDRESS],
    ["data", "stats", "run", "--storage", ADDRESS],
]


@pytest.mark.parametrize("command", WITH_PATHS, ids=" ".join)
def test_an_address_where_a_path_is_meant_is_refused_before_anything_is_read_or_written(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, ConfigError) and about("path", ADDRESS)(done.exception)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_before_a_run_is_up_a_signal_ends_the_command_as_it_would_by_itself(number: int, status: int) -> None:
    ended = []
    with pytest.raises(SystemExit) as exit, exit_on_signals():
        try:
            os.kill(os.getpid(), number)
        except SystemExit:
            ended.append("removed what it had reserved")
            raise SystemExit(1) from None  # as from a call into Ray
    assert exit.value.code == status and ended
    assert signal.getsignal(number) == signal.SIG_DFL, "another one ends the process while Ray shuts down"


def test_without_a_signal_a_command_has_its_own_status() -> None:
    with pytest.raises(SystemExit) as exit, exit_on_signals():
        sys.exit(3)
    assert exit.value.code == 3


def test_a_command_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with exit_on_signals():
        os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    run = ScriptedRun(tmp_path, status="finished")
    with signals(lambda number: run.stop()):
        os.kill(os.getpid(), signal.SIGHUP)
    assert not run.calls


def test_a_run_whose_terminal_is_closed_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(text: str) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=write, flush=lambda: None))
    run = ScriptedRun(tmp_path, signal.SIGHUP)
    with pytest.raises(SystemExit) as exit:
        follow(run)  # type: ignore[arg-type]
    assert exit.value.code == 129 and run.calls == ["stop", "result"]


@pytest.mark.parametrize(("number", "status"), SIGNALS)
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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_programs_send_twice_is_one_and_ctrl_c_after_it_another(number: int) -> None:
    received = queue.Queue[int]()
    with signals(received.put):
        for each in (number, number, signal.SIGINT):
            os.kill(os.getpid(), each)
        assert [received.get(timeout=20) for _ in range(2)] == [number, signal.SIGINT]
    assert received.empty()


def test_signals_mean_afterwards_what_they_meant_before(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number, _ in SIGNALS]
    follow(ScriptedRun(tmp_path, status="finished"))  # type: ignore[arg-type]
    assert [signal.getsignal(number) for number, _ in SIGNALS] == before
