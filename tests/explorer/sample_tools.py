"""Tools of the tests: good ones, and each kind of trouble."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from typing import Annotated

from pydantic import Field


def multiply(a: Annotated[int, Field(description="the first factor")], b: int = 2) -> int:
    """Multiply two whole numbers."""
    return a * b


def hang() -> None:
    """Never return."""
    time.sleep(1000)


def leave(code: int) -> None:
    """End the process."""
    os._exit(code)


def flood(megabytes: int) -> str:
    """Say much."""
    print("noise on the standard output")
    return "x" * (megabytes << 20)


def fail(text: str) -> None:
    """Raise."""
    raise LookupError(text)


def repeat(text: str) -> str:
    """Return the text."""
    return text


async def meet(number: int, of: int) -> int:
    """Return when so many calls have come."""
    _MET.append(number)
    if len(_MET) == of:
        _ALL.set()
    await _ALL.wait()
    return number


async def wait_forever() -> None:
    """Never return."""
    await asyncio.Event().wait()


async def quit_python() -> None:
    """Ask Python to end."""
    sys.exit(3)


_MET: list[int] = []
_ALL = asyncio.Event()


class Counter:
    """Counts from a start; when it is closed, it sends where it got to."""

    def __init__(self, start: int = 0, address: str | None = None) -> None:
        self._at, self._address = start, address

    def add(self, by: int = 1) -> int:
        """Count on."""
        self._at += by
        return self._at

    def crash(self) -> None:
        """End the process."""
        os._exit(7)

    def close(self) -> None:
        if self._address:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(str(self._at).encode(), self._address)


def with_any(*values: int) -> None:
    """Cannot be called by names."""


def with_object(value: asyncio.Lock) -> None:
    """Takes what JSON does not have."""


class Awaited:
    """Has a method that is async."""

    async def step(self) -> None:
        """Step."""
