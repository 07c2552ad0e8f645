"""What a client gets: responses, whole or as streams of events, and errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.endpoint.decoding import Message
from rayrft.endpoint.protocol import ApiError, ChatRequest, Sampled
from rayrft.endpoint.recording import Begun, Conversation
from rayrft.errors import ActorDied, DataError, EngineFailed, RequestRefused, StorageError
from rayrft.experience import TRUNCATED
from rayrft.explorer.engines.exchange import Chunk, Completion, Sampling
from rayrft.explorer.tools.parsing import CallForm

log = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True)
class Ask:
    """A checked request. ``turns`` and the prompt's new part are what is not in the prefix."""

    body: Sampled
    response: str
    begun: Begun | None
    conversation: Conversation
    turns: tuple[dict[str, str], ...]
    prompt: list[int]
    sampling: Sampling
    trained: bool
    form: CallForm | None
    """The form of calls of tools, if it has tools."""


@dataclass(frozen=True)
class Piece:
    """Text that may be shown of an answer, and its tokens."""

    index: int
    text: str
    chunk: Chunk


@dataclass(frozen=True)
class Answer:
    """An answer; ``tail`` is what was not shown of it."""

    completion: Completion
    text: str
    message: Message
    tail: Piece


class EventStream(Response):
    """A response of server-sent events, which ends with its client."""

    def __init__(self, events: AsyncIterator[str], headers: dict[str, str]) -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self.ended: Callable[[str], None] = lambda outcome: None
        """Told how the stream ended."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(until_gone(receive))
        outcome = "499 client_gone"
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                outcome = sending.result()
        finally:
            self.ended(outcome)  # before anything is awaited: Serve may cancel this task at any time
            sending.cancel()
            gone.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)

    async def _send(self, send: Any) -> str:
        """Send all events; return how the stream ended."""
        outcome = "200"
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events) as events:  # type: ignore[type-var]
            try:
                async for event in events:
                    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            except ApiError as error:  # it has been sent as an event
                outcome = f"{error.status} {error.code}"
            except OSError:
                return "499 client_gone"
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        return outcome


class Reply(Protocol):
    """The form of a response: whole, or as the events of a stream, in the order of the methods."""

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""

    def begin(self) -> list[str]:
        """Return the events that begin the answers."""

    def piece(self, piece: Piece) -> list[str]:
        """Return the events of further text."""

    def end(self, answer: Answer) -> list[str]:
        """Return the events of what was held back of an answer, and of its end."""

    def done(self, answers: list[Answer]) -> list[str]:
        """Return the last events."""


class ChoicesReply:
    """The form of ``/v1/chat/completions`` and ``/v1/completions``."""

    def __init__(self, ask: Ask, model: str, tokenizer: ChatTokenizer) -> None:
        self._ask = ask
        self._tokenizer = tokenizer
        self._chat = isinstance(ask.body, ChatRequest)
        self._common = {"id": ask.response, "created": int(time.time()), "model": model}
        self._chunk = {**self._common, "object": "chat.completion.chunk" if self._chat else "text_completion"}

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            logprobs = None
            if self._ask.body.wants_logprobs:
                logprobs = self._logprobs(Chunk(answer.completion.token_ids, answer.completion.logprobs))
            choice = {"index": index, "logprobs": logprobs, "finish_reason": _finish_reason(answer)}
            if self._chat:
                calls = list(answer.message.tool_calls)
                content = answer.message.content or (None if calls else "")
                said = {"role": "assistant", "content": content, "refusal": None}
                choices.append({**choice, "message": {**said, **({"tool_calls": calls} if calls else {})}})
            else:
                choices.append({**choice, "text": answer.text})
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._common, "object": kind, "choices": choices, "usage": self._usage(answers)}

    def begin(self) -> list[str]:
        said = {"role": "assistant", "content": ""} if self._chat else ""
        return [self._choice(index, said) for index in range(self._ask.body.n)]

    def piece(self, piece: Piece) -> list[str]:
        return [self._choice(piece.index, {"content": piece.text} if self._chat else piece.text, chunk=piece.chunk)]

    def end(self, answer: Answer) -> list[str]:
        tail, events = answer.tail, list[str]()
        if tail.text or (tail.chunk.token_ids and self._ask.body.wants_logprobs):
            events = self.piece(tail)
        for number, call in enumerate(answer.message.tool_calls):
            events.append(self._choice(tail.index, {"tool_calls": [{"index": number, **call}]}))
        return [*events, self._choice(tail.index, {} if self._chat else "", _finish_reason(answer))]

    def done(self, answers: list[Answer]) -> list[str]:
        if not self._ask.body.stream_options.include_usage:
            return []
        return [as_event({**self._chunk, "choices": [], "usage": self._usage(answers)})]

    def _choice(self, index: int, said: Any, reason: str | None = None, chunk: Chunk | None = None) -> str:
        logprobs = self._logprobs(chunk) if chunk is not None and self._ask.body.wants_logprobs else None
        choice = {"index": index, "delta" if self._chat else "text": said, "logprobs": logprobs}
        return as_event({**self._chunk, "choices": [{**choice, "finish_reason": reason}]})

    def _logprobs(self, chunk: Chunk) -> dict[str, Any]:
        entries = token_logprobs(chunk, self._tokenizer)
        if self._chat:
            return {"content": entries, "refusal": None}
        tokens, values = [each["token"] for each in entries], [each["logprob"] for each in entries]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": None}

    def _usage(self, answers: list[Answer]) -> dict[str, int]:
        prompt, sampled = usage(self._ask, answers)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def token_logprobs(chunk: Chunk, tokenizer: ChatTokenizer) -> list[dict[str, Any]]:
    """Return the sampled tokens with their log-probs, as the API has them."""
    texts = [tokenizer.decode([token]) for token in chunk.token_ids]  # those that are no text have none here either
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, chunk.logprobs, strict=True)
    ]


def usage(ask: Ask, answers: list[Answer]) -> tuple[int, int]:
    """Return the numbers of tokens of the prompt and of the answers."""
    return len(ask.prompt), sum(len(answer.completion.token_ids) for answer in answers)


def is_truncated(answer: Answer) -> bool:
    """Whether the answer ends where it was cut off."""
    return answer.completion.stop_reason in TRUNCATED


def _finish_reason(answer: Answer) -> str:
    return "length" if is_truncated(answer) else "tool_calls" if answer.message.tool_calls else "stop"


def as_event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def until_gone(receive: Any) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, R]) -> R:
    """Return the result of ``work``; abandon it if the client goes away."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "The client has gone.", code="client_gone")
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


def api_error(error: BaseException) -> ApiError:
    """Return what a client is told of an error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ApiError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return ApiError(499, "The client has gone.", code="client_gone")
    if isinstance(error, RequestRefused | DataError):
        return ApiError(400, str(error), code="invalid_value", param=error.field or None)
    if isinstance(error, TimeoutError):
        return ApiError(504, "The request was not answered in time.", code="timeout", kind="server_error")
    log.error("a request failed", exc_info=error)  # for us alone: it may name actors, addresses and files
    if isinstance(error, ActorDied | EngineFailed):
        code, text = (
            "engine_died" if isinstance(error, ActorDied) else "engine_failed",
            "No engine answered; try again.",
        )
        return ApiError(503, text, code=code, kind="server_error", headers={"Retry-After": "5"})
    known = f"{error.field}: {error.problem}." if isinstance(error, StorageError) else "the server's log says why."
    return ApiError(500, f"The request failed: {known}", code="internal_error", kind="server_error")
