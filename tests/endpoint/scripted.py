"""A policy that says what a test wants, token by token, with an endpoint over it on a real port or a runner."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from rayrft.config.explorer import SamplingConfig
from rayrft.config.serve import ServeConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.endpoint.app import PolicyEndpoint
from rayrft.endpoint.responder import Responder, SessionStore
from rayrft.endpoint.sessions import Sessions
from rayrft.endpoint.settings import EndpointSettings
from rayrft.errors import RequestRefused
from rayrft.experience import Experience, Task
from rayrft.explorer.calls import Parking
from rayrft.explorer.engines.exchange import INTERRUPTED, Chunk, Completion, Request, Session, TokenCallback
from rayrft.explorer.rollout import Rollout, Runner
from rayrft.rewards import RewardResult, Transcript
from rayrft.runtime.serving import key_digest
from tests.explorer.scripted import config

MODEL, KEY, MAX_LENGTH = "policy", "sk-secret", 120
USER: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CHAT: dict[str, Any] = {"model": MODEL, "messages": USER}


Say = Callable[[str], str]


class Policy:
    """Engines that answer with ``say(prompt text)``; ``holding`` keeps them from going on."""

    def __init__(self, tokenizer: ChatTokenizer, say: Say = lambda prompt: "hello") -> None:
        self.tokenizer, self.say = tokenizer, say
        self.version = 0
        self.requests: list[Request] = []
        self.sampled: list[Completion] = []
        self.aborted = 0
        self.holding = asyncio.Event()
        self.holding.set()
        self.error: Exception | None = None

    async def generate(
        self, request: Request, sessions: Sequence[Session] = (), told: TokenCallback | None = None
    ) -> list[Completion]:
        self.requests.append(request)
        for session in sessions:
            session.engine = "engine-0"
        if any(token >= len(self.tokenizer.hf) for token in request.prompt):
            raise RequestRefused("the prompt has token ids outside the vocabulary", field="request")
        if self.error is not None:
            raise self.error
        try:
            answers = [await self._answer(request, sessions[k], told) for k in range(request.n)]
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        self.sampled += answers
        return answers

    async def _answer(self, request: Request, session: Session, told: TokenCallback | None) -> Completion:
        text = self.say(self.tokenizer.hf.decode(request.prompt))
        ids = [*self.tokenizer.hf.encode(text, add_special_tokens=False), self.tokenizer.end_id]
        reason = "stop" if len(ids) <= request.sampling.max_tokens else "length"
        ids = ids[: request.sampling.max_tokens]
        interrupted, sent = asyncio.Event(), list[int]()
        session.interrupts[interrupted.set] = None
        for number, token in enumerate(ids, 1):
            await self.holding.wait()
            await asyncio.sleep(0)
            if interrupted.is_set():
                reason = INTERRUPTED
                break
            sent.append(token)
            if told is not None and number < len(ids):  # the last one comes with the answer
                told(replace(scored([token], request.alternatives), versions=(self.version,)))
        prompt = scored(request.prompt[1:], request.alternatives) if request.scored else None
        tokens = scored(sent, request.alternatives)
        versions = ((0, len(sent), self.version),)
        return Completion(tokens.token_ids, tokens.logprobs, versions, reason, tokens.alternatives, prompt)


def scored(token_ids: Sequence[int], alternatives: int) -> Chunk:
    """Tokens of log-prob -0.5 each, and before it in probability the tokens 7, 8, 9 and so on."""
    others = tuple((7 + rank, -0.1 * (rank + 1)) for rank in range(alternatives))
    return Chunk(tuple(token_ids), (-0.5,) * len(token_ids), (), (others,) * len(token_ids) if others else ())


class LocalSessions:
    """The sessions of a test, without an actor around them, at time 0."""

    def __init__(self) -> None:
        self.sessions = Sessions(ServeConfig(), "run/serve/life", 1, drop_equal=False)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.sessions, name)
        time = [0.0] if "now" in inspect.signature(method).parameters else []

        async def call(*given: Any) -> Any:
            return method(*given, *time)

        return call

    async def forget(self, name: str) -> tuple[int, int]:
        return self.sessions.forget(name), 0


class Served:
    """An endpoint that is up, with clients of it."""

    def __init__(self, endpoint: PolicyEndpoint, policy: Policy, book: LocalSessions, url: str) -> None:
        self.endpoint, self.policy, self.book, self.url = endpoint, policy, book, url
        # Loading certificates takes longer than a test.
        self.http = httpx.AsyncClient(
            base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60, verify=False
        )
        self.client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=KEY, max_retries=0, http_client=openai.DefaultAsyncHttpxClient(verify=False)
        )

    @property
    def prompts(self) -> list[str]:
        """The texts of the prompts that the policy was asked."""
        return [self.policy.tokenizer.hf.decode(request.prompt) for request in self.policy.requests]

    def rows(self, session: str) -> list[Experience]:
        """Reward a session, and return its rows."""
        self.book.sessions.feedback(session, 1.0, {}, 0.0)
        return [row for group in self.book.sessions.take()[0] for row in group.rows]

    def sampled(self, row: Experience) -> bool:
        """Whether the actions of a row are all that was sampled, as it was."""
        answers = [token for each in self.policy.sampled for token in each.token_ids]
        return row.token_ids[row.action_mask == 1].tolist() == answers

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - what is waited for is in another task
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def serve(
    folder: Path,
    say: Say = lambda prompt: "hello",
    *,
    max_length: int = MAX_LENGTH,
    keys: tuple[str, ...] = ("sk-0", KEY),
    sessions: SessionStore | None = None,
    plugins: tuple[Path, ...] = (),
    **config: Any,
) -> AsyncIterator[Served]:
    """Serve a scripted policy with the tokenizer of a folder."""
    tokenizer = ChatTokenizer(folder)
    policy, book = Policy(tokenizer, say), LocalSessions()
    sampling, digests = SamplingConfig(max_tokens=64), tuple(map(key_digest, keys))
    settings = EndpointSettings(ServeConfig(**config), MODEL, max_length, sampling, digests, plugins=plugins)
    endpoint = PolicyEndpoint(Responder(policy, sessions or book, tokenizer, settings))
    server = uvicorn.Server(uvicorn.Config(endpoint.app(), port=0, log_level="warning", lifespan="off"))
    running = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.001)
    port = server.servers[0].sockets[0].getsockname()[1]
    served = Served(endpoint, policy, book, f"http://127.0.0.1:{port}")
    try:
        yield served
    finally:
        await served.client.close()
        await served.http.aclose()
        server.should_exit = True
        await running


class Ran:
    """A runner over a scripted policy; a response that the workflow does not reward is worth its length."""

    def __init__(
        self, folder: Path, workflow: str, options: Any, say: Say = lambda prompt: "dog", **settings: Any
    ) -> None:
        self.scored: list[str] = []
        self.policy = Policy(ChatTokenizer(folder), say)
        limits = {"model.max_length": 200, "explorer.sampling.max_tokens": 32, **settings}
        chosen = {"explorer.workflow": workflow, "explorer.workflow_options": {workflow: options}}
        self.runner = Runner(config(**limits, **chosen), ChatTokenizer(folder), self.policy, self._score)
        self.workflow: Any = self.runner.workflow(workflow)

    async def _score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        responses = [each.response for each in transcripts]
        self.scored += responses
        return [RewardResult(float(len(response))) for response in responses]

    async def __call__(
        self, asked: str | Task = "cat", n: int = 1, parking: Parking | None = None, **metadata: Any
    ) -> Rollout:
        """Run a task, or the one that asks a question."""
        task = asked if isinstance(asked, Task) else Task.create("test", asked, "x", metadata=metadata)
        return await self.runner.run(task, "group", n, 1.0, parking)


@contextlib.asynccontextmanager
async def running(folder: Path, workflow: str, options: Any, *say: Say, **settings: Any) -> AsyncIterator[Ran]:
    ran = Ran(folder, workflow, options, *say, **settings)
    yield ran
    await ran.workflow.close()
