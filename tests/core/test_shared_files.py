"""Files that all nodes must see: which ones, and what a node says of them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayrft.buffer.log.storage import Storage
from rayrft.config import load_config
from rayrft.core import shared_files
from rayrft.core.bundles import ClusterNode
from rayrft.core.shared_files import check_shared, check_storage, find_missing, locate_files, named_files
from rayrft.errors import ConfigError, NoLocks
from rayrft.json_lines import open_lines
from tests.config.given import base
from tests.conftest import ROOT
from tests.errors import about
from tests.hub import TOKEN, hub

Nodes = dict[str, Callable[[Path], bool]]


@pytest.mark.parametrize("key", ["storage", "buffer.storage"])
def test_a_folder_inside_a_jobs_copy_of_its_working_directory_is_refused(key: str) -> None:
    copy = "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/runs"
    with pytest.raises(ConfigError, match=rf"^{key}: is inside the job's copy .* storage=/shared/runs"):
        check_storage(load_config(base(), {key: copy}))
    check_storage(load_config(base(), {key: "/shared/runs"}))


def test_paths_and_hub_ids_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "plugin.py").touch()
    plugin, image = str(tmp_path / "plugin.py"), str(tmp_path / "plugin.py")
    judges = {"judge": {"model": str(tmp_path / "model")}, "other": {"model": "org/model"}}
    rewards = {"parts": [{"name": "model", "options": {"model": name}, "label": name} for name in ("org/scores", "~")]}
    rewards["parts"].append({"name": "model", "options": {"model": "org/pinned", "revision": "1"}})
    operators = [{"name": "diverse", "model": "org/embeds"}, {"name": "judged", "model": "judge"}]
    config = load_config(
        base(), {"plugins": [plugin], "auxiliary": judges, "reward": rewards, "pipelines.tasks": operators}
    )
    found = {"models of rewards and operators": ["org/scores", str(Path.home()), "org/embeds"]}
    found |= {"plugins": [plugin], "auxiliary.judge.model": [str(tmp_path / "model")], "images of tasks": [image]}
    assert named_files(config, [image, image]) == {**found, "auxiliary.other.model": ["org/model"]}


LOOKS = """
import json, sys
from pathlib import Path
from rayrft.core.shared_files import find_missing

marker, said = Path(sys.argv[1]), []
for shards in (), ("model-1.safetensors",), ("model-1.safetensors", "model-2.safetensors"):
    for name in shards:
        [config] = marker.parent.rglob("config.json")
        (config.parent / name).touch()
    said.append([path for _, path in find_missing(marker, {"model.path": ["acme/tiny"], "teacher": ["acme/none"]})])
print(json.dumps(said))
"""
INDEX = {"weight_map": {"embed.weight": "model-1.safetensors", "norm.weight": "model-2.safetensors"}}


def test_a_node_sees_a_model_of_the_hub_if_its_weights_are_cached_or_the_hub_answers(
    tiny_model: Path, tmp_path: Path
) -> None:
    (marker := tmp_path / ".seen-1").touch()

    def looks(offline: str) -> list[list[str]]:
        """What a node does not see without weights, with a part of them, and with all, which it caches meanwhile."""
        settings = {"HF_ENDPOINT": address, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": offline}
        command = [sys.executable, "-c", LOOKS, str(marker)]
        said = subprocess.check_output(command, env={**os.environ, **settings, "PYTHONPATH": str(ROOT)}, text=True)
        found: list[list[str]] = json.loads(said.splitlines()[-1])
        return found

    with hub() as (address, kept):
        kept.repos["acme/tiny"] = {"main": {"config.json": (tiny_model / "config.json").read_bytes()}}
        assert looks("0") == [["acme/none"]] * 3
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    [config] = tmp_path.rglob("config.json")
    (config.parent / "model.safetensors.index.json").write_text(json.dumps(INDEX))
    assert looks("1") == [["acme/tiny", "acme/none"], ["acme/tiny", "acme/none"], ["acme/none"]]


def test_a_node_names_what_it_does_not_see_and_leaves_nothing(tmp_path: Path) -> None:
    marker = tmp_path / ".seen-1"
    files = {"plugins": [str(tmp_path / "there.py"), str(tmp_path / "missing.py")]}
    (tmp_path / "there.py").touch()
    absent = [("storage", str(tmp_path)), ("plugins", str(tmp_path / "missing.py"))]
    assert find_missing(marker, files) == absent
    marker.touch()
    assert find_missing(marker, files) == absent[1:]
    assert {path.name for path in tmp_path.iterdir()} == {".seen-1", "there.py"}
    assert find_missing(Path("/proc/.seen-1"), {}) == [("storage", "/proc")], "a folder that takes no files"


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Other nodes than this one, which is ``node-1``, each with the paths that it sees."""
    nodes: Nodes = {"node-1": Path.exists}

    def ask(asked: set[str], function: Any, path: Path, *arguments: Any) -> dict[str, Any]:
        if function is find_missing:
            [files] = arguments
            named = [("storage", str(path.parent)), *((field, each) for field in files for each in files[field])]
            return {node: [each for each in named if not nodes[node](Path(each[1]))] for node in asked}
        if function is Path.exists:
            return {node: nodes[node](path) and path.exists() for node in asked}
        return {node: function(path, *arguments) for node in asked}

    here = SimpleNamespace(get_node_id=lambda: "node-1")
    monkeypatch.setattr(
        shared_files, "ray", SimpleNamespace(get_runtime_context=lambda: here, is_initialized=lambda: True)
    )
    monkeypatch.setattr(shared_files, "ray_api", SimpleNamespace(total_resources_per_node=dict))
    monkeypatch.setattr(shared_files, "cluster_nodes", lambda _: [ClusterNode(name, {}, id=name) for name in nodes])
    monkeypatch.setattr(shared_files, "ask_nodes", ask)
    return nodes


@pytest.mark.parametrize("field", ["storage", "model.path", "plugins", "images of tasks"])
def test_a_path_that_nodes_do_not_see_is_refused_with_the_names_of_all_of_them(
    tmp_path: Path, nodes: Nodes, field: str
) -> None:
    paths = {name: tmp_path / f"{name}.d" for name in ("storage", "model.path", "plugins", "images of tasks")}
    for name, path in paths.items():
        path.touch() if name == "plugins" else path.mkdir()
    changes = {
        "storage": paths["storage"],
        "model": {"path": str(paths["model.path"])},
        "plugins": [str(paths["plugins"])],
    }
    config = load_config({**base(), **changes})
    files = named_files(config, [str(paths["images of tasks"])])
    nodes |= dict.fromkeys(("node-2", "node-3"), lambda path: path != paths[field])
    nodes["node-4"] = Path.exists
    with pytest.raises(ConfigError, check=about(field, str(paths[field]))) as error:
        check_shared(config.storage, files, [*nodes])
    assert "node-2, node-3" in error.value.problem and "node-4" not in error.value.problem
    assert not [*config.storage.iterdir()]
    check_shared(config.storage / "new", files, ["node-1", "node-4"])
    assert not [*(config.storage / "new").iterdir()]


@pytest.mark.parametrize(
    ("others", "storage", "where"),
    [
        ({}, None, "only on node-1; log in {log}, only on node-1"),
        ({"node-2": True}, None, "shared by 2 nodes: node-1, node-2; log in {log}, shared by 2 nodes: node-1, node-2"),
        (
            {"node-2": True},
            "logs",
            "shared by 2 nodes: node-1, node-2; log in {log}, shared by 2 nodes: node-1, node-2",
        ),
        ({"node-2": False}, "logs", "shared by 2 nodes: node-1, node-2; log in {log}, only on node-2"),
    ],
)
def test_the_nodes_of_a_runs_folders_are_said(
    tmp_path: Path, nodes: Nodes, others: dict[str, bool], storage: str | None, where: str
) -> None:
    """The Buffer is on the last node."""
    for name, shares in others.items():
        nodes["node-1"] = lambda path, shares=shares: shares
        nodes[name] = Path.exists
    config = load_config({**base(), "storage": tmp_path, "buffer": {"storage": storage and tmp_path / storage}})
    placement: Any = SimpleNamespace(nodes={*nodes}, nodes_of=lambda group: {[*nodes][-1]} & {*nodes})
    said = locate_files(config, placement)
    folders = f"files: run folder and checkpoints in {config.folder}, "
    assert said == folders + where.format(log=config.buffer_folder)
    assert not [path for path in tmp_path.rglob(".*")]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
@pytest.mark.parametrize("name", ["lock", "lines.jsonl"])
def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(NoLocks, check=about(name)) as error:
        Storage(tmp_path).lock() if name == "lock" else open_lines(tmp_path / name, bytes, locked=True)
    assert "file system has no file locks" in error.value.remedy
