"""Forms of responses: whole, or as streams of events."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.endpoint.decoding import DecodedMessage
from rayrft.endpoint.protocol import ChatRequest, Sampled
from rayrft.endpoint.recording import Conversation, OpenCall, Prefix
from rayrft.experience import TRUNCATED
from rayrft.explorer.engines.exchange import Chunk, Completion, Sampling
from rayrft.explorer.tools.call_formats import CallFormat
from rayrft.runtime.serving.http import ApiError


@dataclass(frozen=True)
class CheckedRequest:
    """A checked request; ``turns`` are the messages after the prefix."""

    body: Sampled
    response: str
    begun: OpenCall | None
    conversation: Conversation
    turns: tuple[dict[str, str], ...]
    prompt: list[int]
    sampling: Sampling
    trained: bool
    form: CallFormat | None
    """The form of calls of tools, if it has tools."""

    @property
    def prefix(self) -> Prefix | None:
        return self.begun.prefix if self.begun is not None else None


@dataclass(frozen=True)
class TextPiece:
    """Content and reasoning that may be shown of an answer, and their tokens."""

    index: int
    text: str
    chunk: Chunk
    reasoning: str = ""


@dataclass(frozen=True)
class DecodedAnswer:
    """An answer; ``tail`` is the part that was not streamed yet."""

    completion: Completion
    text: str
    message: DecodedMessage
    tail: TextPiece

    @property
    def is_truncated(self) -> bool:
        return self.completion.stop_reason in TRUNCATED


class ReplyForm(ABC):
    """The form of a response: whole, or as the events of a stream, in the order of the methods."""

    def __init__(self, ask: CheckedRequest, model: str, tokenizer: ChatTokenizer) -> None:
        self._ask, self._tokenizer = ask, tokenizer
        self._common: dict[str, Any] = {"id": ask.response, "model": model}

    @abstractmethod
    def whole(self, answers: list[DecodedAnswer]) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""

    @abstractmethod
    def begin(self) -> list[str]:
        """Return the events that begin the answers."""

    @abstractmethod
    def piece(self, piece: TextPiece) -> list[str]:
        """Return the events of further text."""

    @abstractmethod
    def end(self, answer: DecodedAnswer) -> list[str]:
        """Return the events of text that was held back of an answer, and of its end."""

    @abstractmethod
    def done(self, answers: list[DecodedAnswer]) -> list[str]:
        """Return the last events."""

    def failed(self, error: ApiError) -> str:
        """Return the event that ends a stream with an error."""
        return as_event(error.body)

    def _entries(self, tokens: Chunk | Completion) -> list[dict[str, Any]] | None:
        """Return sampled tokens with their log-probs in the form of the API; None if the request wants none."""
        if not self._ask.body.wants_logprobs:
            return None
        texts = [self._tokenizer.decode([token]) for token in tokens.token_ids]
        return [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, tokens.logprobs, strict=True)
        ]

    def _usage(self, answers: list[DecodedAnswer]) -> tuple[int, int]:
        """Return the numbers of tokens of the prompt and of the answers."""
        return len(self._ask.prompt), sum(len(answer.completion.token_ids) for answer in answers)


class ChoicesReply(ReplyForm):
    """The form of ``/v1/chat/completions`` and ``/v1/completions``."""

    def __init__(self, ask: CheckedRequest, model: str, tokenizer: ChatTokenizer) -> None:
        super().__init__(ask, model, tokenizer)
        self._chat = isinstance(ask.body, ChatRequest)
        self._common["created"] = int(time.time())

    def whole(self, answers: list[DecodedAnswer]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            logprobs = self._logprobs(answer.completion)
            choice = {"index": index, "logprobs": logprobs, "finish_reason": _finish_reason(answer)}
            if self._chat:
                calls = list(answer.message.tool_calls)
                content = answer.message.content or (None if calls else "")
                said = {"role": "assistant", "content": content, "refusal": None}
                said |= {"reasoning_content": answer.message.reasoning} if answer.message.reasoning else {}
                choices.append({**choice, "message": {**said, **({"tool_calls": calls} if calls else {})}})
            else:
                choices.append({**choice, "text": answer.text})
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._common, "object": kind, "choices": choices, "usage": self._counts(answers)}

    def begin(self) -> list[str]:
        said = {"role": "assistant", "content": ""} if self._chat else ""
        return [self._choice(index, said) for index in range(self._ask.body.n)]

    def piece(self, piece: TextPiece) -> list[str]:
        if not self._chat:
            return [self._choice(piece.index, piece.text, chunk=piece.chunk)]
        said = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        said |= {"content": piece.text} if piece.text or not said else {}
        return [self._choice(piece.index, said, chunk=piece.chunk)]

    def end(self, answer: DecodedAnswer) -> list[str]:
        tail, events = answer.tail, list[str]()
        if tail.text or tail.reasoning or (tail.chunk.token_ids and self._ask.body.wants_logprobs):
            events = self.piece(tail)
        for number, call in enumerate(answer.message.tool_calls):
            events.append(self._choice(tail.index, {"tool_calls": [{"index": number, **call}]}))
        return [*events, self._choice(tail.index, {} if self._chat else "", _finish_reason(answer))]

    def done(self, answers: list[DecodedAnswer]) -> list[str]:
        include = self._ask.body.stream_options.include_usage
        return [self._chunk(choices=[], usage=self._counts(answers))] if include else []

    def _choice(self, index: int, said: Any, reason: str | None = None, chunk: Chunk | None = None) -> str:
        logprobs = self._logprobs(chunk) if chunk is not None else None
        choice = {"index": index, "delta" if self._chat else "text": said, "logprobs": logprobs}
        return self._chunk(choices=[{**choice, "finish_reason": reason}])

    def _chunk(self, **fields: Any) -> str:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return as_event({**self._common, "object": kind, **fields})

    def _logprobs(self, tokens: Chunk | Completion) -> dict[str, Any] | None:
        entries = self._entries(tokens)
        if entries is None:
            return None
        if self._chat:
            return {"content": entries, "refusal": None}
        texts, values = [each["token"] for each in entries], [each["logprob"] for each in entries]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": None}

    def _counts(self, answers: list[DecodedAnswer]) -> dict[str, int]:
        prompt, sampled = self._usage(answers)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _finish_reason(answer: DecodedAnswer) -> str:
    return "length" if answer.is_truncated else "tool_calls" if answer.message.tool_calls else "stop"


def as_event(body: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
