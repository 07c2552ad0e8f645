"""A run with real engines that lost its Master, resumed: nothing is lost, and nothing is trained twice."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
import torch

import rayrft
from rayrft.buffer.archive import Archive
from rayrft.config import load_config
from rayrft.errors import ActorDied, ConfigError
from rayrft.monitor.records import StepRecord, read_records
from tests.e2e.conftest import Call, small_config

KILLED_AFTER = 7


def make_config(storage: Path) -> dict[str, Any]:
    # Of the same name: what engines sample follows from it.
    config = small_config(storage, "lives", checkpoint={"every": 3}, evaluation={"enabled": False})
    config["stages"][1]["steps"] = 8
    config["stages"][1]["algorithm"]["kl"] = "k3"
    return config


@pytest.fixture(scope="module")
def resumed(other_process: Call, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a run whose Master was killed, and the summary with which it ended once it was resumed."""
    storage = tmp_path_factory.mktemp("killed")
    run = rayrft.start(make_config(storage))
    for record in run.records():
        if isinstance(record, StepRecord) and record.step == KILLED_AFTER:
            os.kill(run.pids()["master"], signal.SIGKILL)
            break
    with pytest.raises(ActorDied) as caught:
        run.result()
    assert caught.value.field == "lives:master"
    ended = other_process("resume", str(run.folder), "checkpoint.keep_last=3")
    assert ended.returncode == 0, ended.stderr
    assert "goes on after 3 steps" in ended.stdout and "finished after" in ended.stdout
    return run.folder, json.loads((run.folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def whole(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run without a fault."""
    run = rayrft.start(make_config(tmp_path_factory.mktemp("whole")))
    run.result()
    return run.folder


def test_the_ledger_closes_and_every_step_is_counted_once(resumed: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = resumed
    assert summary["status"] == "finished" and summary["steps"] == 11
    counters = summary["counters"]
    assert counters["sampled"] == counters["trained"] + sum(counters["dropped"].values()) + counters["held"]
    assert counters["trained"] == 8 * 16
    steps = [record.step for record in read_records(folder) if isinstance(record, StepRecord)]
    assert steps == list(range(1, 12))


@pytest.mark.slow
def test_it_trained_on_what_the_run_without_a_fault_trained_on(resumed: tuple[Path, Any], whole: Path) -> None:
    rows = [_trained(folder) for folder in (whole, resumed[0])]
    assert rows[0].keys() == rows[1].keys() and len(rows[0]) == 128
    assert rows[0] == rows[1]


def _trained(folder: Path) -> dict[str, tuple[int, list[int], float]]:
    """Of every row that was trained: at which step, its tokens and its reward."""
    rows = {}
    for batch in Archive.of_run(folder).rows(where=pc.field("fate") == "trained"):
        for row in batch.select(["experience_id", "trained_step", "token_ids", "reward"]).to_pylist():
            rows[row["experience_id"]] = (row["trained_step"], row["token_ids"], row["reward"])
    return rows


@pytest.mark.slow
def test_its_weights_are_those_of_the_run_without_a_fault(resumed: tuple[Path, Any], whole: Path) -> None:
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "final") for folder in (whole, resumed[0])]
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_what_it_was_asked_for_when_it_was_resumed_holds_from_then_on(resumed: tuple[Path, Any]) -> None:
    folder, _ = resumed
    assert load_config(folder / "config.yaml").checkpoint.keep_last == 3
    kept = {path.name for path in (folder / "checkpoints").glob("step-*")}
    assert kept == {"step-000006", "step-000009", "step-000011"}


def test_a_finished_run_says_how_to_train_on(resumed: tuple[Path, Any], command_line: Call) -> None:
    refused = command_line("resume", str(resumed[0]))
    assert refused.returncode == 1
    assert "the run is finished after 11 steps" in refused.stderr and "stages.mix.steps" in refused.stderr


def test_a_folder_that_is_no_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        rayrft.resume(tmp_path)
    assert (caught.value.field, caught.value.value) == ("run", str(tmp_path))
