"""A job that is submitted to a cluster elsewhere: refused at once where there is none, followed to its end, stopped."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobStatus

from jobs.submit import entrypoint, follow, reach
from rayrft.errors import ClusterError
from tests.conftest import ROOT


def test_an_address_that_leads_nowhere_is_refused_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ClusterError) as caught:
            reach(address)
    assert (caught.value.field, caught.value.value) == ("RAY_ADDRESS", address)


def test_a_script_of_jobs_runs_in_a_copy_of_its_folder_and_its_log_and_exit_status_come_back(
    ray_cluster: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    client, name = reach(f"http://{ray_cluster.dashboard_url}"), f"copied-{os.getpid()}"
    assert asyncio.run(follow(client, *entrypoint("quickstart.py", ["storage=runs"]), name)) == 1
    assert "error: storage: is inside the job's copy of its working directory" in capfd.readouterr().out
    assert client.get_job_info(name).driver_exit_code == 1


@pytest.mark.parametrize("here", [True, False], ids=["as on this machine", "as in an image"])
def test_a_job_takes_the_python_that_the_cluster_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    for name in ("python", "this python"):
        (tmp_path / name).write_text(f'#!/bin/sh\nprintf "%s|" "{name}" "$@"\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ("this python" if here else "elsewhere")))
    found = "this python" if here else "python"
    command, files = entrypoint("quickstart.py", ["--controls", "a=b c"])
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert (
        subprocess.check_output(command, shell=True, text=True, env=path) == f"{found}|quickstart.py|--controls|a=b c|"
    )
    assert files["working_dir"] == str(ROOT / "jobs")
    command, files = entrypoint("/elsewhere/run.py", ["a=b c"])
    assert (shlex.split(command), files) == ([sys.executable, "/elsewhere/run.py", "a=b c"], {})


@pytest.mark.parametrize(
    ("status", "of_driver", "code"),
    [(JobStatus.SUCCEEDED, 0, 0), (JobStatus.FAILED, 1, 1), (JobStatus.FAILED, 130, 130), (JobStatus.STOPPED, None, 1)],
)
def test_the_exit_status_is_that_of_the_job(
    status: JobStatus, of_driver: int | None, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    class Client:
        def submit_job(self, *, entrypoint: str, submission_id: str, runtime_env: dict[str, Any]) -> None:
            assert (entrypoint, submission_id) == ("command", "job")
            assert int(runtime_env["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > 60, "a step is saved"
            assert runtime_env["working_dir"] == "jobs"

        async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
            yield "one\n"
            yield "two\n"

        def get_job_status(self, job: str) -> JobStatus:
            return status

        def get_job_info(self, job: str) -> Any:
            return SimpleNamespace(driver_exit_code=of_driver)

    files = {"working_dir": "jobs"}
    assert asyncio.run(follow(Client(), "command", files, "job")) == code  # type: ignore[arg-type]
    assert capfd.readouterr().out == "one\ntwo\n"


def test_ctrl_c_stops_the_job() -> None:
    stopped = threading.Event()

    class Client:
        def submit_job(self, *, entrypoint: str, submission_id: str, runtime_env: Any) -> None: ...

        async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.to_thread(stopped.wait, 30)
            yield "saved\n"

        def stop_job(self, job: str) -> None:
            assert job == "job"
            stopped.set()

    assert asyncio.run(follow(Client(), "command", {}, "job")) == 130  # type: ignore[arg-type]
    assert stopped.is_set()
