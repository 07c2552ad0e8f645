"""Restarts: actors of a run that die are replaced while it continues, within a budget."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from rayrft.buffer.buffer import Buffer
from rayrft.config import StageConfig
from rayrft.config.placement import RestartsConfig
from rayrft.core.parts.base import Part, RunParts
from rayrft.core.supervision import root_of_death, unless_stopped
from rayrft.errors import ActorDied, ActorUnreachable, DeviceFailed, NotFinite, RayrftError, RowsFailed, WeightSyncError
from rayrft.explorer.explorer import Explorer, Timings
from rayrft.monitor.records import RestartRecord
from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle, Watched, fence, root_cause, until_failed, until_restarted, when_reachable
from rayrft.runtime.ray_api import ray
from rayrft.runtime.waits import cancel

T = TypeVar("T")
log = logging.getLogger(__name__)

_HOUR_S = 3600.0
_LONGEST_S = 60.0
"""Longest time before a restart."""
_GRACE_S = 5.0
"""Time in which the death of an actor becomes known after a failure, which it may have caused."""
_DEATHS = (ActorDied, ActorUnreachable, DeviceFailed, RowsFailed, NotFinite)
"""Errors of an actor that a restart may fix: the others have their cause in the config, the data or the program."""


class Rewound(Exception):
    """The steps since the latest checkpoint are to be repeated: an actor has died whose state is lost."""


class Budget:
    """Deaths of one kind of actor within an hour."""

    def __init__(self, config: RestartsConfig) -> None:
        self._config = config
        self._deaths: deque[tuple[float, RayrftError]] = deque()

    def count(self, restart: RestartRecord) -> None:
        """Count an earlier death."""
        age = max(time.time() - restart.time, 0.0)
        self._deaths.append((time.monotonic() - age, ActorDied(restart.cause, field=restart.actor)))

    def spend(self, cause: RayrftError) -> float:
        """Count a death; return the seconds until the restart. Raises the cause of the hour's first death if there are
        more than ``per_hour``."""
        now = time.monotonic()
        while self._deaths and self._deaths[0][0] <= now - _HOUR_S:
            self._deaths.popleft()
        self._deaths.append((now, cause))
        count, limit = len(self._deaths), self._config.per_hour
        if count > limit:
            first = self._deaths[0][1]
            if limit:
                first.problem += f" (the first of {count} deaths within an hour; restarts.per_hour is {limit})"
            raise first
        longest = min(self._config.backoff_s * 2.0 ** (count - 2), _LONGEST_S) if count > 1 else 0.0
        return longest * random.uniform(0.5, 1.0)


class Restarts:
    """Watches the supervised actors of a run, and restarts those that die. Until ``running`` is set a death ends it.

    ``say`` records a restart: its kind, actor, cause, and the seconds without the actor. ``blame`` tells the Buffer on
    which rows or batch the ranks failed. ``note`` says what is different after a restart. ``before`` holds the restarts
    by a Master that has died.
    """

    def __init__(
        self,
        parts: RunParts,
        config: RestartsConfig,
        say: Callable[[str, str, RayrftError, float], Awaitable[None]],
        blame: Callable[[RowsFailed | NotFinite], Awaitable[None]],
        note: Callable[[str], Awaitable[None]],
        before: Iterable[RestartRecord] = (),
    ) -> None:
        self.running = False
        self.rewinding = False
        """Whether the trainer's weights are lost, and not yet restored."""
        self._parts, self._config, self._say, self._blame, self._note = parts, config, say, blame, note
        self._budgets = defaultdict[str, Budget](lambda: Budget(config))
        for restart in before:
            self._budgets[restart.part].count(restart)
        self._restarts = Counter[str]()
        """Restarts by the actors' names."""
        self._dead: dict[str, Part[Any]] = {}
        """Actors that are being restarted, by name."""
        self._added = asyncio.Queue[tuple[Part[Any], Handle[Any]]]()
        self._changed = asyncio.Condition()
        self._died_at = -_GRACE_S
        self._over = False
        """Whether the run ends, and no actor is replaced."""
        self._rewinds = asyncio.Event()

    def watches(self) -> dict[str, Awaitable[Any]]:
        """Return for each supervised actor a call that ends only by raising why the run cannot continue."""
        watches = {name: self._watch(part, actor) for name, (part, actor) in self._parts.supervised().items()}
        return {name: self._until_over(watch) for name, watch in {**watches, "added": self._watch_added()}.items()}

    def add(self, part: Part[Any], actor: Handle[Any]) -> None:
        """Watch one more actor."""
        self._added.put_nowait((part, actor))

    def kill(self, name: str) -> bool:
        """Kill an actor that does not answer, so that it is restarted; return whether it can be."""
        part, actor = self._parts.supervised().get(name, (None, None))
        if not self.running or part is None or actor is None or part.on_death == "end" or not self._config.per_hour:
            return False
        if name not in self._dead:
            actor.kill(restart=part.on_death == "restart")
        return True

    def is_dead(self, name: str) -> bool:
        """Return whether an actor is being restarted."""
        return name in self._dead

    async def all_up(self) -> None:
        """Wait until no actor is being restarted."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._dead)

    async def survive(self, actor: Handle[Any], call: Callable[[], Awaitable[T]]) -> T:
        """Make a call of an actor, and again of its successor if it dies; return the result. Raises the error of an
        actor that is not replaced, as the run ends."""
        while True:
            known = self._restarts[actor.name]
            try:
                return await when_reachable(call)
            except ray_api.ACTOR_ERRORS:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._over or self._restarts[actor.name] > known)  # noqa: B023 - at once
                if self._over:
                    raise

    async def explore(
        self, buffer: Handle[Buffer], stage: Callable[[], StageConfig], explorer: Handle[Explorer]
    ) -> None:
        """Let an Explorer fill the Buffer, as `Explorer.explore`, for the ``stage`` as it is when the call is made. If
        the Explorer dies, its successor gets its tickets."""
        producers = list[str]()

        async def explore() -> None:
            for producer in producers[-1:]:
                await buffer.call(Buffer.abandon, producer)
            producers.append(f"{explorer.name}-{uuid.uuid4().hex}")
            await explorer.call(Explorer.explore, stage(), producers[-1])

        await self.survive(explorer, explore)

    async def timings(self, explorers: Sequence[Handle[Explorer]]) -> Timings:
        """Return the joint timings of the Explorers that are alive, since the last call."""
        alive = [explorer for explorer in explorers if not self.is_dead(explorer.name)]
        found = await asyncio.gather(*(each.call(Explorer.timings) for each in alive), return_exceptions=True)
        return Timings.of([each for each in found if isinstance(each, Timings)])

    async def unless_rewound(self, work: Awaitable[T], stop: asyncio.Event) -> T:
        """Return the result of ``work``. Raises Rewound if the run has to repeat steps: an actor died whose state is
        lost, and is up again, or ``work`` failed because of the death of any. Raises Stopped if ``stop`` is set before
        the actor is up."""
        working, rewinding = asyncio.ensure_future(work), asyncio.ensure_future(self._rewinds.wait())
        try:
            await asyncio.wait({working, rewinding}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and not self._rewinds.is_set():
                failure = None if working.cancelled() else working.exception()
                if failure is None or not await self._caused(failure):
                    return working.result()
        finally:
            await cancel(working, rewinding)
        async with self._changed:
            up = self._changed.wait_for(lambda: not any(part.rewinds for part in self._dead.values()))
            await unless_stopped(stop, up)
        self._rewinds.clear()
        raise Rewound

    async def restored(self) -> None:
        """Wait until the trainer's weights are those of a step of the run."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self.rewinding)

    async def end_rewind(self) -> None:
        """Record that the trainer's weights are restored, unless they were lost again."""
        async with self._changed:
            self.rewinding = self._rewinds.is_set()
            self._changed.notify_all()

    async def _caused(self, failure: BaseException) -> bool:
        """Return whether a death explains a failure."""
        if not self._config.per_hour or not isinstance(root_cause(failure), (*_DEATHS, WeightSyncError)):
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S), self._changed:
                await self._changed.wait_for(lambda: self._dead or time.monotonic() - self._died_at < _GRACE_S)
                return True
        return False

    async def _until_over(self, watch: Awaitable[None]) -> None:
        try:
            await watch
        except (Exception, asyncio.CancelledError):
            async with self._changed:
                self._over = True
                self._changed.notify_all()
            raise

    async def _watch(self, part: Part[Any], actor: Handle[Any]) -> None:
        pid = await actor.untracked.call(Watched.pid) if part.on_death == "restart" else 0
        while (death := await (until_restarted(actor, pid) if pid else self._failure(actor))) is not None:
            cause, died = death
            if actor not in part.actors:  # the run was scaled down
                await asyncio.Event().wait()
            while True:
                await self._count(part, actor, cause)
                pid = pid and await actor.untracked.call(Watched.pid)  # now: it may die while it is restored
                try:
                    await self._restart(part, actor)
                    break
                except (ray.exceptions.RayError, RayrftError) as error:  # it died again, or another actor did
                    cause = root_of_death(error, actor.name)
            async with self._changed:
                del self._dead[actor.name]
                self._restarts[actor.name] += 1
                self._died_at = time.monotonic()
                self._changed.notify_all()
            await self._say(part.name, actor.name, cause, time.monotonic() - died)

    async def _watch_added(self) -> None:
        async with asyncio.TaskGroup() as watches:
            while True:
                watches.create_task(self._watch(*await self._added.get()))

    async def _failure(self, actor: Handle[Any]) -> tuple[RayrftError, float] | None:
        """Return why an actor failed, and when; None once the run has stopped it."""
        try:
            await until_failed(actor)
        except (ray.exceptions.RayError, RayrftError) as error:
            return root_of_death(error, actor.name), time.monotonic()
        return None

    async def _count(self, part: Part[Any], actor: Handle[Any], cause: RayrftError) -> None:
        """Count a death, and wait until the actor may be restarted. Raises the cause if it may not be."""
        restartable = part.on_death != "end" and isinstance(cause, _DEATHS)
        if not restartable or (not self.running and part.on_death != "restart"):
            raise cause
        if change := part.prepare_successor(cause):
            cause.problem += f"; {change}"
            await self._note(f"{actor.name}: {cause.problem}")
        pause_s = self._budgets[part.name].spend(cause)
        log.warning("%s: %s; restarting it in %.1f s", actor.name, cause.problem, pause_s)
        async with self._changed:
            self._dead[actor.name] = part
            self.rewinding = self.rewinding or part.rewinds
            self._died_at = time.monotonic()
            self._changed.notify_all()
        if part.rewinds:
            self._rewinds.set()
        if isinstance(cause, RowsFailed | NotFinite):
            await self._blame(cause)
        await asyncio.sleep(pause_s)

    async def _restart(self, part: Part[Any], actor: Handle[Any]) -> None:
        if part.on_death == "restart":
            return await part.restarted(actor)
        await part.lost(actor)
        await fence(actor)
        await part.replace(actor)
