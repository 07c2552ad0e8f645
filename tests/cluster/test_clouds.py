"""The files of `ray up` as far as the request for a machine: by Ray's bootstrap and providers, on a stubbed cloud."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config

from tests.conftest import ROOT

RAY = "ray.autoscaler._private"
BOTO = ["boto3", "boto3.exceptions", "boto3.resources.base"]
BOTO += [f"botocore{part}" for part in ("", ".client", ".config", ".exceptions")]
GOOGLE = ["google_auth_httplib2", "httplib2", *(f"googleapiclient{part}" for part in ("", ".discovery", ".errors"))]


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    """An account with one network and nothing of Ray; the modules of both clouds lead to it."""
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes a key there
    error, cloud = type("Refused", (Exception,), {}), MagicMock()
    subnet = MagicMock(subnet_id="net", vpc_id="vpc", state="available", availability_zone="a")
    cloud.subnets.all.return_value = cloud.subnets.filter.return_value = [subnet]
    group = MagicMock(vpc_id="vpc", group_name="ray-autoscaler-rayrft", id="group")
    cloud.security_groups.filter.side_effect = [[], [group]]  # Ray creates it between its two questions
    cloud.create_key_pair.return_value.key_material = "key"
    project = {"projectId": "it", "name": "it", "lifecycleState": "ACTIVE", "commonInstanceMetadata": {}}
    cloud.projects().get().execute.return_value = project
    cloud.projects().getIamPolicy().execute.return_value = {"bindings": []}
    cloud.globalOperations().get().execute.return_value = {"status": "DONE"}
    cloud.zoneOperations().get().execute.return_value = {"status": "DONE"}
    cloud.subnetworks().list().execute.return_value = {"items": [{"selfLink": "net"}]}
    modules: dict[str, Any] = {
        name: MagicMock(__version__="1", HttpError=error, ClientError=error) for name in BOTO + GOOGLE
    }
    modules["boto3"] = MagicMock(__version__="1.44", resource=MagicMock(return_value=cloud))
    modules["googleapiclient"].discovery.build.return_value = cloud
    modules["googleapiclient"].errors = modules["googleapiclient.errors"]
    modules["botocore"].exceptions = modules["botocore.exceptions"]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield cloud
    for name in [each for each in sys.modules if each.startswith((f"{RAY}.aws", f"{RAY}.gcp"))]:
        del sys.modules[name]  # it has seen the stub


def request_node(cloud: str, provider: str, node: str) -> None:
    """Bootstrap a cluster, and request one node of a type."""
    config = prepare_config(yaml.safe_load((ROOT / "cluster" / f"ray_up_{cloud}.yaml").read_text()))
    config = getattr(import_module(f"{RAY}.{cloud}.config"), f"bootstrap_{cloud}")(config)
    nodes = getattr(import_module(f"{RAY}.{cloud}.node_provider"), provider)(config["provider"], "rayrft")
    nodes.create_node(config["available_node_types"][node]["node_config"], {"ray-node-name": node}, 1)


@pytest.mark.parametrize(("node", "machine", "spot"), [("head", "m5.2xlarge", None), ("gpus", "g5.12xlarge", "spot")])
def test_aws_gets_a_request_for_a_node_of_the_file(cloud: MagicMock, node: str, machine: str, spot: str | None) -> None:
    request_node("aws", "AWSNodeProvider", node)
    [request] = [call.kwargs for call in cloud.create_instances.call_args_list]
    assert request["InstanceType"] == machine and request["SubnetId"] == "net" and request["MaxCount"] == 1
    assert request["ImageId"].startswith("ami-") and request["SecurityGroupIds"] == ["group"] and request["KeyName"]
    assert request.get("InstanceMarketOptions", {}).get("MarketType") == spot


GOOGLES = [("head", "n2-standard-8", None), ("gpus", "g2-standard-48", True)]


@pytest.mark.parametrize(("node", "machine", "spot"), GOOGLES)
def test_google_gets_a_request_for_a_node_of_the_file(cloud: MagicMock, node: str, machine: str, spot: bool) -> None:
    request_node("gcp", "GCPNodeProvider", node)
    [request] = [call.kwargs["body"] for call in cloud.instances().insert.call_args_list]
    assert request["machineType"] == f"zones/us-central1-a/machineTypes/{machine}"
    assert request["networkInterfaces"][0]["subnetwork"] == "net" and request["disks"][0]["boot"]
    assert request.get("scheduling", {}).get("preemptible") == spot
