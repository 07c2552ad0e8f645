"""Objects in processes that can be killed: for code that blocks, hangs, leaks or dies.

>>> pool = ProcessPool(Maze, processes=64, plugins=config.plugins)  # doctest: +SKIP
>>> async with pool.lease() as maze:  # doctest: +SKIP
...     observation = await maze.call("reset", task, deadline_s=30)
>>> await pool.close()  # doctest: +SKIP

Every lease has a new object. Processes are forked, in milliseconds, from a template that has imported the factory's
modules and nothing else (see `rayrft.runtime.processes.template`); an import that starts threads belongs into the
factory. They inherit no socket but their own, and end with the process that made the pool, even if it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
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
from typing import Any

import cloudpickle

from rayrft.errors import CallFailed, ProcessDied
from rayrft.runtime.processes.template import RECORD, RENEW, STATUS
from rayrft.runtime.processes.worker import Worker
from rayrft.runtime.ray_api import hide_gpus
from rayrft.runtime.waits import cancel, settle

_PASSED = re.compile(
    r"(?!.*(KEY|TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL))(?:(PATH|HOME|USER|LOGNAME|SHELL|TERM|TMPDIR|TZ|LANG|LANGUAGE|PWD)"
    r"|(LC|LD|PYTHON|VIRTUAL_ENV|CONDA|OMP|MKL|OPENBLAS|CUDA|NVIDIA|ROCR|HIP|TORCH|TOKENIZERS|TRANSFORMERS|HF|XDG|SSL"
    r"|REQUESTS_CA|CURL_CA|SDL|MUJOCO|RAYRFT)\w*|\w+_proxy|\w+_PROXY)"
)
"""Names of the variables that processes inherit: others may be keys, and a model may drive the code in a process."""

_CLOSED = "the pool of processes is closed"
_STARTING_AT_ONCE = 8
"""Processes between fork and readiness: more would only compete for the cores."""


def environment() -> dict[str, str]:
    """Return the variables that model-driven code may see, and those that RAYRFT_PASS_ENV names."""
    asked = os.environ.get("RAYRFT_PASS_ENV", "").split(",")
    return {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name) or name in asked}


class ProcessPool:
    """Up to ``processes`` objects that ``create`` makes, one in each process, ``spares`` of them in advance.

    ``create`` and the arguments and answers of calls are pickled; ``plugins`` are loaded before it. An answer has at
    most ``answer_limit`` bytes, and an object is created within ``start_s``. ``warm_up`` is called once, before
    processes are forked, for imports that all need. They inherit few environment variables (`environment`), or all if
    ``inherit``, for code that no model drives. In an actor without GPUs they see no GPU. After a lease the object is
    closed (``close()``, if there is one). If it leaves threads or processes behind, its process is replaced; else
    another object is created in it.
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
        warm_up: Callable[[], object] | None = None,
        inherit: bool = False,
    ) -> None:
        hide_gpus()
        self._environment = {**os.environ} if inherit else environment()
        self._blueprint = pickle.dumps((tuple(plugins), cloudpickle.dumps((create, warm_up))))
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
        """Lease a process inside an ``async with``.

        Raises CallFailed if its object cannot be created, or ProcessDied if the template cannot start.
        """
        worker = await self._take()
        try:
            yield worker
        finally:
            self._give_back(worker)

    async def close(self) -> None:
        """End all processes, also the leased ones; no other is started."""
        self._closed = True
        await cancel(*self._preparing)
        while self._ready:
            self._ready.popleft().kill()
        while self._fail(ProcessDied(_CLOSED)):
            pass
        if self._template is not None:
            await self._template.close()

    async def _take(self) -> Worker:
        if self._closed:
            raise ProcessDied(_CLOSED)
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
        if worker.idle:
            self._prepare(partial(self._renew, worker))
        self._balance()

    def _balance(self) -> None:
        """Lease the processes that are ready, and start missing ones."""
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
                    return  # no lease waits: the next one tries again
            else:
                self._preparing.discard(task)
                if worker is not None:
                    self._ready.append(worker)
            self._balance()

        task = asyncio.ensure_future(prepare())
        self._preparing.add(task)

    def _fail(self, error: CallFailed) -> bool:
        """Raise the error in the lease that has waited longest; False if there is none."""
        while self._waiting:
            if not (waiter := self._waiting.popleft()).done():
                waiter.set_exception(error)
                return True
        return False

    async def _start(self) -> Worker:
        async with self._starts:
            try:
                if self._template is None or self._template.ended:
                    self._template = _Template(self._blueprint, self._environment)
                await asyncio.shield(self._template.ready)
                worker = await self._template.fork(self._answer_limit)
            except OSError as error:  # no more processes or files
                raise ProcessDied(f"cannot be started: {error}", field="create") from None
            await worker.start(self._start_s)
        return worker

    async def _renew(self, worker: Worker) -> Worker | None:
        """Return the process with another object, or None if it cannot be used again."""
        try:
            await worker.call(RENEW, deadline_s=self._start_s)
        except CallFailed:
            worker.kill()
            return None
        return worker


_MAIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rayrft.runtime.processes.template import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""


class _Template:
    """The process from which the others are forked; it reports those that end."""

    def __init__(self, blueprint: bytes, environment: dict[str, str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = os.memfd_create("blueprint")
        with control, open(fd, "wb") as file:
            file.write(blueprint)
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
            worker = Worker(*await asyncio.open_connection(sock=ours), answer_limit, self.kill)
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
        settle(self.ready, ProcessDied("the template of processes ended", field="create", value=how))
