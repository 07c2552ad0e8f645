"""Calls spread over actors of one class, each of which is replaced when it dies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Generic, TypeVar

from rayrft.errors import ActorDied, ActorUnreachable
from rayrft.runtime.handle import Handle, death_reason

A = TypeVar("A")
R = TypeVar("R")

TRIES = 2
"""How often a call is made whose actor dies or cannot be reached: it may have been ended by something else."""


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
        """Make a call, which weighs ``owed``; return its result, and how many calls of actors failed before.

        Raises ActorDied if the actor of the last call died, ActorUnreachable if it cannot be reached.
        """
        from ray.exceptions import ActorDiedError, RayActorError

        for tries in range(TRIES):
            actor = min(self._actors, key=self._owed.__getitem__)
            start = self._actors[actor]
            self._owed[actor] += owed
            try:
                await asyncio.shield(start)
                return await ask(actor), tries
            except RayActorError as error:
                died = isinstance(error, ActorDiedError)
                failure = (ActorDied if died else ActorUnreachable)(
                    death_reason(error), field=actor.name, remedy="see its log in the Ray dashboard"
                )
                if (died or start.exception()) and self._actors.pop(actor, None) is not None:
                    actor.kill()  # one whose start was not answered may be alive
                    self._add()
            finally:
                self._owed[actor] -= owed
        raise failure

    def _add(self) -> None:
        # In no call's context: Ray would cancel the start, which all calls wait for, together with that call.
        context = Context()
        actor = context.run(self._create)
        self._actors[actor] = asyncio.ensure_future(context.run(self._start, actor))
