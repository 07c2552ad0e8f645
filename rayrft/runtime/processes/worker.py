"""A leased process: calls of its object, under deadlines that count only the time in which the process could run."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pickle
import signal
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rayrft.errors import ActorDied, AnswerTooLarge, CallFailed, CallTimeout, ProcessDied
from rayrft.runtime.processes.run_clock import RunClock
from rayrft.runtime.processes.template import HEADER, Answer, Ask, Cancel, Reply

_NICEST = 19
_LOOK_S = 1.0
"""Seconds between looks at the clock of a long call: before the first look, a wait for a core counts."""

R = TypeVar("R")
Serve = Callable[..., Awaitable[Any]]
"""Answers what an object asks its parent during a call."""


class Worker:
    """A process and its object. ``kill_process`` kills the process with a pid, and all that it has started."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer_limit: int,
        kill_process: Callable[[int], None],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._limit, self._kill_process = answer_limit, kill_process
        self.pid = 0
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Exit code, or the negative number of the signal that ended it."""
        self.idle = False
        """Whether it can take a call."""
        self.low_priority = False
        self._serving = 0
        """Requests of the object that are being answered."""

    async def call(self, method: str, *arguments: Any, deadline_s: float, serve: Serve | None = None) -> Any:
        """Call a method of the object, and return its result. ``serve`` answers what the object asks meanwhile; an
        error that it raises ends the call and kills the process.

        Raises CallFailed with the text of the error that the method raised; CallTimeout, ProcessDied or AnswerTooLarge:
        each of these, and cancellation, kills the process. The deadline is on the seconds in which the process could
        run (`RunClock`). It starts again whenever the object has waited for ``serve``.
        """
        if self._writer.is_closing():
            raise ProcessDied("its process was killed after an earlier call", field=method)
        if not self.idle:
            raise CallFailed("is called before the last call has ended", field=method)
        message = pickle.dumps((method, arguments), pickle.HIGHEST_PROTOCOL)  # if it raises, the process stays idle
        return await self._exchange(method, HEADER.pack(len(message)) + message, "done", deadline_s, serve)

    async def start(self, deadline_s: float) -> None:
        """Wait until the object is created. Raises the errors of `call`."""
        await self._exchange("create", b"", "created", deadline_s, None)

    async def _exchange(self, method: str, message: bytes, done: str, deadline_s: float, serve: Serve | None) -> Any:
        self.idle = False
        try:
            async with self._limit_of(deadline_s) as restart:
                await self._send(method, message)
                received, asking = await self._receive(method), False
                if serve is not None:
                    received, asking = await self._reply(method, received, serve, restart)
        except TimeoutError:
            problem = f"not {done} within {deadline_s:g} s"
            raise CallTimeout(problem, "raise the deadline, or make it faster", field=method) from None
        else:
            if not isinstance(received, Answer):
                raise CallFailed("the answer is invalid: the process wrote into its socket", field=method)
            self.idle = received.kind != "leaks" and not asking
        finally:
            if not self.idle:
                self.kill()
        if received.kind == "value":
            return received.value
        failure = CallFailed(received.problem, field=method)
        failure.add_note(received.trace)
        raise failure

    @contextlib.asynccontextmanager
    async def _limit_of(self, seconds: float) -> AsyncIterator[Callable[[], None]]:
        """Raise TimeoutError in the block once the process could have run so long; the yielded function restarts it."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        clock: RunClock | None = None
        timer: asyncio.TimerHandle
        async with asyncio.timeout(None) as limit:

            def look_in(left: float) -> None:
                nonlocal timer
                timer = loop.call_later(min(left, _LOOK_S) if left < math.inf else left, look)

            def look() -> None:
                nonlocal clock
                clock = clock or (RunClock(self.pid, seconds=loop.time() - began) if self.pid else None)
                left = seconds - (clock.look() if clock else loop.time() - began)
                if left > 1e-3 or self._serving:
                    look_in(_LOOK_S if self._serving else left)
                else:
                    limit.reschedule(loop.time())

            def restart() -> None:
                nonlocal clock, began
                clock, began = None, loop.time()
                timer.cancel()
                look_in(seconds)

            look_in(seconds)
            try:
                yield restart
            finally:
                timer.cancel()

    async def _reply(
        self, method: str, received: object, serve: Serve, restart: Callable[[], None]
    ) -> tuple[object, bool]:
        """Reply to what the object asks until its answer comes; return the answer, and whether a thread still asks."""

        async def reply(ask: Ask) -> None:
            self._serving += 1
            try:
                value = pickle.dumps(await serve(*ask.arguments), pickle.HIGHEST_PROTOCOL)
            finally:
                self._serving -= 1
                if not self._serving:
                    restart()
            message = pickle.dumps(Reply(ask.number, value), pickle.HIGHEST_PROTOCOL)
            await self._send(method, HEADER.pack(len(message)) + message)

        replying = dict[int, asyncio.Task[None]]()
        try:
            async with asyncio.TaskGroup() as tasks:
                while isinstance(received, Ask | Cancel):
                    if isinstance(received, Ask):
                        replying[received.number] = task = tasks.create_task(reply(received))
                        task.add_done_callback(partial(replying.pop, received.number))
                    elif received.number in replying:
                        replying[received.number].cancel()
                    received = await self._receive(method)
                asking = bool(replying)
                for task in replying.values():
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return received, asking

    async def _send(self, method: str, message: bytes) -> None:
        try:
            self._writer.write(message)
            await self._writer.drain()
        except ConnectionError:
            await self._end(method)

    async def _receive(self, method: str) -> object:
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size > self._limit:
                remedy = f"return at most {self._limit} bytes"
                raise AnswerTooLarge("the answer is too large", remedy, field=method, value=size)
            data = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._end(method)
        try:
            received: object = pickle.loads(data)
        except Exception as error:  # an object's class may raise anything when it is unpickled
            raise CallFailed(f"the answer cannot be unpickled: {type(error).__name__}: {error}", field=method) from None
        return received

    async def _end(self, method: str) -> NoReturn:
        """Raise ProcessDied with how the process ended."""
        self.kill()  # it may have closed its socket without ending
        await asyncio.wait([self.ended])  # awaited itself, it would be cancelled with this call
        code = self.ended.result()
        value = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        raise ProcessDied("its process ended", field=method, value=value) from None

    def started(self, pid: int) -> None:
        """Set the pid, which is known a little later than the process can be written to."""
        self.pid = pid
        if self._writer.is_closing():
            self.kill()

    def kill(self) -> None:
        """Kill the process, with all that it has started."""
        self.idle = False
        self._writer.close()
        if self.pid and not self.ended.done():
            self._kill_process(self.pid)

    def lower_priority(self) -> None:
        """Let the process, with all that it has started or will start, get only what others leave of the processors."""
        self.low_priority = True
        pids = [self.pid] if self.pid and not self.ended.done() else []
        for pid in pids:
            with contextlib.suppress(OSError):  # it has just ended
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    # First the thread: what it starts from now on inherits its niceness.
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), _NICEST)
                    pids += map(int, (thread / "children").read_text().split())
                # Where the kernel shares time out by session, niceness counts within one alone: sched(7), autogroups.
                if os.getsid(pid) == pid:
                    Path(f"/proc/{pid}/autogroup").write_text(f"{_NICEST}")


async def call_here(method: str, call: Callable[[], Awaitable[R]], deadline_s: float) -> R:
    """Await a call of a user's coroutine function in this event loop. Raises CallFailed and CallTimeout, as
    `Worker.call` does, and ActorDied."""
    try:
        async with asyncio.timeout(deadline_s) as deadline:
            return await call()
    except ActorDied:
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        if deadline.expired():
            raise CallTimeout(f"not done within {deadline_s:g} s", field=method) from None
        raise failed_call(method, error) from error


def failed_call(method: str, error: BaseException) -> CallFailed:
    """Return the failure of a call that raised an error, with the traceback."""
    failure = CallFailed(f"{type(error).__name__}: {error}", field=method)
    failure.add_note("".join(traceback.format_exception(error)))
    return failure
