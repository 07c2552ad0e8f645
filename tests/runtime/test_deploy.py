"""Applications over HTTP are opened on the head node, whose address clients know and on which Ray Serve listens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import free_port

_SCRIPT = """
import sys

import httpx
import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster

from rayrft.config import read_config
from rayrft.config.serve import RewardServiceConfig
from rayrft.core.services import serve_rewards

from rayrft.errors import ConfigError
from rayrft.runtime.serving import applications


def opened_from_here(fails):
    def opening(*settings):
        if fails:
            raise ConfigError("taken", field="serve.port", remedy="give another")
        return ray.get_runtime_context().get_node_id()

    applications._open = opening
    return applications.HttpApplication("app", "route", None, None, None, ()).open()


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
cluster.add_node(num_cpus=2)
ray.init(cluster.address)
opened = ray.remote(opened_from_here).options(num_cpus=1, max_retries=0)  # so the head is no place for it
assert ray.get(opened.remote(False)) == cluster.head_node.node_id
try:
    ray.get(opened.remote(True))
except ConfigError as error:
    assert error.field == "serve.port"
else:
    raise AssertionError("it opened")
settings = {"reward": {"name": "math"}, "serve": {"port": int(sys.argv[1]), "replicas": 2}}
service = serve_rewards(read_config(RewardServiceConfig, settings))
asked = {"task": {"prompt": "1 + 1?", "answer": "2"}, "response": "It is 2."}
assert httpx.post(f"{service.url}/score", json=asked, timeout=60).json()["value"] == 1
# Both of these nodes have one loopback address. Others have one each, at which a replica listens for its own node.
replicas = [each for each in actors().values() if "rewards:http" in each["Name"]]
assert len(replicas) == 2 and {each["Address"]["NodeID"] for each in replicas} == {cluster.head_node.node_id}
service.stop()
print("as it should be")
"""


@pytest.mark.slow
def test_an_application_is_opened_and_served_on_a_head_without_cpus_from_any_node(tmp_path: Path) -> None:
    """In a process of its own: it makes a cluster of two nodes."""
    environment = {**os.environ, "RAY_ADDRESS": "", "RAY_USAGE_STATS_ENABLED": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(free_port())],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0 and "as it should be" in ran.stdout, ran.stderr[-4000:]
