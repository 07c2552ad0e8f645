"""How a run ends before it is up, with scripted actors: stopped, failed, and on a disk that is full."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ray.exceptions import ActorDiedError

from rayrft.buffer.ledger import Ledger, RowStats
from rayrft.config import load_config
from rayrft.core import master as module
from rayrft.core.checkpoints import Progress
from rayrft.core.master import Master
from rayrft.core.parts.base import Part
from rayrft.core.parts.buffer import BufferPart
from rayrft.core.parts.engines import EvaluationEngines, PolicyEngines
from rayrft.core.parts.explorer import ExplorerPart
from rayrft.core.parts.trainer import TrainerPart
from rayrft.core.preflight import PreparedRun
from rayrft.errors import ActorDied, ConfigError, DataError, RayrftError, StorageError
from rayrft.experience import Task
from rayrft.monitor.ray_metrics import RayMetrics
from rayrft.monitor.records import NoteRecord, RecordFile, read_records
from rayrft.monitor.summary import Summary, read_summary
from rayrft.runtime.handle import Handle, Watched
from rayrft.runtime.waits import ROOM, WaitReport
from tests.core.given import run_folder
from tests.core.prepared import PREPARED
from tests.errors import about
from tests.full_disk import FullDisk
from tests.scripted import remote

LEDGER = Ledger(sampled=3, trained=2, dropped={"late": 1})
Made = tuple[Master, "Actor"]


class Actor(Watched):
    """Answers what every part is asked, but does not come up; with an error it says why."""

    def __init__(self, error: RayrftError | None = None) -> None:
        self.error = error
        self.called = asyncio.Event()

    async def start(self, *_: Any) -> None:
        self.called.set()
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()

    async def load(self, *_: Any) -> None: ...

    async def stats(self) -> RowStats:
        return RowStats(LEDGER, {})

    async def waiting(self) -> WaitReport:
        return WaitReport([], 3600.0)


@pytest.fixture
def master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A Master whose trainer does not come up, and that trainer."""
    config = run_folder(tmp_path, "begins", evaluation={"enabled": False}, monitor={"patience_s": 0.1})
    trainer, buffer = Actor(), Actor()

    class ScriptedTrainer(TrainerPart):
        def create(self) -> list[Handle[Any]]:
            return [self.track(remote(trainer, self.name))]

    class ScriptedBuffer(BufferPart):
        on_death = "end"

        def create(self) -> list[Handle[Any]]:
            return [self.track(remote(buffer, self.name))]

    without: list[type[Part[Any]]] = []
    for kind in (ExplorerPart, PolicyEngines, EvaluationEngines):
        without.append(type(kind.__name__, (kind,), {"exists": False}))
    monkeypatch.setattr(module, "KINDS", [*without, ScriptedBuffer, ScriptedTrainer])
    monkeypatch.setattr(module, "Placement", mock.Mock())  # its groups are there at once
    monkeypatch.setattr(module, "locate_files", lambda config, _: f"files: {config.folder}")
    monkeypatch.setattr(Handle, "kill", lambda self: None)
    monkeypatch.setattr(RayMetrics, "write", lambda *_: None)
    return Master(config, Progress("id")), trainer


async def run(master: Master, inputs: PreparedRun = PREPARED) -> Summary:
    prepared = asyncio.get_running_loop().create_future()
    prepared.set_result(inputs)
    return await asyncio.wait_for(master.run([prepared]), 30)


async def test_a_run_is_stopped_while_its_engines_start(master: Made) -> None:
    subject, trainer = master
    running = asyncio.ensure_future(run(subject))
    await trainer.called.wait()
    folder = (await subject.status()).folder
    (folder / "checkpoints" / "stopped-0").mkdir(parents=True)
    await subject.stop()
    at_once = read_summary(folder)
    assert at_once.status == "killed" and "while it was stopping" in at_once.error, "if nothing comes after it"
    assert not list(folder.glob(".*"))
    summary = await running
    assert (summary.status, summary.steps) == ("stopped", 0)
    assert summary.checkpoint == str(folder / "checkpoints" / "stopped-0")
    assert read_summary(folder) == summary
    assert summary.ledger == LEDGER
    assert (await subject.status()).status == "stopped"


async def test_nodes_that_were_waited_for_must_see_the_files_that_the_others_do(
    master: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    subject, _ = master
    subject._adopt(load_config(subject._config, {"placement.wait_s": 60}))
    (image := tmp_path / "image.png").touch()
    tasks = [Task.create("held out", "what is it?", "a square", images=[str(image)])]
    refuse = mock.Mock(side_effect=ConfigError("is not visible", field="images of tasks"))
    monkeypatch.setattr(module, "check_shared", refuse)
    with pytest.raises(ConfigError, check=about("images of tasks")):
        await run(subject, replace(PREPARED, held_out=tasks))
    folder, files, _ = refuse.call_args.args
    assert (folder, files["images of tasks"]) == (subject._config.folder, [str(image)])


async def test_a_ledger_that_does_not_close_fails_the_run(master: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Actor, "stats", mock.AsyncMock(side_effect=AssertionError("rows are lost")))
    subject, trainer = master
    running = asyncio.ensure_future(run(subject))
    await trainer.called.wait()
    await subject.stop()
    with pytest.raises(ActorDied, check=about("buffer")):
        await running
    assert (await subject.status()).status == "failed"


async def test_who_does_not_come_up_is_named_in_the_records_and_the_status(master: Made) -> None:
    subject, _ = master
    running = asyncio.ensure_future(run(subject))
    seen: list[Any] = []
    while not any(isinstance(record, NoteRecord) and "waiting" in record.data for record in seen):
        seen += await asyncio.wait_for(subject.records(len(seen)), 20)
    [waiting] = seen[-1].data["waiting"]
    assert (waiting["waiter"], waiting["target"], waiting["what"]) == ("master", "trainer", "start")
    assert any("trainer" in line for line in (await subject.status()).waiting)
    await subject.stop()
    await running


async def test_a_run_that_failed_says_why_with_its_counters_also_when_it_is_asked_later(master: Made) -> None:
    subject, trainer = master
    trainer.error = DataError("no rows", field="tasks.path")
    with pytest.raises(DataError):
        await run(subject)
    status = await subject.status()
    assert status.status == "failed" and "tasks.path: no rows" in status.error
    assert status.ledger == LEDGER
    summary = read_summary(status.folder)
    assert summary.error == status.error and summary.ledger == LEDGER


async def test_the_root_cause_is_raised_when_the_disk_is_full(master: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, trainer = master
    trainer.error = StorageError("No space left on device", field="segment-7")

    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))

    def no_record(self: Any, record: Any) -> None:
        if "failed" in getattr(record, "text", ""):
            raise StorageError("No space left on device", field="records.jsonl")

    monkeypatch.setattr("rayrft.monitor.summary.os.replace", full)
    monkeypatch.setattr(RecordFile, "append", no_record)
    with pytest.raises(StorageError) as error:
        await run(subject)
    assert error.value.field == "segment-7"
    assert await subject.records(1000) == [], "who follows is let go"


async def test_records_without_room_are_seen_at_once_and_written_once_when_there_is_room(
    master: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, _ = master
    disk = FullDisk(monkeypatch, "metrics.jsonl")
    running = asyncio.ensure_future(run(subject))
    seen: list[Any] = []
    while not any(ROOM in getattr(record, "text", "") for record in seen):
        seen += await asyncio.wait_for(subject.records(len(seen)), 20)
    status = await subject.status()
    [waiting] = [line for line in status.waiting if "room" in line]
    assert f"{status.folder}/metrics.jsonl: cannot be written" in waiting and "MB free" in waiting
    assert read_records(status.folder) == [] and not running.done()
    disk.has_room = True
    await subject.stop()
    await running
    assert read_records(status.folder) == [*subject._recorder.file.read()] and len(seen) > 1
    assert read_records(status.folder)[: len(seen)] == seen


async def test_an_actor_that_has_died_has_no_pid_until_it_is_replaced(master: Made) -> None:
    subject, trainer = master
    running = asyncio.ensure_future(run(subject))
    await trainer.called.wait()
    trainer.pid = mock.AsyncMock(side_effect=ActorDiedError())  # type: ignore[method-assign]
    assert (await subject.pids()).keys() == {"master", "buffer"}
    await subject.stop()
    await running
