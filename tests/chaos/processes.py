"""The processes of a run, to kill and to count: what psutil tells about the children of the node's raylet."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

import rayrft
from rayrft.monitor.records import Record, RestartRecord, StepRecord, read_records
from rayrft.monitor.summary import Summary

T = TypeVar("T")
R = TypeVar("R", bound=Record)


def raylet_above(pid: int) -> psutil.Process:
    return next(each for each in psutil.Process(pid).parents() if each.name() == "raylet")


def own_raylet() -> psutil.Process:
    """That of the cluster which this process has started."""
    return next(each for each in psutil.Process().children(recursive=True) if each.name() == "raylet")


SERVICES = ("IDLE", "RuntimeEnvAgent", "DashboardAgent", "_AutoscalingCoordinatorActor")
"""Children of the raylet that serve no run: workers that wait for work, and those of Ray itself."""


def works(process: psutil.Process) -> bool:
    """Whether the process is alive, and is an actor, a task, or what one of these has started. A zombie has ended."""
    try:
        ended = not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        return not ended and not process.name().removeprefix("ray::").startswith(SERVICES)
    except psutil.NoSuchProcess:
        return False


def at_work(raylet: psutil.Process) -> set[psutil.Process]:
    """Actors, tasks and what they have started."""
    found = set()
    for worker in filter(works, raylet.children()):
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {worker, *worker.children(recursive=True)}
    return found


def until_ended(found: Callable[[], set[psutil.Process]]) -> None:
    """Return once none of these processes is left: they end a moment after their actors."""
    deadline = time.monotonic() + 60
    while left := found():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def ranks(run: rayrft.Run) -> list[int]:
    """Those on the node of the Trainer, which has no other run."""
    return [each.pid for each in raylet_above(run.pids()["trainer"]).children() if "RayTrainWor" in each.name()]


def core(engine: int) -> int:
    """vLLM's core, whose memory is more than that of its helpers."""
    return int(max(psutil.Process(engine).children(recursive=True), key=lambda each: each.memory_info().rss).pid)


def find(run: rayrft.Run, target: str) -> int | None:
    """The process of an actor by its name, of a ``rank``, or of the ``core of`` an engine; None if it is not up."""
    if target == "rank":
        return next(reversed(ranks(run)), None) if "trainer" in run.pids() else None
    pid = run.pids().get(target.removeprefix("core of "))
    return core(pid) if pid and target.startswith("core of ") else pid


def send(pid: int | None, by: signal.Signals = signal.SIGKILL) -> bool:
    """Signal a process; return whether it was there."""
    try:
        if pid is not None:
            os.kill(pid, by)
    except ProcessLookupError:
        return False
    return pid is not None


def recorded(run: rayrft.Run, kind: type[R]) -> list[R]:
    return [record for record in read_records(run.folder) if isinstance(record, kind)]


def until(run: rayrft.Run, found: Callable[[], T], limit_s: float = 600, pause_s: float = 0.1) -> T:
    """Wait until something is found, while the run is running."""
    deadline = time.monotonic() + limit_s
    while not (result := found()):
        if (run.folder / "summary.json").exists():
            raise AssertionError(f"the run has ended: {run.result()}")
        assert time.monotonic() < deadline, run.status()
        time.sleep(pause_s)
    return result


def more_steps(run: rayrft.Run, count: int) -> None:
    """Wait until the run has taken more steps."""
    taken = len(recorded(run, StepRecord)) + count
    until(run, lambda: len(recorded(run, StepRecord)) >= taken)


def new_restarts(run: rayrft.Run, known: int) -> list[RestartRecord]:
    """Wait for restarts after the first ones."""
    return until(run, lambda: recorded(run, RestartRecord)[known:])


def check_steps(run: rayrft.Run, summary: Summary) -> None:
    """The run has taken each step once, on fresh rows, of which it has 16 a step after the three of the warm-up."""
    steps = recorded(run, StepRecord)
    assert [step.step for step in steps] == list(range(1, summary.steps + 1))
    assert [step.version for step in steps] == sorted(step.version for step in steps)
    assert max(step.staleness_max or 0 for step in steps) == 0
    assert summary.ledger is not None and summary.ledger.closes
    assert summary.ledger.trained == sum(step.usual_rows for step in steps) == 16 * (summary.steps - 3)


def final_weights(run: rayrft.Run) -> bytes:
    return (run.folder / "checkpoints" / "final" / "model.safetensors").read_bytes()
