"""Checks that all nodes of a run see its folder, and the files that its config names."""

from __future__ import annotations

import contextlib
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rayrft.config import RunConfig
from rayrft.config.pipelines import OperatorConfig
from rayrft.config.reward import RewardPart
from rayrft.core.bundles import cluster_nodes
from rayrft.core.parts.buffer import BUFFER
from rayrft.core.placement import Placement
from rayrft.core.run_folder import writing
from rayrft.data.models import find_model, has_weights
from rayrft.errors import ClusterError, ConfigError, ModelError
from rayrft.runtime import ray_api
from rayrft.runtime.ray_api import ray

T = TypeVar("T")

_ANSWER_S = 120.0
"""Time for the nodes to look: each starts a process for it."""
_LOADERS = ("model", "process_model", "diverse", "embedding_novelty")
"""Rewards and operators whose option ``model`` is a folder or an id on the hub."""
_IMAGES = 100
"""Number of images that are looked for."""


def check_storage(config: RunConfig) -> None:
    """Raise ConfigError if a folder that the run writes is in a job's copy of its working directory: Ray makes it on
    one node, and deletes it after the job."""
    for field, folder in (("storage", config.folder), ("buffer.storage", config.buffer_folder)):
        if "runtime_resources/working_dir_files" in str(folder):
            problem = "is inside the job's copy of its working directory, which no other node sees and Ray deletes"
            remedy = "give the absolute path of a folder that all nodes share: storage=/shared/runs"
            raise ConfigError(problem, remedy, field=field, value=str(folder))


def named_models(config: RunConfig) -> dict[str, str]:
    """Return the models of a config, folders and ids on the hub, by their fields."""
    models = {"model.path": config.model.path}
    models |= {f"auxiliary.{name}.model": each.model for name, each in config.auxiliary.items()}
    models |= {f"stages.{each.name}.teacher": each.teacher for each in config.stages}
    return {field: str(path) for field, path in models.items() if path}


def named_files(config: RunConfig, images: Iterable[str] = ()) -> dict[str, list[str]]:
    """Return the files and folders that actors read, and models on the hub by their ids, by the config's field."""
    rewards = [part for each in config.reward.models.values() for part in each.scored_by]
    operators = [*config.pipelines.tasks, *config.pipelines.experiences, *config.pipelines.batch]
    users: list[RewardPart | OperatorConfig] = [*rewards, *operators]
    # Without a network find_model needs the main revision.
    loaded = [each.options.get("model") for each in users if each.name in _LOADERS and "revision" not in each.options]
    folders = [Path(path).expanduser() for path in loaded if path]
    files: dict[str, Iterable[Any]] = {
        "plugins": config.plugins,
        "weight_sync.files.address": [config.weight_sync.files.address],
        "images of tasks": [*dict.fromkeys(images)][:_IMAGES],
    }
    named = {field: [path] for field, path in named_models(config).items()}
    named["models of rewards and operators"] = [str(path.absolute() if path.is_dir() else path) for path in folders]
    named |= {field: [str(path) for path in paths if path and Path(path).exists()] for field, paths in files.items()}
    return {field: paths for field, paths in named.items() if paths}


def check_shared(folder: Path, files: Mapping[str, list[str]], nodes: Iterable[str]) -> None:
    """Raise ConfigError unless every node, by id, writes into this process' ``folder`` (created if missing) and sees
    the ``files``; and ClusterError if a node cannot look."""
    unseen = defaultdict[tuple[str, str], list[str]](list)
    for node, missing in ask_others(folder, files, nodes).items():
        for each in missing:
            unseen[each].append(node)
    for (field, path), names in unseen.items():
        more = f"; nor are {len(unseen) - 1} other paths" if len(unseen) > 1 else ""
        problem = f"is not visible on {', '.join(sorted(names))}, as it is on the node that starts the run{more}"
        remedy = "use a path that all nodes share, or keep the run off those nodes: placement.labels"
        raise ConfigError(problem, remedy, field=field, value=path)


def ask_others(folder: Path, files: Mapping[str, list[str]], nodes: Iterable[str]) -> dict[str, list[tuple[str, str]]]:
    """Return the answers of `find_missing` by the nodes' names, without this process' own node. The ``folder`` is
    created if it is missing."""
    others = {*nodes} - {ray.get_runtime_context().get_node_id()} if ray.is_initialized() else set()
    if not others:
        return {}
    marker = folder / f".seen-{uuid.uuid4().hex}"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
    try:
        return ask_nodes(others, find_missing, marker, files)
    finally:
        marker.unlink()


def locate_files(config: RunConfig, placement: Placement) -> str:
    """Return on which nodes the folders of a run are. Its groups are reserved, and `check_shared` has passed."""
    names = {node.id: node.name for node in cluster_nodes(ray_api.total_resources_per_node())}
    nodes = {*placement.nodes, ray.get_runtime_context().get_node_id()} & names.keys()
    log, owner = config.buffer_folder, placement.nodes_of(BUFFER.name) & names.keys()
    holders = {names[node] for node in nodes}
    lines = [f"files: run folder and checkpoints in {config.folder}, {_on(holders)}"]
    if owner:  # else the Buffer is not the run's
        if len(nodes) > 1 and not log.is_relative_to(config.folder):
            marker = log / f".seen-{uuid.uuid4().hex}"
            ask_nodes(owner, _mark, marker)
            seen = ask_nodes(nodes - owner, Path.exists, marker)
            ask_nodes(owner, Path.unlink, marker, True)
            holders = {*(names[node] for node in owner), *(name for name in seen if seen[name])}
        lines.append(f"log in {log}, {_on(holders)}")
    return "; ".join(lines)


def _mark(marker: Path) -> None:
    with contextlib.suppress(OSError):  # the Buffer raises it, as a StorageError
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()


def _on(names: set[str]) -> str:
    first, *others = sorted(names)
    return f"shared by {len(names)} nodes: {', '.join(sorted(names))}" if others else f"only on {first}"


def ask_nodes(nodes: Iterable[str], function: Callable[..., T], *arguments: Any) -> dict[str, T]:
    """Return a function's answer on each node, given by id, by the nodes' names; nodes that are lost meanwhile are
    missing.

    Raises ClusterError if a node cannot run it.
    """
    names = {node.id: node.name for node in cluster_nodes(ray_api.total_resources_per_node())}
    task, on = ray.remote(num_cpus=0, max_retries=0)(function), ray.util.scheduling_strategies
    asked = {
        node: task.options(scheduling_strategy=on.NodeAffinitySchedulingStrategy(node, soft=False)).remote(*arguments)
        for node in nodes
    }
    ready, _ = ray.wait([*asked.values()], num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
    answers = {}
    for node, asking in asked.items():
        try:
            if asking in ready:
                answers[names[node]] = ray.get(asking)
                continue
            problem = "it did not answer"
        except (ray.exceptions.RayError, ImportError) as error:
            if node not in {each.id for each in cluster_nodes(ray_api.total_resources_per_node())}:
                continue  # it was lost meanwhile
            problem = str(error).strip().splitlines()[-1]
        remedy = "install one version of rayrft on all nodes: bash cluster/setup.sh"
        raise ClusterError(f"node {names[node]} cannot run rayrft: {problem}", remedy)
    return answers


def find_missing(marker: Path, files: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """Return the fields and paths that this node does not see, or cannot write: ``storage`` for the marker's folder. It
    sees models on the hub, by their ids, if it has them cached, with their weights, or the hub answers."""
    missing = [(field, path) for field, paths in files.items() for path in paths if not _is_seen(path)]
    own = marker.with_suffix(f".{uuid.uuid4().hex}")
    try:
        own.touch()
        own.unlink()
        shared = marker.exists()
    except OSError:
        shared = False
    return missing if shared else [("storage", str(marker.parent)), *missing]


def _is_seen(path: str) -> bool:
    if Path(path).exists():
        return True
    if Path(path).is_absolute():
        return False
    try:
        return has_weights(find_model(path, ""))
    except ModelError:
        return False
