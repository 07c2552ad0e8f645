"""Following a run to its end, and the signals that end commands."""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rayrft.cli import say
from rayrft.core.run import Run
from rayrft.errors import RayrftError

if TYPE_CHECKING:
    from rayrft.monitor.summary import Summary

_REPEATED_S = 1.0
"""Seconds within which a signal that no key sends is one with the signal before it."""


def follow(handle: Run) -> Summary:
    """Print a run's lines, final table and paths; return its summary. Raises the root cause if the run fails, and
    SystemExit with status 130 if it is stopped from elsewhere.

    Ctrl-C (or SIGTERM, SIGUSR1 or SIGHUP) asks the run to stop, and a second one ends it immediately. In both cases a
    summary is written, and SystemExit is raised with 128 plus the signal's number.
    """
    received: list[int] = []

    def interrupted(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            threading.Thread(target=handle.stop, daemon=True).start()  # a Master that hangs does not answer
            say("stopping after the current step (press again to end immediately)")
        else:
            handle.kill()

    with signals(interrupted):
        try:
            handle.watch(say)
            summary = handle.result()
        except RayrftError:
            if len(received) < 2:
                raise
            say(f"ended immediately; to resume: rayrft resume {handle.folder}")
            raise SystemExit(128 + received[0]) from None
    _report(handle, summary)
    if status := 128 + received[0] if received else exit_status(summary.status):
        raise SystemExit(status)
    return summary


def exit_status(status: str) -> int:
    """Return the exit status of every command that ends with a run."""
    return {"finished": 0, "stopped": 128 + signal.SIGINT}.get(status, 1)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Raise SystemExit inside at SIGINT, SIGTERM, SIGUSR1 and SIGHUP: before a run is up nothing is to be saved. After
    it they end the process at once, also while Ray shuts down."""
    received, numbers = list[int](), _signal_numbers()

    def end(number: int, _: Any) -> None:
        received.append(number)
        print("interrupted", file=sys.stderr, flush=True)
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    except SystemExit as ended:  # a call into Ray in which it was raised has changed its status
        raise SystemExit(128 + received[0] if received else ended.code) from None
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _signal_numbers() -> list[signal.Signals]:
    """Return the signals that end a run: not SIGHUP under nohup."""
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
    return [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *hangup]


@contextlib.contextmanager
def signals(received: Callable[[int], None]) -> Iterator[None]:
    """Call ``received``, in a separate thread, with the number of every signal to end inside. A plain handler runs only
    when calls into Ray return to Python, up to a second later, and two signals may be merged into one. What programs
    send twice is one signal: `timeout` to the process and to its group, a terminal that closes by itself and its shell.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)  # required by set_wakeup_fd
    numbers = _signal_numbers()

    def listen() -> None:
        last = -math.inf
        while number := reading.recv(1):
            before, last = last, time.monotonic()
            if number[0] == signal.SIGINT or last - before > _REPEATED_S:
                received(number[0])

    handlers = [signal.signal(number, lambda *_: None) for number in numbers]
    fd = signal.set_wakeup_fd(writing.fileno())
    listening = threading.Thread(target=listen, daemon=True)
    listening.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd)
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        writing.close()
        listening.join()
        reading.close()


def _report(handle: Run, summary: Summary) -> None:
    from rayrft.monitor.records import read_records
    from rayrft.monitor.report import accuracy_table, format_table

    say("\n" + accuracy_table(read_records(handle.folder)))
    if summary.restarts:
        counts = ([kind, f"{each.count}", f"{each.seconds:.1f}"] for kind, each in summary.restarts.items())
        say("\n" + format_table([["restarted", "times", "seconds lost"], *counts]))
    if summary.ledger is not None:
        say(f"\nrows: {summary.ledger}")
    say(f"{summary.status} after {summary.seconds['total']:.0f} s, {summary.steps} steps")
    if (plot := handle.folder / "plot.png").exists():
        say(f"plot        {plot}")
    if summary.checkpoint:
        say(f"checkpoint  {summary.checkpoint}")
    if summary.status != "finished":
        say(f"to resume   rayrft resume {handle.folder}")
