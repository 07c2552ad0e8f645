"""What tests put into processes of their own; it imports little."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rayrft.runtime.processes import template


class Unpicklable(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)
        self.lock = threading.Lock()


class Bomb:
    def __reduce__(self) -> Any:
        return os.kill, (0, "not a signal")  # raises where it is unpickled


class Troublemaker:
    def __init__(self, trouble: str = "") -> None:
        self.calls = 0
        if trouble == "die":
            os._exit(5)
        if trouble == "raise":
            raise OSError("no room")
        if trouble == "hang":
            time.sleep(1000)

    def count(self) -> int:
        self.calls += 1
        return self.calls

    def pid(self) -> int:
        return os.getpid()

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def parent(self) -> int:
        return os.getppid()

    def exit(self, code: int) -> None:
        os._exit(code)

    def signal(self, number: int) -> None:
        os.kill(os.getpid(), number)

    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return "rested"

    def hang(self) -> None:
        # In C, with the interpreter's lock held and every signal blocked: only a kill helps.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        ctypes.PyDLL(None).sleep(1000)

    def large(self, size: int) -> bytes:
        return bytes(size)

    def raises(self) -> None:
        raise Unpicklable("no", "way")

    def returns_unpicklable(self) -> Any:
        return threading.Lock()

    def returns_bomb(self) -> Any:
        return Bomb()

    def leak_thread(self) -> None:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True, name="leaked").start()

    def leave_asking(self, told: str) -> None:
        """Leave a thread behind that waits for a reply, once somebody has written what it asks."""
        ask = template.parent.ask
        threading.Thread(target=ask, args=("never",), daemon=True, name="asking").start()
        Path(told).read_text()  # of a pipe

    async def ask_twice(self) -> list[str]:
        return await asyncio.gather(template.parent.ask_async("soon"), template.parent.ask_async("late"))

    def leak_process(self, *, detached: bool = False) -> int:
        """The process survives a kill of its parent's group if it is detached."""
        return subprocess.Popen(["sleep", "1000"], start_new_session=detached).pid

    def leak_daemon(self) -> int:
        return self.leak_process(detached=True)

    def print_garbage(self) -> str:
        print("\0garbage" * 100, flush=True)
        os.write(1, b"\xff" * 1000)
        print("more", file=sys.stderr)
        return "fine"

    def sockets(self) -> list[str]:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return [str(link.readlink()) for link in links if link.is_symlink() and "socket" in str(link.readlink())]

    def close_its_socket(self, garbage: bytes = b"") -> None:
        for name in os.listdir("/proc/self/fd"):
            link = Path("/proc/self/fd") / name
            if link.is_symlink() and "socket" in str(link.readlink()):
                if garbage:
                    os.write(int(name), garbage)
                else:
                    os.close(int(name))
        time.sleep(1000)

    def modules(self) -> list[str]:
        return [name for name in ("torch", "ray", "vllm", "transformers") if name in sys.modules]

    def close(self) -> None:
        self.calls = -1
