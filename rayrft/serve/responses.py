"""What a client gets: whole responses, streams of events, and errors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ActorDied, DataError, RequestRefused
from rayrft.explorer.exchange import Chunk, Completion, Sampling
from rayrft.explorer.tools.parsing import CallForm
from rayrft.serve.decoding import Message
from rayrft.serve.protocol import ApiError, ChatRequest, Sampled, usage
from rayrft.serve.sessions import Begun, Conversation

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
            sending.cancel()
            gone.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            self.ended(outcome)

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


class Events:
    """The events of one streamed response."""

    def __init__(self, ask: Ask, model: str, tokenizer: ChatTokenizer) -> None:
        self._ask = ask
        self._tokenizer = tokenizer
        self._chat = isinstance(ask.body, ChatRequest)
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        self._common = {"id": ask.response, "object": kind, "created": int(time.time()), "model": model}

    def begin(self, index: int) -> str:
        """Return the event that begins an answer."""
        return self._choice(index, {"role": "assistant", "content": ""} if self._chat else "")

    def piece(self, piece: Piece) -> str:
        """Return the event of further text."""
        return self._choice(piece.index, {"content": piece.text} if self._chat else piece.text, chunk=piece.chunk)

    def end(self, answer: Answer) -> list[str]:
        """Return the events of what was held back of an answer, and of its end."""
        tail, calls = answer.tail, answer.message.tool_calls
        events = [self.piece(tail)] if tail.text or (tail.chunk.token_ids and self._ask.body.wants_logprobs) else []
        for number, call in enumerate(calls):
            events.append(self._choice(tail.index, {"tool_calls": [{"index": number, **call}]}))
        return [*events, self._choice(tail.index, {} if self._chat else "", _finish_reason(answer))]

    def usage(self, answers: list[Answer]) -> str:
        """Return the event with the counts of tokens."""
        counts = usage(len(self._ask.prompt), [len(answer.completion.token_ids) for answer in answers])
        return as_event({**self._common, "choices": [], "usage": counts})

    def _choice(self, index: int, said: Any, reason: str | None = None, chunk: Chunk | None = None) -> str:
        logprobs = None
        if chunk is not None and self._ask.body.wants_logprobs:
            logprobs = _logprobs(chunk, self._tokenizer, chat=self._chat)
        choice = {"index": index, "delta" if self._chat else "text": said, "logprobs": logprobs}
        return as_event({**self._common, "choices": [{**choice, "finish_reason": reason}]})


def whole_response(ask: Ask, answers: list[Answer], model: str, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Return the body of a response that is not streamed."""
    chat, choices = isinstance(ask.body, ChatRequest), []
    for index, answer in enumerate(answers):
        logprobs = None
        if ask.body.wants_logprobs:
            chunk = Chunk(answer.completion.token_ids, answer.completion.logprobs)
            logprobs = _logprobs(chunk, tokenizer, chat=chat)
        choice = {"index": index, "logprobs": logprobs, "finish_reason": _finish_reason(answer)}
        if chat:
            calls = list(answer.message.tool_calls)
            content = answer.message.content or (None if calls else "")
            said = {
                "role": "assistant",
                "content": content,
                "refusal": None,
                **({"tool_calls": calls} if calls else {}),
            }
            choices.append({**choice, "message": said})
        else:
            choices.append({**choice, "text": answer.text})
    return {
        "id": ask.response,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage(len(ask.prompt), [len(answer.completion.token_ids) for answer in answers]),
    }


def _logprobs(chunk: Chunk, tokenizer: ChatTokenizer, *, chat: bool) -> dict[str, Any]:
    texts = [str(tokenizer.hf.decode([token])) for token in chunk.token_ids]
    if not chat:
        return {"tokens": texts, "token_logprobs": list(chunk.logprobs), "top_logprobs": None, "text_offset": None}
    entries = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, chunk.logprobs, strict=True)
    ]
    return {"content": entries, "refusal": None}


def _finish_reason(answer: Answer) -> str:
    truncated = answer.completion.stop_reason in ("length", "repetition")
    return "length" if truncated else "tool_calls" if answer.message.tool_calls else "stop"


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
    if isinstance(error, ActorDied):
        return ApiError(503, str(error), code="engine_died", kind="server_error", headers={"Retry-After": "5"})
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error", kind="server_error")
