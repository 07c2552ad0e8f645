"""Tracking of waits between actors, so that a stalled run reports who waits for whom, and since when."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rayrft.files import Room
from rayrft.runtime.trace import Trace

R = TypeVar("R")
ROOM = "room to write"


async def unless(ends: Awaitable[Any], error: Callable[[], BaseException], work: Awaitable[R]) -> R:
    """Return the result of ``work``; abandon it and raise ``error()`` as soon as ``ends`` has returned."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(ends)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise error()
        return working.result()
    finally:
        await cancel(working, ending)


async def cancel(*futures: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended; their errors are of no interest."""
    for each in futures:
        each.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


def cancelled() -> bool:
    """Return whether the current task has been cancelled, and not only what it waits for."""
    current = asyncio.current_task()
    return current is None or current.cancelling() > 0


def in_thread(work: Callable[[], Any]) -> Any:
    """Run a coroutine in another thread and event loop, and return its result; the caller may be in an event loop,
    and an interrupt of the caller does not wait for it."""
    done = Future[Any]()

    def run() -> None:
        try:
            done.set_result(asyncio.run(work()))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="rayrft-coroutine", daemon=True).start()
    return done.result()


def settle(future: asyncio.Future[R], outcome: R | BaseException) -> None:
    """Set the result of a future, or its exception, unless it is done, such as by a cancellation."""
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


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
    """An actor's current waits, for how long it has made no progress, what it does if it loads, and why all that it
    does fails, if it does."""

    waits: list[Wait]
    quiet_s: float
    doing: str = ""
    trouble: str = ""


@dataclass
class _Target:
    internal: bool
    waits: dict[_OpenWait, float] = field(default_factory=dict)
    """When each began, the oldest first."""
    progressed: float = 0.0


class Waits:
    """The waits of the actor named ``waiter``, for use in its event loop, and those for ``rooms``: see `Room`. Its
    ``trace`` has those that have a name there."""

    def __init__(self, waiter: str, trace: Trace | None = None, *, rooms: bool = True) -> None:
        self.trace = trace or Trace()
        self._waiter, self._rooms = waiter, rooms
        self.targets: dict[str, _Target] = {}
        """Targets that are waited for."""
        self._progressed = time.monotonic()

    def on(
        self, target: str, what: str | Callable[[], str], *, internal: bool = False, name: str = ""
    ) -> AbstractContextManager[None]:
        """Record a wait for ``what`` of ``target`` inside. ``internal``: the target is work of this actor, which waits
        in turn, so that anything the actor receives counts as progress. ``name``: that of the activity in the trace."""
        return _OpenWait(self, target, what, internal, name)

    def progressed(self, target: str) -> None:
        """Record progress of the target that does not end a wait."""
        self._progressed = time.monotonic()
        if target in self.targets:
            self.targets[target].progressed = self._progressed

    def report(self) -> WaitReport:
        """Return the current waits, internal ones last."""
        now, waits = time.monotonic(), []
        for target, entry in sorted(self.targets.items(), key=lambda item: item[1].internal):
            oldest, began = next(iter(entry.waits.items()))
            latest = max(began, entry.progressed, self._progressed if entry.internal else 0.0)
            text = oldest.what if isinstance(oldest.what, str) else oldest.what()
            waits.append(Wait(self._waiter, target, text, len(entry.waits), now - latest))
        for file, (since, why) in [*Room.waits.items()] if self._rooms else []:
            waits.append(Wait(self._waiter, ROOM, f"{file}: {why}; free space to continue", 1, now - since))
        return WaitReport(waits, now - self._progressed)


@dataclass(eq=False)
class _OpenWait(AbstractContextManager[None]):
    """The context of a wait: a class, which costs less than a generator, as every group has dozens."""

    waits: Waits
    target: str
    what: str | Callable[[], str]
    internal: bool
    name: str

    def __enter__(self) -> None:
        targets = self.waits.targets
        if (entry := targets.get(self.target)) is None:
            entry = targets[self.target] = _Target(self.internal)
        entry.waits[self] = time.monotonic()
        if self.name:
            self.waits.trace.begin(self.target, self.name)

    def __exit__(self, *_: object) -> None:
        targets = self.waits.targets
        del targets[self.target].waits[self]
        self.waits.progressed(self.target)  # by a result or a failure
        if not targets[self.target].waits:
            del targets[self.target]
        if self.name:
            self.waits.trace.end(self.target, self.name)
