"""A job on a Ray of its own, as the quickstart is one: where Ray never ran, beside another Ray, interrupted."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray.job_submission import JobStatus

from jobs import submit
from jobs.submit import follow, reach
from rayrft.errors import ClusterError
from tests.conftest import ROOT

JOB = """
import signal, sys
from rayrft.core.cluster import connect

def save(*_):
    print("saved", flush=True)
    sys.exit(0)

connect()
signal.signal(signal.SIGTERM, save)
print("ready", sys.argv[1:], flush=True)
signal.pause()
"""


def test_ctrl_c_stops_the_job_and_ends_the_ray_that_was_started_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    mark = uuid.uuid4().hex
    taken = {name: value for name, value in os.environ.items() if not name.startswith("RAY_A")}
    environment = {**taken, "HOME": str(tmp_path), "RAYRFT_TEST_MARK": mark, "PYTHONUNBUFFERED": "1"}
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", 8265))  # the dashboard of another Ray, unless there is one already
            other.listen()
        except OSError:
            pass
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "jobs/submit.py"), str(tmp_path / "job.py"), "a b"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        output = []
        for line in process.stdout:
            output.append(line)
            if line.startswith("ready"):
                break
        started = [each for each in psutil.process_iter() if marked(each, mark)]
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=120)
    text = "".join(output) + rest
    assert process.returncode == 130 and "saved" in rest, text
    assert "ready ['a b']" in text and str(tmp_path / ".ray/auth_token") in text
    assert len(started) > 3, "among them the raylet and the job"
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive


def test_a_job_is_told_which_ray_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(dashboard_url="127.0.0.1:8266", address_info={"gcs_address": "127.0.0.1:7777"})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(submit, "start_local", lambda *, dashboard: context)
    monkeypatch.setattr(ray.job_submission, "JobSubmissionClient", lambda address: address)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with submit.cluster() as found:
        assert found == ("http://127.0.0.1:8266", ["env", "RAY_ADDRESS=127.0.0.1:7777"])


def marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("RAYRFT_TEST_MARK") == mark
    except psutil.Error:
        return False


@pytest.mark.parametrize("scheme", ["", "http://"])
def test_an_address_that_leads_nowhere_is_refused_at_once(scheme: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"{scheme}127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ClusterError) as caught:
            reach(address)
    assert (caught.value.field, caught.value.value) == ("RAY_ADDRESS", address)


@pytest.mark.parametrize(("status", "code"), [(JobStatus.SUCCEEDED, 0), (JobStatus.FAILED, 1), (JobStatus.STOPPED, 1)])
def test_the_exit_status_is_that_of_the_job(status: JobStatus, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    class Client:
        def submit_job(self, *, entrypoint: str, submission_id: str) -> None:
            assert (entrypoint, submission_id) == ("command", "job")

        async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
            yield "one\n"
            yield "two\n"

        def get_job_status(self, job: str) -> JobStatus:
            return status

    assert asyncio.run(follow(Client(), "command", "job")) == code  # type: ignore[arg-type]
    assert capfd.readouterr().out == "one\ntwo\n"
