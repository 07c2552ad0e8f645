"""Who makes rows: watched, so that what a dead producer had under way goes to others."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from rayrft.buffer.log import events as e
from rayrft.buffer.store import Store


class Producers:
    """The producers that are attached, by name."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._watching: dict[str, asyncio.Task[None]] = {}

    def attach(self, producer: str, actor: Any) -> None:
        """Watch a producer from now on, by its handle."""
        if (watching := self._watching.pop(producer, None)) is not None:
            watching.cancel()
        self._watching[producer] = asyncio.create_task(self._watch(producer, actor))

    async def detach(self, producer: str) -> None:
        """The producer is done; after the last one no more rows come."""
        if (watching := self._watching.pop(producer, None)) is not None:
            watching.cancel()
        if not self._watching:
            await self._store.commit(e.ProducersEnded("end_of_data"))

    async def _watch(self, producer: str, actor: Any) -> None:
        from ray.exceptions import RayActorError

        with contextlib.suppress(RayActorError):
            await actor.watch.remote()
        del self._watching[producer]
        await self._store.commit(e.Abandoned(producer))
        if not self._watching:
            await self._store.commit(e.ProducersEnded("producer_died"))
