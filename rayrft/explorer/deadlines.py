"""Deadlines of a group's attempts, which stand still while their requests wait for an engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rayrft.explorer.engines.exchange import Session


class Expired(Exception):
    """An attempt was ended by its deadline, or that of its group."""


class GroupDeadline:
    """The attempts of a group, which end together when its deadline is over.

    One timer serves all of a group's deadlines: thousands, set and cancelled, would cost more than what they guard.
    """

    def __init__(self, seconds: float | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.running = set[_Deadline]()
        """Those that do not stand still."""
        self._timer: asyncio.Handle | None = None
        self._due = math.inf
        self.attempts = set[_Deadline]()
        self.whole = None if seconds is None else _Deadline(self, seconds, self._end)

    @property
    def expired(self) -> bool:
        return self.whole is not None and self.whole.expired

    @contextmanager
    def attempt(self, seconds: float, session: Session) -> Iterator[None]:
        """Cancel the current task, and raise Expired, when it has run for so many seconds, or the group for its own."""
        if self.expired:
            raise Expired
        task = asyncio.current_task()
        assert task is not None  # a coroutine is running
        deadline = _Deadline(self, seconds, task.cancel, self.whole)
        session.on_queue, session.on_dequeue = deadline.stop, deadline.start
        self.attempts.add(deadline)
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
            self.attempts.discard(deadline)

    def close(self) -> None:
        """Guard nothing any more."""
        if self._timer is not None:
            self._timer.cancel()

    def add(self, deadline: _Deadline) -> None:
        """Let a deadline run."""
        self.running.add(deadline)
        if deadline.due < self._due:
            self._set(deadline.due)

    def _end(self) -> None:
        for attempt in self.attempts:
            attempt.end()

    def _set(self, due: float) -> None:
        self.close()
        self._due = due
        self._timer = self.loop.call_at(due, self._ring)

    def _ring(self) -> None:
        """End what is due. What was stopped meanwhile is not, and what was started again is later."""
        now, self._due = self._due, math.inf
        for deadline in [deadline for deadline in self.running if deadline.due <= now]:
            self.running.discard(deadline)
            deadline.end()
        if self.running:
            self._set(min(deadline.due for deadline in self.running))


class _Deadline:
    """Calls ``expire`` when work of the group has been running for so many seconds.

    It runs while it was started more often than stopped, and the ``whole`` group's runs with it.
    """

    def __init__(
        self, group: GroupDeadline, seconds: float, expire: Callable[[], object], whole: _Deadline | None = None
    ) -> None:
        self._group = group
        self._left = seconds
        self._expire = expire
        self._whole = whole
        self._active = 0
        self.due = 0.0
        """When it expires, in the event loop's time, if it is not stopped before."""
        self.expired = False

    def start(self) -> None:
        self._active += 1
        if self._active == 1:
            self.due = self._group.loop.time() + self._left
            self._group.add(self)
            if self._whole is not None:
                self._whole.start()

    def stop(self) -> None:
        self._active -= 1
        if self._active == 0:
            self._left = self.due - self._group.loop.time()
            self._group.running.discard(self)
            if self._whole is not None:
                self._whole.stop()

    def end(self) -> None:
        if not self.expired:
            self.expired = True
            self._expire()
