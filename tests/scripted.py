"""Stand-ins for actors, to test logic without waiting for engines."""

from __future__ import annotations

import asyncio
from typing import Any

from rayrft.runtime.handle import Handle


class Remote:
    """Makes an object's coroutine methods callable as on an actor handle."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        return type("Method", (), {"remote": staticmethod(lambda *a, **k: asyncio.ensure_future(method(*a, **k)))})


def handle(actor: Any, name: str = "actor") -> Handle[Any]:
    """A handle of a Ray actor whose class is a stand-in, or is not told."""
    return Handle(name, actor)


def remote(target: Any, name: str = "actor") -> Handle[Any]:
    """A handle of an object in this process."""
    return Handle(name, Remote(target))
