"""The far side of `rayrft.runtime.processes.pool`: the template process, and the processes that it forks.

The template imports what the objects need, once, and forks a process for each. It has no other thread and runs no code
of the objects, so that it answers at all times. It reaps processes that die, with all that they had started. When the
parent dies, its end of the control socket closes, and the template kills everything and exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import inspect
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rayrft.registry import load_plugins
from rayrft.runtime.waits import settle

HEADER = struct.Struct("<Q")
"""The length of the pickle that follows it, on the socket of a process."""
RECORD = struct.Struct("<ci")
"""On the control socket, a packet each. To the template: ``f``, the socket of a process to fork with it, and ``k``, the
pid to kill. From the template: ``r`` when it has imported everything, ``s`` a pid started, ``e`` a pid ended, followed
by its status (`STATUS`), ``x`` its failure, followed by the text."""
STATUS = struct.Struct("<i")
"""Exit code, or the negative number of the signal."""

RENEW = "renew"
"""Instead of a method's name: close the object and create another."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl


@dataclass(frozen=True)
class Answer:
    """The result of a call: a value, or the text of an exception, whose class may not be known elsewhere."""

    kind: Literal["value", "raised", "leaks"]
    value: Any = None
    problem: str = ""
    trace: str = ""


@dataclass(frozen=True)
class Ask:
    """A request of an object to the parent during a call."""

    number: int
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Cancel:
    """The request of that number was cancelled."""

    number: int


@dataclass(frozen=True)
class Reply:
    """The reply to the request of that number, pickled: an unpickling error is raised in the code that asked."""

    number: int
    value: bytes


def main(control_fd: int, blueprint_fd: int) -> None:
    """Run the template until the parent closes the control socket or dies. The blueprint is a pickle of the plugins,
    which are loaded first, and of the pickled factory and warm-up function."""
    # Output of imports must not stay in a buffer: every fork would print it again.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    control = socket.socket(fileno=control_fd)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        with open(blueprint_fd, "rb") as file:
            plugins, factory = pickle.load(file)
        load_plugins(plugins)
        create, warm_up = pickle.loads(factory)
        if warm_up is not None:
            warm_up()
    except BaseException:  # a user's module may raise anything
        control.send(RECORD.pack(b"x", 0) + traceback.format_exc()[-8000:].encode())
        return
    gc.collect()
    gc.freeze()  # collecting would copy the pages that the forks share
    try:
        with contextlib.suppress(ConnectionError):  # the parent has died
            control.send(RECORD.pack(b"r", os.getpid()))
            _Template(control, create).run()
    finally:
        _kill_children()


class _Template:
    def __init__(self, control: socket.socket, create: Callable[[], Any]) -> None:
        self._control = control
        self._create = create
        self._pids: set[int] = set()
        self._wake, woken = os.pipe()
        for fd in (self._wake, woken):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake:
                    os.read(fd, 1 << 16)
                    self._reap()
                else:
                    self._handle()

    def _handle(self) -> None:
        """Execute one command. Raises ConnectionError if the parent has died."""
        message, fds, _, _ = socket.recv_fds(self._control, RECORD.size, 1)
        if not message:
            raise ConnectionResetError
        command, pid = RECORD.unpack(message)
        if command == b"f":
            self._control.send(RECORD.pack(b"s", self._fork(fds[0])))
        elif pid in self._pids:
            os.kill(pid, signal.SIGKILL)

    def _fork(self, fd: int) -> int:
        template = os.getpid()
        pid = os.fork()
        if pid:
            os.close(fd)
            self._pids.add(pid)
            return pid
        try:
            os.setsid()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            if os.getppid() != template:
                return os._exit(1)
            self._control.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed()  # `random` does so by itself after a fork
            _serve(socket.socket(fileno=fd), self._create)
        finally:
            os._exit(0)

    def _reap(self) -> None:
        while self._pids:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if pid in self._pids:
                self._pids.discard(pid)
                # Processes that it had started are the template's children now.
                _kill_children(except_for=self._pids)
                self._control.send(RECORD.pack(b"e", pid) + STATUS.pack(os.waitstatus_to_exitcode(status)))


class Parent:
    """The parent, which the object of this process may ask during a call with ``serve`` (see `Worker.call`)."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.RLock()
        """Held by the thread that reads."""
        self._writing = threading.Lock()
        self._asked = 0
        self._futures: dict[int, asyncio.Future[bytes]] = {}

    def ask(self, *arguments: Any) -> Any:
        """Ask, and block until there is a reply."""
        with self._lock:
            number = self._send(arguments)
            while (reply := self._read()).number != number:
                pass
            return pickle.loads(reply.value)

    async def ask_async(self, *arguments: Any) -> Any:
        """Ask, and await the reply. Cancellation cancels the request."""
        loop = asyncio.get_running_loop()
        with self._lock:
            number = self._send(arguments)
            future = self._futures[number] = loop.create_future()
        loop.add_reader(self._connection, self._read_if_ready)
        try:
            return pickle.loads(await future)
        finally:
            with self._lock:
                del self._futures[number]
                if future.cancelled():
                    self.send(Cancel(number))
                if not self._futures:
                    loop.remove_reader(self._connection)

    def send(self, message: object) -> None:
        """Write a message. What cannot be pickled raises TypeError, AttributeError or PicklingError."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._writing:
            self._connection.sendall(HEADER.pack(len(data)) + data)

    def receive(self) -> Any:
        """Block until there is a message. Raises ConnectionError if the parent closed the connection."""
        (size,) = HEADER.unpack(self._exactly(HEADER.size))
        return pickle.loads(self._exactly(size))

    def call(self) -> tuple[str, tuple[Any, ...]]:
        """Block until there is a call. Raises ConnectionError if the parent closed the connection."""
        with self._lock:  # a thread that was left behind may still read its reply
            while isinstance(message := self.receive(), Reply):
                pass  # to a cancelled request
        return message

    def _send(self, arguments: tuple[Any, ...]) -> int:
        self._asked += 1
        self.send(Ask(self._asked, arguments))
        return self._asked

    def _read(self) -> Reply:
        """Read a reply; set the future of the coroutine that waits for it, if there is one."""
        reply: Reply = self.receive()
        if (future := self._futures.get(reply.number)) is not None:
            future.get_loop().call_soon_threadsafe(settle, future, reply.value)
        return reply

    def _read_if_ready(self) -> None:
        with self._lock:
            ready = select.poll()
            ready.register(self._connection, select.POLLIN)
            if ready.poll(0):  # another thread may have read it meanwhile
                try:
                    self._read()
                except ConnectionError:
                    os._exit(0)  # the parent has closed the connection

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._connection.recv_into(view)
            if not count:
                raise ConnectionResetError
            view = view[count:]
        return data


parent: Parent
"""The parent of this process, if it was forked from a template."""


def _serve(connection: socket.socket, create: Callable[[], Any]) -> None:
    """Create an object and call its methods, as the parent says, until the parent closes the connection."""
    global parent
    parent, loop = Parent(connection), asyncio.Runner()
    instance, method, arguments = None, RENEW, tuple[Any, ...]()

    def call(method: str, *arguments: Any) -> Any:
        """Call a method of the object, be it a coroutine function."""
        returned = getattr(instance, method)(*arguments)
        return loop.run(returned) if inspect.iscoroutine(returned) else returned

    while True:
        try:
            if method == RENEW:
                if hasattr(instance, "close"):
                    call("close")
                instance = None
                loop.close()
                loop = asyncio.Runner()
                if leaks := _leaks():
                    answer = Answer("leaks", problem=leaks)
                else:
                    instance, answer = create(), Answer("value")
            else:
                answer = Answer("value", call(method, *arguments))
            parent.send(answer)
        except BaseException as error:  # a user's code may raise anything, and what it returns may be no pickle
            problem = f"{type(error).__name__}: {error}"[:2000]
            parent.send(Answer("raised", problem=problem, trace=traceback.format_exc()[-8000:]))
        try:
            method, arguments = parent.call()
        except ConnectionError:
            return


def _leaks() -> str:
    """Return a description of the threads and processes that a closed object left behind."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    return ", ".join([f"thread {name}" for name in threads] + [f"process {pid}" for pid in _children()])


def _children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def _kill_children(except_for: set[int] | frozenset[int] = frozenset()) -> None:
    """Kill all children and their descendants, which become children of this process when their parent dies."""
    while pids := [pid for pid in _children() if pid not in except_for]:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
