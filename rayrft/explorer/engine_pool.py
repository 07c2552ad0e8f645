"""EnginePool: the only owner of which engines are members; and the client that spreads requests over them.

An engine is a member from the moment it holds the trainer's weights (`WeightSync.admit`) until it leaves. Whoever needs
the members asks the pool, and follows changes by a long poll: no other part keeps a list that outlives a generation.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rayrft.errors import ActorDied, WeightSyncError
from rayrft.explorer.engine import RolloutEngine
from rayrft.explorer.exchange import Completion, Request, Requester, Session, Told
from rayrft.handle import Handle, TrackedHandle
from rayrft.waits import Waits

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member:
    """An engine that takes requests, and the version of the weights that it holds."""

    handle: Handle[RolloutEngine]
    version: int

    @property
    def name(self) -> str:
        return self.handle.name


@dataclass(frozen=True)
class Membership:
    """The members by the order in which they joined; the generation grows whenever one joins or leaves."""

    generation: int
    members: tuple[Member, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @property
    def engines(self) -> list[Handle[RolloutEngine]]:
        return [member.handle for member in self.members]


class EnginePool:
    """The actor. It only keeps the membership: engines are created, and given weights, by the Master."""

    def __init__(self) -> None:
        self._membership = Membership(0, ())
        self._changed = asyncio.Condition()

    async def members(self, after: int = -1) -> Membership:
        """Return the membership as soon as its generation is beyond ``after``."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._membership.generation > after)
            return self._membership

    async def join(self, engines: Sequence[Member]) -> Membership:
        """Add engines that hold their version's weights, as one change. Raises WeightSyncError if a name is taken."""
        for name in self._membership.names:
            if any(engine.name == name for engine in engines):
                raise WeightSyncError(
                    "an engine of this name is a member", field=name, remedy="let it leave before another joins"
                )
        return await self._change((*self._membership.members, *engines))

    async def leave(self, name: str, reason: str) -> None:
        """Remove a member: it gets no new requests and no new weights. Nothing happens if it has left before."""
        if name in self._membership.names:
            log.warning("%s leaves the engine pool: %s", name, reason)
            await self._change(tuple(member for member in self._membership.members if member.name != name))

    async def died(self, name: str, reason: str) -> ActorDied:
        """Remove a member that died; return the error in which its requests end."""
        await self.leave(name, reason)
        return ActorDied(
            f"the engine failed to answer: {reason}", field=name, remedy="see the engine's log in the Ray dashboard"
        )

    async def synced(self, names: Collection[str], version: int) -> None:
        """Record the version that these members now hold; the generation stays."""
        members = tuple(
            replace(member, version=version) if member.name in names else member for member in self._membership.members
        )
        self._membership = Membership(self._membership.generation, members)

    async def watch(self) -> None:
        """Never return: a caller that awaits it learns at once when this actor dies."""
        await asyncio.Event().wait()

    async def pid(self) -> int:
        """Return the actor's process id."""
        return os.getpid()

    async def _change(self, members: tuple[Member, ...]) -> Membership:
        self._membership = membership = Membership(self._membership.generation + 1, members)
        async with self._changed:
            self._changed.notify_all()
        return membership


_SPILL_ANSWERS, _SPILL_RATIO = 8, 1.5
"""A session leaves its engine when that owes so many answers, and so many times as many, more than another: decoding
behind them would take longer than the prefix takes to be computed again."""


class EngineClient:
    """Sends requests to the members, and to no other engine, from one process.

    The n answers to one prompt are one request, so that they share its prefix; it goes to the member that owes this
    client the fewest answers, or to that of its session. An engine that left finishes the requests that it has. While
    there is no member, requests wait for one to join.
    """

    def __init__(self, pool: Handle[EnginePool], waits: Waits) -> None:
        self._pool = TrackedHandle(pool, waits, endless=[EnginePool.members])
        self._waits = waits
        self._engines: dict[str, Requester] = {}
        self._outstanding: Counter[str] = Counter()
        self._has_members = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def generate(
        self, request: Request, sessions: Sequence[Session] = (), told: Told | None = None
    ) -> list[Completion]:
        """Sample the answers to a request on one engine, that of the first of its ``sessions`` if it has one; the
        others follow. For ``told`` see `Requester.ask`.

        Raises ActorDied, naming the engine, if it or its core has died, RequestRefused, and DataError for images that
        cannot be read.
        """
        from ray.exceptions import RayActorError, RayTaskError

        name = await self._choose(sessions[0].engine if sessions else None)
        for session in sessions:
            session.engine = name
        self._outstanding[name] += request.n
        try:
            return await self._engines[name].ask(request, sessions[0] if sessions else None, told)
        except (RayActorError, RayTaskError) as error:
            cause = getattr(error, "cause", None) or error
            [text, *_] = str(cause).strip().splitlines() or ["no message"]
            reason = f"{type(cause).__name__}: {text}"
            raise await self._pool.call(EnginePool.died, name, reason) from None
        finally:
            self._outstanding[name] -= request.n

    async def _choose(self, home: str | None) -> str:
        """Return ``home`` if it is a member that does not owe many more answers than the one with the fewest, else the
        latter; wait until there is a member."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
        while not self._engines:
            joining = asyncio.ensure_future(self._has_members.wait())
            try:
                with self._waits.on("engine_pool", "an engine to join"):
                    await asyncio.wait({joining, self._following}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                joining.cancel()
            if self._following.done():
                break
        if self._following.done():  # the pool died, and with it the knowledge of who is a member
            self._following.result()
        least = min(self._engines, key=self._outstanding.__getitem__)
        if home is None or home not in self._engines:
            return least
        fewest = self._outstanding[least]
        spills = self._outstanding[home] > max(fewest + _SPILL_ANSWERS, fewest * _SPILL_RATIO)
        return least if spills else home

    async def _follow(self) -> None:
        """Keep the members those of the pool. Never returns; raises ActorDied when the pool has died."""
        from ray.exceptions import RayActorError

        membership = Membership(-1, ())
        while True:
            try:
                membership = await self._pool.call(EnginePool.members, membership.generation)
            except RayActorError as error:
                raise ActorDied(f"the actor died: {error}", field="engine_pool") from None
            self._engines = {
                member.name: Requester(TrackedHandle(member.handle, self._waits)) for member in membership.members
            }
            if self._engines:
                self._has_members.set()
            else:
                self._has_members.clear()
