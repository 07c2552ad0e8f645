"""A run is steered while it runs: held, saved, evaluated, changed and led to its next stage."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import rayrft
from rayrft.config import RunConfig
from rayrft.config.stage import CheckpointConfig
from rayrft.core.checkpoints import Checkpoints
from rayrft.core.run import Run
from rayrft.core.steering import histories
from rayrft.errors import ConfigError, RunFinished
from rayrft.monitor.records import NoteRecord, StepRecord, read_records
from tests.core.resumable import Wishes
from tests.core.test_resume import Process, end_of, make_config, trained
from tests.e2e.conftest import WITHOUT_VLLM, small_config
from tests.trainer.learners import qwen3

MU, LR, STEPS = (f"stages.mix.{key}" for key in ("algorithm.mu", "optimizer.lr", "steps"))
WISHES: Wishes = {
    3: [("change", {MU: 0.1})],
    7: [("change", {LR: 5e-3, "checkpoint.every": 4})],
    10: [("pause",), ("change", {MU: 0.4, "stages.mix.algorithm.kl_coef": 0.2}), ("checkpoint",), ("unpause",)],
    12: [("change", {LR: 1e-3})],
    13: [("skip_stage",)],
}
"""What a user does during these steps."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    qwen3(50, 16, 32, layers=2, heads=2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def changed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunConfig, list[str]]]:
    """A run that was changed, and not killed; and its events."""
    config = make_config(tmp_path_factory.mktemp("changed"), model, "changed")
    process = Process(config, wishes=WISHES)
    events = list(process.events())
    process.end()
    yield config, events


def steps(config: RunConfig) -> list[StepRecord]:
    return [record for record in read_records(config.folder) if isinstance(record, StepRecord)]


def test_changes_apply_from_the_next_step_and_are_in_history_journal_and_config(
    changed: tuple[RunConfig, list[str]],
) -> None:
    config, _ = changed
    taken = steps(config)
    assert [record.step for record in taken] == list(range(1, 14)), "the stage was skipped after 13 steps"
    rates = {record.step: record.metrics.lr for record in taken}
    assert rates[8] / rates[7] > 4 and rates[13] / rates[12] < 0.3
    assert [record.metrics.kl_coef for record in taken[8:12]] == [0.1, 0.1, 0.2, 0.2]
    journal = [json.loads(line) for line in (config.folder / "changes.jsonl").read_text().splitlines()]
    known = [(change["step"], change["key"], change["old"], change["new"]) for change in journal]
    assert known[0] == (3, MU, 0.3, 0.1) and (7, LR, 1e-3, 5e-3) in known and known[-1] == (13, STEPS, 10, 8)
    notes = [record.data for record in read_records(config.folder) if isinstance(record, NoteRecord)]
    assert [(each["key"], each["old"], each["new"]) for each in notes if "key" in each] == [each[1:] for each in known]
    mix = yaml.safe_load((config.folder / "config.yaml").read_text())["stages"][1]
    assert (mix["algorithm"]["mu"], mix["optimizer"]["lr"], mix["steps"]) == (0.4, 1e-3, 8)


@pytest.mark.parametrize("most", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_a_changed_run_that_is_killed_anywhere_is_the_one_that_was_not(
    most: int, model: Path, tmp_path: Path, changed: tuple[RunConfig, list[str]]
) -> None:
    reference, events = changed
    chance, kills, number = random.Random(most), 0, 0
    while kills < most:
        config = make_config(tmp_path, model, f"killed-{number}")
        number += 1
        for _ in range(100):
            process, last = Process(config, wishes=WISHES), chance.randrange(len(events) // 2, len(events))
            for count, _ in enumerate(process.events()):
                if count == last:
                    process.kill()
                    kills += 1
                    break
            else:
                process.end()
                break
        assert_equal(config, reference)


def assert_equal(config: RunConfig, reference: RunConfig) -> None:
    assert trained(config) == trained(reference)
    weights = [torch.load(each.folder / "weights.pt") for each in (config, reference)]
    torch.testing.assert_close(*weights, atol=1e-6, rtol=0)
    assert end_of(config) == end_of(reference)
    assert [record.step for record in steps(config)] == list(range(1, 14))
    values = [
        {key: [change.new for change in changes] for key, changes in histories(each.folder).items()}
        for each in (config, reference)
    ]
    assert values[0] == values[1], "a change was made twice, or is lost"


def test_a_run_that_is_stopped_while_it_is_paused_resumes_as_it_was(
    model: Path, tmp_path: Path, changed: tuple[RunConfig, list[str]]
) -> None:
    config = make_config(tmp_path, model, "stopped")
    wishes = {**WISHES, 9: [("pause",), ("stop",)]}
    process = Process(config, wishes=wishes)
    assert [*process.events()][-1] == "stopped"
    process.end()
    assert Checkpoints(config.folder, config.checkpoint).holds(9)
    process = Process(config, wishes=wishes)
    assert [*process.events()][-1] == "end"
    process.end()
    assert_equal(config, changed[0])


ATTACHED = """
import json, sys
import rayrft

run = rayrft.attach("steered")
print(json.dumps([run.status().status, run.checkpoint(), run.unpause() > 0]))
"""


def wait_for(run: Run, step: int) -> StepRecord:
    return next(record for record in run.records() if isinstance(record, StepRecord) and record.step == step)


@pytest.mark.usefixtures("ray_cluster")
def test_a_running_run_is_steered_from_here_and_from_another_process(ray_cluster: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_staleness": 1, "evaluation": {"temperatures": [0.0]}, "checkpoint": {"every": None}}
    config = small_config(tmp_path, "steered", **WITHOUT_VLLM, **options)
    config["stages"] = [{**config["stages"][1], "steps": 10_000}, {**config["stages"][1], "name": "last", "steps": 1}]
    run = rayrft.start(config, say=lambda text: None)
    held = run.pause()
    assert run.pause() == held
    status = run.status()
    assert (status.status, status.step) == ("paused", held) and status.paused_since
    [record] = run.evaluate()
    assert record.step == held and record.count

    before = (run.folder / "config.yaml").read_text()
    for key, value, reason in (
        ("stages.mix.algorithm.mu", 2, "must lie in"),
        ("stages.mix.batch_size", 40, "cannot change while the run is running"),
        ("stages.mix.steps", 0, "greater than or equal to 1"),
        ("max_stalenes", 2, "did you mean 'max_staleness'"),
    ):
        with pytest.raises(ConfigError, match=f"(?i){reason}") as refused:
            run.set(key, value)
        assert refused.value.field == key
    assert (run.folder / "config.yaml").read_text() == before and not (run.folder / "changes.jsonl").exists()

    assert run.set("stages.mix.optimizer.lr", 0.0, max_staleness=0) == held
    environment, command = (
        {**os.environ, "RAY_ADDRESS": ray_cluster.address_info["gcs_address"]},
        [sys.executable, "-c"],
    )
    asked = subprocess.run([*command, ATTACHED], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(asked.stdout) == ["paused", held, True]
    assert Checkpoints(run.folder, CheckpointConfig()).holds(held)
    rates = {step: wait_for(run, step).metrics.lr for step in (held, held + 1)}
    assert rates == {held: 1e-4, held + 1: 0.0}
    assert wait_for(run, held + 3).staleness_max == 0
    with pytest.raises(ConfigError, match="is not paused"):
        run.unpause()

    taken = run.skip_stage()
    summary = run.result()
    assert summary.status == "finished" and summary.stages == {"mix": taken, "last": 1}
    assert summary.ledger is not None and summary.ledger.closes and summary.seconds["paused"] > 0
    with pytest.raises(RunFinished):
        run.pause()
