"""The handle of a run, with a scripted Master: ended from anywhere, any number of times, and asked at any time."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table

from rayrft.buffer.ledger import Ledger, RowStats
from rayrft.core.janitor import Janitor
from rayrft.core.launch import attach, find_status, running_runs, start, starting_runs
from rayrft.core.placement import clear_run, named_actors, reserve_name
from rayrft.core.run import Run
from rayrft.errors import ActorDied, DataError, PlacementError, RunNotFound
from rayrft.monitor.records import NoteRecord, RecordFile, read_records
from rayrft.monitor.summary import RunStatus, Totals, read_summary, summarise, write_summary
from rayrft.runtime.handle import NAMESPACE, Watched
from tests.core.given import run_folder
from tests.e2e.conftest import small_config
from tests.scripted import handle

pytestmark = pytest.mark.usefixtures("ray_cluster")
NOTES = [NoteRecord("", 0, float(second), "hello") for second in range(3)]


class ScriptedMaster(Watched):
    """Gives the first of the records, and then waits endlessly."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def run(self) -> None:
        await self.watch()

    async def records(self, count: int) -> list[Any]:
        if count:
            await self.watch()
        return NOTES[:1]

    async def status(self) -> RunStatus:
        return RunStatus(self._folder.name, "running", None, 0, 0, self._folder, [], Ledger())

    async def stop(self) -> None: ...


def begin(folder: Path) -> Run:
    name = f"{folder.name}:master"
    group = placement_group([{"CPU": 0.01}], name=name)
    master = ray.remote(ScriptedMaster).options(num_cpus=0, name=name, max_concurrency=100).remote(folder)
    ray.get([group.ready(), master.pid.remote()])
    return Run(folder.name, folder, handle(master), master.run.remote())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run under way whose Master has said one of three things that are on the disk."""
    config = run_folder(tmp_path, "scripted")
    file = RecordFile(config.folder)
    for note in NOTES:
        file.append(note)
    handle = begin(config.folder)
    yield handle
    handle.kill()


def kill_master(run: Run) -> None:
    os.kill(ray.get(run._master.actor.pid.remote()), signal.SIGKILL)


def groups_of(name: str) -> list[str]:
    groups = placement_group_table().values()
    return [group["name"] for group in groups if group["name"].startswith(name) and group["state"] != "REMOVED"]


def all_at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each call gave or raised, made from as many threads."""
    together = threading.Barrier(len(calls))

    def make(call: Callable[[], Any]) -> Any:
        together.wait()
        try:
            return call()
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(make, calls, timeout=60))


def test_a_run_is_killed_from_many_threads_while_others_wait_for_it(run: Run) -> None:
    other = attach("scripted")
    follow = lambda: list(run.records())  # noqa: E731
    *kills, result, records, later = all_at_once(run.kill, other.kill, run.kill, run.result, follow, other.status)
    assert kills == [None] * 3
    for error in (result, records):
        assert isinstance(error, ActorDied) and error.field == "scripted:master"
    assert later.status in ("running", "killed")
    for ended in (run, other):
        assert (ended.status().status, ended.status().ledger.sampled) == ("killed", 0)
    assert read_summary(run.folder).status == "killed"
    assert "scripted" not in running_runs() and not groups_of("scripted:")
    assert not list(run.folder.glob(".*"))


def test_a_process_that_stops_its_run_waits_for_its_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    attach("scripted").stop()
    assert not at_exit, "it belongs to another process"
    run.stop()
    kill_master(run)
    [wait] = at_exit
    wait()
    assert read_summary(run.folder).status == "failed"


def test_a_run_that_was_resumed_is_watched_from_there(run: Run) -> None:
    lines: list[str] = []
    resumed = Run(run.name, run.folder, run._master, earlier=2)
    kill_master(run)
    with pytest.raises(ActorDied):
        resumed.watch(lines.append)
    assert len(lines) == 1 and len(read_records(run.folder)) == 3


def test_a_run_is_starting_from_its_plan_to_its_master(tmp_path: Path) -> None:
    reserve_name("early")
    assert "early" in starting_runs() and "early" not in running_runs()
    with pytest.raises(RunNotFound, match="the run is starting"):
        attach("early")
    assert find_status("early").status == "starting"
    with pytest.raises(PlacementError, match="is starting"):
        start(small_config(tmp_path, "early"), say=lambda _: None)
    with pytest.raises(PlacementError, match="is starting") as error:
        reserve_name("early")
    assert (error.value.field, error.value.value) == ("name", "early")
    clear_run("early")
    assert "early" not in starting_runs() and not groups_of("early:")


def test_a_dead_master_is_told_with_why_it_died_by_whoever_asks(run: Run) -> None:
    kill_master(run)
    follow = lambda: list(run.records())  # noqa: E731
    result, records, state = all_at_once(run.result, follow, run.status)
    for error in (result, records):
        assert isinstance(error, ActorDied) and error.field == "scripted:master"
        assert "worker process has died" in error.problem
    assert state.status == "failed" and state.error == str(result) == read_summary(run.folder).error
    assert not groups_of("scripted:")


def test_records_that_the_master_had_no_time_to_tell_are_read_from_the_disk(run: Run) -> None:
    follow = run.records()
    assert next(follow) == NOTES[0]
    rows = RowStats(Ledger(sampled=4), {})
    write_summary(run.folder, summarise("scripted", "finished", None, Totals(NOTES), rows, 1.0))
    kill_master(run)
    assert [*follow] == NOTES[1:] == read_records(run.folder)[1:]
    assert run.result().status == "finished"
    assert (run.status().status, run.status().ledger.sampled) == ("finished", 4)
    run.stop()


def test_a_handle_of_a_run_that_ended_leaves_the_next_of_its_name_alone(run: Run) -> None:
    run.kill()
    (run.folder / "summary.json").unlink()
    following = begin(run.folder)
    run.kill()
    assert run.status().status == "killed"
    assert following.status().status == "running" and not read_summary(run.folder)
    following.kill()


class Saving(Watched):
    """A Master that notes how it ends."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    async def stop(self) -> None:
        self.notes.write_text("stopped")

    async def run(self, prepared_refs: list[Any]) -> None:
        self.notes.write_text(self.notes.read_text() + ", saved")


def test_a_run_whose_janitor_is_called_by_nobody_saves_and_is_cleared(tmp_path: Path) -> None:
    """As where the process that started it died together with the node of the janitor."""
    reserve_name("lost")
    options = {"namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0, "max_restarts": -1}
    ray.remote(Saving).options(name="lost:master", **options).remote(notes := tmp_path / "notes")
    janitor = ray.remote(Janitor).options(name="lost:janitor", **options).remote("lost", 30.0, 0.1)
    assert ray.wait([janitor.watch.remote()], timeout=60)[0], "it has ended"
    assert notes.read_text() == "stopped, saved"
    assert not groups_of("lost:") and not named_actors("lost:")


def test_a_start_removes_the_groups_of_a_dead_run_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrft.core.launch.prepare", mock.Mock(side_effect=DataError("no rows", field="tasks.path")))
    ray.get(placement_group([{"CPU": 0.01}], name="again:engines").ready())
    with pytest.raises(DataError):
        start(small_config(tmp_path, "again"))
    assert not groups_of("again:")
