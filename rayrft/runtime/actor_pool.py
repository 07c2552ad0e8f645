"""Calls spread over actors of one class, each of which is replaced or restarted when it dies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Generic, TypeVar

from rayrft.errors import ActorDied, ActorUnreachable
from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle, death_reason

A = TypeVar("A")
R = TypeVar("R")

TRIES = 2
"""How often a call is made whose actor or process dies: it may have been ended by something else."""


async def with_retry(call: Callable[[], Awaitable[R]], who: str) -> tuple[R, int]:
    """Make a call up to `TRIES` times while its actor dies or cannot be reached; return its result and the number of
    retries. Raises ActorDied or ActorUnreachable for ``who`` if the last try fails."""
    for retries in range(TRIES):
        try:
            return await call(), retries
        except ray_api.ACTOR_ERRORS as error:
            kind = ActorDied if isinstance(error, ray_api.ACTOR_DEATHS) else ActorUnreachable
            failure = kind(death_reason(error), "see its log in the Ray dashboard", field=who)
    raise failure


class ActorPool(Generic[A]):
    """``count`` actors that ``create`` makes and ``start`` starts, in an event loop. Calls go to the least loaded actor
    that has started; ``who`` names the actors in errors. ``restarted``: Ray restarts those that die, and repeats the
    call of ``start``, but not the others."""

    def __init__(
        self,
        create: Callable[[], Handle[A]],
        start: Callable[[Handle[A]], Awaitable[None]],
        count: int,
        who: str,
        *,
        restarted: bool = False,
    ) -> None:
        self._create, self._start, self._count, self._who, self._restarted = create, start, count, who, restarted
        self._starts: dict[Handle[A], asyncio.Future[None]] = {}
        self._load = Counter[Handle[A]]()

    @property
    def is_open(self) -> bool:
        return bool(self._starts)

    async def open(self, *, any_started: bool = False) -> None:
        """Start the actors; raises their errors. ``any_started``: return once one has started or failed."""
        for _ in range(self._count):
            self._begin()
        if any_started:
            await asyncio.wait(self._starts.values(), return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.gather(*self._starts.values())

    def close(self) -> None:
        """Kill the actors."""
        for actor in self._starts:
            actor.kill()

    async def call(self, ask: Callable[[Handle[A]], Awaitable[R]], *, load: int = 1) -> tuple[R, int]:
        """Make a call of this load; return its result, and the number of retries. Raises the errors of `with_retry`."""

        async def call_one() -> R:
            while not (started := [actor for actor, start in self._starts.items() if start.done()]):
                await asyncio.wait(self._starts.values(), return_when=asyncio.FIRST_COMPLETED)
            actor = min(started, key=self._load.__getitem__)
            start = self._starts[actor]
            self._load[actor] += load
            try:
                start.result()
                return await ask(actor.with_options(max_task_retries=0))
            except ray_api.ACTOR_ERRORS as error:
                died = self._restarted or isinstance(error, ray_api.ACTOR_DEATHS) or start.exception() is not None
                if died and self._starts.get(actor) is start:
                    if not self._restarted:
                        self._starts.pop(actor)
                        actor.kill()  # one whose start was not answered may be alive
                    self._begin(actor if self._restarted else None)
                raise
            finally:
                self._load[actor] -= load

        return await with_retry(call_one, self._who)

    def _begin(self, actor: Handle[A] | None = None) -> None:
        # In no call's context: Ray would cancel the start, which all calls wait for, together with that call.
        context = Context()
        actor = actor or context.run(self._create)
        self._starts[actor] = asyncio.ensure_future(context.run(self._start, actor))
