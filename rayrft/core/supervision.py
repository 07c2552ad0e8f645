"""Supervision of actors: stalled waits, the root cause of a failure, and the user's request to stop."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from rayrft.errors import ActorUnreachable, RayrftError, Stalled
from rayrft.runtime import ray_api
from rayrft.runtime.handle import root_cause
from rayrft.runtime.ray_api import ray
from rayrft.runtime.waits import ROOM, Wait, WaitReport, Waits, cancel, unless

_POLLS = 3
"""Polls per ``patience_s``, besides those at which a wait is due."""
_SILENT_POLLS = 12
"""An actor that keeps no waits is asked at one of so many polls: there may be hundreds of engines, and the actor that
waits for one of them reports it."""


@dataclass
class StallMonitor:
    """Watchdog for stalled waits of the Master (``waits``) and the other actors.

    ``heartbeats`` has a call for each actor that returns its `WaitReport`, or anything else if it keeps none: an answer
    shows that the actor is alive. A stalled wait is noted after ``patience_s`` without progress, and again whenever
    that time has doubled, with the calls in which its target is; after ``stall_s`` it ends the run. Trouble of an
    actor is noted when it begins.
    """

    waits: Waits
    heartbeats: Mapping[str, Callable[[], Awaitable[Any]]]
    note: Callable[..., Awaitable[None]]
    patience_s: float
    stall_s: float
    silent_s: float = math.inf
    """Time without an answer after which an actor is killed."""
    kill: Callable[[str], bool] = lambda name: False
    """Kills an actor so that it is restarted; returns whether it can be."""
    stack: Callable[[str], Awaitable[str | None]] | None = None
    """Returns the calls in which an actor is, or nothing."""
    stopped: Callable[[str], Awaitable[bool | None]] | None = None
    """Returns whether a signal has stopped an actor, which is then killed. It is asked for one without an answer."""
    overdue: list[str] = field(default_factory=list)
    """Overdue waits, one line per wait."""
    starting: bool = False
    """Whether the actors load libraries and models, from the first: they may not answer then, and a note says what is
    loading."""

    def __post_init__(self) -> None:
        self._began, self._pings = time.monotonic(), Waits("master", rooms=False)
        self._asking: dict[str, asyncio.Future[Any]] = {}
        self._polls, self._silent = 0, set[str]()
        """Polls so far, and the actors that keep no waits."""
        self._next_note: dict[tuple[str, str], float] = {}
        self._troubled = set[str]()
        """Actors whose trouble was noted, and has not ended."""
        self._awaited = set[str]()
        """Targets of waits that were quiet at the latest poll: they are asked at each."""

    async def watch(self) -> None:
        """Note overdue waits. Raises Stalled after ``stall_s`` without progress, and StorageError for a lost note."""
        try:
            while True:
                pause_s = await self.poll()
                await asyncio.sleep(pause_s)  # a stall is not an event
        finally:
            for asking in self._asking.values():
                asking.cancel()

    async def poll(self) -> float:
        """Note overdue waits; return the seconds until the next poll. Raises Stalled."""
        reports = await self._ask_all()
        for name, report in reports.items():
            if not report.trouble:
                self._troubled.discard(name)
            elif name not in self._troubled:
                self._troubled.add(name)
                await self.note(f"{name}: no group succeeds: {report.trouble}")
        waits = quiet_waits([self.waits.report(), self._pings.report()], reports)
        self._awaited = {wait.target for wait in waits if wait.quiet_s >= self.patience_s / _POLLS}
        late = [wait for wait in waits if wait.quiet_s >= self.patience_s or wait.target == ROOM]
        self.overdue = [describe(wait) for wait in late]
        self._next_note = {key: self._next_note[key] for key in map(_key, late) if key in self._next_note}
        if news := [wait for wait in late if wait.quiet_s >= self._due(wait)]:
            self._next_note.update({_key(wait): max(2 * wait.quiet_s, self.patience_s) for wait in news})
            text = f"no progress: {'; '.join(map(describe, news))}"
            if self.starting:
                doing = {name: f": {each.doing}" for name, each in reports.items() if each.doing}
                phases = dict.fromkeys(f"{wait.target} ({wait.what}{doing.get(wait.target, '')})" for wait in news)
                text = f"still starting after {time.monotonic() - self._began:.0f} s: {', '.join(phases)}"
            elif self.stack is not None and (stack := await self.stack(news[0].target)):
                text += f"; {news[0].target} is at {stack}"
            await self.note(text, waiting=[asdict(wait) for wait in news])
        for wait in self._pings.report().waits:
            if wait.quiet_s >= self.silent_s and not self.starting:
                self.kill(wait.target)
        # A lease has the same deadline, and its error says more: it comes first.
        # A write that waits for room raises its own error, and its actor must not be killed.
        excused = {ROOM, *(wait.waiter for wait in late if wait.target == ROOM)}
        stalled = [w for w in late if w.quiet_s >= self.stall_s + self.patience_s and w.target not in excused]
        if stalled and not self.kill(stalled[0].target):
            problem = f"no progress: {describe(stalled[0])}"
            remedy = "see its log in the Ray dashboard; if it only takes long, raise monitor.stall_s"
            raise Stalled(problem, remedy, field=stalled[0].target, value=stalled[0].what)
        soonest = min((self._due(wait) - wait.quiet_s for wait in waits), default=self.patience_s)
        return min(max(soonest, 0.01 * self.patience_s), self.patience_s / _POLLS, self.silent_s / _POLLS)

    async def _ask_all(self) -> dict[str, WaitReport]:
        """Return the reports of the actors that answer soon. A call without an answer is kept, and counts as a wait."""
        self._polls += 1
        for number, (name, ask) in enumerate(self.heartbeats.items(), self._polls):
            skipped = name in self._silent - self._awaited and number % _SILENT_POLLS
            if name not in self._asking and not skipped:
                self._asking[name] = asyncio.ensure_future(self._ping(name, ask))
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=self.patience_s / (2 * _POLLS))
        reports = {}
        for name, asking in list(self._asking.items()):
            if asking.done():
                del self._asking[name]
                if isinstance(report := asking.result(), WaitReport):
                    reports[name] = report
                else:
                    self._silent.add(name)
        return reports

    async def _ping(self, name: str, ask: Callable[[], Awaitable[Any]]) -> Any:
        with self._pings.on(name, "heartbeat"):
            looking = asyncio.create_task(self._kill_if_stopped(name))
            try:
                return await ask()
            except ray.exceptions.RayError:  # `supervise` reports deaths, also of vLLM's core
                return None
            finally:
                looking.cancel()

    async def _kill_if_stopped(self, name: str) -> None:
        """Look now and then whether an actor that does not answer is stopped. Never returns."""
        while True:
            await asyncio.sleep(self.patience_s / _POLLS)  # a stop is not an event
            if self.stopped is not None and not self.starting and await self.stopped(name):
                self.kill(name)

    def _due(self, wait: Wait) -> float:
        return self._next_note.get(_key(wait), 0.0 if wait.target == ROOM else self.patience_s)


def quiet_waits(own: Iterable[WaitReport], parts: Mapping[str, WaitReport]) -> list[Wait]:
    """Return all waits, root causes first. Progress of the target counts as progress of the wait."""
    waits = (wait for report in (*parts.values(), *own) for wait in report.waits)
    updated = [replace(w, quiet_s=min(w.quiet_s, parts[w.target].quiet_s)) if w.target in parts else w for w in waits]
    return sorted(updated, key=lambda wait: wait.target in parts)


def describe(wait: Wait) -> str:
    """Format a wait as one line."""
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - wait.quiet_s))
    more = f" and {wait.count - 1} more" if wait.count > 1 else ""
    return f"{wait.waiter} waits for {wait.target} ({wait.what}{more}): nothing for {wait.quiet_s:.0f} s, since {since}"


def _key(wait: Wait) -> tuple[str, str]:
    return wait.waiter, wait.target


T = TypeVar("T")
_GRACE_S = 3.0
"""Time to wait for an actor's death to become known after another failure, which it may have caused."""
_LOST_S = 60.0
"""The same after a call to an actor that cannot be reached: Ray notices within this time that a node is lost."""


class Stopped(Exception):
    """The user asked the run to stop."""


async def supervise(main: Coroutine[Any, Any, None], watches: dict[str, Awaitable[Any]]) -> None:
    """Run ``main`` while watching actors. A watch is a call that ends only when its actor fails.

    Raises the root cause: the death of an actor if there is one, else the error of ``main``.
    """
    work = asyncio.ensure_future(main)
    watching = {asyncio.ensure_future(_watch(name, watch)) for name, watch in watches.items()}
    try:
        await asyncio.wait({work, *watching}, return_when=asyncio.FIRST_COMPLETED)
        if work.done() and not work.cancelled() and work.exception() is None:
            return
        failure = work.exception() if work.done() and not work.cancelled() else None
        lost = failure is not None and isinstance(root_cause(failure), ActorUnreachable)
        grace = _LOST_S if lost else _GRACE_S
        deaths, _ = await asyncio.wait(watching, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        for dead in deaths:
            if (error := dead.exception()) is not None:
                raise error
        await work
    finally:
        await cancel(work, *watching)


async def unless_stopped(stop: asyncio.Event, work: Awaitable[T]) -> T:
    """Return the result of ``work``; abandon it and raise Stopped as soon as ``stop`` is set."""
    return await unless(stop.wait(), Stopped, work)


def root_of_death(error: BaseException, name: str) -> RayrftError:
    """Return the root cause of the death of an actor, with the addresses of the actor and of this process."""
    cause = root_cause(error, name)
    actor = error.actor_id if isinstance(error, ray.exceptions.RayActorError) and not error.actor_init_failed else None
    if actor and ray.is_initialized() and (found := ray_api.actors(actor)):
        cause.problem += f", on {found['Address']['IPAddress']}, seen from {ray.util.get_node_ip_address()}"
    return cause


async def _watch(name: str, watch: Awaitable[Any]) -> None:
    try:
        await watch
    except Exception as error:
        raise root_of_death(error, name) from None
