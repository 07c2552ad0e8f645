"""Deadlines of a group's attempts, which stand still while their requests wait for an engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

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


class AttemptDeadline(_Deadline):
    """Cancels the task that makes it, and raises Expired there, when the task has been inside of it for so many
    seconds, or the group for its own."""

    def __init__(self, group: GroupDeadline, seconds: float, session: Session) -> None:
        task = asyncio.current_task()
        assert task is not None  # a coroutine is running
        super().__init__(group, seconds, task.cancel, group.whole)
        self._task, self._session = task, session

    def __enter__(self) -> None:
        if self._group.expired:
            raise Expired
        self._session.on_queue, self._session.on_dequeue = self.stop, self.start
        self._group.attempts.add(self)
        self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        self._group.attempts.discard(self)
        if kind is not None and issubclass(kind, asyncio.CancelledError) and self.expired:
            self._task.uncancel()
            raise Expired from None
