"""Who died first: turns the many errors that follow one death into the one that caused them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from rayrft.errors import ActorDied, RayrftError

T = TypeVar("T")
_GRACE_S = 3.0
"""A peer of a dead actor may fail a moment before the death is known; so long is waited for the better cause."""


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


def root_cause(error: BaseException, actor: str = "master") -> RayrftError:
    """The error under Ray's wrappings, as one of ours."""
    from ray.exceptions import RayTaskError

    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif isinstance(error, RayTaskError) and error.cause is not None:
            error = error.cause
        else:
            break
    if isinstance(error, RayrftError):
        return error
    text = str(error).strip().splitlines() or ["no message"]
    return ActorDied(f"{type(error).__name__}: {text[0]}", field=actor, remedy="see its log in the Ray dashboard")


async def _watch(name: str, watch: Awaitable[Any]) -> None:
    from ray.exceptions import RayActorError

    try:
        await watch
    except RayActorError as error:
        reason = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = next((line for line in reason if "cause" in line.lower() or "exit" in line.lower()), reason[0])
        raise ActorDied(f"the actor died: {told}", field=name, remedy="see its log in the Ray dashboard") from None
    except Exception as error:
        raise root_cause(error, name) from None
