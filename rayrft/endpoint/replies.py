"""Forms of responses: whole, or as streams of events."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Protocol

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.endpoint.decoding import DecodedMessage
from rayrft.endpoint.protocol import ChatRequest, Sampled
from rayrft.endpoint.recording import Begun, Conversation
from rayrft.experience import TRUNCATED
from rayrft.explorer.engines.exchange import Chunk, Completion, Sampling
from rayrft.explorer.tools.parsing import CallForm


@dataclass(frozen=True)
class CheckedRequest:
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
class TextPiece:
    """Text that may be shown of an answer, and its tokens."""

    index: int
    text: str
    chunk: Chunk


@dataclass(frozen=True)
class DecodedAnswer:
    """An answer; ``tail`` is what was not shown of it."""

    completion: Completion
    text: str
    message: DecodedMessage
    tail: TextPiece


class ReplyForm(Protocol):
    """The form of a response: whole, or as the events of a stream, in the order of the methods."""

    def whole(self, answers: list[DecodedAnswer]) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""

    def begin(self) -> list[str]:
        """Return the events that begin the answers."""

    def piece(self, piece: TextPiece) -> list[str]:
        """Return the events of further text."""

    def end(self, answer: DecodedAnswer) -> list[str]:
        """Return the events of what was held back of an answer, and of its end."""

    def done(self, answers: list[DecodedAnswer]) -> list[str]:
        """Return the last events."""


class ChoicesReply:
    """The form of ``/v1/chat/completions`` and ``/v1/completions``."""

    def __init__(self, ask: CheckedRequest, model: str, tokenizer: ChatTokenizer) -> None:
        self._ask = ask
        self._tokenizer = tokenizer
        self._chat = isinstance(ask.body, ChatRequest)
        self._common = {"id": ask.response, "created": int(time.time()), "model": model}
        self._chunk = {**self._common, "object": "chat.completion.chunk" if self._chat else "text_completion"}

    def whole(self, answers: list[DecodedAnswer]) -> dict[str, Any]:
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

    def piece(self, piece: TextPiece) -> list[str]:
        return [self._choice(piece.index, {"content": piece.text} if self._chat else piece.text, chunk=piece.chunk)]

    def end(self, answer: DecodedAnswer) -> list[str]:
        tail, events = answer.tail, list[str]()
        if tail.text or (tail.chunk.token_ids and self._ask.body.wants_logprobs):
            events = self.piece(tail)
        for number, call in enumerate(answer.message.tool_calls):
            events.append(self._choice(tail.index, {"tool_calls": [{"index": number, **call}]}))
        return [*events, self._choice(tail.index, {} if self._chat else "", _finish_reason(answer))]

    def done(self, answers: list[DecodedAnswer]) -> list[str]:
        if not self._ask.body.stream_options.include_usage:
            return []
        return [as_event({**self._chunk, "choices": [], "usage": self._usage(answers)})]

    def _choice(self, index: int, said: Any, reason: str | None = None, chunk: Chunk | None = None) -> str:
        logprobs = self._logprobs(chunk) if chunk is not None and self._ask.body.wants_logprobs else None
        choice = {"index": index, "delta" if self._chat else "text": said, "logprobs": logprobs}
        return as_event({**self._chunk, "choices": [{**choice, "finish_reason": reason}]})

    def _logprobs(self, chunk: Chunk) -> dict[str, Any]:
        entries = logprob_entries(chunk, self._tokenizer)
        if self._chat:
            return {"content": entries, "refusal": None}
        tokens, values = [each["token"] for each in entries], [each["logprob"] for each in entries]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": None}

    def _usage(self, answers: list[DecodedAnswer]) -> dict[str, int]:
        prompt, sampled = usage(self._ask, answers)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def logprob_entries(chunk: Chunk, tokenizer: ChatTokenizer) -> list[dict[str, Any]]:
    """Return the sampled tokens with their log-probs, as the API has them."""
    texts = [tokenizer.decode([token]) for token in chunk.token_ids]  # those that are no text have none here either
    return [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, chunk.logprobs, strict=True)
    ]


def usage(ask: CheckedRequest, answers: list[DecodedAnswer]) -> tuple[int, int]:
    """Return the numbers of tokens of the prompt and of the answers."""
    return len(ask.prompt), sum(len(answer.completion.token_ids) for answer in answers)


def is_truncated(answer: DecodedAnswer) -> bool:
    """Whether the answer ends where it was cut off."""
    return answer.completion.stop_reason in TRUNCATED


def _finish_reason(answer: DecodedAnswer) -> str:
    return "length" if is_truncated(answer) else "tool_calls" if answer.message.tool_calls else "stop"


def as_event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
