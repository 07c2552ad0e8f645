"""A whole small run with other settings of the Buffer, which is killed again and again, and of the tasks; and a weight
transport of one's own."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import rayrft
from rayrft.buffer.log.storage import Storage
from rayrft.buffer.reader import Archive, StateReader
from rayrft.config import load_config
from rayrft.monitor.records import NoteRecord, StepRecord, read_records
from tests.conftest import ROOT
from tests.e2e.conftest import WITHOUT_VLLM, small_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[rayrft.Run, dict[str, Any]]:
    """A stage that trains on groups twice, and one that is asked for more steps than there are tasks left for."""
    config = small_config(
        tmp_path_factory.mktemp("runs"), "replay", evaluation={"enabled": False}, max_staleness=2, **WITHOUT_VLLM
    )
    warmup, mix = config["stages"]
    mix["algorithm"] |= {"advantage": "gae", "value_loss": "squared"}
    config["stages"] = [warmup, {**mix, "steps": 6}, {**mix, "name": "rest", "steps": 100}]
    overrides = {
        "buffer.sampler.name": "priority",
        "buffer.sampler.score": "td_error",
        "buffer.sampler.tau": 2,
        "buffer.sampler.max_uses": 2,
        "buffer.sampler.replay_ratio": 2,
        "tasks.sampler": "near_half",
        "tasks.epochs": 1,
        "tasks.sources.0.size": 160,
        "trainer.ranks": 2,
        "weight_sync.backend": "shared_file",  # every digest is verified, or the run would end
        "plugins": [*config["plugins"], str(ROOT / "tests" / "samples" / "shared_file.py")],
    }
    run, kills = rayrft.start(config, say=lambda _: None, **overrides), 0
    for record in run.records():
        taken = isinstance(record, StepRecord) and record.usual_rows
        if taken and kills < 4 and (buffer := run.pids().get("buffer")) is not None:  # else it is being restarted
            os.kill(buffer, signal.SIGKILL)
            kills += 1
    assert kills == 4
    return run, run.result()


def steps(run: rayrft.Run, stage: str) -> list[StepRecord]:
    return [r for r in read_records(run.folder) if isinstance(r, StepRecord) and r.stage == stage]


def test_it_trains_on_groups_twice_and_draws_tasks_by_pass_rate(finished: tuple[rayrft.Run, dict[str, Any]]) -> None:
    run, summary = finished
    ledger, taken = summary.ledger, [*steps(run, "mix"), *steps(run, "rest")]
    assert [step.usual_rows for step in taken] == [16] * len(taken)
    assert max(step.staleness_max or 0 for step in taken) <= 2
    assert ledger.sampled < len(taken) * 16, "rows were used twice"
    assert ledger.closes


def test_a_buffer_that_is_killed_again_and_again_loses_nothing_and_the_run_goes_on(
    finished: tuple[rayrft.Run, dict[str, Any]],
) -> None:
    run, summary = finished
    taken = [*steps(run, "mix"), *steps(run, "rest")]
    assert summary.status == "finished" and [step.step for step in taken] == [*range(4, 4 + len(taken))]
    uses = [use for batch in Archive.of_run(run.folder).rows("usual") for use in batch["uses"].to_pylist()]
    assert max(uses) == 2 and sum(uses) == len(taken) * 16, "every step got its whole batch, once"
    assert summary.expert["gold"].drawn == 3 * 16 + len(taken) * 4


def test_errors_of_the_critic_come_back_to_the_groups(finished: tuple[rayrft.Run, dict[str, Any]]) -> None:
    run, _ = finished
    buffer = load_config(run.folder / "config.yaml").buffer
    groups = StateReader(Storage(run.folder / "buffer"), buffer.sampler, 0).read().groups
    errors = groups.score[groups.uses > 0]
    assert len(errors) >= 12 and (errors != 1.0).any()


def test_a_stage_ends_with_its_tasks(finished: tuple[rayrft.Run, dict[str, Any]]) -> None:
    run, summary = finished
    assert summary.status == "finished" and len(steps(run, "mix")) == 6
    assert [*summary.stages][-1] == "rest" and 0 < summary.stages["rest"] < 100
    notes = [record.text for record in read_records(run.folder) if isinstance(record, NoteRecord)]
    assert any("stage ends after" in note and "end_of_data" in note for note in notes), notes
