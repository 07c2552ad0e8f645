"""A run whose rewards are on Ray Serve."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import rayrft
from rayrft.applications import applications
from rayrft.monitor.records import StepRecord
from tests.e2e.conftest import WITHOUT_VLLM, small_config


def test_a_run_scores_on_serve_and_deletes_what_it_has_there_and_a_resumed_one_does_so_again(
    ray_cluster: Any, tmp_path: Path, port: int
) -> None:
    # Ray Serve has one address in a cluster, and other runs come with this one.
    reward = {"placement": "serve", "name": "reasoning_gym", "workers": 2, "replicas": {"max": 2}}
    config = small_config(tmp_path, "scored", reward=reward, serve={"port": port, "record": False}, **WITHOUT_VLLM)
    said: list[str] = []
    run = rayrft.start(config, say=said.append)
    try:
        plan = next(line for line in said[0].splitlines() if line.startswith("scored:reward"))
        assert plan.split()[:3] == ["scored:reward", "2", "0.1"] and "on Ray Serve, 1 to 2: reasoning_gym" in plan
        summary = run.result()
        steps = [record for record in run.records() if isinstance(record, StepRecord)]
    finally:
        run.kill()
    assert summary.status == "finished" and not applications("scored:")
    counts = steps[-1].rewards[""]
    assert counts["scored"] > 0 and counts["unknown"] == counts["errors"] == counts["retried"] == 0
    assert 0 < counts["slowest_s"] <= counts["seconds"]

    resumed = rayrft.resume(run.folder, say=said.append, **{"stages.mix.steps": 4})
    try:
        seen = {name for _ in resumed.records() for name in applications("scored:rewards")}
        assert resumed.result().status == "finished"
    finally:
        resumed.kill()
    assert len(seen) <= 1 and not applications("scored:")


@pytest.mark.slow
def test_a_killed_run_leaves_no_rewards(ray_cluster: Any, tmp_path: Path, port: int) -> None:
    reward = {"placement": "serve", "name": "reasoning_gym"}
    config = small_config(tmp_path, "killed", reward=reward, serve={"port": port, "record": False}, **WITHOUT_VLLM)
    run = rayrft.start(config, say=lambda text: None)
    try:
        next(record for record in run.records() if isinstance(record, StepRecord))
        assert len(applications("killed:rewards")) == 1
    finally:
        run.kill()
    deadline = time.monotonic() + 60
    while applications("killed:"):
        assert time.monotonic() < deadline
        time.sleep(0.1)  # Ray Serve has no event for it
