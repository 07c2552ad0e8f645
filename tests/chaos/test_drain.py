"""Ray drains a node of a run, as before a preemption, and the node is gone: with a cluster of two nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

_SCRIPT = """
import subprocess, sys, tempfile
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import rayrft
from rayrft.core.placement import actor_name
from rayrft.runtime.handle import find_actor
from rayrft.explorer.engines.pool import EnginePool
from rayrft.monitor.records import NoteRecord, RestartRecord, StepRecord
from rayrft.runtime.handle import fetch
from tests.chaos.processes import more_steps, new_restarts, recorded, until
from tests.e2e.conftest import WITHOUT_VLLM, small_config

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "labels": {"zone": "a"}})
leaves = cluster.add_node(num_cpus=4, labels={"zone": "b"})
ray.init(cluster.address, namespace="rayrft", log_to_driver=False)
config = small_config(Path(tempfile.mkdtemp()), "drained", **WITHOUT_VLLM, evaluation={"enabled": False})
config["stages"] = [{**config["stages"][1], "steps": 10_000}]
config["max_staleness"] = 1
config["checkpoint"] = {"every": None}
config["monitor"] = {"patience_s": 3}
config["explorer"]["engine"] = {"count": 2}
groups = ("master", "explorer", "buffer", "engine_pool", "trainer", "ranks")
config["placement"] = {"engines": "spread", "labels": {name: {"zone": "a"} for name in groups}}
run = rayrft.start(config)


def members():
    return {*fetch(find_actor(actor_name("drained", "engine_pool")).call(EnginePool.members)).names}


def notes():
    return [each.text for each in recorded(run, NoteRecord)]


try:
    more_steps(run, 2)
    assert members() == {"engine-0", "engine-1"}
    command = ["drain-node", "--address", cluster.address, "--node-id", leaves.node_id]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    command += ["--deadline-remaining-seconds", "600"]
    subprocess.run([str(Path(sys.executable).with_name("ray")), *command], check=True)
    until(run, lambda: len(members()) == 1)
    until(run, lambda: "writes a checkpoint" in notes())
    assert sum("drains a node" in text for text in notes()) == 1
    more_steps(run, 3)
    assert not recorded(run, RestartRecord) and len(members()) == 1, "its actors live on, without requests"
    cluster.remove_node(leaves)
    [restart] = new_restarts(run, 0)
    assert restart.part == "engines" and members() == {"engine-0", "engine-1"}
    more_steps(run, 2)
    run.skip_stage()
    summary = run.result()
    assert summary.status == "finished" and summary.ledger.closes
    assert [step.step for step in recorded(run, StepRecord)] == list(range(1, summary.steps + 1))
finally:
    run.kill()
print("as it should be")
"""


@pytest.mark.slow
def test_engines_of_a_drained_node_take_no_more_requests_and_are_replaced_once_it_is_gone(tmp_path: Path) -> None:
    """In a process of its own: it makes a cluster of two nodes."""
    environment = {**os.environ, "RAY_ADDRESS": "", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", _SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400
    )
    assert ran.returncode == 0 and "as it should be" in ran.stdout, (ran.stdout + ran.stderr)[-4000:]
