"""``summary.json``: written whole by however many writers, on a full disk too, and from what a dead run left."""

from __future__ import annotations

import errno
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rayrft.buffer.ledger import Ledger
from rayrft.errors import StorageError
from rayrft.monitor.records import RecordFile
from rayrft.monitor.summary import (
    Totals,
    read_summary,
    reserve_space,
    status_at_end,
    summarise,
    summarise_from_folder,
    write_summary,
)
from tests.buffer.in_process import LocalBuffer, ObjectTable
from tests.buffer.rows import group, plan
from tests.core.given import run_folder
from tests.monitor.made import evaluation, step

ENDED = summarise("run", "failed", "why", Totals(), None, 0.0)


def test_many_writers_leave_one_whole_summary_and_nothing_else(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def write(number: int) -> None:
        together.wait()
        for _ in range(50):
            write_summary(tmp_path, summarise(str(number), "finished", None, Totals(), None, 0.0))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    assert read_summary(tmp_path).name in "01234567"
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_a_full_disk_leaves_no_part_of_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(StorageError) as error:
        write_summary(tmp_path, ENDED)
    assert error.value.field == str(tmp_path / "summary.json")
    assert not list(tmp_path.iterdir()) and read_summary(tmp_path) is None


def test_the_room_that_was_kept_for_the_summary_is_free_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve_space(tmp_path)
    [kept] = tmp_path.iterdir()
    assert kept.stat().st_blocks * 512 >= 1 << 16
    seen, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda *names: (seen.append(kept.exists()), replace(*names)))
    write_summary(tmp_path, ENDED)
    assert seen == [False] and [file.name for file in tmp_path.iterdir()] == ["summary.json"]


@pytest.fixture
def dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run whose processes are gone: three groups of two were put, the first was trained."""
    ObjectTable(monkeypatch)
    config = run_folder(tmp_path, "dead")
    file = RecordFile(config.folder)
    for record in (evaluation("mix", 0, 10), step(step=4, version=4, train_s=2.0)):
        file.append(record)
    buffer = LocalBuffer(config.folder / "buffer", config.buffer)
    buffer.do("open_stage", plan(1, scheduled=False))
    for number in range(3):
        buffer.put([(group(number), None)])
    buffer.do("lease", 0, 1, 5)
    buffer.do("ack", 0)
    buffer.kill()
    return config.folder


def test_a_run_whose_master_died_is_summarised_from_its_folder(dead: Path) -> None:
    found = summarise_from_folder(dead, "failed", "the master died")
    assert found.ledger == Ledger(sampled=6, trained=2, held=4)
    assert (found.steps, found.weight_version, found.seconds["train"]) == (4, 4, 2.0)
    assert found.accuracy["0"].after.right == 10
    write_summary(dead, found)
    assert read_summary(dead) == found
    state = status_at_end(found, dead)
    assert (state.status, state.error, state.step, state.ledger.held) == ("failed", "the master died", 4, 4)


def test_what_a_damaged_log_held_is_not_made_up(dead: Path) -> None:
    [journal, *_] = (dead / "buffer").glob("journal*")
    journal.write_bytes(b"x" + journal.read_bytes()[1:])
    found = summarise_from_folder(dead, "failed", "the log is damaged")
    assert found.ledger is None and found.expert is None
    assert "sampled" not in json.loads(status_at_end(found, dead).to_json())


def test_a_run_that_ended_before_its_buffer_began_sampled_nothing(dead: Path) -> None:
    for file in (dead / "buffer").iterdir():
        if file.is_file():
            file.unlink()
    assert summarise_from_folder(dead, "stopped", "").ledger == Ledger()
