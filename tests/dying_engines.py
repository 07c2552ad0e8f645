"""Engines without vLLM that die, for runs with the plugin `tests/with_dying_engines.py`."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import ray

from rayrft.explorer.engines.exchange import Completion, Request, Stream
from tests.scripted_engine import ScriptedEngine


class DyingEngine(ScriptedEngine):
    """Takes some time for an answer, and dies within one request of ten, until there were twenty deaths. Each leaves a
    line with the engine's name in the file ``deaths`` beside the model's folder."""

    async def start(self, model: str, *rest: Any, **settings: Any) -> None:
        await super().start(model, *rest, **settings)
        self._deaths, self._rng = Path(model).parent / "deaths", random.Random()

    async def generate(self, request: Request, stream: Stream | None = None) -> list[Completion]:
        await asyncio.sleep(self._rng.uniform(0.0, 0.1))  # as if it were decoding
        if self._rng.random() < 0.1:
            with self._deaths.open("a+") as deaths:
                deaths.seek(0)
                if len(deaths.readlines()) < 20:
                    print(ray.get_runtime_context().get_actor_name(), file=deaths, flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
        return await super().generate(request, stream)
