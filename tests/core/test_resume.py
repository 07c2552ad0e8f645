"""A run that is killed at its worst moments and resumed is the run that was not; `test_steering` kills one anywhere."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rayrft.config import RunConfig
from rayrft.core.checkpoints import Checkpoints
from rayrft.errors import StorageError
from rayrft.monitor.records import NoteRecord, read_records
from tests.core.resuming import Process, assert_same, end_of, make_config, steps, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


Whole = tuple[RunConfig, list[str]]


def until_end(config: RunConfig, poisoned: int | None = None) -> list[Any]:
    process = Process(config, poisoned)
    events = list(process.events())
    process.end()
    return events


def go_through(config: RunConfig, like: RunConfig | None = None) -> list[str]:
    """Run to the end without a kill, and compare with another run; gives the events."""
    events = until_end(config)
    assert events[-1] == "end"
    if like is not None:
        assert_same(config, like)
    return events


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A run that was not killed, and its events."""
    config = make_config(tmp_path_factory.mktemp("reference"), model, "whole")
    events = go_through(config)
    assert numbers(config) == list(range(1, 16))
    return config, events


def numbers(config: RunConfig) -> list[int]:
    return [record.step for record in steps(config)]


def test_a_run_begins_again_where_no_checkpoint_was_written(model: Path, tmp_path: Path, whole: Whole) -> None:
    config = make_config(tmp_path, model, "early")
    Process(config).kill_at("train")
    go_through(config, like=whole[0])


def test_a_checkpoint_that_was_being_written_is_not_taken_for_one(model: Path, tmp_path: Path, whole: Whole) -> None:
    config = make_config(tmp_path, model, "torn")
    Process(config).kill_at("checkpoint")
    [journal] = (config.folder / "buffer").glob("journal*")
    with journal.open("ab") as file:
        file.write(b'{"event":"half')
    checkpoints = config.folder / "checkpoints"
    (checkpoints / "step-000099").mkdir()  # as if a file system had kept the folder and lost what was in it
    go_through(config)
    assert not list(checkpoints.glob(".*"))
    notes = [record.text for record in read_records(config.folder) if isinstance(record, NoteRecord)]
    assert sum("14 bytes of unfinished writes" in note for note in notes) == 1
    assert_same(config, whole[0])


def test_a_run_resumes_from_the_checkpoint_before_one_that_is_gone(model: Path, tmp_path: Path, whole: Whole) -> None:
    config = make_config(tmp_path, model, "damaged")
    newest = config.folder / "checkpoints" / "step-000011"
    process = Process(config)
    for event in process.events():
        if event == "train" and (newest / "manifest.json").is_file():
            process.kill()
            break
    shutil.rmtree(newest)
    assert (latest := Checkpoints(config.folder, config.checkpoint).latest()) and latest.logged[1] > 0
    [journal] = (config.folder / "buffer").glob("journal*")
    whole_journal = journal.read_bytes()
    journal.write_bytes(whole_journal[: len(whole_journal) // 4])
    (config.folder / "buffer" / "synced").unlink()
    assert until_end(config) == [StorageError.__name__], "it lacks steps that the checkpoint holds"
    journal.write_bytes(whole_journal)
    go_through(config, like=whole[0])


def test_a_row_that_steps_fail_on_is_left_out_after_the_second_time(model: Path, tmp_path: Path, whole: Whole) -> None:
    config = make_config(tmp_path, model, "poisoned")
    first, second, third = (until_end(config, poisoned=9)[-1] for _ in range(3))
    [row] = second
    assert row in first and "/9/" in row and third == "end"
    assert numbers(config) == list(range(1, 16))
    assert end_of(config)["trained"] == end_of(whole[0])["trained"] - 2, "the row and the other one of its group"


def test_a_run_that_took_its_last_step_only_saves_its_weights(whole: Whole) -> None:
    events = go_through(whole[0])
    assert "save" in events and "train" not in events and "put" not in events
    assert_same(whole[0], whole[0])


def test_a_finished_stage_takes_more_steps_when_it_is_told_to(model: Path, tmp_path: Path, whole: Whole) -> None:
    longer = make_config(tmp_path, model, "longer", **{"stages.mix.steps": 12})
    shutil.copytree(whole[0].folder, longer.folder, dirs_exist_ok=True)
    go_through(longer)
    assert numbers(longer) == list(range(1, 18))


def test_the_last_and_the_best_checkpoints_are_kept(model: Path, tmp_path: Path) -> None:
    overrides = {"checkpoint.keep_last": 2, "checkpoint.keep_best": 1, "checkpoint.best_by": "reward"}
    config = make_config(tmp_path, model, "kept", **overrides)
    go_through(config)
    rewards = {record.step: record.reward for record in steps(config) if record.reward}
    kept = sorted(int(path.name.removeprefix("step-")) for path in (config.folder / "checkpoints").glob("step-*"))
    saved = [step for step in (8, 11, 14, 15) if step in rewards]
    notes = [r.data.get("checkpoint") for r in read_records(config.folder) if isinstance(r, NoteRecord)]
    assert {8, 11, 14, 15} <= set(notes), "also of those that are deleted"
    assert set(kept) == {14, 15, max(saved, key=lambda step: (rewards[step], -step))}
