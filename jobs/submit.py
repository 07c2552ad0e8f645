"""Submit a script of this folder to the dashboard at RAY_ADDRESS, follow its log, and exit as it did.

``RAY_ADDRESS=http://head:8265 python jobs/submit.py SCRIPT [ARGUMENT …]``; Ctrl-C stops the job. The folder is sent
along; a script given by an absolute path elsewhere must be at that path on the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrft.core.cluster import use_token
from rayrft.errors import ClusterError, RayrftError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

HERE = Path(__file__).resolve().parent


def main(script: str, arguments: list[str]) -> int:
    """Exit status: 0 where the job succeeded, 130 where it was interrupted or its run stopped, else 1."""
    command, files = entrypoint(script, arguments)
    try:
        client = reach(os.environ["RAY_ADDRESS"])
        return asyncio.run(follow(client, command, files, f"{Path(script).stem}-{int(time.time())}-{os.getpid()}"))
    except RayrftError as error:
        say(str(error))
        return 1


def entrypoint(script: str, arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """Return the job's command, and the part of its runtime environment that sends this folder. This process' Python
    runs the script where the cluster has it at the same path, else `python`."""
    path = HERE / script
    if not path.is_relative_to(HERE):
        return shlex.join([sys.executable, str(path), *arguments]), {}
    choose = '[ -x "$0" ] || exec python "$@"; exec "$0" "$@"'
    command = ["sh", "-c", choose, sys.executable, str(path.relative_to(HERE)), *arguments]
    return shlex.join(command), {"working_dir": str(HERE), "excludes": ["runs"]}


def reach(address: str) -> JobSubmissionClient:
    """A client of the cluster with that dashboard. Raises ClusterError, within seconds, where none takes our jobs."""
    import requests
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        # The client itself would wait without end.
        if requests.get(f"{address}/api/version", timeout=5).status_code == requests.codes.unauthorized:
            use_token()
        return JobSubmissionClient(address)
    except (requests.RequestException, ConnectionError, AuthenticationError, RuntimeError) as error:
        why = "nothing answers" if isinstance(error, requests.RequestException) else str(error).splitlines()[0]
        raise ClusterError(
            f"jobs cannot be submitted there: {why}",
            "give the dashboard of a Ray that runs, or unset it to have one started",
            field="RAY_ADDRESS",
            value=address,
        ) from None


async def follow(client: JobSubmissionClient, command: str, files: dict[str, Any], job: str) -> int:
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
        say("stopping the job (once more: leaving it)")
        loop.run_in_executor(None, client.stop_job, job)

    async def print_log() -> None:
        async for lines in client.tail_job_logs(job):
            print(lines, end="", flush=True)

    # Ray would kill the job 3 s after it is stopped, in the middle of a step.
    environment = {**files, "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}}
    client.submit_job(entrypoint=command, submission_id=job, runtime_env=environment)
    log = asyncio.create_task(print_log())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    with contextlib.suppress(asyncio.CancelledError):
        await log
    if interrupted:
        return 130
    if client.get_job_status(job) == JobStatus.SUCCEEDED:
        return 0
    return 130 if client.get_job_info(job).driver_exit_code == 130 else 1


def say(text: str) -> None:
    print(f"submit: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
