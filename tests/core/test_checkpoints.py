"""Checkpoints of a run: whole whatever dies, and kept by the rules."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rayrft.config.stage import CheckpointConfig
from rayrft.core.checkpoints import Checkpoints, Progress, Saver, export
from rayrft.errors import ConfigError, StorageError
from tests.core.given import run_folder, write
from tests.core.looping import ScriptedTrainer
from tests.errors import about
from tests.scripted import remote


class Killed(BaseException):
    """The process dies here."""


class Mortal:
    """Lets so many writes to disk through, and dies at the next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, writes: float) -> None:
        self._left = writes
        for owner, name in ((Path, "rename"), (Path, "write_text"), (os, "fsync")):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))
        monkeypatch.setattr(shutil, "rmtree", self._rmtree)

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise Killed

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._count()
            return function(*args, **kwargs)

        return call

    def _rmtree(self, folder: Path, ignore_errors: bool = False) -> None:
        # The manifest goes last: what is left halfway looks whole.
        for file in sorted(folder.iterdir(), key=lambda each: each.name == "manifest.json") if folder.exists() else ():
            self._count()
            file.unlink()
        if folder.exists():
            self._count()
            folder.rmdir()


def go_on(checkpoints: Checkpoints, step: int) -> None:
    """What a run does that stands at that step: another checkpoint, a stage's end at the same step, one more."""
    write(checkpoints, Progress("run", step=step + 3))
    checkpoints.update_manifest(Progress("run", step=step + 3, stage_asked=6))
    write(checkpoints, Progress("run", step=step + 6))


def dies(checkpoints: Checkpoints, writes: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether it died before all was written."""
    with monkeypatch.context() as dying:
        Mortal(dying, writes)
        try:
            go_on(checkpoints, 3)
        except Killed:
            return True
    return False


def test_a_crash_at_any_write_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = 0
    while True:
        checkpoints = Checkpoints(tmp_path / str(writes), CheckpointConfig(keep_last=1))
        write(checkpoints, Progress("run", step=3))
        if not dies(checkpoints, writes, monkeypatch):
            break
        for each in checkpoints.all():
            assert (checkpoints.at(each.step) / "weights").is_file(), each
        latest = checkpoints.latest()
        assert latest is not None
        go_on(checkpoints, latest.step)  # what the crash left is in nobody's way
        assert [each.step for each in checkpoints.all()] == [latest.step + 6]
        assert not list((tmp_path / str(writes) / "checkpoints").glob(".*"))
        writes += 1
    assert writes > 20, "it died at every write once"


def test_the_end_of_a_stage_is_noted_at_a_step_that_has_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    progress = Progress("run", step=6, stage_step=6)
    write(checkpoints, progress)
    assert checkpoints.holds(6) and not checkpoints.holds(7)
    progress.end("mix", asked=8)
    checkpoints.update_manifest(progress)
    assert checkpoints.latest() == progress
    assert (checkpoints.at(6) / "weights").is_file()


def test_a_stage_is_entered_again_only_when_it_is_asked_for_more_than_before() -> None:
    progress = Progress("run", step=10, stage=1, stage_step=4, stage_began=6)
    assert progress.needs(1), "it has not ended"
    progress.end("mix", asked=10)  # its data came to an end after four steps
    assert not progress.needs(10) and progress.needs(12)
    progress.begin(1)
    assert (progress.stage_step, progress.stage_began) == (4, 6) and progress.needs(12)
    progress.step, progress.stage_step = 12, 6
    progress.end("mix", asked=12)
    assert progress.stages_done == {"mix": 6}
    progress.begin(2)
    assert (progress.stage_step, progress.stage_began) == (0, 12) and progress.needs(1)


def test_the_best_that_were_measured_are_kept_and_of_equals_the_earlier(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=1, keep_best=2, best_by="accuracy"))
    accuracies = {1: 0.2, 2: 0.9, 3: None, 4: 0.9, 5: 0.9, 6: 0.5, 7: None}
    for step, accuracy in accuracies.items():
        write(checkpoints, Progress("run", step=step, accuracy=accuracy))
    assert [each.step for each in checkpoints.all()] == [2, 4, 7]


def test_a_run_can_resume_from_the_oldest_of_the_last(tmp_path: Path) -> None:
    """Also past a million steps, where names are longer, and where one is kept for its accuracy."""
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=2, keep_best=1))
    for step in (3, 999_950, 1_000_000, 1_000_050):
        write(checkpoints, Progress("run", step=step, accuracy=0.9 if step == 3 else None))
    assert [each.step for each in checkpoints.all()] == [3, 1_000_000, 1_000_050]
    assert checkpoints.fallback() == 1_000_000
    assert (latest := checkpoints.latest()) and latest.step == 1_000_050


def test_a_checkpoint_is_not_exported_to_an_address(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=about("to", "s3:/bucket/model")):
        export(run_folder(tmp_path, "run").folder, Path("s3://bucket/model"))


def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=1))
    write(checkpoints, Progress("run", step=3))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_text", mock.Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(StorageError, check=about(str(tmp_path / "checkpoints" / ".step-000006.partial"))):
            write(checkpoints, Progress("run", step=6))
    assert (latest := checkpoints.latest()) and latest.step == 3


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(b"12")], ids=["missing", "cut off"])
def test_a_checkpoint_that_is_not_whole_is_found_by_its_manifest(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    for step in (3, 6):
        write(checkpoints, Progress("run", step=step), "ranks/0")
    checkpoints.update_manifest(Progress("run", step=6, stage_asked=6))
    checkpoints.check(3)
    checkpoints.check(6)
    damage(checkpoints.at(6) / "ranks" / "0")
    with pytest.raises(StorageError, check=about("checkpoint", str(checkpoints.at(6)))):
        checkpoints.check(6)
    checkpoints.check(3)


def test_a_checkpoint_whose_evaluation_has_not_ended_is_kept_until_it_is_judged(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=1, keep_best=1))
    for step in (1, 2, 3, 4):
        checkpoints.evaluating.add(step)
        write(checkpoints, Progress("run", step=step, records=step))
    assert [each.step for each in checkpoints.all()] == [1, 2, 3, 4]
    for step, accuracy in ((2, 0.7), (1, 0.4), (3, None)):
        checkpoints.judge(step, accuracy)
    assert [(each.step, each.accuracy, each.records) for each in checkpoints.all()] == [(2, 0.7, 2), (4, None, 4)]
    checkpoints.check(2)
    checkpoints.judge(5, 1.0)  # has no checkpoint
    checkpoints.judge(4, 0.9)
    assert [(each.step, each.accuracy) for each in checkpoints.all()] == [(4, 0.9)]


def test_an_evaluation_that_ends_while_a_checkpoint_is_written_leaves_it_alone(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=1))
    write(checkpoints, Progress("run", step=3))
    (checkpoints.begin(6) / "weights").write_text("half of them")
    left_over = checkpoints.at(3).with_name(".step-000002.partial")
    left_over.mkdir()
    checkpoints.judge(3, 0.5)
    assert not left_over.exists()
    checkpoints.commit(Progress("run", step=6))
    assert (checkpoints.at(6) / "weights").is_file() and [each.step for each in checkpoints.all()] == [6]


@pytest.mark.parametrize("fails", [False, True])
async def test_an_export_is_not_waited_for_but_by_who_reads_it_and_the_next_checkpoint(
    tmp_path: Path, fails: bool
) -> None:
    trainer, progress = ScriptedTrainer(), Progress("run", step=4)
    writing = trainer.held["sft"] = asyncio.get_running_loop().create_future()
    buffer = mock.AsyncMock(**{"flush.return_value": [0, 0]})
    saver = Saver(run_folder(tmp_path, "run"), remote(buffer), remote(trainer), progress)
    await saver.export("sft")
    saver.check()
    saving, reading = (asyncio.ensure_future(each) for each in (saver.checkpoint(records=0), saver.exported("sft")))
    for _ in range(20):
        await asyncio.sleep(0)
    assert trainer.calls == ["save"] and not reading.done()
    if fails:
        writing.set_exception(StorageError("full", field="storage"))
        for wait in (saving, reading, saver.done()):
            with pytest.raises(StorageError):
                await wait
        with pytest.raises(StorageError):
            saver.check()
    else:
        writing.set_result(None)
        await saving
        await saver.done()
        assert await reading == saver.checkpoints.folder / "sft"
    assert saver.checkpoints.holds(4) is not fails
