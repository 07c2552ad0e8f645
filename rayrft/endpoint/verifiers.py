"""Environments of the library verifiers, as a workflow: its harness plays an episode with the attempt's endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

from rayrft.config.serve import History
from rayrft.data.episodes import host_command, verifiers_tasks
from rayrft.endpoint.agent import Applications
from rayrft.errors import CallFailed, DataError, ProcessDied
from rayrft.rewards import RewardResult

_LINE_BYTES = 1 << 26


class Verifiers(Applications):
    """Plays an episode of a verifiers environment for each task of the source ``verifiers``.

    ``environment`` is the library's own config, such as ``{taskset: {id: my-words}, agent: {harness: {id: bash},
    runtime: {type: docker}}}``. ``python`` is that of the environment in which verifiers 0.4 or later and the taskset
    are installed. The reward is that of the episode's agent, or the mean of those of its agents; rewards and metrics by
    name are its components.

    Each of up to ``processes`` processes plays one episode at a time. An episode that fails, or whose process dies,
    fails its attempt alone. Raises DataError if the environment cannot be loaded.
    """

    def __init__(
        self,
        python: str,
        environment: dict[str, Any],
        processes: int = 16,
        tool_calls: str = "auto",
        history: History = "sampled",
    ) -> None:
        if processes < 1:
            raise TypeError(f"processes must be at least 1, not {processes}")
        verifiers_tasks(python, environment, 1, "explorer.workflow_options.verifiers")
        super().__init__(_Hosts(python, environment, processes), tool_calls, history)


class _Host:
    """A process that plays episodes, one after another."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.is_idle = True

    async def call(self, method: str, *arguments: Any, deadline_s: float) -> RewardResult:
        """Play an episode: see `Callee`. Raises CallFailed if it fails, ProcessDied, and DataError for a task from
        elsewhere."""
        task, access = arguments
        if "verifiers" not in (own := task.metadata.get("environment", {})):
            problem = "the task does not come from a verifiers environment"
            raise DataError(problem, "take tasks of source verifiers", field="task", value=task.id)
        variables = access.variables()
        settings = {"variables": variables, "base_url": variables["OPENAI_BASE_URL"]}
        said = await self.ask({"task": own["verifiers"], **settings})
        return RewardResult(said["reward"], said["components"])

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send an order; return the answer. Raises CallFailed for a problem, and ProcessDied."""
        assert self._process.stdin is not None and self._process.stdout is not None  # they are pipes
        self.is_idle = False
        with contextlib.suppress(ConnectionError):  # the process has died, which its stdout shows
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            problem = f"its process ended with status {await self._process.wait()}"
            raise ProcessDied(problem, "see the Explorer's log in the Ray dashboard", field="verifiers")
        said: dict[str, Any] = json.loads(line)
        self.is_idle = True
        if "problem" in said:
            raise CallFailed(f"the episode failed: {said['problem']}", field="verifiers")
        return said

    async def kill(self) -> None:
        """Kill it with all that it has started, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()


class _Hosts:
    """Up to so many processes, which are started when they are needed."""

    def __init__(self, python: str, environment: dict[str, Any], processes: int) -> None:
        self._python, self._environment = python, environment
        self._places = asyncio.Semaphore(processes)
        self._all, self._ready = set[_Host](), list[_Host]()

    @contextlib.asynccontextmanager
    async def lease(self) -> AsyncIterator[_Host]:
        """Lease a process, which is used again if it stays healthy. Raises CallFailed if it cannot start."""
        async with self._places:
            host = self._ready.pop() if self._ready else await self._start()
            try:
                yield host
            finally:
                if host.is_idle:
                    self._ready.append(host)
                else:
                    await self._end(host)

    async def close(self) -> None:
        await asyncio.gather(*map(self._end, list(self._all)))

    async def _start(self) -> _Host:
        command, variables = host_command(self._python)
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "limit": _LINE_BYTES}
        process = await asyncio.create_subprocess_exec(*command, env=variables, start_new_session=True, **pipes)  # type: ignore[arg-type]
        self._all.add(host := _Host(process))
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._end, host)
            await host.ask({"environment": self._environment})
            undo.pop_all()
        return host

    async def _end(self, host: _Host) -> None:
        await host.kill()
        self._all.discard(host)
