"""A disk that remembers what was done to it, and stops when it is told to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayrft import files
from rayrft.buffer.log import storage

_CHANGES = ("makedirs", "write", "pwrite", "fsync", "fdatasync", "replace", "truncate", "ftruncate", "unlink")


class Killed(BaseException):
    """The process is gone here. No handler of errors catches it."""


class Disk:
    """Stands between the log and the operating system.

    ``calls`` are the changes so far, each with the file it was made to. ``stop`` lets so many more be made; the next
    raises ``failure``, after half of it if it is a write. With Killed all later ones do so, too.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        self.stop(None)
        self._names: dict[int, str] = {}
        for module in (storage, files):
            monkeypatch.setattr(module, "os", self)

    def stop(self, left: int | None, failure: BaseException | None = None) -> None:
        self._left, self._failure = left, failure or Killed()
        self.failed = False
        self.on_failure: Callable[[], None] = lambda: None

    def close_all(self) -> None:
        """What the operating system does for a process that is gone."""
        for descriptor in list(self._names):
            self.close(descriptor)

    def open(self, path: str, flags: int, *mode: int) -> int:
        name = Path(path).name
        if flags & os.O_CREAT:
            self._change("open", name)
        descriptor = os.open(path, flags, *mode)
        self._names[descriptor] = name
        return descriptor

    def close(self, descriptor: int) -> None:
        self._names.pop(descriptor, None)
        os.close(descriptor)

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in _CHANGES:
            return real

        def call(target: Any, *rest: Any, **named: Any) -> Any:
            file = self._names[target] if isinstance(target, int) else Path(target).name
            if name in ("fsync", "fdatasync"):
                return self._change(name, file)  # that it is made is what counts here
            self._change(name, file, lambda: name == "write" and os.write(target, rest[0][: len(rest[0]) // 2]))
            return real(target, *rest, **named)

        return call

    @property
    def killed(self) -> bool:
        return self.failed and isinstance(self._failure, Killed)

    def _change(self, name: str, file: str, half: Callable[[], Any] = lambda: None) -> None:
        if self.killed:
            raise self._failure
        if self._left == 0 and not self.failed:
            self.failed = True
            half()
            self.on_failure()
            raise self._failure
        if self._left is not None:
            self._left -= 1
        self.calls.append((name, file))
