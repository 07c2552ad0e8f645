"""A train loop with scripted parts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

from rayrft.buffer.ledger import Ledger
from rayrft.core.checkpoints import Checkpoints, Progress
from rayrft.core.train_loop import TrainLoop
from rayrft.monitor.recorder import Recorder
from rayrft.trainer.api import RankCall
from tests.core.given import restarts, run_folder
from tests.scripted import remote


class ScriptedTrainer:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.held: dict[str, asyncio.Future[None]] = {}
        """What folders of these names wait for, before they are written."""

    async def call_ranks(self, call: RankCall) -> list[Any]:
        self.calls.append(call.method)
        return [None]

    async def written(self, folder: Path) -> None:
        if folder.name in self.held:
            await self.held[folder.name]


class EvaluatesForEver:
    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def evaluate(self, temperature: float, samples: int, beside: bool) -> None:
        self.asked.set()
        await asyncio.Event().wait()


class Subject:
    """A train loop on scripted actors."""

    def __init__(self, folder: Path) -> None:
        config = run_folder(folder, "evaluates", monitor={"stall_s": 0.05})
        progress, self.stop = Progress("id"), asyncio.Event()
        Checkpoints(config.folder, config.checkpoint).mark_beginning(progress)
        self.trainer, self.explorer = ScriptedTrainer(), EvaluatesForEver()
        self.buffer = AsyncMock()
        self.buffer.resume.return_value = Ledger(), 0
        self.buffer.flush.return_value = self.buffer.lease.return_value = None
        buffer, trainer, explorers = remote(self.buffer), remote(self.trainer), [remote(self.explorer)]
        self.loop = TrainLoop(config, buffer, trainer, explorers, Recorder(config), progress, self.stop, restarts())
