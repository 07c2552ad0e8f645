"""Who died first: turns the many errors that follow one death into the one that caused them. And who asked to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from rayrft.errors import ActorDied, RayrftError

if TYPE_CHECKING:
    from ray.exceptions import RayActorError

T = TypeVar("T")
_REMEDY = "see its log in the Ray dashboard"
_GRACE_S = 3.0
"""A peer of a dead actor may fail a moment before the death is known; so long is waited for the better cause."""


class Stopped(Exception):
    """The user asked the run to stop."""


async def supervise(main: Coroutine[Any, Any, T], watches: dict[str, Awaitable[Any]]) -> T:
    """Run ``main`` while watching actors. A watch is a call that ends only when its actor fails.

    Raises the root cause: the death of an actor where there is one, else what ``main`` raised.
    """
    work = asyncio.ensure_future(main)
    watching = {asyncio.ensure_future(_watch(name, watch)) for name, watch in watches.items()}
    try:
        await asyncio.wait({work, *watching}, return_when=asyncio.FIRST_COMPLETED)
        if work.done() and not work.cancelled() and work.exception() is None:
            return work.result()
        deaths, _ = await asyncio.wait(watching, timeout=_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        for death in deaths:
            if (error := death.exception()) is not None:
                raise error
        return await work
    finally:
        for task in (work, *watching):
            task.cancel()
        await asyncio.gather(work, *watching, return_exceptions=True)


async def unless_stopped(stop: asyncio.Event, work: Awaitable[T]) -> T:
    """The result of ``work``; raises Stopped, and leaves the work alone, as soon as the user asks for it."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Stopped
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


def root_cause(error: BaseException, actor: str = "master") -> RayrftError:
    """The error under Ray's wrappings, as one of ours."""
    from ray.exceptions import RayActorError, RayTaskError

    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, RayTaskError) and error.cause is not None:
            error = error.cause
        else:
            break
    if isinstance(error, RayrftError):
        return error
    if isinstance(error, RayActorError):
        return ActorDied(f"the actor died: {death(error)}", field=actor, remedy=_REMEDY)
    text = str(error).strip().splitlines() or ["no message"]
    return ActorDied(f"{type(error).__name__}: {text[0]}", field=actor, remedy=_REMEDY)


def death(error: RayActorError) -> str:
    """Why an actor died, in a line of what Ray says of it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if error.actor_init_failed:  # a traceback, which ends with what was raised
        return lines[-1].rpartition("rayrft.errors.")[2].rstrip(".")
    # A heading, what actor it was (indented), and why it died.
    return next((line for line in lines[1:] if not line.startswith("\t")), lines[0]).rstrip(".")


async def _watch(name: str, watch: Awaitable[Any]) -> None:
    try:
        await watch
    except Exception as error:
        raise root_cause(error, name) from None
