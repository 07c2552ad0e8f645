"""A disk that is full, or fails, for a while."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rayrft.files import Room


class FullDisk:
    """Takes half of the data of a write to a file of one of these names, and then no more, until ``full`` is false.
    Writes of this process wait for room, and try again at once."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *names: str,
        full: Callable[[], bool] | None = None,
        error: int = errno.ENOSPC,
    ) -> None:
        self.error = error
        self.full = full or (lambda: not self.has_room)
        self.has_room = False
        self.refusals = 0
        self.waited_for = threading.Event()
        """Set once a write was refused and made again."""
        self._names, self._write = names, os.write
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(Room, "poll_s", 0.001)
        monkeypatch.setattr(Room, "limit_s", 60.0)

    def write(self, descriptor: int, data: memoryview) -> int:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        if not name.startswith(self._names) or not self.full():
            return self._write(descriptor, data)
        if len(data) > 1 and random.random() < 0.5:
            return self._write(descriptor, data[: len(data) // 2])
        self.refusals += 1
        if self.refusals > 1:
            self.waited_for.set()
        raise OSError(self.error, os.strerror(self.error))
