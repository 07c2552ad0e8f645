"""Submit a script of this folder as a job, follow its log, and exit as it did: ``submit.py SCRIPT [ARGUMENT …]``.

RAY_ADDRESS=http://head:8265   the dashboard of the cluster; without it a Ray is started, which ends with the job
RAYRFT_KEEP_RAY=1              leave the Ray that was started, with its dashboard, until Ctrl-C
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rayrft.core.cluster import check_address, start_local, use_token
from rayrft.errors import ClusterError, RayrftError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

HERE = Path(__file__).resolve().parent


def main(script: str, arguments: list[str]) -> int:
    """Exit status: 0 where the job succeeded, 130 where it was interrupted, else 1."""
    job = f"{Path(script).stem}-{int(time.time())}-{os.getpid()}"
    try:
        with cluster() as (client, environment):
            command = [*environment, sys.executable, str(HERE / script), *arguments]
            return asyncio.run(follow(client, shlex.join(command), job))
    except RayrftError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:  # before there was a job
        return 130


@contextlib.contextmanager
def cluster() -> Iterator[tuple[JobSubmissionClient, list[str]]]:
    """The cluster of RAY_ADDRESS, or one of our own, and what its jobs' commands begin with.

    Raises ClusterError, within seconds, where none can be reached.
    """
    import ray
    from ray.job_submission import JobSubmissionClient

    if given := os.environ.get("RAY_ADDRESS"):
        yield reach(given), []
        return
    # A run that is stopped saves its weights first: Ray kills a job after three seconds.
    os.environ.setdefault("RAY_JOB_STOP_WAIT_TIME_S", "60")
    context = start_local(dashboard=True)
    # Ray itself gives a job the address of any Ray on its machine, where there are several.
    address = f"RAY_ADDRESS={context.address_info['gcs_address']}"
    try:
        say(f"started a Ray, dashboard http://{context.dashboard_url}")
        say(f"from another terminal: {address} .venv/bin/rayrft status")
        yield JobSubmissionClient(f"http://{context.dashboard_url}"), ["env", address]
        if os.environ.get("RAYRFT_KEEP_RAY"):
            say("the Ray goes on until Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    finally:
        say("stopping the Ray")
        ray.shutdown()


def reach(address: str) -> JobSubmissionClient:
    """A client of the cluster with that dashboard (http://head:8265), or with that head node (head:6379)."""
    import requests
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        if address.startswith(("http://", "https://")):
            use_token()
            requests.get(f"{address}/api/version", timeout=5)  # the client itself would wait for ever
        else:
            check_address(address)
        return JobSubmissionClient(address)
    except (requests.RequestException, ConnectionError, AuthenticationError, RuntimeError) as error:
        why = "nothing answers" if isinstance(error, requests.RequestException) else str(error).splitlines()[0]
        raise ClusterError(
            f"jobs cannot be submitted there: {why}",
            field="RAY_ADDRESS",
            value=address,
            remedy="give the dashboard of a Ray that runs, or unset it to have one started",
        ) from None


async def follow(client: JobSubmissionClient, command: str, job: str) -> int:
    """Submit and print the log to its end. Ctrl-C stops the job, a second one leaves it at once."""
    from ray.job_submission import JobStatus

    interrupted = False
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        nonlocal interrupted
        if interrupted:
            log.cancel()
            return
        interrupted = True
        say("stopping the job (once more: at once)")
        loop.run_in_executor(None, client.stop_job, job)

    async def print_log() -> None:
        async for lines in client.tail_job_logs(job):
            print(lines, end="", flush=True)

    client.submit_job(entrypoint=command, submission_id=job)
    log = asyncio.create_task(print_log())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    with contextlib.suppress(asyncio.CancelledError):
        await log
    if interrupted:
        return 130
    return 0 if client.get_job_status(job) == JobStatus.SUCCEEDED else 1


def say(text: str) -> None:
    print(f"jobs: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
