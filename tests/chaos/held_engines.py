"""Real engines that wait at doors, for runs with the plugin `tests/chaos/with_held_engines.py`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from rayrft.config.explorer import EngineConfig
from rayrft.explorer.engines.engine import EngineWeights, RolloutEngine
from rayrft.explorer.engines.exchange import Completion, Request, Stream


class HeldEngine(RolloutEngine):
    """Waits within a call for as long as the test holds the door of that call and this engine."""

    async def start(self, model: str, config: EngineConfig, **options: Any) -> None:
        await super().start(model, config, **options)
        self._doors = Path(model).parent / "doors"

    async def generate(self, request: Request, stream: Stream | None = None) -> list[Completion]:
        answers, _ = await asyncio.gather(super().generate(request, stream), self._pass("generate"))
        return answers

    async def receive(self, number: int, version: int) -> EngineWeights:
        await self._pass("receive")
        return await super().receive(number, version)

    async def _pass(self, moment: str) -> None:
        name = ray.get_runtime_context().get_actor_name().rpartition(":")[2]
        door = self._doors / f"{moment} {name}"
        if door.exists():
            with contextlib.suppress(FileNotFoundError):
                await asyncio.to_thread(door.read_bytes)  # a pipe, which ends when the test closes it


@contextlib.contextmanager
def held(folder: Path, moment: str, engine: str) -> Iterator[Callable[[], bool]]:
    """Hold an engine of the run with this folder at its next such moment; it may pass afterwards. Gives a function that
    says whether the engine has come."""
    door = folder / "doors" / f"{moment} {engine}"
    door.parent.mkdir(exist_ok=True)
    os.mkfifo(door)
    ends: list[int] = []

    def has_come() -> bool:
        try:
            ends.append(os.open(door, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            if error.errno != errno.ENXIO:  # nobody reads
                raise
        return bool(ends)

    try:
        yield has_come
    finally:
        door.unlink()
        for end in ends:
            os.close(end)
