"""`cluster/slurm.sbatch` on a SLURM of two nodes: a signal, a requeue, and the quickstart to its end."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rayrft.monitor.records import StepRecord, read_records
from rayrft.monitor.summary import read_summary
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

Start = Callable[..., "subprocess.Popen[str]"]
TOOLS = ["sbatch", "slurmctld", "slurmd", "munged", "ip", "unshare", "nsenter"]
APART = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
STEPS = 40
QUICK = ["tasks.eval_size=20", "stages.warmup.steps=2", f"stages.mix.steps={STEPS}", "stages.mix.batch_size=72"]
QUICK += ["explorer.drop_zero_variance=false"]  # after two steps of a warm-up nothing is right


@pytest.fixture
def on_slurm(tmp_path: Path) -> Iterator[Start]:
    """Starts a command on the first of two nodes."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=path) is None]:
        pytest.skip(f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge iproute2")
    if os.geteuid() != 0 or subprocess.run([*APART, "true"], capture_output=True).returncode:
        pytest.skip("a SLURM with nodes in namespaces needs root, and a machine that allows them")
    folder = tmp_path / "slurm"
    folder.mkdir()
    environment = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf"), "HOME": str(tmp_path)}
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        environment.pop(name, None)
    script, job = ROOT / "tests" / "cluster" / "slurm.sh", str(os.getpid())
    command = [*APART, "bash", str(script), str(folder), job]
    cluster = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert cluster.stdout is not None and cluster.stdout.readline() == "ready\n"
        first = subprocess.check_output(["pgrep", "--parent", str(cluster.pid)], text=True).strip()
        enter = ["nsenter", "--target", first, "--net", "--mount", "--uts", "--pid"]

        def start(*command: str) -> subprocess.Popen[str]:
            full = [*enter, "env", "-C", str(ROOT), *command]
            return subprocess.Popen(full, stdout=subprocess.PIPE, text=True, env=environment)

        yield start
    finally:
        cluster.kill()
        cluster.wait()
        Path(f"/tmp/rayrft-{job}").rmdir()


def submit(start: Start, log: Path, line: str, signal: str, *arguments: str, **variables: str) -> tuple[int, str]:
    """Submit a job, send a signal when its log has a line, and return its exit status and what SLURM says about it."""
    log.touch()
    export = ",".join(["ALL", *(f"{key}={value}" for key, value in variables.items())])
    options = ["--wait", "--nodes=2", f"--output={log}", f"--export={export}"]
    job = start("sbatch", *options, "cluster/slurm.sbatch", *arguments)
    threading.Thread(target=job.wait, daemon=True).start()  # `tail` takes a process that nobody awaits for a live one
    follow = subprocess.Popen(["tail", "-f", f"--pid={job.pid}", str(log)], stdout=subprocess.PIPE, text=True)
    assert follow.stdout is not None  # it is a pipe
    assert any(each.startswith(line) for each in follow.stdout), log.read_text()
    assert start("scancel", "--batch", f"--signal={signal}", "--name=rayrft").wait(60) == 0
    status = job.wait(900)
    return status, start("scontrol", "show", "job", str(os.getpid())).communicate(timeout=60)[0]


def test_a_signal_saves_the_run_and_the_requeued_job_ends_it(on_slurm: Start, tmp_path: Path) -> None:
    log, storage = tmp_path / "log", tmp_path / "runs"
    arguments = ["jobs/quickstart.yaml", f"storage={storage}", *QUICK]
    status, shown = submit(on_slurm, log, "[mix    3]", "USR1", *arguments)
    text = log.read_text()
    assert status == 0 and "Restarts=1" in shown, text
    assert "shared by 2 nodes" in text and "resumes after" in text and text.count("finished after") == 1
    summary = read_summary(storage / "quickstart")
    assert summary is not None and summary.ledger is not None
    assert summary.status == "finished" and summary.ledger.closes
    steps = [record.step for record in read_records(storage / "quickstart") if isinstance(record, StepRecord)]
    assert steps == [*range(1, 3 + STEPS)], "nothing twice, nothing lost"


RAY = """case $1 in
  start) echo "starts"; exec sleep 600 ;;
  status) [ -z "${UP:-}${SLURM_RESTART_COUNT:-}" ] || echo " node_1" ;;
esac"""
RAYRFT = """[ -z "${SLURM_RESTART_COUNT:-}" ] || exit 0
trap "echo saved; exit 143" TERM
echo running; sleep 600 & wait"""


@pytest.fixture
def home(tmp_path: Path) -> str:
    """A checkout whose Ray is up if UP is set or the job was requeued, and whose run then ends or awaits a signal."""
    programs = tmp_path / "checkout" / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, script in (("ray", RAY), ("rayrft", RAYRFT)):
        (programs / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (programs / name).chmod(0o755)
    return str(tmp_path / "checkout")


def test_a_signal_before_the_run_requeues_the_job(on_slurm: Start, tmp_path: Path, home: str) -> None:
    status, shown = submit(on_slurm, tmp_path / "log", "starts", "USR1", RAYRFT_HOME=home)
    assert status == 0 and "Restarts=1" in shown


def test_a_run_is_stopped_with_its_weights_saved(on_slurm: Start, tmp_path: Path, home: str) -> None:
    status, shown = submit(on_slurm, tmp_path / "log", "running", "TERM", RAYRFT_HOME=home, UP="1")
    assert status == 143 and "Restarts=0" in shown
    assert "saved" in (tmp_path / "log").read_text().splitlines()
