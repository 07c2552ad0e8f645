"""A run that is stopped saves where it stands, whatever it was doing."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from rayrft.buffer.ledger import Ledger, Resumed
from rayrft.core.checkpoints import Checkpoints, Progress
from rayrft.core.supervision import Stopped
from rayrft.core.train_loop import TrainLoop
from rayrft.core.weight_sync import WeightSync
from rayrft.errors import RayrftError, Stalled, StorageError, WeightSyncError
from rayrft.monitor import sinks
from rayrft.monitor.recorder import Recorder
from rayrft.monitor.records import NoteRecord
from rayrft.trainer.api import RankCall
from tests.core.given import restarts, run_folder
from tests.errors import about
from tests.monitor.made import lease, result
from tests.scripted import remote


class ScriptedTrainer:
    def __init__(self) -> None:
        self.calls: list[str] = []

    async def call_ranks(self, call: RankCall) -> list[Any]:
        self.calls.append(call.method)
        return [None]

    async def written(self, folder: Path) -> None: ...


class EvaluatesForEver:
    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def evaluate(self, temperature: float, beside: bool) -> None:
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
        self.buffer.resume.return_value = Resumed(Ledger(), 0)
        self.buffer.flush.return_value = self.buffer.lease.return_value = None
        buffer, trainer, explorers = remote(self.buffer), remote(self.trainer), [remote(self.explorer)]
        self.loop = TrainLoop(config, buffer, trainer, explorers, Recorder(config), progress, self.stop, restarts())


@pytest.fixture
def subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setattr(sinks.RayMetrics, "write", lambda *_: None)
    return Subject(tmp_path)


async def test_an_evaluation_is_left_alone_when_the_run_is_stopped(subject: Subject) -> None:
    trainer, explorer, stop = subject.trainer, subject.explorer, subject.stop
    running = asyncio.ensure_future(subject.loop.run())
    await asyncio.wait_for(explorer.asked.wait(), 20)
    stop.set()
    with pytest.raises(Stopped):
        await asyncio.wait_for(running, 20)
    assert trainer.calls == ["open_stage", "save"], "at step 0 the checkpoint is the run's beginning"


async def test_the_buffer_is_told_when_the_stage_ends(subject: Subject) -> None:
    stage = subject.loop.config.stages[1]
    subject.loop.progress.step = subject.loop.progress.stage_began = 3
    await subject.loop._open(stage)
    [plan] = subject.buffer.open_stage.await_args.args
    assert (plan.version, plan.end) == (3, 3 + stage.steps)


async def test_an_explorer_that_failed_between_two_waits_for_a_batch_ends_the_second(subject: Subject) -> None:
    loop = asyncio.get_running_loop()
    lease, exploring = loop.create_future(), loop.create_future()
    exploring.set_exception(StorageError("No space left on device", field="journal"))
    with pytest.raises(StorageError):
        await asyncio.wait_for(subject.loop._unless_ended(lease, exploring), 20)


async def test_a_gap_between_engine_and_trainer_is_noted_once_and_ends_a_run_with_engines(subject: Subject) -> None:
    stage, bound = subject.loop.config.stages[1], subject.loop.config.probe_bounds.mean
    for _ in range(2):
        await subject.loop._doubt(stage, lease(0, 0), result(logprob_gap=4 * bound))
    notes = [record for record in await subject.loop.recorder.after(0) if isinstance(record, NoteRecord)]
    assert len(notes) == 1 and "engine and trainer disagree" in notes[0].text
    subject.loop.weight_sync = cast(WeightSync, object())
    with pytest.raises(WeightSyncError, check=about("weight_sync.tolerance")):
        await subject.loop._doubt(stage, lease(0, 0), result(logprob_gap=4 * bound))


async def test_an_explorer_that_does_not_abandon_its_groups_ends_the_run(subject: Subject) -> None:
    with pytest.raises(Stalled, check=about("explorer")):
        await asyncio.wait_for(subject.loop._end_exploring(asyncio.get_running_loop().create_future()), 20)


async def test_blocks_that_are_lost_again_and_again_end_the_run(subject: Subject) -> None:
    with pytest.raises(RayrftError, check=about("buffer.lease", 0)):
        await subject.loop._train(0, asyncio.get_running_loop().create_future(), AsyncExitStack())
    assert subject.buffer.lease.await_count == 5 and subject.trainer.calls == ["train"] * 5
