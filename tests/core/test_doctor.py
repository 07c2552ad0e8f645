"""What keeps a machine from running rayrft is said before an actor starts, in one line with its remedy."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import rayrft
from rayrft.cli.main import app
from rayrft.config import load_config
from rayrft.core import doctor as module
from rayrft.core.bundles import Bundles, cluster_nodes
from rayrft.core.doctor import Gpu, Machine, check_gpus, doctor, judge, look
from rayrft.core.placement import named_actors
from rayrft.errors import ClusterError
from rayrft.runtime import ray_api
from tests.config.given import base

H100 = Gpu("H100", "GPU-1", 81_000, 80_000)
VERSIONS = {"rayrft": "0.1.0", "torch": "2.13.0", "vllm": "0.32.0"}
SOUND = Machine("one", VERSIONS, (H100, H100), "580.65.06", "13.0", 2, "/usr/bin/gcc", shared_gib=64.0)
SMI = """#!/bin/sh
case "$1" in
  --query-gpu=*) printf '%s\\n' 'NVIDIA H100, GPU-7, 81559, 20000, 570.12' 'NVIDIA H100, GPU-8, 81559, 81000, 570.12' ;;
  *) printf '%s\\n' "GPU-7, $PPID, 61000" ;;
esac
"""


def faults(machine: Machine, *, gpus: bool = False) -> list[str]:
    return [str(each) for each in judge([machine], [machine] if gpus else ()) if each.state != "ok"]


def test_a_sound_machine_has_a_line_for_each_gpu_and_no_fault() -> None:
    assert faults(SOUND, gpus=True) == []
    said = [str(each) for each in judge([SOUND])]
    assert "GPU 1, H100: 78 of 79 GiB free" in said[-1] and all(line.startswith("ok") for line in said)


@pytest.mark.parametrize(
    ("change", "said", "remedy"),
    [
        ({"driver": None, "gpus": (), "usable": 0}, "no NVIDIA driver answers", "--gpus=all"),
        ({"driver": "570.12"}, "driver 570.12, and torch's CUDA 13.0 needs 580", "Update the driver"),
        ({"cuda": None, "usable": 0}, "torch is built for CPUs", "RAYRFT_DEVICE=gpu"),
        ({"usable": 0}, "torch can use 0 of 2 GPUs", "CUDA_VISIBLE_DEVICES"),
        ({"usable": 0, "gpus": ()}, "torch can use 0 of 0 GPUs", "CUDA_VISIBLE_DEVICES"),
        ({"compiler": None}, "no C compiler", "apt-get install gcc"),
        ({"headers": False}, "no Python.h", "python3-dev"),
        ({"shared_gib": 0.0625}, "/dev/shm has 0.062 GiB", "--shm-size"),
        ({"address": "10.0.0.7"}, "no network interface has the node's address, 10.0.0.7", "--node-ip-address"),
        ({"gpus": (H100, replace(H100, free=20_000, holders=("python 77 (60000 MiB)",)))}, "held by python 77", "End"),
    ],
)
def test_a_fault_is_one_line_with_its_remedy(change: dict[str, Any], said: str, remedy: str) -> None:
    [line] = faults(replace(SOUND, **change), gpus=True)
    assert said in line and remedy in line and "\n" not in line


def test_an_older_cuda_needs_an_older_driver() -> None:
    assert faults(replace(SOUND, driver="550.1", cuda="12.8"), gpus=True) == []


def test_a_machine_without_gpus_needs_no_driver_unless_a_config_asks() -> None:
    bare = replace(SOUND, gpus=(), driver=None, cuda=None, usable=0, compiler=None)
    assert faults(bare) == [] and len(faults(bare, gpus=True)) == 2


def test_nodes_of_other_versions_and_of_other_gpus_are_named() -> None:
    other = replace(SOUND, name="two", versions={**VERSIONS, "vllm": "0.31.0"}, gpus=(replace(H100, name="A100"),) * 2)
    said = [str(each) for each in judge([SOUND, other]) if each.state != "ok"]
    assert "two: vllm 0.31.0, and 0.32.0 on one" in said[0] and "2 kinds: A100, H100" in said[1]


HEAD = replace(SOUND, name="head", gpus=(), driver=None, cuda=None, usable=0, compiler=None)


@pytest.mark.parametrize(("package", "version", "found"), [("rayrft", "0.2.0", 1), ("torch", "2.13.0+cpu", 0)])
def test_a_node_without_gpus_needs_the_same_release_and_no_driver(package: str, version: str, found: int) -> None:
    head = replace(HEAD, versions={**VERSIONS, package: version})
    said = [str(each) for each in judge([SOUND, head], [SOUND]) if each.state != "ok"]
    assert len(said) == found and all(f"head: {package} {version}" in line for line in said)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old driver, of which another process uses one of two GPUs; and no compiler."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)


@pytest.mark.usefixtures("driver")
def test_the_driver_is_asked_for_gpus_and_for_who_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    found = look()
    assert found.driver == "570.12" and [gpu.free for gpu in found.gpus] == [20_000, 81_000]
    assert found.gpus[1].holders == () and f"{os.getpid()} (61000 MiB)" in found.gpus[0].holders[0]
    assert found.compiler is None and not found.headers and "none" not in found.versions.values()
    said = " ".join(str(each) for each in judge([found]))
    for fault in ("needs 580", "no C compiler", "no Python.h", "20 of 80 GiB free; held by"):
        assert fault in said


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("visible", "found"), [("1", ["GPU-8"]), (" GPU-7 , GPU-8", ["GPU-7", "GPU-8"]), ("GPU-8", ["GPU-8"]), ("", [])]
)
def test_gpus_that_are_not_visible_to_torch_are_not_counted(
    visible: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.uuid for gpu in look().gpus] == found


@pytest.mark.usefixtures("driver")
def test_a_gpu_whose_driver_does_not_say_its_memory_is_no_fault(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI.replace("81559, 20000", "[N/A], [N/A]"))
    first, second = look().gpus
    assert (first.total, first.free, second.total) == (0, 0, 81_559)
    said = [str(each) for each in judge([replace(SOUND, gpus=(replace(first, holders=()), H100))])]
    assert any("unknown memory" in line and line.startswith("ok") for line in said)


def test_without_a_driver_there_are_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look().gpus == () and look().driver is None


def test_without_nvidia_smi_torch_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", uuid="GPU-7", total_memory=80 << 30)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    found = replace(look(), compiler="/usr/bin/gcc", headers=True, shared_gib=64.0)
    assert [(gpu.name, gpu.total) for gpu in found.gpus] == [("H100", 80 << 10)] * 2
    [note] = faults(found, gpus=True)
    assert note.startswith("note") and "nvidia-smi" in note


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result.exit_code, result.output


def test_a_config_says_which_models_and_folder_are_looked_for(tmp_path: Path, ray_cluster: Any) -> None:
    raw = {**base(), "storage": str(tmp_path / "runs"), "auxiliary": {"user": {"model": str(tmp_path / "none")}}}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(raw))
    code, said = command(str(tmp_path / "my.yaml"))
    assert code == 1 and "fault  auxiliary.user.model: no such model" in said
    assert "ok     storage: " in said and "GiB free" in said
    code, said = command(str(tmp_path / "my.yaml"), "auxiliary={}")
    assert code == 0 and "fault" not in said and "no GPU: engines and ranks run on the CPU" in said


def test_other_nodes_are_asked_for_the_files_that_a_config_names(
    tmp_path: Path, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def answers(nodes: Any, function: Any, *arguments: Any) -> dict[str, Any]:
        asked.extend(arguments)
        return {"two": [("storage", str(arguments[0].parent)), ("auxiliary.user.model", "org/model")]}

    own = ray_cluster.address_info["node_id"]
    monkeypatch.setattr("rayrft.core.shared_files.ask_nodes", answers)
    monkeypatch.setattr(module, "find_model", lambda path, field: path)
    config = load_config(base(), {"storage": str(tmp_path), "auxiliary.user.model": "org/model"})
    said = [str(each) for each in module.judge_files(config, [own, "other"]) if each.state == "fault"]
    assert [line.split(".")[0] for line in said] == [
        f"fault  storage: node two does not see {tmp_path}",
        "fault  auxiliary",
    ]
    marker, files = asked
    assert files == {"auxiliary.user.model": ["org/model"]} and not marker.exists()
    asked.clear()
    assert [*module.judge_files(config, [own])] and asked == []


def test_all_nodes_of_a_run_are_compared_at_its_start(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    [node] = cluster_nodes(ray_api.total_resources_per_node())
    plan = [Bundles("engines", 1, 0.1, 1.0, 0.1, ""), Bundles("buffer", 1, 0.1, 0.0, 0.1, "")]
    machines = {node.name: SOUND, "head": HEAD}
    asked, said = list[set[str]](), list[str]()
    monkeypatch.setattr(module, "ask_nodes", lambda nodes, function: asked.append(nodes) or machines)
    monkeypatch.setattr(module, "fitting_nodes", lambda parts: {node.id, *["head"] * (len(parts) > 1)})
    assert check_gpus(plan, said.append) == pytest.approx(81_000 * 2**20 / 1e9) and asked == [{node.id, "head"}]
    assert said == []
    machines[node.name] = replace(SOUND, gpus=(replace(H100, free=20_000), H100), shared_gib=0.5)
    check_gpus(plan, said.append)
    assert [line.split(":")[0] for line in said] == ["note   one"] * 2 and "20 of 79 GiB free" in said[1]
    machines["head"] = replace(HEAD, versions={**VERSIONS, "rayrft": "0.2.0"})
    with pytest.raises(ClusterError, match=r"^node head: rayrft 0.2.0, and 0.1.0 on one"):
        check_gpus(plan, said.append)
    machines[node.name] = replace(SOUND, gpus=(replace(H100, total=0),))
    machines["head"] = HEAD
    assert check_gpus(plan, said.append) is None, "the driver does not say the memory"


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs are there")
def test_gpus_that_ray_counts_and_torch_has_not_end_a_run_before_any_actor(tmp_path: Path, ray_cluster: Any) -> None:
    with pytest.raises(ClusterError, match=r"^node \S+: no NVIDIA driver answers") as error:
        check_gpus([Bundles("engines", 1, 0.1, 1.0, 0.1, "")], print)
    assert "--gpus=all" in error.value.remedy
    check_gpus([Bundles("engines", 1, 0.1, 0.0, 0.1, "")], print)  # none is asked for
    gpus = {"explorer.engine": {"count": 1, "gpus": 1}, "trainer": {"ranks": 1, "gpus": 1}}
    with pytest.raises(ClusterError, match="no NVIDIA driver answers"):
        rayrft.start({**base(), "storage": str(tmp_path), "name": "no-gpus"}, **gpus)
    assert named_actors("no-gpus:") == [] and not (tmp_path / "no-gpus").exists()
    assert any("no GPU" in each.found for each in doctor())
