"""Calls spread over actors of one class, each of which is replaced when it dies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from rayrft.errors import ActorDied
from rayrft.handle import Handle

A = TypeVar("A")
R = TypeVar("R")

TRIES = 2
"""How often a call is made whose actor dies: it may have been ended by something else."""


class ActorPool(Generic[A]):
    """``count`` actors that ``create`` makes and ``start`` starts, in an event loop. A call goes to the one that owes
    the least."""

    def __init__(
        self, create: Callable[[], Handle[A]], start: Callable[[Handle[A]], Awaitable[None]], count: int
    ) -> None:
        self._create, self._start, self._count = create, start, count
        self._actors: dict[Handle[A], asyncio.Future[None]] = {}
        """Each with its start."""
        self._owed = Counter[Handle[A]]()

    async def open(self) -> None:
        """Start the actors. Raises what their start raises."""
        for _ in range(self._count):
            self._add()
        await asyncio.gather(*self._actors.values())

    async def call(self, ask: Callable[[Handle[A]], Awaitable[R]], *, owed: int = 1) -> tuple[R, int]:
        """Make a call, which weighs ``owed``; return its result, and how many actors died of it before.

        Raises ActorDied if as many actors died of it as it was made times.
        """
        from ray.exceptions import RayActorError

        for tries in range(TRIES):
            actor = min(self._actors, key=self._owed.__getitem__)
            self._owed[actor] += owed
            try:
                await asyncio.shield(self._actors[actor])
                return await ask(actor), tries
            except RayActorError as error:
                problem = str(error).splitlines()[0]
                if self._actors.pop(actor, None) is not None:
                    self._add()
            finally:
                self._owed[actor] -= owed
        raise ActorDied(problem, field=actor.name, remedy="see its log in the Ray dashboard")

    def _add(self) -> None:
        actor = self._create()
        self._actors[actor] = asyncio.ensure_future(self._start(actor))
