"""A dead actor ends the run loudly: root cause first, the summary written, no final checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.state import list_actors

import rayrft
from rayrft.errors import ActorDied
from rayrft.monitor.records import StepRecord, read_records
from rayrft.monitor.summary import read_summary
from tests.conftest import ROOT
from tests.e2e.conftest import WITHOUT_VLLM, small_config


def kill_engine_core(run: rayrft.Run) -> None:
    children = psutil.Process(run.pids()["engine-0"]).children(recursive=True)
    core = max(children, key=lambda child: child.memory_info().rss)  # the others are helpers of multiprocessing
    core.kill()


def kill_trainer_rank(run: rayrft.Run) -> None:
    alive = [("class_name", "=", "RayTrainWorker"), ("state", "=", "ALIVE")]
    [rank, *_] = list_actors(address=ray.get_runtime_context().gcs_address, filters=alive)
    os.kill(rank.pid, signal.SIGKILL)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("kill", "named", "settings"),
    [
        pytest.param(kill_engine_core, "engine-0", {}, id="engine-core"),
        pytest.param(kill_trainer_rank, "trainer", WITHOUT_VLLM | {"trainer": {"ranks": 2}}, id="trainer-rank"),
    ],
)
def test_a_dead_actor_ends_the_run_with_its_name(
    kill: Callable[[rayrft.Run], None], named: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    config = small_config(tmp_path, "dying", evaluation={"enabled": False}, **settings)
    run = rayrft.start(config, say=lambda _: None, **{"stages.mix.steps": 10_000})
    for record in run.records():
        if isinstance(record, StepRecord) and record.usual_rows:
            break
    try:
        kill(run)
        with pytest.raises(ActorDied) as caught:
            run.result()
        assert named in str(caught.value.field)
    finally:
        run.kill()
    summary = read_summary(run.folder)
    assert summary.status == "failed" and named in summary.error and summary.checkpoint is None
    ledger = summary.ledger
    assert ledger.closes and ledger.sampled > 0
    assert not (run.folder / "checkpoints" / "final").exists()
    assert any(isinstance(record, StepRecord) for record in read_records(run.folder)), "the folder stays readable"


@pytest.mark.usefixtures("ray_cluster")
def test_a_buffer_that_is_killed_again_and_again_loses_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    config = small_config(tmp_path, "stubborn", evaluation={"enabled": False}, **WITHOUT_VLLM)
    run = rayrft.start(config, say=lambda _: None, **{"stages.mix.steps": 12, "trainer.ranks": 2, "max_staleness": 1})
    kills = 0
    try:
        for record in run.records():
            if isinstance(record, StepRecord) and record.usual_rows and kills < 4:
                os.kill(run.pids()["buffer"], signal.SIGKILL)
                kills += 1
        summary = run.result()
    finally:
        run.kill()
    assert kills == 4
    ledger = summary.ledger
    assert summary.status == "finished" and summary.steps == 15
    assert ledger.trained == 12 * 16, "every step got its whole batch, once"
    assert ledger.closes
    assert summary.expert["gold"].drawn == 3 * 16 + 12 * 4


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_twenty_deaths_of_engines_within_a_request_cost_a_resume_each_and_no_row(tmp_path: Path) -> None:
    changes = {"stages.mix.steps": 80, "explorer.engine.count": 2, "checkpoint.every": 1, "max_staleness": 1}
    plugins = {**WITHOUT_VLLM, "plugins": [str(ROOT / "tests" / "with_dying_engines.py")]}
    config = small_config(tmp_path, "killed", evaluation={"enabled": False}, **plugins)
    run, summary = rayrft.start(config, say=lambda _: None, **changes), None
    for resumes in range(25):  # noqa: B007 - it is compared with the deaths
        try:
            summary = run.result()
            break
        except ActorDied as error:
            assert str(error.field).startswith("engine-"), error
        finally:
            run.kill()
        run = rayrft.resume(run.folder, say=lambda _: None)
    assert summary is not None and summary.status == "finished"
    [deaths] = tmp_path.rglob("deaths")
    died = len(deaths.read_text().split())
    assert died >= 20 and died / 2 <= resumes <= died, "at most both die at once"
    steps = [record.step for record in read_records(run.folder) if isinstance(record, StepRecord)]
    assert steps == list(range(1, 84)), "each step is counted once"
    assert summary.ledger.closes and summary.ledger.trained == 80 * 16
