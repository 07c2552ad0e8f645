"""The endpoint of attempts whose application calls its model by an API: one server in an Explorer, below which every
process of an application has a path and a key. Calls are answered with the run's sampling, deadlines and parking, and
recorded as they are sampled."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import uvicorn
from fastapi import Response

from rayrft.config.explorer import SamplingConfig
from rayrft.config.serve import ServeConfig
from rayrft.endpoint.app import PolicyEndpoint
from rayrft.endpoint.recording import Call, Conversation, OpenCall, SessionRows
from rayrft.endpoint.responder import Responder
from rayrft.endpoint.sessions import SessionStats
from rayrft.endpoint.settings import EndpointSettings
from rayrft.errors import ActorDied, DataError, FeedbackRefused, ModelError, RequestRefused
from rayrft.explorer.engines.exchange import Completion, Request, Session, TokenCallback
from rayrft.explorer.trajectory import ContextFull, Model, Trajectory
from rayrft.rewards import RewardResult
from rayrft.runtime.serving import key_digest
from rayrft.runtime.serving.http import ApiError
from rayrft.runtime.waits import cancel, cancelled, settle

R = TypeVar("R")

_CALLS = count()
"""Numbers of calls, unique over all attempts, so that a late call of an ended attempt is recognised."""

MOST_CALLS = 1000
"""Calls of one attempt: an application that makes more of them fails, for each may become a row."""


@dataclass(frozen=True)
class Access:
    """How an application reaches its endpoint: at ``url``, or by the socket file of a server for local programs."""

    url: str
    socket: str
    path: str
    key: str

    def variables(self, url: str = "") -> dict[str, str]:
        """Return the environment variables by which clients of OpenAI's and Anthropic's APIs find a model; ``url`` is
        that of another server which leads to this one."""
        base = (url or self.url) + self.path
        local = ",".join(filter(None, ["127.0.0.1", os.environ.get("NO_PROXY") or os.environ.get("no_proxy")]))
        openai = {"OPENAI_BASE_URL": f"{base}/v1", "OPENAI_API_KEY": self.key}
        anthropic = {"ANTHROPIC_BASE_URL": base, "ANTHROPIC_API_KEY": self.key}
        return {**openai, **anthropic, "NO_PROXY": local, "no_proxy": local}


class ApplicationAttempt:
    """An attempt: the engines and the session store of its application's calls."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._recorded = SessionRows()
        self._ids = set[str]()
        """Ids of sessions and responses, which feedback may name."""
        self._lost: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._full, self._cut, self._calls = False, False, 0
        """Whether a prompt had no room for an answer, and whether the latest answer was cut; the number of calls."""
        self.last_answer = ""
        self.reward: RewardResult | None = None

    async def result(self, calling: Coroutine[Any, Any, R]) -> tuple[R, list[Trajectory]]:
        """Return the application's result and its rows, or raise the error that ends the run, even if the application
        handles it.

        Raises ContextFull where no prompt had room for an answer, or the application failed after such a prompt or
        after an answer that was cut, and ValueError if nothing was sampled.
        """
        running = asyncio.ensure_future(calling)
        try:
            await asyncio.wait({running, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            if self._lost.done():
                self._lost.result()
            failure, rows = running.exception(), self.trajectories()
            if rows and failure is None:
                return running.result(), rows
            if rows and (self._full or self._cut):
                rows[-1].end_for_length()
                raise ContextFull("the application failed after an answer that was cut")
            if self._full:
                problem = f"model.max_length, {self._model.max_length} tokens, leaves no room for an answer; raise it"
                raise ContextFull(f"{problem} ({failure})" if failure else problem)
            raise failure or ValueError("the application made no call of the model that can be trained")
        finally:
            await cancel(running, self._lost)  # the application's process is killed

    def trajectories(self) -> list[Trajectory]:
        """Return the rows with sampled tokens."""
        rows = (row for row in self._recorded.rows if row.answers)
        recorded = self._model.recorded
        return [recorded(row.token_ids, row.prompt_length, row.answers, row.turns, row.images) for row in rows]

    # The engines and the session store of the endpoint.

    async def generate(
        self, request: Request, sessions: Sequence[Session] = (), on_tokens: TokenCallback | None = None
    ) -> list[Completion]:
        if request.scored:
            problem, remedy = "attempts are sampled without the log-probs of prompts", "ask for those of the answer"
            raise RequestRefused(problem, remedy, field="logprobs")
        sampling = request.sampling
        asked = request.prompt, request.images, sampling.max_tokens, sampling.json_schema, request.alternatives
        answers = (self._model.generate(*asked) for _ in range(request.n))
        try:
            return await asyncio.gather(*answers)
        except asyncio.CancelledError:
            if cancelled():
                raise
            raise _ended() from None
        except (ActorDied, ModelError) as error:
            settle(self._lost, error)
            raise

    async def begin(self, session: str, task: str | None, conversation: Conversation) -> OpenCall:
        self._ids.add(session)
        self._calls += 1
        if self._calls > MOST_CALLS:
            problem = f"the application made more than {MOST_CALLS} calls of the model"
            settle(self._lost, RuntimeError(problem))
            raise _ended()
        number = next(_CALLS)
        return OpenCall(session, number, self._recorded.begin(number, conversation))

    async def answered(self, begun: OpenCall, call: Call) -> None:
        if begun.number in self._recorded.running:
            self._recorded.answered(begun.number, call)
            self._ids.add(call.response)
            self.last_answer = call.choices[0].text
            self._cut = call.choices[0].completion.stop_reason == "length"

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


class ProcessEndpoint:
    """The endpoint of one process, whose engines and session store are the attempt that the process works on."""

    def __init__(self, server: Server, config: ServeConfig, model: Model) -> None:
        key, nobody = secrets.token_urlsafe(16), cast(ApplicationAttempt, _NoAttempt())
        sampling = SamplingConfig(max_tokens=model.max_tokens)
        settings = EndpointSettings(config, "policy", model.max_length, sampling, (key_digest(key),), any_model=True)
        self._responder = Responder(nobody, nobody, model.tokenizer, settings)
        self.name = secrets.token_hex(8)
        server.apps[self.name] = PolicyEndpoint(self._responder).app()
        self._access = Access(server.url, server.socket, f"/{self.name}", key)

    @contextlib.contextmanager
    def serving(self, attempt: ApplicationAttempt) -> Iterator[Access]:
        """Answer requests for this attempt in a ``with``."""
        before = self._responder.engines, self._responder.sessions
        self._responder.engines = self._responder.sessions = attempt
        try:
            yield self._access
        finally:
            self._responder.engines, self._responder.sessions = before


def _ended() -> ApiError:
    return ApiError(409, "The attempt has ended.", code="attempt_ended")


class Server(uvicorn.Server):
    """One port of this machine for the endpoints of all processes, each below a path of its own; ``for_sandboxes``:
    also a socket file."""

    def __init__(self, *, for_sandboxes: bool = False) -> None:
        config = uvicorn.Config(self._dispatch, interface="asgi3", log_level="warning", lifespan="off", ws="none")
        super().__init__(config)
        self.apps: dict[str, Callable[..., Any]] = {}
        """The applications by the first part of their paths."""
        sockets, self.socket = [socket.create_server(("127.0.0.1", 0))], ""
        self.url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
        self._folders = contextlib.ExitStack()
        if for_sandboxes:
            # Not below /tmp or /dev/shm, in whose place a sandbox has folders of its own.
            folder = tempfile.TemporaryDirectory(prefix="rayrft-endpoint-", dir="/var/tmp", ignore_cleanup_errors=True)
            path = Path(self._folders.enter_context(folder), "socket")
            self.socket = str(path)
            sockets.append(socket.socket(socket.AF_UNIX))
            sockets[1].bind(self.socket)
            # The user of a sandbox can open it; requests need a key.
            path.parent.chmod(0o755)
            path.chmod(0o666)
        self._serving = asyncio.create_task(self.serve(sockets=sockets))

    async def close(self) -> None:
        self.should_exit = True
        await self._serving
        self._folders.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield

    async def _dispatch(self, scope: Any, receive: Any, send: Any) -> None:
        _, name, *rest = scope["path"].split("/", 2)
        path, app = "/" + "".join(rest), self.apps.get(name) or Response(status_code=404)
        await app({**scope, "path": path, "raw_path": path.encode()}, receive, send)
