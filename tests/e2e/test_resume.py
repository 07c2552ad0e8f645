"""A run with real engines and partial rollouts that lost its Master, resumed: nothing is lost, and nothing is trained
twice."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import rayrft
from rayrft.buffer.reader import Archive
from rayrft.config import load_config
from rayrft.config.stage import CheckpointConfig
from rayrft.core.checkpoints import Checkpoints
from rayrft.errors import ActorDied
from rayrft.monitor.records import StepRecord, read_records
from rayrft.monitor.summary import Summary, read_summary
from tests.conftest import ROOT
from tests.e2e.conftest import WITHOUT_VLLM, Call, small_config
from tests.errors import about

AGAIN = 8
"""Steps that are taken from the checkpoint on: those that the killed run took after it, and more."""


def make_config(storage: Path, steps: int, *, parks: bool) -> dict[str, Any]:
    # Of the same name: what engines sample follows from it.
    config = small_config(storage, "lives", checkpoint={"every": 3}, evaluation={"enabled": False})
    config["stages"][1]["steps"] = steps
    config["stages"][1]["algorithm"]["kl"] = "k3"
    if parks:
        config["explorer"]["partial"] = {"budget": 4}  # of at most 6 tokens of an answer
    config["restarts"] = {"per_hour": 0}
    return config


@dataclass(frozen=True)
class Resumed:
    """A run whose Master was killed in its second stage, once it was resumed and had ended."""

    folder: Path
    steps: int
    """That the second stage was asked for in the end; the first has three."""

    @property
    def summary(self) -> Summary:
        return read_summary(self.folder)


def kill_and_resume(other_process: Call, storage: Path, *, parks: bool) -> Resumed:
    run = rayrft.start(make_config(storage, steps=10_000, parks=parks))
    for _ in run.records():
        if max(path.name for path in run.folder.glob("checkpoints/step-*")) > "step-000003":
            os.kill(run.pids()["master"], signal.SIGKILL)
            break
    with pytest.raises(ActorDied, check=about("lives:master")):
        run.result()
    status = run.status()
    assert status.status == "failed" and status.ledger.trained > 0 and status.ledger.closes
    reached = Checkpoints(run.folder, CheckpointConfig()).all()[-1].stage_step
    asked = reached + AGAIN
    ended = other_process("resume", str(run.folder), f"stages.mix.steps={asked}", "checkpoint.keep_last=3")
    assert ended.returncode == 0, ended.stderr
    assert f"resumes after {reached} steps" in ended.stdout and "finished after" in ended.stdout
    return Resumed(run.folder, asked)


@pytest.fixture(scope="module")
def resumed(other_process: Call, tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    return kill_and_resume(other_process, tmp_path_factory.mktemp("killed"), parks=True)


@pytest.fixture(scope="module")
def twins(other_process: Call, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of a resumed run and of the same run without a fault. They park nothing: whether a group is parked
    before or after another one begins follows the load, and with it the weights that it is begun under."""
    killed = kill_and_resume(other_process, tmp_path_factory.mktemp("exact"), parks=False)
    whole = rayrft.start(make_config(tmp_path_factory.mktemp("whole"), killed.steps, parks=False))
    whole.result()
    return killed.folder, whole.folder


def test_the_ledger_closes_and_every_step_is_counted_once(resumed: Resumed) -> None:
    summary = resumed.summary
    assert summary.status == "finished" and summary.steps == 3 + resumed.steps
    ledger = summary.ledger
    assert ledger.closes
    assert ledger.trained + ledger.dropped["old_tokens"] == resumed.steps * 16
    steps = [record.step for record in read_records(resumed.folder) if isinstance(record, StepRecord)]
    assert steps == list(range(1, 4 + resumed.steps))


def test_parked_answers_went_on_and_only_their_new_tokens_are_trained(resumed: Resumed) -> None:
    old = 0
    for batch in Archive.of_run(resumed.folder).rows(where="group_status = 'trained' and status <> 'masked'"):
        for row in batch.to_pylist():
            [span] = row["weight_versions"]
            assert span["version"] == row["trained_step"]
            actions = [place for place, action in enumerate(row["action_mask"]) if action]
            assert actions == list(range(span["start"], span["end"]))
            old += span["start"] - row["prompt_length"]
    assert old > 0


@pytest.mark.slow
def test_it_trained_on_what_the_run_without_a_fault_trained_on(twins: tuple[Path, Path]) -> None:
    killed, whole = map(_trained, twins)
    assert killed == whole and len(whole) >= AGAIN * 16


def _trained(folder: Path) -> dict[str, tuple[int, list[int], float]]:
    """Of every row that was trained: at which step, its tokens and its reward."""
    rows = {}
    for batch in Archive.of_run(folder).rows(where="group_status = 'trained'"):
        for row in batch.select(["experience_id", "trained_step", "token_ids", "reward"]).to_pylist():
            rows[row["experience_id"]] = (row["trained_step"], row["token_ids"], row["reward"])
    return rows


@pytest.mark.slow
def test_its_weights_are_those_of_the_run_without_a_fault(twins: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "final") for folder in twins]
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_what_it_was_asked_for_when_it_was_resumed_holds_from_then_on(resumed: Resumed) -> None:
    assert load_config(resumed.folder / "config.yaml").checkpoint.keep_last == 3
    assert len(list((resumed.folder / "checkpoints").glob("step-*"))) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_twenty_deaths_of_engines_within_a_request_cost_no_resume_and_no_row(tmp_path: Path) -> None:
    changes = {"stages.mix.steps": 80, "explorer.engine.count": 2, "checkpoint.every": 1, "max_staleness": 1}
    changes |= {"restarts.per_hour": 30, "restarts.backoff_s": 0}
    plugins = {**WITHOUT_VLLM, "plugins": [str(ROOT / "tests" / "with_dying_engines.py")]}
    config = small_config(tmp_path, "killed", evaluation={"enabled": False}, **plugins)
    run = rayrft.start(config, say=lambda _: None, **changes)
    try:
        summary = run.result()
    finally:
        run.kill()
    [deaths] = tmp_path.rglob("deaths")
    died = len(deaths.read_text().split())
    assert summary.status == "finished" and summary.restarts["engines"].count == died == 20
    steps = [record.step for record in read_records(run.folder) if isinstance(record, StepRecord)]
    assert steps == list(range(1, 84)), "each step is counted once"
    assert summary.ledger.closes and summary.ledger.trained == 80 * 16
