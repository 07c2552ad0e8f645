"""An autoscaler of Ray's, whose nodes are processes of this machine, sees what a run waits for."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rayrft.monitor.summary import read_summary
from tests.conftest import ROOT
from tests.e2e.conftest import WITHOUT_VLLM, small_config

pytestmark = pytest.mark.slow

HEAD = "f" * 51 + "00000"
"""The id that Ray's provider of simulated nodes gives a cluster's head."""


def of_cluster(port: int) -> dict[str, object]:
    """The config of a cluster whose head has no CPU."""
    workers = {"node_config": {}, "resources": {"CPU": 4, "memory": 8 << 30}, "min_workers": 0, "max_workers": 2}
    lists = ["setup_commands", "head_setup_commands", "worker_setup_commands", "initialization_commands"]
    lists += ["head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude"]
    return {
        "cluster_name": "simulated",
        "max_workers": 2,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "provider": {
            "type": "external",
            "module": "tests.cluster.simulated.Simulated",
            "gcs_address": f"127.0.0.1:{port}",
            "head_node_id": HEAD,
            "disable_node_updaters": True,
        },
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "rsync_filter": [],
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"node_config": {}, "resources": {"CPU": 0}, "max_workers": 0},
            "ray.worker": workers,
        },
        **{name: [] for name in lists},
    }


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster with an autoscaler."""
    folder = tmp_path_factory.mktemp("cluster")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = folder / "cluster.yaml"
    config.write_text(json.dumps(of_cluster(port)))
    environment = os.environ | {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "PYTHONPATH": str(ROOT),
        "RAY_FAKE_CLUSTER": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
    }
    start = [str(ROOT / ".venv" / "bin" / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    start += [f"--port={port}", "--num-cpus=0", f"--autoscaling-config={config}", "--include-dashboard=false"]
    start += ["--object-store-memory=100000000", "--disable-usage-stats"]
    pipe = subprocess.PIPE
    with subprocess.Popen(start, env=environment, stdout=pipe, text=True, start_new_session=True) as head:
        assert head.stdout is not None  # it is a pipe
        try:
            assert any("Ray runtime started" in line for line in head.stdout), "it has not started"
            yield f"127.0.0.1:{port}"
        finally:
            started = [
                each for each in psutil.process_iter(["cmdline"]) if f":{port}" in " ".join(each.info["cmdline"] or ())
            ]
            for process in [*psutil.Process(head.pid).children(recursive=True), *started]:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            head.kill()
            if (current := Path("/tmp/ray/ray_current_cluster")).is_file() and f":{port}" in current.read_text():
                current.unlink()  # else Ray would offer the next driver a dead cluster


def test_a_run_waits_for_the_nodes_that_an_autoscaler_starts_for_it(address: str, tmp_path: Path) -> None:
    made = small_config(tmp_path / "runs", "scaled", evaluation={"enabled": False}, **WITHOUT_VLLM)
    (path := tmp_path / "scaled.json").write_text(json.dumps(made))
    command = [str(ROOT / ".venv" / "bin" / "rayrft"), "run", str(path)]
    environment = os.environ | {"RAY_ADDRESS": address}
    refused = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 1 and "placement.wait_s" in refused.stderr, refused.stdout + refused.stderr
    command += ["placement.wait_s=100", "stages.mix.steps=3"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "waiting up to 100 s for nodes: " in done.stdout
    summary = read_summary(tmp_path / "runs" / "scaled")
    assert summary is not None and summary.status == "finished"
