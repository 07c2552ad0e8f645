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
STEPS = 40
QUICK = ["tasks.eval_size=20", "stages.warmup.steps=2", f"stages.mix.steps={STEPS}", "stages.mix.batch_size=72"]
QUICK += ["explorer.drop_zero_variance=false"]  # after two steps of a warm-up nothing is right


@pytest.fixture
def on_slurm(tmp_path: Path) -> Iterator[Start]:
    """Starts a command on the first of two nodes."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=path) is None]:
        pytest.skip(f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge iproute2")
    if os.geteuid() != 0:
        pytest.skip("a SLURM with nodes in namespaces needs root")
    folder = tmp_path / "slurm"
    folder.mkdir()
    environment = {**os.environ, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf"), "HOME": str(tmp_path)}
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        environment.pop(name, None)
    apart = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
    script, job = ROOT / "tests" / "cluster" / "slurm.sh", str(os.getpid())
    cluster = subprocess.Popen(
        [*apart, "bash", str(script), str(folder), job], stdout=subprocess.PIPE, text=True, env=environment
    )
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


def test_a_signal_saves_the_run_and_the_requeued_job_ends_it(on_slurm: Start, tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "runs" / "quickstart"
    log.touch()
    submit = ["sbatch", "--wait", "--nodes=2", f"--output={log}", "cluster/slurm.sbatch", "jobs/quickstart.yaml"]
    job = on_slurm(*submit, f"storage={tmp_path / 'runs'}", *QUICK)
    threading.Thread(target=job.wait, daemon=True).start()  # the end of a job that nobody awaits would not be seen
    follow = subprocess.Popen(["tail", "-f", f"--pid={job.pid}", str(log)], stdout=subprocess.PIPE, text=True)
    assert follow.stdout is not None  # it is a pipe
    assert any(line.startswith("[mix    3]") for line in follow.stdout), log.read_text()
    signalled = on_slurm("scancel", "--batch", "--signal=USR1", "--name=rayrft")
    assert signalled.wait(60) == 0
    assert job.wait(900) == 0, log.read_text()
    text = log.read_text()
    assert "files: 2 nodes share" in text and "resumes after" in text and text.count("finished after") == 1
    shown, _ = on_slurm("scontrol", "show", "job", str(os.getpid())).communicate(timeout=60)
    assert "JobState=COMPLET" in shown and "Restarts=1" in shown and "ExitCode=0:0" in shown  # -ED or -ING
    summary = read_summary(folder)
    assert summary is not None and summary.ledger is not None
    assert summary.status == "finished" and summary.ledger.closes
    steps = [record.step for record in read_records(folder) if isinstance(record, StepRecord)]
    assert steps == [*range(1, 3 + STEPS)], "nothing twice, nothing lost"
