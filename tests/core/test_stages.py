"""A run that is stopped saves where it stands, whatever it was doing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rayrft.config import load_config
from rayrft.core.cast import Cast
from rayrft.core.progress import Checkpoints, Progress
from rayrft.core.recorder import Recorder
from rayrft.core.stages import Stages
from rayrft.core.supervision import Stopped
from rayrft.monitor import sinks
from tests.e2e.conftest import small_config
from tests.scripted import Remote


class ScriptedTrainer:
    def __init__(self) -> None:
        self.commands: list[str] = []

    async def command(self, command: Any) -> list[Any]:
        self.commands.append(type(command).__name__)
        return [None]

    async def written(self, folder: Path) -> None: ...


class ScriptedBuffer:
    async def resume(self, step: int, life: str) -> None: ...

    async def cover(self, step: int) -> None: ...

    async def settle(self) -> None: ...

    async def stats(self) -> dict[str, Any]:
        return {"sampled": 0}


class EvaluatesForEver:
    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def evaluate(self, temperature: float) -> None:
        self.asked.set()
        await asyncio.Event().wait()


async def test_an_evaluation_is_left_alone_when_the_run_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks.RayMetrics, "write", lambda *_: None)
    config = load_config(small_config(tmp_path, "evaluates"))
    config.folder.mkdir()
    progress, stop = Progress("id"), asyncio.Event()
    Checkpoints(config.folder, config.checkpoint).mark_beginning(progress)
    trainer, explorer = ScriptedTrainer(), EvaluatesForEver()
    cast = Cast(Remote(ScriptedBuffer()), Remote(trainer), Remote(explorer), None, [], [])
    running = asyncio.ensure_future(Stages(config, cast, Recorder(config), progress, stop).run())
    await asyncio.wait_for(explorer.asked.wait(), 20)
    stop.set()
    with pytest.raises(Stopped):
        await asyncio.wait_for(running, 20)
    assert trainer.commands == ["OpenStage", "Save"], "at step 0 the checkpoint is the run's beginning"
