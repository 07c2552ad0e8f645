"""A run whose rewards are on Ray Serve."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

import rayrft
from rayrft.monitor.records import StepRecord
from rayrft.runtime.serving.applications import applications
from tests.conftest import ROOT
from tests.e2e.conftest import WITHOUT_VLLM, free_port, small_config


@pytest.mark.slow
@pytest.mark.parametrize("resumes", [False, True])
def test_a_run_scores_on_serve_and_deletes_what_it_has_there_and_a_resumed_one_does_so_again(
    resumes: bool, ray_cluster: Any, tmp_path: Path, tiny_model: Path, port: int
) -> None:
    # Ray Serve has one address in a cluster, and other runs come with this one.
    judge = {"name": "tests.rewards.trouble:AsksAnother", "role": "gate"}
    reward = {"placement": "serve", "workers": 2, "replicas": {"max": 2}, "parts": [{"name": "reasoning_gym"}, judge]}
    config = small_config(tmp_path, "scored", reward=reward, serve={"port": port, "record": False}, **WITHOUT_VLLM)
    config["auxiliary"] = {"grader": {"model": str(tiny_model), "max_length": 300}}
    config["stages"], config["tasks"]["eval_size"] = config["stages"][1:], 4
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
    counts = steps[-1].timings.rewards[""]
    assert counts.scored > 0 and counts.unknown == counts.errors == counts.retried == 0
    assert 0 < counts.slowest_s <= counts.seconds
    if not resumes:
        return

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


@pytest.mark.slow
@pytest.mark.parametrize("proxy", [None, "ray"])
def test_the_command_serves_rewards_until_ctrl_c_and_leaves_no_process(proxy: str | None, tmp_path: Path) -> None:
    """In a process of its own with a Ray of its own."""
    port, keys = free_port(), tmp_path / "keys"
    keys.write_text("sk-1\n")
    config = {"reward": {"domains": {"math": {"name": "math"}}}, "serve": {"port": port, "keys_file": str(keys)}}
    config["serve"]["proxy"] = proxy
    (tmp_path / "rewards.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "rayrft", "serve", "rewards", str(tmp_path / "rewards.yaml")]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment
    )
    assert process.stdout is not None
    try:
        url = next(line.split()[-1] for line in process.stdout if line.startswith("rewards at"))
        assert url == f"http://127.0.0.1:{port}/rewards/v1"
        asked = {"domain": "math", "task": {"prompt": "1 + 1?", "answer": "2"}, "response": "It is 2."}
        http = httpx.Client(headers={"Authorization": "Bearer sk-1"}, timeout=60)
        assert http.post(f"{url}/score", json=asked).json()["value"] == 1.0
        assert httpx.post(f"{url}/score", json=asked).json()["error"]["code"] == "invalid_api_key"
        again = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
        assert again.returncode == 1 and "serve.port: the port cannot be used" in again.stderr
        assert "Traceback" not in again.stderr
        started = psutil.Process(process.pid).children(recursive=True)
        sockets = [each for child in started for each in child.net_connections("tcp4") if each.status == "LISTEN"]
        reached = {each.laddr.ip for each in sockets if each.laddr.port in {port, *range(30_000, 31_000)}}
        assert reached == {"127.0.0.1"}, "the service and its replicas are for this machine alone"
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        _, alive = psutil.wait_procs(started, timeout=60)
        assert not alive
    finally:
        process.kill()
