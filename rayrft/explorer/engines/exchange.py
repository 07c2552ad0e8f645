"""Requests to an engine and their answers, in fewer calls between the actors than there are requests.

A client begins requests whenever it has some, and has one call open that returns what is finished. Requests that come
together travel together, and so do answers that an engine finishes in one step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from rayrft.config.explorer import RepetitionConfig
from rayrft.errors import EngineFailed, RayrftError
from rayrft.runtime.handle import Handle
from rayrft.runtime.waits import settle

log = logging.getLogger(__name__)

INTERRUPTED = "abort"


@dataclass(frozen=True)
class Sampling:
    """How to sample; ``temperature`` 0 is greedy."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int | None = None
    """If set, the answers do not depend on the engine's other requests."""
    repetition: RepetitionConfig | None = None
    """When an answer repeats itself, and is stopped."""
    top_p: float = 1.0
    """Below 1, or with a ``top_k``, what is sampled is not the distribution that is trained."""
    top_k: int = 0
    """The number of most probable tokens that are sampled from; 0: all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    """As in vLLM's `SamplingParams`; other values than these also change the distribution."""
    json_schema: str = ""
    """The JSON schema that the answer follows, as JSON; only engines with a tokenizer take one."""


Alternatives = tuple[tuple[int, float], ...]
"""The most probable tokens at a position with their log-probs, most probable first."""


@dataclass(frozen=True)
class Chunk:
    """The next tokens of an answer that is being sampled, each with its log-prob and the version of the weights; the
    ``alternatives`` of each, if the request asks for them."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...] = ()
    alternatives: tuple[Alternatives, ...] = ()

    def cut(self, first: int, end: int | None = None) -> Chunk:
        """Return a part of the tokens."""
        kept = slice(first, end)
        return Chunk(self.token_ids[kept], self.logprobs[kept], self.versions[kept], self.alternatives[kept])

    @classmethod
    def joined(cls, chunks: Sequence[Chunk]) -> Chunk:
        """Return the tokens of chunks that follow one another."""
        columns = (map(attrgetter(each.name), chunks) for each in fields(cls))
        return cls(*(tuple(itertools.chain.from_iterable(column)) for column in columns))


@dataclass(frozen=True)
class Completion:
    """One answer. ``logprobs`` has an entry per token; ``versions`` are (start, end, version) over the answer.
    ``stop_reason`` is `INTERRUPTED` if it was interrupted. For the rest see `Request`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int, int], ...]
    stop_reason: str
    alternatives: tuple[Alternatives, ...] = ()
    prompt: Chunk | None = None
    """The tokens of the prompt but the first, which has no probability."""

    def continued(self, rest: Completion) -> Completion:
        """Return the answer with the tokens that were sampled after it."""
        if not (count := len(self.token_ids)):
            return rest
        versions = [*self.versions]
        for first, end, version in rest.versions:
            if versions and versions[-1][2] == version:
                first = versions.pop()[0] - count
            versions.append((first + count, end + count, version))
        tokens, logprobs = self.token_ids + rest.token_ids, self.logprobs + rest.logprobs
        return Completion(tokens, logprobs, tuple(versions), rest.stop_reason, self.alternatives + rest.alternatives)


UNBEGUN = Completion((), (), (), INTERRUPTED)


@dataclass(frozen=True)
class Request:
    """``n`` answers to one prompt of token ids and images."""

    prompt: list[int]
    n: int
    sampling: Sampling
    images: tuple[str, ...] = ()
    stream: bool = False
    """Bring the tokens of the one answer as they are sampled, and then the answer."""
    alternatives: int = 0
    """Number of most probable tokens to return per token."""
    scored: bool = False
    """Whether to return the log-probs of the prompt, at temperature 1."""


@dataclass(frozen=True)
class Capacity:
    """What an engine can work on at once: tokens that its KV cache holds, and answers that it decodes."""

    tokens: float = math.inf
    answers: float = math.inf


class Stream:
    """An answer on its way, at the engine: its tokens so far."""

    def __init__(self, arrived: Callable[[Stream], None]) -> None:
        self._arrived = arrived
        self.chunks: list[Chunk] = []
        self._taken = 0

    def add(self, chunk: Chunk) -> None:
        """Append tokens."""
        if chunk.token_ids:
            self.chunks.append(chunk)
            self._arrived(self)

    def take(self) -> Chunk:
        """Return the tokens since the last call."""
        first, self._taken = self._taken, len(self.chunks)
        return Chunk.joined(self.chunks[first:])


@dataclass
class Session:
    """One attempt's requests, each of which begins with those before it."""

    engine: str | None = None
    """The member that answered last, and holds their prefix in its cache."""
    interrupts: dict[Callable[[], object], None] = field(default_factory=dict)
    """What interrupts its requests in flight, in their order."""

    on_queue: Callable[[], None] = lambda: None
    """Called when a request begins to wait for an engine with room."""
    on_dequeue: Callable[[], None] = lambda: None
    """Called when it ends to."""

    def interrupt(self) -> None:
        """End the requests in flight: they are answered with the tokens that were sampled until then, which are none if
        they wait for an engine. Requests on the way to an engine are answered in full."""
        for interrupt in list(self.interrupts):
            interrupt()

    @contextlib.contextmanager
    def queued(self) -> Iterator[None]:
        """Tell that a request waits for an engine meanwhile."""
        self.on_queue()
        try:
            yield
        finally:
            self.on_dequeue()


EngineAnswer = list[Completion] | RayrftError
"""The n answers to a request, or why it has none."""

TokenCallback = Callable[[Chunk], None]
"""Receives the tokens of an answer as they are sampled."""


class Answering(ABC):
    """An actor that answers requests, each in its own time."""

    def __init__(self) -> None:
        self._mailboxes: dict[str, _Mailbox] = {}

    @abstractmethod
    async def generate(self, request: Request, stream: Stream | None = None) -> list[Completion]:
        """Sample the answers to a request; the tokens of one that streams are added to its ``stream``, too. An error is
        that of this request alone; ActorDied says that the engine can answer no other one."""

    async def interrupt(self, request: Request) -> None:
        """End a request with what was sampled until now. Nothing happens if it is not running, or the engine cannot."""
        return

    async def capacity(self) -> Capacity:
        """Return how much it can work on at once; unlimited by default."""
        return Capacity()

    async def exchange(
        self, client: str, requests: dict[int, Request], cancelled: Sequence[int], interrupted: Sequence[int] = ()
    ) -> dict[int, EngineAnswer | Chunk]:
        """Begin a client's requests, by its numbers, abort the cancelled ones, and end the interrupted ones with what
        they have. Return the finished answers, and the chunks of streams, as soon as there is one.

        A call ends the call before it of the same client, which then returns none.
        """
        mailbox = self._mailboxes.setdefault(client, _Mailbox())
        for number in cancelled:
            mailbox.abort(number)
        for number, request in requests.items():
            mailbox.begin(number, request, self.generate)
        for number in interrupted:
            if number in mailbox.running:
                await self.interrupt(mailbox.running[number][0])
        return await mailbox.collect()


class _Mailbox:
    """The requests of one client, at the engine, by the client's numbers."""

    def __init__(self) -> None:
        self.running: dict[int, tuple[Request, asyncio.Future[list[Completion]]]] = {}
        self._finished: dict[int, EngineAnswer] = {}
        self._brought: dict[int, Stream] = {}
        """Streams with tokens that are not collected."""
        self._aborted: set[int] = set()
        """Aborted before they began, or after they had ended."""
        self._ready = asyncio.Event()
        """Set when the latest call to collect may return."""

    def begin(self, number: int, request: Request, generate: Callable[..., Awaitable[list[Completion]]]) -> None:
        if number in self._aborted:
            return
        stream = Stream(lambda each: self._bring(number, each)) if request.stream else None
        task = asyncio.ensure_future(generate(request, stream) if stream else generate(request))
        self.running[number] = request, task
        task.add_done_callback(lambda _: self._end(number))

    def abort(self, number: int) -> None:
        if number in self.running:
            self._brought.pop(number, None)
            self.running.pop(number)[1].cancel()
        elif self._finished.pop(number, None) is None:
            self._aborted.add(number)

    async def collect(self) -> dict[int, EngineAnswer | Chunk]:
        self._ready.set()
        self._ready = ready = asyncio.Event()
        if self.running and not self._finished and not self._brought:
            await ready.wait()
        if ready is not self._ready:
            return {}
        chunks, finished = {number: stream.take() for number, stream in self._brought.items()}, self._finished
        self._finished, self._brought = {}, {}
        return {**chunks, **finished}

    def _bring(self, number: int, stream: Stream) -> None:
        self._brought[number] = stream
        self._ready.set()

    def _end(self, number: int) -> None:
        if number not in self.running:  # it was aborted
            return
        _, task = self.running.pop(number)
        self._brought.pop(number, None)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, RayrftError):
            log.error("a request failed", exc_info=error)
            problem = f"the engine failed on the request: {type(error).__name__}: {error}"
            error = EngineFailed(problem, "see the engine's log in the Ray dashboard", field="request")
        self._finished[number] = error or task.result()
        self._ready.set()


class Requester:
    """The requests of one client to one engine."""

    def __init__(self, engine: Handle[Any]) -> None:
        self._engine = engine
        self._client = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._unsent: dict[int, Request] = {}
        self._cancelled: list[int] = []
        self._interrupted: list[int] = []
        self._asked: dict[int, asyncio.Future[list[Completion]]] = {}
        self._on_tokens: dict[int, TokenCallback] = {}
        self._calls = 0
        """Number of open calls."""
        self._scheduled = False

    def ask(
        self, request: Request, session: Session | None = None, on_tokens: TokenCallback | None = None
    ) -> asyncio.Future[list[Completion]]:
        """Begin a request, and return the future of its answers; if that is cancelled, the engine ends the request. Its
        ``session`` may interrupt it. ``on_tokens`` gets the tokens of a request that streams; the last ones come with
        the answer only. The future's error is the engine's RayrftError, or that of the call that the request was in.
        """
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        interrupts = (session or Session()).interrupts
        if on_tokens is not None:
            self._on_tokens[number] = on_tokens

        def interrupt() -> None:
            self._interrupted.append(number)
            self._schedule()

        def end(_: object) -> None:
            del interrupts[interrupt]
            self._on_tokens.pop(number, None)
            if self._asked.pop(number, None) is not None and self._unsent.pop(number, None) is None:
                self._cancelled.append(number)
                self._schedule()

        self._unsent[number], self._asked[number], interrupts[interrupt] = request, answer, None
        answer.add_done_callback(end)
        self._schedule()
        return answer

    def _schedule(self) -> None:
        """Make a call once all that is ready to run has run, so that what is asked together travels together.

        The call is in no request's context: Ray would cancel it, which all requests share, together with that one.
        """
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._call, context=Context())

    def _call(self) -> None:
        self._scheduled = False
        requests, cancelled, interrupted = self._unsent, self._cancelled, self._interrupted
        if not requests and not cancelled and not interrupted and (self._calls or not self._asked):
            return
        self._unsent, self._cancelled, self._interrupted = {}, [], []
        try:
            call = self._engine.call(Answering.exchange, self._client, requests, cancelled, interrupted)
        except Exception as error:  # such as a request that cannot be pickled: raised in the callers of `ask`
            self._fail(requests, error)
            return
        self._calls += 1
        asyncio.ensure_future(call).add_done_callback(self._receive)

    def _receive(self, call: asyncio.Future[dict[int, EngineAnswer | Chunk]]) -> None:
        self._calls -= 1
        if call.cancelled():  # the event loop ends
            return
        if error := call.exception():
            sent = self._asked.keys() - self._unsent
            self._cancelled += sent  # if the engine is alive, it ends them at the next call
            self._fail(sent, error)
            return
        for number, answered in call.result().items():
            if isinstance(answered, Chunk):
                if number in self._on_tokens:
                    self._on_tokens[number](answered)
            elif number in self._asked:  # else it was cancelled
                settle(self._asked.pop(number), answered)
        if self._asked and not self._calls:
            self._schedule()

    def _fail(self, numbers: Collection[int], error: BaseException) -> None:
        for number in numbers & self._asked.keys():
            settle(self._asked.pop(number), error)
