"""A run is steered while it runs: held, saved, evaluated, changed and led to its next stage."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from typer.testing import CliRunner

import rayrft
from rayrft.cli.main import app
from rayrft.config import RunConfig, load_config
from rayrft.config.stage import CheckpointConfig
from rayrft.core import launch
from rayrft.core.checkpoints import Checkpoints, Progress
from rayrft.core.master import Master
from rayrft.core.run import Run
from rayrft.core.steering import ConfigChange, Steering, config_at, histories, latest_config
from rayrft.core.supervision import Stopped
from rayrft.core.train_loop import TrainLoop
from rayrft.errors import ConfigError, RunFinished, StorageError
from rayrft.monitor.ray_metrics import RayMetrics
from rayrft.monitor.records import EvaluationRecord, NoteRecord, StepRecord, read_records
from tests.core.given import run_folder
from tests.core.looping import Subject
from tests.core.resumable import Wishes
from tests.core.resuming import Process, assert_same, make_config, steps, write_model
from tests.e2e.conftest import WITHOUT_VLLM, small_config
from tests.errors import about

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
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def changed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunConfig, list[str]]]:
    """A run that was changed, and not killed; and its events."""
    config = make_config(tmp_path_factory.mktemp("changed"), model, "changed")
    process = Process(config, wishes=WISHES)
    events = list(process.events())
    process.end()
    yield config, events


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


@pytest.mark.parametrize("most", [10, pytest.param(30, marks=pytest.mark.slow)])
def test_a_changed_run_that_is_killed_anywhere_is_the_one_that_was_not(
    most: int, model: Path, tmp_path: Path, changed: tuple[RunConfig, list[str]]
) -> None:
    reference, events = changed
    chance, kills, number = random.Random(most), 0, 0
    while kills < most:
        config = make_config(tmp_path, model, f"killed-{number}")
        number += 1
        for _ in range(100):
            process, last = Process(config, wishes=WISHES), chance.randrange(len(events))
            for count, _ in enumerate(process.events()):
                if count == last:
                    process.kill()
                    kills += 1
                    break
            else:
                process.end()
                break
        assert_same(config, reference)


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
    assert_same(config, changed[0])


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
    assert (record.step, record.temperature, record.samples) == (held, 0.0, 1) and record.count
    [sampled] = run.evaluate(temperature=0.5, samples=2)
    assert (sampled.step, sampled.temperature, sampled.samples) == (held, 0.5, 2)
    assert sampled.count == 2 * record.count

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
    for wrong, field in (({"temperature": -1.0}, "evaluation.temperatures.0"), ({"samples": 0}, "evaluation.samples")):
        with pytest.raises(ConfigError, check=about(field)):
            run.evaluate(**wrong)
    assert (
        len([each for each in read_records(run.folder) if isinstance(each, EvaluationRecord) and each.step == held])
        == 2
    )
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


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainLoop:
    """A train loop on scripted actors, before its first step."""
    monkeypatch.setattr(RayMetrics, "write", lambda *_: None)
    return Subject(tmp_path).loop


def steering_of(loop: TrainLoop) -> Steering:
    return Steering(loop.config, loop.progress, lambda _: None)


@pytest.mark.parametrize("ends", [StorageError, Stopped])
async def test_a_failing_explorer_and_a_stop_end_a_pause_also_if_the_clock_is_set_meanwhile(
    loop: TrainLoop, ends: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    steering, exploring = steering_of(loop), asyncio.get_running_loop().create_future()
    loop.exploring = exploring
    held = asyncio.ensure_future(steering.border(loop))
    await held
    asked = asyncio.ensure_future(steering.ask("pause"))
    await asyncio.sleep(0)
    held = asyncio.ensure_future(steering.border(loop))
    assert await asyncio.wait_for(asked, 20) == 0 and steering.paused_since is not None and not held.done()
    now, jump = time.time(), 86_400.0 if ends is Stopped else -86_400.0
    monkeypatch.setattr(time, "time", lambda: now + jump)
    if ends is Stopped:
        loop.stop.set()
    else:
        exploring.set_exception(StorageError("No space left on device", field="journal"))
    with pytest.raises(ends):
        await asyncio.wait_for(held, 20)
    notes = [record.data for record in await loop.recorder.after(0) if isinstance(record, NoteRecord)]
    assert steering.paused_since is None and 0 < notes[-1]["paused_s"] < 3600


async def test_requests_of_a_run_that_has_ended_are_refused(loop: TrainLoop) -> None:
    steering = steering_of(loop)
    asked = asyncio.ensure_future(steering.ask("checkpoint"))
    await asyncio.sleep(0)
    steering.end()
    for request in (asked, steering.ask("pause")):
        with pytest.raises(RunFinished):
            await asyncio.wait_for(request, 20)


def test_a_key_that_is_overridden_loses_its_later_changes(loop: TrainLoop) -> None:
    config, folder = loop.config, loop.config.folder
    changes = [(4, MU, 0.2, 0.1), (8, MU, 0.1, 0.05), (8, LR, 1e-4, 1e-5)]
    lines = [json.dumps(asdict(ConfigChange(*change, time=0.0))) + "\n" for change in changes]
    (folder / "changes.jsonl").write_text("".join(lines))
    latest = latest_config(config)
    assert latest.stages[1].optimizer.lr == 1e-5
    at_6, later = config_at(latest, 6)
    assert (at_6.stages[1].algorithm.build().mu(), at_6.stages[1].optimizer.lr) == (0.1, 1e-4)
    assert [(change.step, change.key) for change in later] == [(8, MU), (8, LR)]
    assert config_at(latest, 0)[0] == config
    loop.progress.step = 6
    steering = Steering(load_config(latest, {MU: 0.2}), loop.progress, lambda _: None)
    assert (steering.config.stages[1].algorithm.build().mu(), steering.config.stages[1].optimizer.lr) == (0.2, 1e-4)
    assert [change.step for change in histories(folder)[MU]] == [4, 6]
    assert config_at(load_config(latest, {MU: 0.2}), 5)[1] == [*histories(folder)[MU][1:], *later[1:]]


async def test_an_explore_job_refuses_to_be_steered(tmp_path: Path) -> None:
    stage = {"stages": [{"name": "mix", "algorithm": {"name": "grpo"}, "steps": 2, "batch_size": 8, "group_size": 4}]}
    config = run_folder(tmp_path, "explores", mode="explore", buffer={"name": "b"}, demonstrations={}, **stage)
    with pytest.raises(ConfigError, match="takes no optimiser steps"):
        await Master(config, Progress("id")).steer("pause")


def test_every_request_is_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    run = mock.Mock(**{"pause.return_value": 7, "unpause.return_value": 3.2, "set.return_value": 8})
    monkeypatch.setattr(launch, "attach", lambda name: run)
    said = [CliRunner().invoke(app, command.split()).output for command in COMMANDS]
    assert said[:3] == ["r: paused after step 7\n", "r: was paused for 3 s\n", "r: changed after step 8\n"]
    run.set.assert_called_once_with("max_staleness", 2, **{"stages.mix.optimizer.lr": 1e-5})
    run.evaluate.assert_called_once_with(0.5, 2)
    assert all(method.called for method in (run.checkpoint, run.skip_stage))


COMMANDS = ["pause r", "unpause r", "set r max_staleness=2 stages.mix.optimizer.lr=1e-5"]
COMMANDS += ["checkpoint r", "evaluate r --temperature 0.5 --samples 2", "skip-stage r"]
