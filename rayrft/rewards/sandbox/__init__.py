"""Run untrusted programs that can reach nothing but their own folder.

    sandbox = Sandbox()
    outcome = sandbox.run({"a.py": "print(input()[::-1])"}, [*sandbox.python, "a.py"], b"abc")
    assert outcome.stdout == b"cba\\n"

`isolation.py` confines files, network and processes, `seccomp.py` system calls. Time and memory are limited twice. The
kernel limits each process (address space, CPU time, files) and their number. Every 20 ms, a watch sums the resident
memory and the CPU time of all processes, and ends a program that exceeds its limits. So memory is bounded by
``memory_mib``, the growth within 20 ms, and twice ``folder_mib`` of files; without the watch, by twice ``memory_mib``
for each of ``processes``. Cgroups are not needed, which most users cannot create.

A program ends with its first process: all processes that it started are dead when a call returns or the caller is
killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Self

from rayrft.errors import ConfigError, SandboxFailed
from rayrft.rewards.sandbox.isolation import ISOLATIONS, Files, Isolation, Job, Launch, Root, SandboxLimits, bytecode
from rayrft.runtime.processes.run_clock import RunClock

__all__ = ["ISOLATIONS", "Files", "Process", "ProgramOutcome", "Sandbox", "SandboxLimits", "bytecode", "isolate"]

Ended = Literal["exit", "wall", "cpu", "memory", "processes", "output", "killed"]

_USUAL = SandboxLimits()
_WATCH_S = 0.02
_START_S = 20.0  # the longest start of a sandbox; usually 10 ms
_LAST_MOMENT_S = 0.2
_ERRORS_KEPT = 1 << 14  # bytes from the end of stderr

_BY_ITSELF = ("bwrap", "unshare")
"""Isolations that ``auto`` tries, in this order."""


@dataclass(frozen=True)
class ProgramOutcome:
    """How a program ended."""

    ended: Ended
    """``exit``: by itself, or by a signal; ``killed``: by the caller; else by the limit of this name."""
    exit_code: int | None
    """The exit status, or 128 plus the number of the signal; None unless the program ended by itself."""
    stdout: bytes
    """Output that was not read, up to ``output_bytes``."""
    stderr: bytes
    """The last 16 KiB."""
    seconds: float
    """Wall time since the program started to run."""
    waited_s: float = 0.0
    """The part of ``seconds`` in which the program waited for a core."""

    @property
    def succeeded(self) -> bool:
        """Whether the program ended by itself with status 0."""
        return self.ended == "exit" and self.exit_code == 0

    def describe(self) -> str:
        """Return a few words, with the last line of stderr."""
        if self.ended == "killed":
            return f"it was stopped after {self.seconds:.1f} s"
        if self.ended != "exit":
            what = "time" if self.ended == "wall" else "CPU time" if self.ended == "cpu" else self.ended
            return f"ended by the limit of {what} after {self.seconds:.1f} s"
        lines = self.stderr.decode(errors="replace").strip().splitlines()
        return f"exit status {self.exit_code}" + (f": {lines[-1][:200]}" if lines else "")


class Process:
    """A program in a sandbox. Leaving its context kills it with all its processes."""

    def __init__(self, started: Launch, limits: SandboxLimits) -> None:
        self._started, self._process, self._limits = started, started.process, limits
        assert started.process.stdin and started.process.stdout and started.process.stderr
        self._pipes = started.process.stdin, started.process.stdout, started.process.stderr
        self._stdin, self._stdout, self._stderr = (pipe.fileno() for pipe in self._pipes)
        self._sending, self._received, self._errors, self._status = bytearray(), bytearray(), b"", b""
        self._written = {self._stdout: 0, self._stderr: 0}
        self._end_input = False
        self._outcome: ProgramOutcome | None = None
        self._why: Ended = "exit"
        self._first = -1
        self._poller = select.poll()
        try:
            self._begin()
        except BaseException as error:
            self._process.kill()
            self._process.wait()
            self._close()
            if isinstance(error, OSError):
                raise SandboxFailed("the sandbox did not start", value=str(error)) from None
            raise

    def _begin(self) -> None:
        first = self._process.pid if self._started.status is None else self._read_first()
        self.first_pid, self._first = first, os.pidfd_open(first)
        for fd in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(fd, False)
        for fd in (self._stdout, self._stderr, self._first):
            self._poller.register(fd, select.POLLIN)
        self._open = {self._stdout, self._stderr, self._stdin}
        self._began = time.monotonic()
        self._watch_at = self._began + _WATCH_S / 2
        self._clock = RunClock(first, itself=self._started.status is None)
        if self._started.go is not None:
            os.write(self._started.go, b"1")

    def _read_first(self) -> int:
        """Wait for the first process inside, and return its id."""
        assert self._started.status is not None
        poller, deadline = select.poll(), time.monotonic() + _START_S
        poller.register(self._started.status, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0 and poller.poll(1000 * left):
            said = os.read(self._started.status, 4096)
            if not said:
                self._process.wait()
                words = self._pipes[2].read().decode(errors="replace").strip()[-500:]
                raise SandboxFailed("the sandbox did not start", value=words)
            self._status += said
            if b"\n" in self._status and (pid := self._reported("child-pid")) is not None:
                return pid
        raise SandboxFailed("the sandbox did not start", value=f"nothing within {_START_S:g} s")

    def _reported(self, what: str) -> int | None:
        """Return the isolation's report of this name."""
        for line in self._status.replace(b"}", b"}\n").split(b"\n"):
            if f'"{what}"'.encode() in line:
                return json.loads(line)[what]
        return None

    def send(self, data: bytes) -> None:
        """Queue input, which is written during waits."""
        if self._stdin in self._open:
            self._sending += data
            self._poller.register(self._stdin, select.POLLOUT)

    def end_input(self) -> None:
        """Close stdin when all input is written."""
        self._end_input = True
        self.send(b"")

    @property
    def waited_s(self) -> float:
        """Seconds in which the program waited for a core."""
        if self._outcome is not None:
            return self._outcome.waited_s
        return max(0.0, time.monotonic() - self._began - self._clock.seconds())

    def line(self, seconds: float, beside: Process | None = None) -> bytes | None:
        """Return the next line of output, without its end; None if the output ends or the program runs for
        ``seconds`` without one. ``beside`` is another process to watch meanwhile."""
        deadline = self._clock.seconds() + seconds
        while b"\n" not in self._received:
            if self._outcome is not None or self._stdout not in self._open:
                return None
            if self._clock.seconds() >= deadline and self._clock.look() >= deadline:
                return None
            self._turn(deadline)
            if beside is not None and beside._outcome is None:
                beside._turn(0.0)
        end = self._received.index(b"\n")
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line

    def wait(self) -> ProgramOutcome:
        """Wait for the end. Raises SandboxFailed if the sandbox ends before its program."""
        while self._outcome is None:
            self._turn(None)
        return self._outcome

    def finish(self) -> ProgramOutcome:
        """End a program that stopped answering: at once if its output is open, else after a moment to end by itself."""
        if self._outcome is None and self._stdout in self._open:
            return self.kill("wall")
        deadline = self._clock.seconds() + _LAST_MOMENT_S
        while self._outcome is None and self._clock.seconds() < deadline:
            self._turn(deadline)
        return self.kill()

    def kill(self, why: Ended = "killed") -> ProgramOutcome:
        """Kill the program with all its processes."""
        if self._outcome is None and self._why == "exit":
            self._why = why
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                if self._started.status is None:
                    os.killpg(self.first_pid, signal.SIGKILL)
                else:
                    signal.pidfd_send_signal(self._first, signal.SIGKILL)
        return self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self.kill()
        except SandboxFailed:
            if error[1] is None:
                raise

    def _turn(self, deadline: float | None) -> None:
        """Read, write and watch once, at most until the program's clock shows the deadline."""
        left = math.inf if deadline is None else deadline - self._clock.seconds()
        left = min(left, self._watch_at - time.monotonic())
        # A killed program is only waited for.
        events = self._poller.poll(max(0.0, 1000 * left) if self._why == "exit" else None)
        for fd, _ in events:
            if fd == self._stdin:
                self._write()
            elif fd != self._first:
                self._read(fd)
        if any(fd == self._first for fd, _ in events):
            self._finish()
        elif self._why == "exit":
            if max(self._written.values()) > self._limits.output_bytes:
                self.kill("output")
            elif time.monotonic() >= self._watch_at:
                self._watch()

    def _write(self) -> None:
        try:
            del self._sending[: os.write(self._stdin, self._sending)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._sending, self._end_input = bytearray(), True
        if not self._sending:
            self._poller.unregister(self._stdin)
            if self._end_input:
                self._open.discard(self._stdin)
                self._pipes[0].close()

    def _read(self, fd: int) -> bool:
        """Read available output; return whether there was any."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._poller.unregister(fd)
            self._open.discard(fd)
            return False
        self._written[fd] += len(data)
        if fd == self._stderr:
            self._errors = (self._errors + data)[-_ERRORS_KEPT:]
        elif self._written[fd] <= self._limits.output_bytes:
            self._received += data
        return True

    def _watch(self) -> None:
        ran, usage = self._clock.look(), self._clock.usage
        self._watch_at = time.monotonic() + _WATCH_S
        if usage.memory > self._limits.memory_mib << 20:
            self.kill("memory")
        elif usage.cpu_s > self._limits.cpu_s:
            self.kill("cpu")
        elif ran >= self._limits.wall_s:
            self.kill("wall")
        elif usage.processes > self._limits.processes + 1:  # the kernel's limit did not hold
            self.kill("processes")

    def _finish(self) -> None:
        """Take the outcome after the first process, and with it all others, has died."""
        seconds, waited_s = time.monotonic() - self._began, self.waited_s
        if self._started.status is None:
            code: int | None = self._process.wait()
            code = 128 - code if code is not None and code < 0 else code
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.first_pid, signal.SIGKILL)
        else:
            self._process.wait()
            while said := os.read(self._started.status, 4096):
                self._status += said
            code = self._reported("exit-code")
        for fd in (self._stdout, self._stderr):
            while self._written[fd] <= self._limits.output_bytes and fd in self._open and self._read(fd):
                pass
        if self._why == "exit" and max(self._written.values()) > self._limits.output_bytes:
            self._why = "output"
        code = code if self._why == "exit" else None
        self._outcome = ProgramOutcome(self._why, code, bytes(self._received), self._errors, seconds, waited_s)
        self._close()
        if self._why == "exit" and code is None:
            words = self._errors.decode(errors="replace")[-500:]
            raise SandboxFailed("the sandbox ended before its program did", value=words)

    def _close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for fd in (self._started.status, self._started.go, self._first):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._started.clean()


class Sandbox:
    """Runs programs in the isolation of this name: ``auto`` is bubblewrap or namespaces, by what the host has;
    ``runsc`` and ``none_i_trust_the_code``, which only limits, must be named.

    With ``packages``, programs can read installed packages such as numpy, in `paths`; ``folders`` are further readable
    folders, or sockets; ``lenient`` is that of `Job`. Raises ConfigError, with the remedy, if the host does not support
    the isolation.
    """

    def __init__(
        self, isolation: str = "auto", *, packages: bool = False, folders: Sequence[str] = (), lenient: bool = False
    ) -> None:
        names = ("purelib", "platlib") if packages else ()
        self.paths = sorted({os.path.realpath(sysconfig.get_path(name)) for name in names})
        self.python = [os.path.realpath(sys.executable), "-I", "-S", "-B", "-X", "utf8"]
        """The command that starts Python without `site` and packages."""
        self.folders = tuple(folders)
        self._root = Root.of_host([*self.paths, *folders])
        self.isolation, self._lenient = isolate(isolation, (*self.paths, *folders), lenient), lenient

    def describe(self) -> str:
        """Return one line on what isolates."""
        if description := self.isolation.description:
            return f"code runs isolated by {description}"
        return "code runs with limits of time and memory and without isolation: it can read and write what you can"

    def start(self, files: Files, command: Sequence[str], limits: SandboxLimits = _USUAL) -> Process:
        """Start a program in a folder with files; ``command[0]`` is a path. Raises SandboxFailed if it cannot start."""
        raw = {name: data if isinstance(data, bytes) else data.encode(errors="replace") for name, data in files.items()}
        return Process(self.isolation.start(Job(self._root, raw, command, limits, self._lenient)), limits)

    def run(
        self, files: Files, command: Sequence[str], stdin: bytes = b"", limits: SandboxLimits = _USUAL
    ) -> ProgramOutcome:
        """Run a program to its end. Raises SandboxFailed if it cannot start, or the sandbox ends before it."""
        with self.start(files, command, limits) as process:
            process.send(stdin)
            process.end_input()
            return process.wait()


@lru_cache
def isolate(name: str, folders: tuple[str, ...] = (), lenient: bool = False) -> Isolation:
    """Return the isolation of this name, or the best for ``auto``, after a program that sees these folders has run in
    it. Raises ConfigError with the defects of each isolation, and the remedy."""
    if name != "auto" and name not in ISOLATIONS:
        remedy = f"choose one of auto, {', '.join(ISOLATIONS)}"
        raise ConfigError("unknown isolation", remedy, field="reward.options.isolation", value=name)
    lacking = []
    for each in _BY_ITSELF if name == "auto" else (name,):
        problem = ISOLATIONS[each].missing() or _try(ISOLATIONS[each], folders, lenient)
        if problem is None:
            return ISOLATIONS[each]
        lacking.append(f"{each}: {problem}")
    problem = f"code cannot be isolated on this machine ({'; '.join(lacking)})"
    remedy = "install bubblewrap (`apt-get install bubblewrap`); in a container, allow user namespaces, or give it "
    remedy += "CAP_SYS_ADMIN; where all code is trusted, set it to none_i_trust_the_code"
    raise ConfigError(problem, remedy, field="reward.options.isolation", value=name)


def _try(isolation: Isolation, folders: tuple[str, ...], lenient: bool) -> str | None:
    """Return why a trivial program does not run or see the folders; None if it does."""
    look = "import os, sys; print([each for each in sys.argv[1:] if not os.access(each, os.R_OK)])"
    command = [os.path.realpath(sys.executable), "-I", "-S", "-c", look, *folders]
    try:
        with Process(isolation.start(Job(Root.of_host(folders), {}, command, _USUAL, lenient)), _USUAL) as process:
            outcome = process.wait()
    except (SandboxFailed, OSError) as error:
        return str(error)
    if not outcome.succeeded:
        return outcome.describe()
    return None if outcome.stdout == b"[]\n" else f"a program does not see {outcome.stdout.decode().strip()}"
