"""Stand-ins for actors, to test logic without waiting for engines."""

from __future__ import annotations

import asyncio
from typing import Any


class Remote:
    """Makes an object's coroutine methods callable as on an actor handle."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        return type("Method", (), {"remote": staticmethod(lambda *args: asyncio.ensure_future(method(*args)))})
