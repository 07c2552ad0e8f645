"""An application that calls its model by the API of OpenAI, as a workflow.

Every attempt calls the application in a process, whose environment names an endpoint in the Explorer and its key. The
endpoint answers requests like the calls of any other workflow, with the run's sampling, deadlines and parking, and
records them as they are sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import math
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, NoReturn, TypeVar, cast
from weakref import WeakKeyDictionary, finalize

import uvicorn

from rayrft.config.explorer import SamplingConfig
from rayrft.config.serve import ServeConfig
from rayrft.endpoint.app import PolicyEndpoint
from rayrft.endpoint.recording import Call, Conversation, OpenCall, SessionRows
from rayrft.endpoint.responder import Responder
from rayrft.endpoint.sessions import SessionStats
from rayrft.endpoint.settings import EndpointSettings
from rayrft.errors import ActorDied, ConfigError, DataError, FeedbackRefused, ModelError
from rayrft.experience import Task
from rayrft.explorer.engines.exchange import Completion, Request, Session, TokenCallback
from rayrft.explorer.environments import EnvironmentClient
from rayrft.explorer.tools.call_formats import check_call_format
from rayrft.explorer.trajectory import ContextFull, Model, Trajectory
from rayrft.registry import loaded_plugins
from rayrft.rewards import RewardResult
from rayrft.runtime.processes.pool import ProcessPool
from rayrft.runtime.processes.worker import Worker
from rayrft.runtime.serving import key_digest
from rayrft.runtime.serving.http import ApiError
from rayrft.runtime.waits import cancel, settle

R = TypeVar("R")

_CALLS = count()
"""Numbers of calls, unique over all attempts, so that a late call of an ended attempt is recognised."""


class Agent:
    """Calls the function ``agent``, ``package.module:function``, with the task's question; it may be a coroutine
    function. Calls of the model that continue each other are one row of the attempt, others are further rows.

    All rows have the reward that the application posts to ``/feedback``; else the number that the function returns;
    else the run's reward of the text that it returns, or of the last answer if it returns None.

    There are up to ``processes`` processes; one that is well after an attempt is used again, with the modules that it
    has imported. ``tool_calls`` is the form in which the model writes calls of tools.
    """

    def __init__(self, agent: str, processes: int = 64, tool_calls: str = "auto") -> None:
        check_call_format(tool_calls, "tool_calls")
        if processes < 1:
            raise TypeError(f"processes must be at least 1, not {processes}")
        module, _, function = agent.partition(":")
        if not function or not _is_found(module):
            remedy = "give package.module:function of one that can be imported where the Explorer runs"
            raise ConfigError("no such module" if function else "names no function", remedy, field="agent", value=agent)
        self._agent = agent
        self._config = ServeConfig(off_policy="ignore", tool_calls=tool_calls, deadline_s=math.inf)
        self._processes = ProcessPool(
            _Application, processes=processes, plugins=loaded_plugins(), warm_up=_import_client
        )
        self._endpoints = WeakKeyDictionary[Worker, _ProcessEndpoint]()
        self._listening: asyncio.Future[_Server] | None = None

    async def run(self, task: Task, model: Model, env: EnvironmentClient | None = None) -> list[Trajectory]:
        if self._listening is None:
            self._listening = asyncio.ensure_future(_Server().start())
        server = await asyncio.shield(self._listening)
        attempt = _Attempt(model)
        async with contextlib.AsyncExitStack() as leases:
            with model.queued():
                worker = await leases.enter_async_context(self._processes.lease())
            if worker not in self._endpoints:
                endpoint = self._endpoints[worker] = _ProcessEndpoint(server, self._config, model)
                finalize(worker, server.apps.pop, endpoint.name)
            with self._endpoints[worker].serving(attempt) as access:
                calling = worker.call("run", self._agent, task.question, *access, deadline_s=math.inf)
                returned = await attempt.result(calling)
        trajectories = attempt.trajectories()
        if not trajectories:
            raise ValueError("the application made no call of the model")
        result = attempt.reward or await _result(returned, attempt.last_answer, partial(model.score, task))
        for trajectory in trajectories:
            trajectory.reward(result)
        return trajectories

    async def close(self) -> None:
        """End the processes and the endpoint."""
        await self._processes.close()
        if self._listening is not None:
            await (await self._listening).close()


async def _result(returned: Any, last_answer: str, score: Callable[[str], Awaitable[RewardResult]]) -> RewardResult:
    """Return the reward that follows from what the application returned."""
    match returned:
        case int() | float() if math.isfinite(returned):
            return RewardResult(float(returned))
        case str() | None:
            return await score(last_answer if returned is None else returned)
    raise TypeError(f"the application must return a text, a finite number or None, not {returned!r:.80}")


class _Application:
    """The application, in its process."""

    def run(self, agent: str, question: str, url: str, key: str) -> Any:
        local = ",".join(filter(None, ["127.0.0.1", os.environ.get("NO_PROXY") or os.environ.get("no_proxy")]))
        os.environ |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "NO_PROXY": local, "no_proxy": local}
        module, _, function = agent.partition(":")
        # Imported here, since the import may create a client: URL and key are the same for all attempts of a process.
        return getattr(importlib.import_module(module), function)(question)


def _import_client() -> None:
    """Import OpenAI's client once for all processes, since most applications use it."""
    with contextlib.suppress(ImportError):
        importlib.import_module("openai")


class _Attempt:
    """An attempt: the engines and the session store of its application's calls."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._recorded = SessionRows()
        self._ids = set[str]()
        """Ids of sessions and responses, which feedback may name."""
        self._lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._full = False
        self.last_answer = ""
        self.reward: RewardResult | None = None

    async def result(self, calling: Coroutine[Any, Any, R]) -> R:
        """Return the application's result, or raise the error that ends the run, even if the application handles it.

        Raises ContextFull where a prompt had no room for an answer and the application failed after it.
        """
        running = asyncio.ensure_future(calling)
        try:
            await asyncio.wait({running, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                self._lost.result()
            try:
                return running.result()
            except Exception:  # of the application, which may raise anything
                if self._full and (rows := self.trajectories()):
                    rows[-1].end_for_length()
                    raise ContextFull("the application failed after a prompt without room for an answer") from None
                raise
        finally:
            await cancel(running, self._lost)  # the application's process is killed

    def trajectories(self) -> list[Trajectory]:
        """Return the rows with sampled tokens."""
        rows = [row for row in self._recorded.rows if row.answers]
        return [self._model.recorded(row.token_ids, row.prompt_length, row.answers, row.turns) for row in rows]

    # The engines and the session store of the endpoint.

    async def generate(
        self, request: Request, sessions: Sequence[Session] = (), on_tokens: TokenCallback | None = None
    ) -> list[Completion]:
        answers = (self._model.generate(request.prompt, (), request.sampling.max_tokens) for _ in range(request.n))
        try:
            return await asyncio.gather(*answers)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise _ended() from None
        except (ActorDied, ModelError) as error:
            settle(self._lost, error)
            raise

    async def begin(self, session: str, task: str | None, conversation: Conversation) -> OpenCall:
        self._ids.add(session)
        number = next(_CALLS)
        return OpenCall(session, number, self._recorded.begin(number, conversation))

    async def answered(self, begun: OpenCall, call: Call) -> None:
        if begun.number in self._recorded.running:
            self._recorded.answered(begun.number, call)
            self._ids.add(call.response)
            self.last_answer = call.choices[0].text

    async def failed(self, begun: OpenCall, reason: str) -> None:
        self._full = self._full or reason == "context_length_exceeded"
        if begun.number in self._recorded.running:
            self._recorded.failed(begun.number)

    async def feedback(self, name: str, reward: float, components: dict[str, float]) -> str:
        if name not in self._ids:
            raise DataError("no session or response has this id", field="id", value=name)
        if not all(map(math.isfinite, [reward, *components.values()])):
            raise DataError("is not a finite number", field="reward", value=reward)
        if self.reward is not None:
            raise FeedbackRefused("the attempt has its reward", field=name, value="rewarded")
        self.reward = RewardResult(reward, components)
        return name

    async def opted_out(self, rows: int) -> None:
        raise NotImplementedError  # calls of the run's own agents are always recorded

    async def forget(self, name: str) -> tuple[int, int]:
        return 0, 0

    async def stats(self) -> SessionStats:
        return SessionStats(1, 0, {}, {}, {}, {})


class _NoAttempt:
    """The engines and the session store of a process without an attempt: every call is refused."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _ended()


class _ProcessEndpoint:
    """The endpoint of one process, whose engines and session store are the attempt that the process works on."""

    def __init__(self, server: _Server, config: ServeConfig, model: Model) -> None:
        key, nobody = secrets.token_urlsafe(16), cast(_Attempt, _NoAttempt())
        sampling = SamplingConfig(max_tokens=model.max_tokens)
        settings = EndpointSettings(config, "policy", model.max_length, sampling, (key_digest(key),), any_model=True)
        self._responder = Responder(nobody, nobody, model.tokenizer, settings)
        self.name = secrets.token_hex(8)
        server.apps[self.name] = PolicyEndpoint(self._responder).app()
        self._access = f"{server.url}/{self.name}/v1", key

    @contextlib.contextmanager
    def serving(self, attempt: _Attempt) -> Iterator[tuple[str, str]]:
        """Answer requests for this attempt in a ``with``; gives the URL and the key for them."""
        before = self._responder.engines, self._responder.sessions
        self._responder.engines = self._responder.sessions = attempt
        try:
            yield self._access
        finally:
            self._responder.engines, self._responder.sessions = before


def _ended() -> ApiError:
    return ApiError(409, "The attempt has ended.", code="attempt_ended")


class _Server(uvicorn.Server):
    """One port of this machine for the endpoints of all processes, each below a path of its own."""

    def __init__(self) -> None:
        super().__init__(
            uvicorn.Config(self._dispatch, interface="asgi3", log_level="warning", lifespan="off", ws="none")
        )
        self.apps: dict[str, Callable[..., Any]] = {}
        """The applications by the first part of their paths."""

    async def start(self) -> _Server:
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._serving = asyncio.create_task(self.serve(sockets=[listening]))
        return self

    async def close(self) -> None:
        self.should_exit = True
        await self._serving

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield

    async def _dispatch(self, scope: Any, receive: Any, send: Any) -> None:
        _, name, *rest = scope["path"].split("/", 2)
        if name in self.apps:
            path = "/" + "".join(rest)
            await self.apps[name]({**scope, "path": path, "raw_path": path.encode()}, receive, send)
        else:
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body"})


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # of a package that it is in
        return False
