"""A run that is stopped saves where it stands, whatever it was doing."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import cast

import pytest

from rayrft.core.supervision import Stopped
from rayrft.core.weight_sync import WeightSync
from rayrft.errors import RayrftError, Stalled, StorageError, WeightSyncError
from rayrft.monitor.ray_metrics import RayMetrics
from rayrft.monitor.records import NoteRecord
from tests.core.looping import Subject
from tests.errors import about
from tests.monitor.made import lease, result


@pytest.fixture
def subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setattr(RayMetrics, "write", lambda *_: None)
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
    await subject.loop.open(stage)
    [plan] = subject.buffer.open_stage.await_args.args
    assert (plan.version, plan.end) == (3, 3 + stage.steps)


async def test_an_explorer_that_failed_between_two_waits_for_a_batch_ends_the_second(subject: Subject) -> None:
    loop = asyncio.get_running_loop()
    lease, subject.loop.exploring = loop.create_future(), loop.create_future()
    subject.loop.exploring.set_exception(StorageError("No space left on device", field="journal"))
    with pytest.raises(StorageError):
        await asyncio.wait_for(subject.loop.unless_ended(lease), 20)


async def test_a_gap_between_engine_and_trainer_is_noted_once_and_ends_a_run_with_engines(subject: Subject) -> None:
    stage, bound = subject.loop.config.stages[1], subject.loop.config.probe_bounds.mean
    for _ in range(2):
        await subject.loop.doubt(stage, lease(0, 0), result(logprob_gap=4 * bound))
    notes = [record for record in await subject.loop.recorder.after(0) if isinstance(record, NoteRecord)]
    assert len(notes) == 1 and "engine and trainer disagree" in notes[0].text
    subject.loop.weight_sync = cast(WeightSync, object())
    with pytest.raises(WeightSyncError, check=about("weight_sync.tolerance")):
        await subject.loop.doubt(stage, lease(0, 0), result(logprob_gap=4 * bound))


async def test_an_explorer_that_does_not_abandon_its_groups_ends_the_run(subject: Subject) -> None:
    subject.loop.exploring = asyncio.get_running_loop().create_future()
    with pytest.raises(Stalled, check=about("explorer")):
        await asyncio.wait_for(subject.loop.end_exploring(), 20)


async def test_blocks_that_are_lost_again_and_again_end_the_run(subject: Subject) -> None:
    subject.loop.exploring = asyncio.get_running_loop().create_future()
    with pytest.raises(RayrftError, check=about("buffer.lease", 0)):
        await subject.loop.train(0, AsyncExitStack())
    assert subject.buffer.lease.await_count == 5 and subject.trainer.calls == ["train"] * 5
