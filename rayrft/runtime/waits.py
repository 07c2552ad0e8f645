"""Tracking of waits between actors, so that a stalled run reports who waits for whom, and since when."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """``waiter`` waits for ``count`` results of ``target``, the oldest of which is ``what``.

    ``quiet_s`` is the time without progress: since the last result, or since the wait began.
    """

    waiter: str
    target: str
    what: str
    count: int
    quiet_s: float


@dataclass(frozen=True)
class WaitReport:
    """An actor's current waits, and for how long it has received nothing at all."""

    waits: list[Wait]
    quiet_s: float


@dataclass
class _Target:
    began: dict[int, float]
    what: dict[int, str | Callable[[], str]]
    internal: bool
    progressed: float = 0.0


class Waits:
    """The waits of the actor named ``waiter``, for use in its event loop."""

    def __init__(self, waiter: str) -> None:
        self._waiter = waiter
        self._targets: dict[str, _Target] = {}
        self._number = 0
        self._progressed = time.monotonic()

    @contextlib.contextmanager
    def on(self, target: str, what: str | Callable[[], str], *, internal: bool = False) -> Iterator[None]:
        """Record a wait for ``what`` of ``target`` inside. ``internal``: the target is work of this actor, which waits
        in turn, so that anything the actor receives counts as progress."""
        number = self.begin(target, what, internal=internal)
        try:
            yield
        finally:
            self.end(target, number)

    def begin(self, target: str, what: str | Callable[[], str], *, internal: bool = False) -> int:
        """Begin a wait; return its number, for `end`."""
        self._number += 1
        entry = self._targets.setdefault(target, _Target({}, {}, internal))
        entry.began[self._number], entry.what[self._number] = time.monotonic(), what
        return self._number

    def end(self, target: str, number: int) -> None:
        """End a wait, by a result or a failure; both count as progress of the target."""
        entry = self._targets[target]
        del entry.began[number], entry.what[number]
        self.progressed(target)
        if not entry.began:
            del self._targets[target]

    def progressed(self, target: str) -> None:
        """Record progress of the target that does not end a wait."""
        self._progressed = time.monotonic()
        if target in self._targets:
            self._targets[target].progressed = self._progressed

    def report(self) -> WaitReport:
        """Return the current waits, internal ones last."""
        now = time.monotonic()
        waits = []
        for target, entry in sorted(self._targets.items(), key=lambda item: item[1].internal):
            oldest = min(entry.began, key=entry.began.__getitem__)
            what = entry.what[oldest]
            latest = max(entry.began[oldest], entry.progressed, self._progressed if entry.internal else 0.0)
            text = what if isinstance(what, str) else what()
            waits.append(Wait(self._waiter, target, text, len(entry.began), now - latest))
        return WaitReport(waits, now - self._progressed)
