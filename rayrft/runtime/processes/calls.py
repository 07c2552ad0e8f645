"""A queue of calls that the processes of a pool make: in batches, again if a process died, past slow ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rayrft.errors import CallFailed, CallTimeout, ProcessDied, RayrftError
from rayrft.runtime.actor_pool import TRIES
from rayrft.runtime.processes.pool import ProcessPool
from rayrft.runtime.processes.worker import Worker
from rayrft.runtime.waits import cancel, settle

A = TypeVar("A")
R = TypeVar("R")

_SLOW, _LEAST_SLOW_S, _SLOWEST_SHARE = 10.0, 0.05, 0.25
"""A call is slow once it takes so many times as long as usual, but not before so many seconds, and at the latest after
this share of the deadline. A batch is expected to end within the same share."""
_STARTS = 3
"""How often in a row a process is started that dies, or does not start in time."""


@dataclass
class QueuedCall(Generic[A, R]):
    """A call with its argument; ``done`` has the result, or the error of the last try."""

    argument: A
    done: asyncio.Future[R]
    tries: int = 0
    seconds: float = 0.0
    """Duration of the last try."""


class CallQueue(Generic[A, R]):
    """Calls that ``make`` makes in the processes of a pool, ``workers`` of which are active.

    A free process takes the calls that wait: at most ``max_batch()`` of its object, and no more than are expected to
    end within a fraction of the deadline. Calls of a batch that fails are each made again alone. A call that fails
    alone with an error of type ``again`` is made again once. ``fresh``: each batch has a new object.

    While a call is slow, a spare process works beside it, since a call that hangs would delay others until its
    deadline. After half of the deadline its process gets only what others leave of the processors, and ends with the
    call. If no process can be started, all calls raise the error that ``failure`` returns, now and later.
    """

    def __init__(
        self,
        pool: ProcessPool,
        make: Callable[[Worker, Sequence[QueuedCall[A, R]]], Awaitable[Sequence[R]]],
        *,
        workers: int,
        spare: int,
        deadline_s: float,
        start_s: float,
        failure: Callable[[CallFailed], RayrftError],
        again: tuple[type[Exception], ...] = (ProcessDied,),
        fresh: bool = False,
    ) -> None:
        self._pool, self._make, self._failure, self._again, self._fresh = pool, make, failure, again, fresh
        self._workers, self._deadline_s, self._start_s = workers, deadline_s, start_s
        self._working = set[asyncio.Task[None]]()
        self._active = 0
        """Processes that make calls."""
        self._slow, self._most_slow = 0, spare
        """Slow calls in flight: each allows one more active process."""
        self._usual_s: float | None = None
        """Mean duration of recent successful calls; in a batch, each counts its share."""
        self._calls: asyncio.Queue[QueuedCall[A, R]] = asyncio.Queue()
        self._error: RayrftError | None = None

    async def open(self) -> None:
        """Start the processes. Raises the error of ``failure`` if one cannot be started."""
        ready = [asyncio.get_running_loop().create_future() for _ in range(self._workers)]
        for each in ready:
            self._start(each)
        await asyncio.gather(*ready)

    def put(self, argument: A) -> QueuedCall[A, R]:
        """Queue a call. Raises the error of ``failure`` if no process can be started."""
        if self._error is not None:
            raise self._error
        call = QueuedCall[A, R](argument, asyncio.get_running_loop().create_future())
        self._calls.put_nowait(call)
        return call

    async def close(self) -> None:
        """End the processes."""
        await cancel(*self._working)
        await self._pool.close()

    def _start(self, ready: asyncio.Future[None] | None = None) -> None:
        task = asyncio.create_task(self._work(ready))
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    async def _work(self, ready: asyncio.Future[None] | None) -> None:
        """Make calls in one process after another, until none can be started, or enough others are active."""
        starts = 0
        while self._active < self._workers + self._slow:
            try:
                async with self._pool.lease() as worker:
                    if ready is not None:
                        settle(ready, None)
                    self._active += 1
                    try:
                        most: int = await worker.call("max_batch", deadline_s=self._start_s)
                        starts = 0
                        while worker.idle and self._active <= self._workers + self._slow:
                            await self._make_batch(worker, await self._take(most))
                            if self._fresh:
                                break
                    finally:
                        self._active -= 1
            except CallFailed as error:
                starts += 1
                if self._active >= self._workers:
                    return
                if starts < _STARTS and isinstance(error, ProcessDied | CallTimeout):
                    continue
                self._error = self._failure(error)
                if ready is not None:
                    settle(ready, self._error)
                while not self._calls.empty():
                    settle(self._calls.get_nowait().done, self._error)
                return

    async def _take(self, most: int) -> list[QueuedCall[A, R]]:
        """Wait for a call, and return it with others that wait; a call that is made again is alone."""
        most = min(most, int(_SLOWEST_SHARE * self._deadline_s / self._usual_s)) if self._usual_s else 1
        calls = list[QueuedCall[A, R]]()
        while not calls or (len(calls) < most and not calls[0].tries and not self._calls.empty()):
            call = await self._calls.get()
            if call.done.done():  # it was cancelled
                continue
            if calls and call.tries:
                self._calls.put_nowait(call)
                break
            calls.append(call)
        for call in calls:
            call.tries += 1
        return calls

    async def _make_batch(self, worker: Worker, calls: Sequence[QueuedCall[A, R]]) -> None:
        started, slow, later = time.perf_counter(), asyncio.Event(), asyncio.get_running_loop().call_later
        timers = [later(self._slow_after(len(calls)), self._stand_in, slow)]
        timers.append(later(self._deadline_s / 2, worker.lower_priority))
        try:
            results = await self._make(worker, calls)
        except Exception as error:  # of the object, its process or its arguments; a lone call raises it
            for call in calls:
                call.seconds = time.perf_counter() - started
                if len(calls) > 1 or (isinstance(error, self._again) and call.tries < TRIES):
                    self._calls.put_nowait(call)
                else:
                    settle(call.done, error)
            return
        finally:
            for timer in timers:
                timer.cancel()
            self._slow -= slow.is_set()
            if worker.low_priority:
                worker.kill()  # a process may not raise its priority again
        took = (time.perf_counter() - started) / len(calls)
        self._usual_s = took if self._usual_s is None else 0.9 * self._usual_s + 0.1 * took
        for call, result in zip(calls, results, strict=True):
            settle(call.done, result)

    def _slow_after(self, calls: int) -> float:
        latest = _SLOWEST_SHARE * self._deadline_s
        if self._usual_s is None:
            return latest
        usual_s = calls * self._usual_s
        return max(_LEAST_SLOW_S, min(latest, _SLOW * usual_s), 2 * usual_s)

    def _stand_in(self, slow: asyncio.Event) -> None:
        """Let another process work while a call is slow."""
        if self._slow < self._most_slow:
            self._slow += 1
            slow.set()
            self._start()
