"""All shards, as the Buffer calls them: the first in its own process, the others actors that may die and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rayrft.buffer.log.segments import Extent
from rayrft.buffer.log.shard import NotOpen, Shard
from rayrft.errors import StorageError

_ATTEMPTS = 5


class Shards:
    """``committed`` gives the extents of a shard that the journal speaks of.

    A shard does one thing at a time. One that died is started again by Ray and opened where the journal stands, and
    what it was doing is done again: rows that it had written and nobody had heard of are cut off.
    """

    def __init__(self, first: Shard, others: list[Any], committed: Callable[[int], list[Extent]]) -> None:
        self._first = first
        self._others = others
        self._committed = committed
        self._thread = ThreadPoolExecutor(1, "shard")
        self._locks = [asyncio.Lock() for _ in range(1 + len(others))]
        self._opened: set[int] = set()
        self.torn_bytes = 0
        """Cut off when shards were opened."""

    def __len__(self) -> int:
        return len(self._locks)

    async def call(self, shard: int, method: str, *arguments: Any, **named: Any) -> Any:
        """Have a shard do something. Raises StorageError when it dies again and again."""
        from ray.exceptions import RayActorError

        async with self._locks[shard]:
            for _ in range(_ATTEMPTS):
                try:
                    if shard not in self._opened:
                        self.torn_bytes += await self._do(shard, "open", self._committed(shard))
                        self._opened.add(shard)
                    return await self._do(shard, method, *arguments, **named)
                except (RayActorError, NotOpen) as error:
                    self._opened.discard(shard)
                    died = error
        raise StorageError(
            f"died {_ATTEMPTS} times in a row: {type(died).__name__}",
            field=f"buffer.shard-{shard}",
            remedy="see its log in the Ray dashboard",
        )

    async def all(self, method: str, *arguments: Any) -> list[Any]:
        """Have every shard do something."""
        return await asyncio.gather(*(self.call(shard, method, *arguments) for shard in range(len(self))))

    async def _do(self, shard: int, method: str, *arguments: Any, **named: Any) -> Any:
        if shard:
            return await getattr(self._others[shard - 1], method).remote(*arguments, **named)
        work = asyncio.get_running_loop()
        return await work.run_in_executor(self._thread, lambda: getattr(self._first, method)(*arguments, **named))
