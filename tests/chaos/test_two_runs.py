"""Two runs at once on one cluster: deaths in one of them change nothing in the other, nor in its own result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rayrft
from rayrft.monitor.records import RestartRecord, StepRecord
from tests.chaos.processes import final_weights, find, more_steps, new_restarts, recorded, send
from tests.e2e.conftest import WITHOUT_VLLM, small_config


def make_config(storage: Path, name: str, steps: int) -> dict[str, Any]:
    config = small_config(storage, name, evaluation={"enabled": False}, **WITHOUT_VLLM)
    config["restarts"] = {"backoff_s": 0}
    config["stages"][1]["steps"] = steps
    return config


@contextlib.contextmanager
def running(config: dict[str, Any]) -> Iterator[rayrft.Run]:
    run = rayrft.start(config, say=lambda _: None)
    try:
        yield run
    finally:
        run.kill()


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_whose_engine_and_trainer_die_and_one_beside_it_end_with_the_weights_that_they_have_alone(
    tmp_path: Path,
) -> None:
    with (
        running(make_config(tmp_path, "dying", 10_000)) as dying,
        running(make_config(tmp_path, "calm", 10_000)) as calm,
    ):
        for deaths, target in enumerate(("engine-0", "trainer")):
            more_steps(dying, 4)
            more_steps(calm, 4)
            assert send(find(dying, target))
            new_restarts(dying, deaths)
        for run in (calm, dying):
            run.skip_stage()
            assert run.result().status == "finished"
    assert [each.part for each in recorded(dying, RestartRecord)] == ["engines", "trainer"]
    assert not recorded(calm, RestartRecord)
    for run in (calm, dying):
        steps = len(recorded(run, StepRecord))
        with running(make_config(tmp_path / "alone", run.name, steps - 3)) as alone:
            assert alone.result().steps == steps
        assert final_weights(run) == final_weights(alone), run.name
