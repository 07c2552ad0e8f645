"""The files for clusters, read as Ray, KubeRay and the shell read them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config, validate_config

from rayrft.config import load_config, parse_override
from rayrft.core.bundles import ClusterNode, check_placement
from rayrft.core.parts.table import plan_placement
from tests.cluster.kuberay import KINDS
from tests.conftest import ROOT

CLUSTER = ROOT / "cluster"
CLOUDS = [CLUSTER / f"ray_up_{cloud}.yaml" for cloud in ("aws", "gcp")]
MANIFESTS = sorted((CLUSTER / "kuberay").glob("*.yaml"))
SCRIPTS = [*sorted(CLUSTER.glob("*.sh")), CLUSTER / "slurm.sbatch"]


@pytest.mark.parametrize("file", CLOUDS, ids=lambda path: path.stem)
def test_ray_up_accepts_its_files_and_workers_start_on_demand(file: Path) -> None:
    config = prepare_config(yaml.safe_load(file.read_text()))
    validate_config(config)
    workers = {name: kind for name, kind in config["available_node_types"].items() if name != config["head_node_type"]}
    assert workers and all(kind["min_workers"] == 0 < kind["max_workers"] for kind in workers.values())
    assert all(kind["resources"]["GPU"] > 0 for kind in workers.values())
    start, dashboard = config["head_start_ray_commands"][-2:]
    assert "ray start --head" in start and "cluster/grafana/dashboard.py" in dashboard


def ray_clusters(manifest: Path) -> list[dict[str, Any]]:
    """The RayClusters of a file, by themselves or inside jobs."""
    found = [each for each in yaml.safe_load_all(manifest.read_text()) if each["kind"] in ("RayCluster", "RayJob")]
    specs = [each["spec"] if each["kind"] == "RayCluster" else each["spec"]["rayClusterSpec"] for each in found]
    metadata = {"namespace": "default", "name": "rayrft"}
    return [{"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec} for spec in specs]


def resources_of_ray(manifest: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(manifest.read_text()) if each["apiVersion"].startswith("ray.io/")]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_kuberay_knows_every_field(manifest: Path) -> None:
    resources = resources_of_ray(manifest)
    assert resources and all(KINDS[each["kind"]].model_validate(each) for each in resources)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_kuberay_finds_the_resources_of_the_containers(manifest: Path) -> None:
    [cluster] = ray_clusters(manifest)
    cluster["spec"].setdefault("workerGroupSpecs", [])  # which only the autoscaler requires
    types = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    groups = {"headgroup": cluster["spec"]["headGroupSpec"]}
    groups |= {each["groupName"]: each for each in cluster["spec"]["workerGroupSpecs"]}
    assert types.keys() == groups.keys()
    for name, group in groups.items():
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
        assert pod["securityContext"]["runAsUser"] == 1000
        asked = container["resources"]["requests"]
        cpus = group["rayStartParams"].get("num-cpus", asked["cpu"])
        found = types[name]["resources"]
        assert found["CPU"] == int(cpus) and found["memory"] == int(asked["memory"].removesuffix("Gi")) << 30
        assert found.get("GPU", 0) == int(asked.get("nvidia.com/gpu", 0))


def test_jobs_run_configs_that_exist_and_resume_after_a_loss() -> None:
    for manifest in MANIFESTS:
        for job in yaml.safe_load_all(manifest.read_text()):
            if job["kind"] == "RayJob":
                command, mode, config, *overrides = job["spec"]["entrypoint"].split()
                assert (command, mode) == ("rayrft", "run") and job["spec"]["backoffLimit"] > 0
                values = dict(override.split("=") for override in overrides)
                checked = load_config(ROOT / Path(config).relative_to("/opt/rayrft"), values)
                assert checked.on_existing == "resume" and checked.storage == Path("/shared/runs")


@pytest.mark.parametrize("file", [CLUSTER / "kuberay" / "cluster.yaml", *CLOUDS], ids=lambda path: path.stem)
def test_the_job_in_the_head_of_a_cluster_fits_its_nodes_and_waits_for_them(file: Path) -> None:
    """The file starts none of them before the job is there."""
    [line] = re.findall(r"^#   ray job submit --working-dir jobs -- (.*)$", file.read_text(), re.MULTILINE)
    command, mode, config, *overrides = shlex.split(line)
    assert (command, mode) == ("rayrft", "run")
    job = load_config(ROOT / "jobs" / config, dict(map(parse_override, overrides)))
    if file in CLOUDS:
        types = prepare_config(yaml.safe_load(file.read_text()))["available_node_types"]
    else:
        types = _derive_autoscaling_config_from_ray_cr(ray_clusters(file)[0])["available_node_types"]
    memory = {"memory": 128 << 30}  # a machine of a cloud says it by itself
    nodes = [
        ClusterNode(name, memory | kind["resources"])
        for name, kind in types.items()
        for _ in range(kind["max_workers"])
    ]
    check_placement(plan_placement(job), nodes)
    assert job.placement.wait_s >= 300 and job.trainer.gpus and job.explorer.engine.gpus
    assert job.storage == Path("/shared/runs")


def test_a_job_for_a_cluster_elsewhere_waits_for_its_nodes() -> None:
    commands = re.findall(r"`RAY_ADDRESS=.*jobs/submit.py (.*)`", (CLUSTER / "README.md").read_text())
    assert commands and all("placement.wait_s=600" in command.split() for command in commands)


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_pods_without_gpus_have_an_image_without_cuda(manifest: Path) -> None:
    [spec] = [each["spec"] for each in ray_clusters(manifest)]
    groups = [spec["headGroupSpec"], *spec.get("workerGroupSpecs", [])]
    containers = [each for group in groups for each in group["template"]["spec"]["containers"]]
    with_gpus = any("nvidia.com/gpu" in each["resources"]["requests"] for each in containers)
    made = re.search(r"--build-arg DEVICE=cpu.*-t (\S+) \.$", manifest.read_text(), re.MULTILINE | re.DOTALL)
    assert {each["image"] for each in containers} == {"registry.example.com/rayrft" if made is None else made[1]}
    assert (made is None) is with_gpus


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_kubernetes_accepts_pods_and_volumes(manifest: Path) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate")
    claims = [each for each in yaml.safe_load_all(manifest.read_text()) if each["apiVersion"] == "v1"]
    [cluster] = [each["spec"] for each in ray_clusters(manifest)]
    pods = [group["template"] for group in (cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", []))]
    for made in [*claims, *({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **pod} for pod in pods)]:
        kubernetes.validate(made, "1.31", strict=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


YAMLLINT = "{extends: relaxed, rules: {line-length: {max: 200}}}"
LINTERS = [
    ["shellcheck", "--severity", "warning", *map(str, SCRIPTS)],
    ["hadolint", str(CLUSTER / "Containerfile")],
    ["yamllint", "-d", YAMLLINT, str(CLUSTER)],
]


@pytest.mark.parametrize("command", LINTERS, ids=lambda command: command[0])
def test_linters_find_nothing(command: list[str]) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if shutil.which(command[0], path=path) is None:
        pytest.skip(f"{command[0]} is not installed")
    subprocess.run(command, check=True, env={**os.environ, "PATH": path})


def test_nodes_in_namespaces_are_refused_by_name_without_arguments() -> None:
    done = subprocess.run(["bash", str(CLUSTER / "several_nodes.sh")], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("several_nodes: usage: several_nodes.sh N | --exec I")
