"""An explore job and a train job that meet at a named Buffer, in any order, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rayrft
from rayrft.buffer.reader import Archive
from rayrft.core.shared_buffer import buffer_status, buffers, stop_buffer
from rayrft.errors import ActorDied, PlacementError
from rayrft.monitor.records import Record, RolloutRecord, StepRecord, read_records
from tests.e2e.conftest import WITHOUT_VLLM, Call, small_config
from tests.errors import about


def job(storage: Path, model: Path, mode: str, name: str, **changes: Any) -> dict[str, Any]:
    """One config for both jobs: only its mode and name differ."""
    config = small_config(storage, name, **WITHOUT_VLLM)
    live = {"name": "live", "algorithm": {"name": "grpo"}, "steps": 100, "batch_size": 16, "group_size": 4}
    return {
        **config,
        "mode": mode,
        "model": {"path": str(model), "max_length": 48},
        "tasks": {"epochs": 1, "eval_size": 4, "sources": [{**config["tasks"]["sources"][0], "size": 80}]},
        "demonstrations": {},
        "evaluation": {"enabled": False},
        "buffer": {"name": "met", "max_rows": 48},
        "checkpoint": {"every": 2},
        "restarts": {"per_hour": 0},
        "stages": [live],
        **changes,
    }


@pytest.fixture
def storage(tmp_path: Path, ray_cluster: Any) -> Iterator[Path]:
    yield tmp_path
    if "met" in buffers():
        stop_buffer("met", force=True)


def until(run: rayrft.Run, kind: type[Record], count: int) -> None:
    """Return when the job has made so many records of a kind, in all its lives."""
    for record in run.records():
        count -= isinstance(record, kind)
        if not count:
            return
    raise AssertionError(f"the job ended {count} records before")


def lose(run: rayrft.Run, actor: str) -> None:
    os.kill(run.pids()[actor], signal.SIGKILL)
    with pytest.raises(ActorDied):
        run.result()


@pytest.mark.slow
def test_each_task_is_trained_once_though_both_jobs_and_the_buffer_are_killed(
    storage: Path, tiny_model: Path, command_line: Call
) -> None:
    explorer = rayrft.start(job(storage, tiny_model, "explore", "explorer"))
    until(explorer, RolloutRecord, 2)  # before there is any trainer
    lose(explorer, "master")
    trainer = rayrft.start(job(storage, tiny_model, "train", "trainer"))
    until(trainer, StepRecord, 1)
    with pytest.raises(PlacementError, check=about("buffer.name", "trainer")):
        rayrft.start(job(storage, tiny_model, "train", "another")).result()
    explorer = rayrft.resume(explorer.folder)
    os.kill(trainer.pids()["buffer"], signal.SIGKILL)
    until(trainer, StepRecord, 3)
    lose(trainer, "master")
    trainer = rayrft.resume(trainer.folder)
    assert explorer.result().status == "finished"
    rollouts = [record for record in read_records(explorer.folder) if isinstance(record, RolloutRecord)]
    assert rollouts[-1].step == buffer_status("met").feeds[0].groups
    assert rollouts[0].step < 16, "the records of the life that was killed are kept"
    with pytest.raises(PlacementError, check=about("buffer.name", ["trainer"])):
        stop_buffer("met")
    summary = trainer.result()
    assert summary.status == "finished"
    status = buffer_status("met")
    assert status.trainer == "trainer" and [feed.job for feed in status.feeds] == ["explorer"]
    assert status.ledger == summary.ledger and status.ledger.closes
    tasks = status.feeds[0].groups
    assert tasks > 60 and (status.ledger.sampled, status.ledger.trained) == (4 * tasks, 4 * (tasks - tasks % 4))
    steps = {record.step: record for record in read_records(trainer.folder) if isinstance(record, StepRecord)}
    assert sum(step.usual_rows for step in steps.values()) == 4 * (tasks - tasks % 4)
    rows = [row for batch in Archive.of_run(explorer.folder).rows("usual") for row in batch.to_pylist()]
    assert set(Counter(row["task_id"] for row in rows).values()) == {4} and len(rows) == 4 * tasks
    assert {(row["group_status"], row["uses"]) for row in rows} <= {("trained", 1), ("ready", 0)}
    listed = command_line("buffer", "list")
    assert listed.returncode == 0 and listed.stdout.startswith(f"met: explorer, trainer; sampled {4 * tasks} ="), listed
    assert json.loads(command_line("buffer", "status", "met").stdout)["feeds"][0]["groups"] == tasks
    assert command_line("buffer", "stop", "met").returncode == 0
    assert buffers() == []
