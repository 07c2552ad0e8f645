"""An application that calls its model by the API of OpenAI or Anthropic, as a workflow.

Every attempt calls the application in a process, whose environment names an endpoint in the Explorer and its key. The
endpoint answers requests like the calls of any other workflow, with the run's sampling, deadlines and parking, and
records them as they are sampled.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, get_args
from weakref import WeakKeyDictionary, finalize

from rayrft.config.serve import History, ServeConfig
from rayrft.endpoint.attempts import Access, ApplicationAttempt, ProcessEndpoint, Server
from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.explorer.environments import EnvironmentClient
from rayrft.explorer.tools.vllm_parsers import check_call_format
from rayrft.explorer.trajectory import ContextFull, Model, Trajectory
from rayrft.registry import loaded_plugins
from rayrft.rewards import RewardResult
from rayrft.runtime.processes.pool import ProcessPool


class Callee(Protocol):
    """A process that an attempt has to itself: see `Worker`."""

    async def call(self, method: str, *arguments: Any, deadline_s: float) -> Any: ...


class Processes(Protocol):
    """The processes of applications: see `ProcessPool`."""

    def lease(self) -> AbstractAsyncContextManager[Callee]: ...

    async def close(self) -> None: ...


def pool(create: Callable[[], Any], processes: int, warm_up: Callable[[], object] | None = None) -> Processes:
    """Return up to ``processes`` processes with an application each. A process that is healthy after an attempt is used
    again, with the modules that it has imported."""
    if processes < 1:
        raise TypeError(f"processes must be at least 1, not {processes}")
    return ProcessPool(create, processes=processes, plugins=loaded_plugins(), warm_up=warm_up)


class Applications:
    """Attempts of applications in ``processes``, whose method ``run`` gets a task and how it reaches the model. Calls
    of the model that continue each other are one row of the attempt, others are further rows.

    All rows have the reward that the application posts to ``/feedback``. Without one, they have the number, or the
    result, that ``run`` returns. Else the run's reward scores the text that it returns, or the last answer if it
    returns None.

    ``tool_calls`` is the form in which the model writes calls of tools, ``history`` what later calls see of earlier
    answers: see `ServeConfig`.
    """

    in_sandboxes = False
    """Whether applications reach their endpoint by a socket file."""
    cut_result: float | str | None = None
    """What counts as returned by an application that failed after an answer that was cut; None: the run's reward scores
    the last answer."""

    def __init__(self, processes: Processes, tool_calls: str, history: History) -> None:
        check_call_format(tool_calls, "tool_calls")
        self.call_format = tool_calls
        if history not in get_args(History):
            raise TypeError(f"history must be one of {', '.join(get_args(History))}, not {history!r}")
        self._config = ServeConfig(off_policy="ignore", tool_calls=tool_calls, history=history, deadline_s=math.inf)
        self._processes = processes
        self._endpoints = WeakKeyDictionary[Callee, ProcessEndpoint]()
        self._server: Server | None = None

    async def run(self, task: Task, model: Model, env: EnvironmentClient | None = None) -> list[Trajectory]:
        server = self._server = self._server or Server(for_sandboxes=self.in_sandboxes)
        attempt, cut = ApplicationAttempt(model), None
        async with contextlib.AsyncExitStack() as leases:
            with model.queued():
                worker = await leases.enter_async_context(self._processes.lease())
            if worker not in self._endpoints:
                endpoint = self._endpoints[worker] = ProcessEndpoint(server, self._config, model)
                finalize(worker, server.apps.pop, endpoint.name)
            with self._endpoints[worker].serving(attempt) as access:
                calling = worker.call("run", task, access, deadline_s=math.inf)
                try:
                    returned, trajectories = await attempt.result(calling)
                except ContextFull as error:
                    if attempt.reward is None and self.cut_result is None:
                        raise
                    returned, trajectories, cut = self.cut_result, model.started, error
        said = attempt.last_answer if returned is None else returned
        result = attempt.reward or await _result(said, partial(model.score, task))
        for trajectory in trajectories:
            trajectory.reward(result)
        if cut is not None:
            raise cut
        return trajectories

    async def close(self) -> None:
        """End the processes and the endpoint."""
        await self._processes.close()
        if self._server is not None:
            await self._server.close()


class Agent(Applications):
    """Calls the function ``agent``, ``package.module:function``, with the task's question; it may be a coroutine
    function. Processes, rows and rewards are those of `Applications`."""

    def __init__(self, agent: str, processes: int = 64, tool_calls: str = "auto", history: History = "sampled") -> None:
        module, _, function = agent.partition(":")
        if not function or not _is_found(module, function):
            remedy = "list its file under plugins, or give package.module:function of an installed one"
            problem = "no such function" if function else "names no function"
            raise ConfigError(problem, remedy, field="agent", value=agent)
        # Most applications use OpenAI's client: it is imported once for all processes.
        warm_up = partial(importlib.import_module, "openai")
        super().__init__(pool(partial(_Function, module, function), processes, warm_up), tool_calls, history)


async def _result(returned: Any, score: Callable[[str], Awaitable[RewardResult]]) -> RewardResult:
    """Return the reward that follows from what the application returned, or from its last answer."""
    match returned:
        case RewardResult():
            return returned
        case int() | float() if math.isfinite(returned):
            return RewardResult(float(returned))
        case str():
            return await score(returned)
    raise TypeError(f"the application must return a text, a finite number or None, not {returned!r:.80}")


@dataclass(frozen=True)
class _Function:
    """The application, in its process."""

    module: str
    name: str

    def run(self, task: Task, access: Access) -> Any:
        os.environ |= access.variables()
        # Imported here, since the import may create a client: URL and key are the same for all attempts of a process.
        return getattr(importlib.import_module(self.module), self.name)(task.question)


def _is_found(module: str, name: str) -> bool:
    """Return whether there is a module whose source has a name, without importing it."""
    if module in sys.modules:
        return hasattr(sys.modules[module], name)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # of a package that it is in
        return False
    source = getattr(spec.loader, "get_source", lambda name: None)(module) if spec is not None else ""
    return source is None or re.search(rf"\b{re.escape(name)}\b", source) is not None
