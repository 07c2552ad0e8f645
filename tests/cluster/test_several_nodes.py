"""A cluster of two nodes, each in namespaces of its own: what goes wrong only between nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from rayrft.monitor.records import StepRecord, read_records
from rayrft.monitor.summary import read_summary
from tests.conftest import ROOT
from tests.e2e.conftest import WITHOUT_VLLM, small_config

pytestmark = pytest.mark.slow

SCRIPT = ["bash", str(ROOT / "cluster" / "several_nodes.sh")]
RAYRFT = str(ROOT / ".venv" / "bin" / "rayrft")
SLOW_FROM = {8: (0, 2), 18: (50, 0), 28: (50, 2)}
"""Delay in each direction (ms) and loss (%) of the link between the nodes, after these steps of a run."""
On = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which the script finds the running cluster."""
    environment = {
        **os.environ,
        "RAYRFT_NODES": f"/tmp/rayrft-test-{os.getpid()}",
        "HOME": str(tmp_path_factory.mktemp("home")),
        "PYTHONPATH": str(ROOT),
    }
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        environment.pop(name, None)
    pipe = subprocess.PIPE
    cluster = subprocess.Popen([*SCRIPT, "2"], stdout=pipe, stderr=pipe, text=True, env=environment)
    try:
        assert cluster.stdout is not None and cluster.stderr is not None  # they are pipes
        if not cluster.stdout.readline().startswith("RAY_ADDRESS="):
            why = cluster.stderr.read().strip()
            pytest.skip(why) if cluster.wait(60) == 77 else pytest.fail(why)
        yield environment
    finally:
        cluster.send_signal(signal.SIGINT)
        subprocess.run([*SCRIPT, "--stop"], env=environment)
        cluster.wait(60)


@pytest.fixture
def on(nodes: dict[str, str]) -> On:
    """Runs a command on a node, in an environment with these changes; node 0 runs no Ray."""

    def run(node: int, *command: str, cwd: Path = ROOT, **changes: str) -> subprocess.CompletedProcess[str]:
        variables = [f"{key}={value}" if value else f"--unset={key}" for key, value in changes.items()]
        full = [*SCRIPT, "--exec", str(node), "env", *sorted(variables), *command]
        return subprocess.run(full, env=nodes, cwd=cwd, capture_output=True, text=True, timeout=900)

    return run


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run whose node is lost."""
    return tmp_path_factory.mktemp("runs") / "cut"


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Path]:
    """Writes a small run's config, with Explorer and engines on node 2, and Buffer and ranks on node 1."""

    def write(name: str, **changes: Any) -> Path:
        made = small_config(tmp_path / "runs", name, evaluation={"enabled": False}, **changes)
        where = {"engines": "2", "explorer": "2", "buffer": "1", "ranks": "1", "master": "1"}
        made["placement"] = {"labels": {group: {"node": node} for group, node in where.items()}}
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(made))
        return path

    return write


def test_a_run_goes_on_without_loss_when_a_killed_node_is_replaced(
    nodes: dict[str, str], on: On, config: Callable[..., Path], tmp_path: Path
) -> None:
    """With real engines: hosts files that map a node's name to 127.0.1.1 are no obstacle to gloo."""
    path = config("lives", checkpoint={"every": 2})
    command = [*SCRIPT, "--exec", "1", RAYRFT, "run", str(path), "stages.mix.steps=20"]
    with subprocess.Popen(command, env=nodes, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None  # it is a pipe
        assert any(line.startswith("[mix    8]") for line in running.stdout), "it ended before its eighth step"
        subprocess.run([*SCRIPT, "--kill", "2"], env=nodes, check=True)
        subprocess.run([*SCRIPT, "--join", "2"], env=nodes, check=True)
        said, _ = running.communicate(timeout=500)
    assert running.returncode == 0, said
    folder = tmp_path / "runs" / "lives"
    summary = read_summary(folder)
    assert summary is not None and summary.ledger is not None
    assert summary.status == "finished" and summary.ledger.closes
    assert summary.restarts.keys() >= {"engines", "explorer"}
    steps = [record for record in read_records(folder) if isinstance(record, StepRecord)]
    assert [record.step for record in steps] == [*range(1, 24)], "nothing twice, nothing lost"
    assert all(record.metrics.logprob_gap < 1e-4 for record in steps if record.usual_rows)


def test_a_run_goes_on_over_a_link_that_loses_and_delays_packets_and_is_cut_for_a_while(
    nodes: dict[str, str], config: Callable[..., Path], tmp_path: Path
) -> None:
    command = [*SCRIPT, "--exec", "1", RAYRFT, "run", str(config("link", **WITHOUT_VLLM)), "stages.mix.steps=60"]
    refused = ""
    with subprocess.Popen(command, env=nodes, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None  # it is a pipe
        for step, (delay_ms, loss_percent) in SLOW_FROM.items():
            assert any(line.startswith(f"[mix {step:4}]") for line in running.stdout), f"it ended before step {step}"
            slow = [*SCRIPT, "--slow", "2", str(delay_ms), str(loss_percent)]
            done = subprocess.run(slow, env=nodes, stderr=subprocess.PIPE, text=True)
            refused = done.stderr.strip() if done.returncode == 77 else ""
            assert done.returncode in (0, 77), done.stderr
        assert any(line.startswith("[mix   38]") for line in running.stdout), "it ended before step 38"
        subprocess.run([*SCRIPT, "--cut", "2"], env=nodes, check=True)
        time.sleep(15)  # less than Ray takes to give the node up
        subprocess.run([*SCRIPT, "--plug", "2"], env=nodes, check=True)
        said, _ = running.communicate(timeout=800)  # answers may be lost: Ray asks for them again after 7 minutes
    subprocess.run([*SCRIPT, "--slow", "2", "0", "0"], env=nodes)
    assert running.returncode == 0, said
    summary = read_summary(tmp_path / "runs" / "link")
    assert summary is not None and summary.status == "finished"
    assert summary.ledger is not None and summary.ledger.closes
    steps = [record for record in read_records(tmp_path / "runs" / "link") if isinstance(record, StepRecord)]
    assert [record.step for record in steps] == [*range(1, 64)], "nothing twice, nothing lost"
    if refused:
        pytest.skip(f"the link was cut and healed, but not slow: {refused}")
    for first, (delay_ms, loss_percent) in {3: (0, 0), **SLOW_FROM}.items():
        seconds = [record.step_s for record in steps[first : first + 5]]
        print(f"{delay_ms} ms, {loss_percent} % lost: steps of {median(seconds):.2f} s, at most {max(seconds):.2f} s")


def test_what_a_node_does_not_see_is_refused_with_its_name(on: On, config: Callable[..., Path]) -> None:
    path = config("unseen", **WITHOUT_VLLM)
    done = on(1, RAYRFT, "run", str(path), "storage=/dev/shm/runs")
    assert done.returncode == 1 and "error: storage: is not visible on node-2" in done.stderr
    assert on(1, "cp", str(ROOT / "tests" / "without_vllm.py"), "/dev/shm/plugin.py").returncode == 0
    done = on(1, RAYRFT, "run", str(path), 'plugins=["/dev/shm/plugin.py"]')
    assert done.returncode == 1 and "error: plugins: is not visible on node-2" in done.stderr


def test_a_machine_outside_and_a_process_without_the_token_are_refused_in_one_line(
    on: On, config: Callable[..., Path]
) -> None:
    path = config("outside", **WITHOUT_VLLM)
    done = on(0, RAYRFT, "run", str(path))
    assert done.returncode == 1 and "RAY_ADDRESS: this machine is not a node of the cluster" in done.stderr
    assert "http://10.77.0.1:8265 ray job submit" in done.stderr.splitlines()[-1]
    done = on(1, RAYRFT, "run", str(path), RAY_AUTH_MODE="", RAY_AUTH_TOKEN_PATH="")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: RAY_ADDRESS: the cluster requires a token, and we send none")


def test_a_job_is_submitted_from_outside_with_its_working_directory(
    on: On, config: Callable[..., Path], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    config("job", **WITHOUT_VLLM).rename(source / "my.yaml")
    submit = ["ray", "job", "submit", "--working-dir", ".", "--", "rayrft", "run", "my.yaml"]  # as in the README
    address = {"RAY_ADDRESS": "http://10.77.0.1:8265"}
    done = on(0, *submit, f"storage={tmp_path / 'runs'}", cwd=source, **address)
    assert done.returncode == 0 and "finished after" in done.stdout, done.stdout + done.stderr
    folder, shared = tmp_path / "runs" / "job", "shared by 2 nodes: node-1, node-2"
    files = f"files: run folder and checkpoints in {folder}, {shared}; log in {folder / 'buffer'}, {shared}"
    assert files in done.stdout
    local = ["name=local", "buffer.storage=/dev/shm/logs", "stages.mix.steps=1"]
    done = on(0, *submit, f"storage={tmp_path / 'runs'}", *local, cwd=source, **address)
    assert done.returncode == 0 and "log in /dev/shm/logs/local, only on node-1" in done.stdout
    lost = on(0, *submit, "name=lost", "storage=runs", cwd=source, **address)
    assert lost.returncode != 0 and "storage: is inside the job's copy of its working directory" in lost.stdout


def test_ctrl_c_ends_the_following_alone_and_a_job_that_is_stopped_is_saved_and_continued_by_the_next_submission(
    nodes: dict[str, str], on: On, config: Callable[..., Path], tmp_path: Path
) -> None:
    job, address = [str(ROOT / ".venv/bin/ray"), "job"], "http://10.77.0.1:8265"
    run = ["--", RAYRFT, "run", str(config("halted", on_existing="resume", **WITHOUT_VLLM))]
    command = [*job, "submit", "--submission-id", "halted", *run]
    assert _interrupted(nodes, address, *command, "stages.mix.steps=100000") != 0
    assert "RUNNING" in on(0, *job, "status", "halted", RAY_ADDRESS=address).stdout
    assert on(0, *job, "stop", "halted", RAY_ADDRESS=address).returncode == 0
    # Ray has killed the driver; who starts the run again waits for its end.
    refused = on(1, RAYRFT, "resume", str(folder := tmp_path / "runs" / "halted"), "trainer.cpus=1000")
    assert "the run needs 1001 CPU" in refused.stderr, refused.stdout + refused.stderr
    _assert_saved(folder)
    taken = max(record.step for record in read_records(folder) if isinstance(record, StepRecord))
    again = on(0, *job, "submit", *run, f"stages.mix.steps={taken}", RAY_ADDRESS=address)
    assert again.returncode == 0 and "finished after" in again.stdout, again.stdout + again.stderr
    steps = [record.step for record in read_records(folder) if isinstance(record, StepRecord)]
    assert steps == [*range(1, 3 + taken + 1)], "those after the stop follow those before it"


def test_ctrl_c_of_the_script_that_submits_stops_the_job(
    nodes: dict[str, str], config: Callable[..., Path], tmp_path: Path
) -> None:
    (script := tmp_path / "run.py").write_text("from rayrft.cli.main import app\n\napp()\n")
    command = [str(ROOT / ".venv/bin/python"), str(ROOT / "jobs" / "submit.py"), str(script), "run"]
    command += [str(config("left", **WITHOUT_VLLM)), "stages.mix.steps=100000"]
    assert _interrupted(nodes, "http://10.77.0.1:8265", *command) == 130
    _assert_saved(tmp_path / "runs" / "left")


def _interrupted(nodes: dict[str, str], address: str, *command: str) -> int:
    """Submit a run from node 0, and press Ctrl-C once it has taken some steps; return the exit status."""
    following = [*SCRIPT, "--exec", "0", "env", f"RAY_ADDRESS={address}", *command]
    with subprocess.Popen(following, env=nodes, cwd=ROOT, stdout=subprocess.PIPE, text=True) as submitted:
        assert submitted.stdout is not None  # it is a pipe
        assert any(line.startswith("[mix    6]") for line in submitted.stdout), "it ended before its sixth step"
        [entered] = psutil.Process(submitted.pid).children()
        entered.send_signal(signal.SIGINT)
        submitted.communicate(timeout=180)
    return submitted.returncode


def _assert_saved(folder: Path) -> None:
    summary = read_summary(folder)
    assert summary is not None and summary.status == "stopped" and summary.checkpoint is not None
    assert (Path(summary.checkpoint) / "model.safetensors").is_file()


def test_a_cut_link_is_named_with_both_addresses_within_a_minute(
    nodes: dict[str, str], config: Callable[..., Path], cut: Path
) -> None:
    """The next test continues the run."""
    command = [*SCRIPT, "--exec", "1", RAYRFT, "run", str(config("cut", restarts={"per_hour": 0}, **WITHOUT_VLLM))]
    command += ["stages.mix.steps=100000", f"storage={cut.parent}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=nodes, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as running:
        assert running.stdout is not None and running.stderr is not None  # they are pipes
        assert any(line.startswith("[mix    6]") for line in running.stdout), "it ended before its sixth step"
        subprocess.run([*SCRIPT, "--cut", "2"], env=nodes, check=True)
        cut = time.monotonic()
        said = next((line for line in running.stderr if "on 10.77.0.2, seen from 10.77.0.1" in line), "")
        named = time.monotonic() - cut
        running.communicate(timeout=180)
    assert running.returncode == 1 and "its node has died" in said
    assert named < 60


def test_a_run_that_has_lost_a_node_is_resumed_waits_for_another_and_has_ranks_on_both(
    nodes: dict[str, str], cut: Path
) -> None:
    """The last test that needs the second node. Neither rank fits beside the other."""
    taken = len([record for record in read_records(cut) if isinstance(record, StepRecord)])
    subprocess.run([*SCRIPT, "--kill", "2"], env=nodes, check=True)
    command = [*SCRIPT, "--exec", "1", RAYRFT, "resume", str(cut), f"stages.mix.steps={taken + 3}"]
    command += ["trainer.ranks=2", "trainer.cpus=1.2", "placement.labels.ranks={}", "placement.wait_s=120"]
    with subprocess.Popen(command, env=nodes, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None  # it is a pipe
        waits = next((line for line in running.stdout if line.startswith("waiting up to 120 s for nodes")), "")
        subprocess.run([*SCRIPT, "--join", "2"], env=nodes, check=True)
        said, _ = running.communicate(timeout=500)
    assert running.returncode == 0, said
    assert "the run needs 3.2 CPU and the cluster has 2 free: node-1" in waits
    summary = read_summary(cut)
    assert summary is not None and summary.ledger is not None
    assert summary.status == "finished" and summary.ledger.closes
    steps = [record.step for record in read_records(cut) if isinstance(record, StepRecord)]
    assert steps == [*range(1, 3 + taken + 3 + 1)], "nothing twice, nothing lost"


def test_a_user_who_is_not_root_has_a_cluster_in_a_user_namespace(nodes: dict[str, str], tmp_path: Path) -> None:
    environment = {**nodes, "RAYRFT_NODES": str(tmp_path / "state"), "RAYRFT_NODE_ROOTLESS": "1"}
    with subprocess.Popen([*SCRIPT, "1"], stdout=subprocess.PIPE, env=environment, text=True) as cluster:
        assert cluster.stdout is not None  # it is a pipe
        if not cluster.stdout.readline() and cluster.wait(60) == 77:
            pytest.skip("this machine allows no user namespaces")
        command = [*SCRIPT, "--exec", "1", "sh", "-c", "ray status && readlink /proc/self/ns/user"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        subprocess.run([*SCRIPT, "--stop"], env=environment, check=True)
        cluster.wait(60)
    assert done.returncode == 0 and done.stdout.count(" node_") == 1, done.stdout + done.stderr
    assert "user:[" in done.stdout and os.readlink("/proc/self/ns/user") not in done.stdout
    assert not (tmp_path / "state").exists()


def test_a_head_that_does_not_start_is_an_error_and_leaves_nothing(nodes: dict[str, str], tmp_path: Path) -> None:
    environment = nodes | {"RAYRFT_NODES": str(tmp_path / "state"), "RAYRFT_NODE_STORE": "many"}
    done = subprocess.run([*SCRIPT, "1"], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "the head did not start" in done.stderr and "'many'" in done.stderr
    assert not (tmp_path / "state").exists()
