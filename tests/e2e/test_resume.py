"""A run with real engines that lost its Master, resumed: nothing is lost, and nothing is trained twice."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
import torch

import rayrft
from rayrft.buffer.archive import Archive
from rayrft.errors import ActorDied, ConfigError
from rayrft.monitor.records import StepRecord, read_records
from tests.e2e.conftest import small_config

KILLED_AFTER = 7


def make_config(storage: Path) -> dict[str, Any]:
    # Of the same name: what engines sample follows from it.
    config = small_config(storage, "lives", checkpoint={"every": 3}, evaluation={"enabled": False})
    config["stages"][1]["steps"] = 8
    config["stages"][1]["algorithm"]["kl"] = "k3"
    return config


@pytest.fixture(scope="module")
def runs(
    command_line: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, dict[str, Any]]:
    """The folder of a run without a fault, that of one whose Master was killed, and the summary of the resumed one."""
    storage = tmp_path_factory.mktemp("whole")
    rayrft.start(make_config(storage)).result()
    killed = tmp_path_factory.mktemp("killed")
    run = rayrft.start(make_config(killed))
    for record in run.records():
        if isinstance(record, StepRecord) and record.step == KILLED_AFTER:
            os.kill(run.pids()["master"], signal.SIGKILL)
            break
    with pytest.raises(ActorDied, match="the master died"):
        run.result()
    counters = run.status()
    assert counters["status"] == "failed" and counters["trained"] >= (KILLED_AFTER - 3) * 16
    assert counters["sampled"] == counters["trained"] + sum(counters["dropped"].values()) + counters["held"]
    resumed = command_line("resume", str(killed / "lives"), "checkpoint.keep_last=3")
    assert resumed.returncode == 0, resumed.stderr
    assert "goes on after 3 steps" in resumed.stdout and "finished after" in resumed.stdout
    return storage / "lives", killed / "lives", json.loads((killed / "lives" / "summary.json").read_text())


def test_the_ledger_closes_and_every_step_is_counted_once(runs: tuple[Path, Path, dict[str, Any]]) -> None:
    _, killed, summary = runs
    assert summary["status"] == "finished" and summary["steps"] == 11
    counters = summary["counters"]
    assert counters["sampled"] == counters["trained"] + sum(counters["dropped"].values()) + counters["held"]
    assert counters["trained"] == 8 * 16
    steps = [record.step for record in read_records(killed) if isinstance(record, StepRecord)]
    assert steps == list(range(1, 12))


def test_it_trained_on_what_the_run_without_a_fault_trained_on(runs: tuple[Path, Path, dict[str, Any]]) -> None:
    whole, killed, _ = runs
    rows = [_trained(folder) for folder in (whole, killed)]
    assert rows[0].keys() == rows[1].keys() and len(rows[0]) == 128
    assert rows[0] == rows[1]


def _trained(folder: Path) -> dict[str, tuple[int, list[int], float]]:
    """Of every row that was trained: at which step, its tokens and its reward."""
    rows = {}
    for batch in Archive.of_run(folder).rows(where=pc.field("fate") == "trained"):
        for row in batch.select(["experience_id", "trained_step", "token_ids", "reward"]).to_pylist():
            rows[row["experience_id"]] = (row["trained_step"], row["token_ids"], row["reward"])
    return rows


def test_its_weights_are_those_of_the_run_without_a_fault(runs: tuple[Path, Path, dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "final") for folder in runs[:2]]
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_what_it_was_asked_for_when_it_was_resumed_holds_from_then_on(
    runs: tuple[Path, Path, dict[str, Any]],
) -> None:
    whole, killed, _ = runs
    kept = [rayrft.config.load_config(folder / "config.yaml").checkpoint.keep_last for folder in (whole, killed)]  # type: ignore[attr-defined]
    assert kept == [2, 3]


def test_a_finished_run_says_how_to_train_on(
    runs: tuple[Path, Path, dict[str, Any]], command_line: Callable[..., Any]
) -> None:
    refused = command_line("resume", str(runs[1]))
    assert refused.returncode == 1
    assert "the run is finished after 11 steps" in refused.stderr and "stages.mix.steps" in refused.stderr


def test_a_folder_that_is_no_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run lies there"):
        rayrft.resume(tmp_path)
