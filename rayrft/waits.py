"""Who waits for whom, and since when: what a run says when nothing comes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Wait:
    """``waiter`` waits for ``count`` things of ``target``, the oldest of which is ``what``.

    ``quiet_s`` is for how long nothing came of it: since the last that did, or since the wait began.
    """

    waiter: str
    target: str
    what: str
    count: int
    quiet_s: float


@dataclass(frozen=True)
class WaitReport:
    """What an actor waits for at present, and for how long nothing at all came to it."""

    waits: list[Wait]
    quiet_s: float


@dataclass
class _Target:
    began: dict[int, float]
    what: dict[int, str | Callable[[], str]]
    own: bool
    moved: float = 0.0


class Waits:
    """The waits of the actor called ``waiter``, for use in its event loop."""

    def __init__(self, waiter: str) -> None:
        self._waiter = waiter
        self._targets: dict[str, _Target] = {}
        self._number = 0
        self._moved = time.monotonic()

    @contextlib.contextmanager
    def on(self, target: str, what: str | Callable[[], str], *, own: bool = False) -> Iterator[None]:
        """In here the actor waits for ``what`` of ``target``. With ``own`` it is work of its own, which waits in turn:
        whatever comes to the actor moves it on."""
        number = self.begin(target, what, own=own)
        try:
            yield
        finally:
            self.end(target, number)

    def begin(self, target: str, what: str | Callable[[], str], *, own: bool = False) -> int:
        """A wait that `end` ends, which takes the number that this gives."""
        self._number += 1
        at = self._targets.setdefault(target, _Target({}, {}, own))
        at.began[self._number], at.what[self._number] = time.monotonic(), what
        return self._number

    def end(self, target: str, number: int) -> None:
        """It came, or failed: either moves the target on."""
        at = self._targets[target]
        del at.began[number], at.what[number]
        self.moved(target)
        if not at.began:
            del self._targets[target]

    def moved(self, target: str) -> None:
        """Something came of the target, though what is waited for is not all there."""
        self._moved = time.monotonic()
        if target in self._targets:
            self._targets[target].moved = self._moved

    def report(self) -> WaitReport:
        """How it stands now; work of its own comes last."""
        now = time.monotonic()
        waits = []
        for target, at in sorted(self._targets.items(), key=lambda item: item[1].own):
            oldest = min(at.began, key=at.began.__getitem__)
            what = at.what[oldest]
            moved = max(at.began[oldest], at.moved, self._moved if at.own else 0.0)
            said = what if isinstance(what, str) else what()
            waits.append(Wait(self._waiter, target, said, len(at.began), now - moved))
        return WaitReport(waits, now - self._moved)


class Followed:
    """An actor (``handle``) called ``name``, whose calls are among the waits of who makes them.

    ``endless`` are those that nobody waits for: they last as long as the run does, or rest while there is no work.
    ``cancelled`` are those that end at the actor, too, when they are cancelled here.
    """

    def __init__(
        self,
        name: str,
        handle: Any,
        waits: Waits,
        endless: Collection[str] = (),
        cancelled: Collection[str] = (),
    ) -> None:
        self._name = name
        self._handle = handle
        self._waits = waits
        self._endless = endless
        self._cancelled = cancelled

    def __getattr__(self, method: str) -> Any:
        remote = getattr(self._handle, method).remote
        if method in self._endless:
            return SimpleNamespace(remote=remote)

        def call(*args: Any, **kwargs: Any) -> Awaitable[Any]:
            # A trainer's command says more than that it is one.
            what = type(args[0]).__name__ if method == "command" else method
            return asyncio.ensure_future(self._wait(what, remote(*args, **kwargs), method in self._cancelled))

        return SimpleNamespace(remote=call)

    async def _wait(self, what: str, answer: Awaitable[Any], cancel: bool) -> Any:
        with self._waits.on(self._name, what):
            try:
                return await answer
            except asyncio.CancelledError:
                import ray

                if cancel and isinstance(answer, ray.ObjectRef):
                    ray.cancel(answer)
                raise
