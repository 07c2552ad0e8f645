"""Objects in processes of their own, which can be killed: for code that blocks, hangs, leaks or dies.

>>> pool = ProcessPool(Maze, processes=64, plugins=config.plugins)  # doctest: +SKIP
>>> async with pool.lease() as maze:  # doctest: +SKIP
...     observation = await maze.call("reset", task, deadline_s=30)
>>> await pool.close()  # doctest: +SKIP

Every lease has an object that nobody used before. Processes are forked, in milliseconds, from a template that has
imported the factory's modules and nothing else (see `rayrft.runtime.processes.template`); an import that starts threads
belongs into the factory. They inherit no socket but their own, and end with the process that made the pool, even if it
is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from rayrft.errors import AnswerTooLarge, CallFailed, CallTimeout, ProcessDied
from rayrft.runtime.processes.run_clock import RunClock
from rayrft.runtime.processes.template import HEADER, RECORD, RENEW, STATUS, Answer, Ask, Blueprint, GiveUp, Reply

_PASSED = re.compile(
    r"(?!.*(KEY|TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL))(?:(PATH|HOME|USER|LOGNAME|SHELL|TERM|TMPDIR|TZ|LANG|LANGUAGE|PWD)"
    r"|(LC|LD|PYTHON|VIRTUAL_ENV|CONDA|OMP|MKL|OPENBLAS|CUDA|NVIDIA|ROCR|HIP|TORCH|TOKENIZERS|TRANSFORMERS|HF|XDG|SSL"
    r"|REQUESTS_CA|CURL_CA|SDL|MUJOCO|RAYRFT)\w*|\w+_proxy|\w+_PROXY)"
)
"""Names of the variables that processes inherit: others may be keys, and a model may drive what runs in a process."""

_STARTING_AT_ONCE = 8
"""Processes between fork and readiness: more would only compete for the cores."""

_LOOK_S = 1.0
"""How often a call that takes longer is looked at: before that, a wait for a core counts."""


def environment() -> dict[str, str]:
    """Return the variables that code may see which a model drives, and those that RAYRFT_PASS_ENV names."""
    asked = os.environ.get("RAYRFT_PASS_ENV", "").split(",")
    return {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name) or name in asked}


Asked = Callable[..., Awaitable[Any]]
"""Replies to what an object asks during a call: takes a name and arguments."""


class Worker:
    """A process and the object in it, while it is leased."""

    def __init__(
        self, template: _Template, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer_limit: int
    ) -> None:
        self._template = template
        self._reader, self._writer = reader, writer
        self._limit = answer_limit
        self.pid = 0
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Exit code, or the negative number of the signal that ended it."""
        self.at_rest = False
        """Whether it is not at work, so that it can take a call."""

    async def call(self, method: str, *arguments: Any, deadline_s: float, asked: Asked | None = None) -> Any:
        """Call a method of the object, and return what it returns. Meanwhile it may ask: ``asked`` is called with the
        name and the arguments, and what it returns is the reply; what it raises ends the call, and the process.

        Raises CallFailed with the text of what it raised; CallTimeout, ProcessDied or AnswerTooLarge, after which the
        process is no more. A call that is cancelled costs the process, too. The deadline is on the seconds in which the
        process could run (`RunClock`): a busy machine makes no call late.
        """
        if self._writer.is_closing():
            raise ProcessDied("its process was killed after an earlier call", field=method)
        if not self.at_rest:
            raise CallFailed("is called before the last call has ended", field=method)
        message = pickle.dumps(
            (method, arguments), pickle.HIGHEST_PROTOCOL
        )  # where it raises, the process is as it was
        self.at_rest = False
        try:
            async with self._limit_of(deadline_s):
                return await self._answer(method, HEADER.pack(len(message)) + message, asked)
        except TimeoutError:
            problem = f"not done within {deadline_s:g} s"
            raise CallTimeout(problem, "raise the deadline, or make it faster", field=method) from None
        finally:
            if not self.at_rest:
                self.kill()

    async def start(self, deadline_s: float) -> None:
        """Wait until the object is created. Raises the errors of `call`."""
        try:
            async with self._limit_of(deadline_s):
                await self._answer("create", b"")
        except TimeoutError:
            raise CallTimeout(f"not created within {deadline_s:g} s", "make it faster to create") from None
        finally:
            if not self.at_rest:
                self.kill()

    @contextlib.asynccontextmanager
    async def _limit_of(self, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError in the block once the process could have run for so long."""
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
                if left > 1e-3:
                    look_in(left)
                else:
                    limit.reschedule(loop.time())

            look_in(seconds)
            try:
                yield
            finally:
                timer.cancel()

    async def _answer(self, method: str, message: bytes, asked: Asked | None = None) -> Any:
        await self._send(method, message)
        answer, asking = await self._receive(method), False
        if asked is not None:
            answer, asking = await self._reply(method, answer, asked)
        if not isinstance(answer, Answer):
            raise CallFailed("what came is no answer: the process wrote into its socket", field=method)
        self.at_rest = answer.kind != "leaks" and not asking
        if answer.kind == "value":
            return answer.value
        failure = CallFailed(answer.problem, field=method)
        failure.add_note(answer.trace)
        raise failure

    async def _reply(self, method: str, received: object, asked: Asked) -> tuple[object, bool]:
        """Reply to what the object asks until its answer comes; return that, and whether it asks on, in some thread."""

        async def reply(ask: Ask) -> None:
            value = pickle.dumps(await asked(ask.method, *ask.arguments), pickle.HIGHEST_PROTOCOL)
            message = pickle.dumps(Reply(ask.number, value), pickle.HIGHEST_PROTOCOL)
            await self._send(method, HEADER.pack(len(message)) + message)

        replying = dict[int, asyncio.Task[None]]()
        try:
            async with asyncio.TaskGroup() as tasks:
                while isinstance(received, Ask | GiveUp):
                    if isinstance(received, Ask):
                        replying[received.number] = task = tasks.create_task(reply(received))
                        task.add_done_callback(partial(_forget, replying, received.number))
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
        self.kill()  # it may have closed its socket and live on
        await asyncio.wait([self.ended])  # awaited itself, it would be cancelled with this call
        raise self._died(method) from None

    def started(self, pid: int) -> None:
        """Note the pid, which is known a little later than the process can be written to."""
        self.pid = pid
        if self._writer.is_closing():
            self.kill()

    def kill(self) -> None:
        """Kill the process, with all that it has started."""
        self.at_rest = False
        self._writer.close()
        if self.pid and not self.ended.done():
            self._template.kill(self.pid)

    def _died(self, method: str) -> ProcessDied:
        code = self.ended.result()
        value = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        return ProcessDied("its process ended", field=method, value=value)


class ProcessPool:
    """Up to ``processes`` objects that ``create`` makes, each in a process of its own, ``spares`` of them in advance.

    ``create`` and the arguments and answers of calls are pickled; ``plugins`` are loaded before it. An answer has at
    most ``answer_limit`` bytes, and an object is created within ``start_s``. ``warm_up`` is called once, before
    processes are forked, for imports that all need. They inherit few environment variables (`environment`), or all if
    ``inherit``, for code that no model drives.

    A process that is well after a lease, with neither threads nor processes left behind by the object that it closed
    (``close()``, if there is one), has another object created in it; others are replaced.
    """

    def __init__(
        self,
        create: Callable[[], Any],
        *,
        processes: int,
        plugins: Sequence[Path] = (),
        spares: int = 1,
        answer_limit: int = 1 << 20,
        start_s: float = 60.0,
        warm_up: Callable[[], None] | None = None,
        inherit: bool = False,
    ) -> None:
        self._environment = dict(os.environ) if inherit else environment()
        self._blueprint = Blueprint(tuple(plugins), cloudpickle.dumps((create, warm_up)))
        self._processes, self._spares = processes, min(spares, processes)
        self._answer_limit, self._start_s = answer_limit, start_s
        self._template: _Template | None = None
        self._ready: deque[Worker] = deque()
        self._waiting: deque[asyncio.Future[Worker]] = deque()
        self._leased: set[Worker] = set()
        self._preparing: set[asyncio.Task[None]] = set()
        """A process that is started, or made ready for another lease, in each."""
        self._closed = False
        self._starts = asyncio.Semaphore(_STARTING_AT_ONCE)

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[Worker]:
        """Wait for a process, and have it to oneself.

        Raises CallFailed if its object cannot be created, or ProcessDied, among others, if the template cannot start.
        """
        worker = await self._take()
        try:
            yield worker
        finally:
            self._give_back(worker)

    async def close(self) -> None:
        """End all processes, those leased, too; none is started any more."""
        self._closed = True
        for task in self._preparing:
            task.cancel()
        await asyncio.gather(*self._preparing, return_exceptions=True)
        while self._ready:
            self._ready.popleft().kill()
        while self._fail(_closed()):
            pass
        if self._template is not None:
            await self._template.close()

    async def _take(self) -> Worker:
        if self._closed:
            raise _closed()
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._balance()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._give_back(waiter.result())
            raise

    def _give_back(self, worker: Worker) -> None:
        self._leased.discard(worker)
        if self._closed:
            return
        if worker.at_rest:
            self._prepare(partial(self._renew, worker))
        self._balance()

    def _balance(self) -> None:
        """Hand out what is ready, and start what is missing."""
        self._waiting = deque(waiter for waiter in self._waiting if not waiter.done())
        self._ready = deque(worker for worker in self._ready if not worker.ended.done())
        while self._waiting and self._ready:
            worker = self._ready.popleft()
            self._leased.add(worker)
            self._waiting.popleft().set_result(worker)
        coming = len(self._ready) + len(self._preparing)
        wanted = len(self._waiting) + self._spares - coming
        for _ in range(min(wanted, self._processes - coming - len(self._leased))):
            self._prepare(self._start)

    def _prepare(self, work: Callable[[], Awaitable[Worker | None]]) -> None:
        async def prepare() -> None:
            try:
                worker = await work()
            except CallFailed as error:
                self._preparing.discard(task)
                if not self._fail(error):
                    return  # nobody waits: the next lease tries again
            else:
                self._preparing.discard(task)
                if worker is not None:
                    self._ready.append(worker)
            self._balance()

        task = asyncio.ensure_future(prepare())
        self._preparing.add(task)

    def _fail(self, error: CallFailed) -> bool:
        """Raise the error in the lease that has waited longest; False if there is none."""
        self._waiting = deque(waiter for waiter in self._waiting if not waiter.done())
        if self._waiting:
            self._waiting.popleft().set_exception(error)
            return True
        return False

    async def _start(self) -> Worker:
        async with self._starts:
            if self._template is None or self._template.ended:
                try:
                    self._template = _Template(self._blueprint, self._environment)
                except OSError as error:  # no more processes or files
                    raise ProcessDied(f"cannot be started: {error}", field="create") from None
            await asyncio.shield(self._template.ready)
            try:
                worker = await self._template.fork(self._answer_limit)
            except OSError as error:
                raise ProcessDied(f"cannot be started: {error}", field="create") from None
            await worker.start(self._start_s)
        return worker

    async def _renew(self, worker: Worker) -> Worker | None:
        """Return the process with another object, or None: it is replaced where it is missed."""
        try:
            await worker.call(RENEW, deadline_s=self._start_s)
        except CallFailed:
            worker.kill()
            return None
        return worker


def _forget(replying: dict[int, asyncio.Task[None]], number: int, _: object) -> None:
    del replying[number]


def _closed() -> ProcessDied:
    return ProcessDied("the pool of processes is closed")


_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rayrft.runtime.processes.template import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""


class _Template:
    """The process that the others are forked from, and who among them has ended."""

    def __init__(self, blueprint: Blueprint, environment: dict[str, str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = os.memfd_create("blueprint")
        with control, open(fd, "wb") as file:
            file.write(pickle.dumps(blueprint))
            file.flush()
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _MAIN, json.dumps(sys.path), str(control.fileno()), str(fd)],
                pass_fds=(control.fileno(), fd),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **environment},
            )
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ended = False
        self._forking: deque[Worker] = deque()
        self._workers: dict[int, Worker] = {}
        self._loop.add_reader(self._control, self._receive)

    async def fork(self, answer_limit: int) -> Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            worker = Worker(self, *await asyncio.open_connection(sock=ours), answer_limit)
            # The template answers in order. It always reads, so that sending does not block.
            self._forking.append(worker)
            try:
                socket.send_fds(self._control, [RECORD.pack(b"f", 0)], [theirs.fileno()])
            except OSError:
                self._forking.remove(worker)
                raise ProcessDied("the template of processes ended") from None
        return worker

    def kill(self, pid: int) -> None:
        with contextlib.suppress(OSError):  # the template has ended, and all processes with it
            self._control.send(RECORD.pack(b"k", pid))

    async def close(self) -> None:
        if not self.ended:
            self._end("closed")
        await self._loop.run_in_executor(None, self._process.wait)

    def _receive(self) -> None:
        try:
            message = self._control.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            message = b""
        if not message:
            self._end(f"exit code {self._process.wait()}")
            return
        kind, pid = RECORD.unpack_from(message)
        rest = message[RECORD.size :]
        if kind == b"r":
            self.ready.set_result(None)
        elif kind == b"x":
            trace = rest.decode(errors="replace")
            failure = CallFailed(f"its modules cannot be imported: {trace.splitlines()[-1]}", field="create")
            failure.add_note(trace)
            self.ready.set_exception(failure)
        elif kind == b"s":
            worker = self._workers[pid] = self._forking.popleft()
            worker.started(pid)
        else:
            self._workers.pop(pid).ended.set_result(*STATUS.unpack(rest))

    def _end(self, how: str) -> None:
        self.ended = True
        self._loop.remove_reader(self._control)
        self._control.close()
        for worker in [*self._workers.values(), *self._forking]:
            worker.ended.set_result(-signal.SIGKILL)
        if not self.ready.done():
            self.ready.set_exception(ProcessDied("the template of processes ended", field="create", value=how))
