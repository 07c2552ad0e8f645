"""EnginePool: the only owner of which engines are members.

An engine is a member from the moment it holds the trainer's weights (`WeightSync.admit`) until it leaves. Router,
WeightSync and evaluation ask the pool and follow changes by a long poll: nothing else keeps a list of members.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.runtime.handle import Handle, Watched

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
    """The members by the order in which they joined; the generation changes whenever one joins or leaves, and is never
    that of another membership, whether or not the pool was restarted."""

    generation: int
    members: tuple[Member, ...]
    replaced: bool = True
    """Whether members that die are replaced, so that their requests may wait for the successors."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @property
    def engines(self) -> list[Handle[RolloutEngine]]:
        return [member.handle for member in self.members]


class EnginePool(Watched):
    """The actor. It only keeps the membership: engines are created, and given weights, by the Master."""

    def __init__(self, *, replaced: bool = True) -> None:
        """``replaced``: see `Membership`."""
        self.membership = Membership(random.getrandbits(62), (), replaced)
        self._changed = asyncio.Condition()

    async def members(self, after: int = -1) -> Membership:
        """Return the membership as soon as its generation is not ``after``."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.membership.generation != after)
            return self.membership

    async def newer(self, than: int) -> Membership | None:
        """Return the membership unless its generation is ``than``: it has a handle of every engine."""
        return self.membership if self.membership.generation != than else None

    async def join(self, engines: Sequence[Member]) -> Membership:
        """Add engines that hold their version's weights, as one change; of present members only the version changes. A
        member of the same name leaves: it has died, or there would not be another engine of its name."""
        joining = [engine.name for engine in engines]
        others = tuple(member for member in self.membership.members if member.name not in joining)
        return await self._change((*others, *engines))

    async def leave(self, engine: Handle[RolloutEngine], reason: str) -> None:
        """Remove a member: it gets no new requests and no new weights. Nothing happens if it has left before, also if
        an engine of its name has joined since."""
        left = tuple(member for member in self.membership.members if member.handle.actor != engine.actor)
        if len(left) < len(self.membership.members):
            log.warning("%s leaves the engine pool: %s", engine.name, reason)
            await self._change(left)

    async def synced(self, names: Collection[str], version: int) -> None:
        """Record the version that these members now hold; the generation stays."""
        held, before = {*names}, self.membership
        members = (replace(each, version=version) if each.name in held else each for each in before.members)
        self.membership = replace(before, members=tuple(members))

    async def _change(self, members: tuple[Member, ...]) -> Membership:
        before = self.membership
        self.membership = membership = replace(before, generation=before.generation + 1, members=members)
        async with self._changed:
            self._changed.notify_all()
        return membership
