"""Deadlines of a group's attempts, which stand still while their requests wait for an engine."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator

from rayrft.explorer.engines.exchange import Session


class _Deadline:
    """Calls ``expire`` when work has been running for so many seconds; the ``whole`` that it is part of runs with it.

    It runs while it was started more often than stopped: an attempt whose request waits for an engine is stopped.
    """

    def __init__(
        self, timer: _Timer, seconds: float, expire: Callable[[], object], whole: _Deadline | None = None
    ) -> None:
        self._timer, self._left, self._expire, self._whole = timer, seconds, expire, whole
        self._active = 0
        self.due = 0.0
        """When it expires, in the event loop's time, if it is not stopped before."""
        self.expired = False

    def start(self) -> None:
        self._active += 1
        if self._active == 1:
            self.due = self._timer.loop.time() + self._left
            self._timer.add(self)
            if self._whole is not None:
                self._whole.start()

    def stop(self) -> None:
        self._active -= 1
        if self._active == 0:
            self._left = self.due - self._timer.loop.time()
            self._timer.discard(self)
            if self._whole is not None:
                self._whole.stop()

    def end(self) -> None:
        if not self.expired:
            self.expired = True
            self._expire()


class _Timer:
    """One timer for all deadlines of a group: thousands that are set and cancelled would cost more than what they
    guard."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._running = set[_Deadline]()
        self._handle: asyncio.Handle | None = None
        self._due = math.inf

    def add(self, deadline: _Deadline) -> None:
        self._running.add(deadline)
        if deadline.due < self._due:
            self._set(deadline.due)

    def discard(self, deadline: _Deadline) -> None:
        self._running.discard(deadline)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _set(self, due: float) -> None:
        self.cancel()
        self._due, self._handle = due, self.loop.call_at(due, self._ring)

    def _ring(self) -> None:
        """End what is due. What was stopped meanwhile is not, and what was started again is later."""
        now, self._due = self._due, math.inf
        for deadline in [deadline for deadline in self._running if deadline.due <= now]:
            self.discard(deadline)
            deadline.end()
        if self._running:
            self._set(min(deadline.due for deadline in self._running))


class Expired(Exception):
    """An attempt was ended by its deadline, or that of its group."""


class GroupDeadline:
    """The attempts of a group, which end together when its deadline is over."""

    def __init__(self, seconds: float | None) -> None:
        self._timer = _Timer()
        self._deadline = None if seconds is None else _Deadline(self._timer, seconds, self._expire)
        self._attempts = set[_Deadline]()

    @property
    def expired(self) -> bool:
        return self._deadline is not None and self._deadline.expired

    @contextlib.contextmanager
    def attempt(self, seconds: float, session: Session) -> Iterator[None]:
        """Cancel the current task, and raise Expired, when it has been running for so many seconds, or the group for
        its own."""
        if self.expired:
            raise Expired
        task = asyncio.current_task()
        assert task is not None  # a coroutine is running
        deadline = _Deadline(self._timer, seconds, task.cancel, self._deadline)
        session.on_queue, session.on_dequeue = deadline.stop, deadline.start
        self._attempts.add(deadline)
        deadline.start()
        try:
            yield
        except asyncio.CancelledError:
            if not deadline.expired:
                raise
            task.uncancel()
            raise Expired from None
        finally:
            deadline.stop()
            self._attempts.discard(deadline)

    def close(self) -> None:
        """Guard nothing any more."""
        self._timer.cancel()

    def _expire(self) -> None:
        for deadline in self._attempts:
            deadline.end()
