"""A whole run is scaled, and its actors are killed, one of each kind: it goes through to its end."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

import rayrft
from rayrft.monitor.records import EvaluationRecord, Record, RestartRecord, StepRecord
from rayrft.monitor.summary import Summary
from tests.e2e.conftest import WITHOUT_VLLM, small_config

KINDS = {
    "engine-2": "engines",
    "rank": "trainer",
    "explorer-1": "explorer",
    "engine_pool": "engine_pool",
    "evaluation-0": "evaluation",
    "trainer": "trainer",
    "buffer": "buffer",
    "master": "master",
}
"""Each actor with the kind that its restart counts for; a rank's is that of the Trainer."""


def kill(run: rayrft.Run, actor: str, by: signal.Signals = signal.SIGKILL) -> None:
    if actor == "rank":
        raylet = next(each for each in psutil.Process(run.pids()["trainer"]).parents() if each.name() == "raylet")
        ranks = [each for each in raylet.children() if each.name().startswith("ray::RayTrainWor")]
        os.kill(ranks[-1].pid, by)
    else:
        os.kill(run.pids()[actor], by)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def survived(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Summary, list[Record]]:
    """The run in which each of the actors was killed after another few steps, and its records as they were followed."""
    config = small_config(tmp_path_factory.mktemp("survives"), "survives", **WITHOUT_VLLM)
    config["evaluation"] = {"engines": 1, "samples": 1}
    config["stages"][1] |= {"steps": 4 * len(KINDS) + 4, "evaluate_every": 4}
    changes = {"explorer.engine.count": 2, "explorer.count": 2, "trainer.ranks": 2, "checkpoint.every": 3}
    run = rayrft.start(config, say=lambda _: None, **changes, **{"restarts.backoff_s": 0})
    records, left, scaled = list[Record](), [*KINDS], False
    try:
        for record in run.records():
            records.append(record)
            if isinstance(record, StepRecord) and record.step == 1:
                assert run.scale(3) == 2
            if isinstance(record, RestartRecord) and record.actor == "engine-2":
                assert run.scale(2) == 3 and "engine-2" not in run.pids()
                scaled = True
            due = 4 + 4 * (len(KINDS) - len(left))
            taken = isinstance(record, StepRecord) and record.usual_rows and record.step >= due
            if left and taken and {left[0], "trainer"} - {"rank"} <= run.pids().keys():  # or at a later step
                kill(run, left.pop(0))
        assert scaled
        return run.result(), records
    finally:
        run.kill()


def test_a_run_of_which_each_kind_of_actor_dies_takes_every_step_once(
    survived: tuple[Summary, list[Record]],
) -> None:
    summary, records = survived
    assert summary.status == "finished"
    steps = [record for record in records if isinstance(record, StepRecord)]
    assert [step.step for step in steps] == list(range(1, summary.steps + 1))
    assert [step.version for step in steps] == sorted(step.version for step in steps)
    assert max(step.staleness_max or 0 for step in steps) == 0
    assert summary.ledger is not None and summary.ledger.closes
    assert summary.ledger.trained == sum(step.usual_rows for step in steps) == 16 * (summary.steps - 3)


def test_each_restart_is_a_record_and_counted_with_the_seconds_without_the_actor(
    survived: tuple[Summary, list[Record]],
) -> None:
    summary, records = survived
    restarts = [record for record in records if isinstance(record, RestartRecord)]
    assert {record.part for record in restarts} == {*KINDS.values()}
    assert {record.actor for record in restarts} >= KINDS.keys() - {"rank"}
    assert all(record.seconds > 0 and record.cause for record in restarts)
    assert {kind: counted.count for kind, counted in summary.restarts.items()} == {
        kind: sum(record.part == kind for record in restarts) for kind in KINDS.values()
    }


def test_evaluations_that_are_not_lost_are_of_the_step_whose_weights_they_sampled(
    survived: tuple[Summary, list[Record]],
) -> None:
    found = [record for record in survived[1] if isinstance(record, EvaluationRecord)]
    assert len({(record.stage, record.step, record.temperature) for record in found}) == len(found), (
        "none is written twice"
    )
    assert found[-1].step == survived[0].steps
