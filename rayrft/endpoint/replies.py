"""Forms of responses: whole, or as streams of events."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.endpoint.decoding import DecodedMessage
from rayrft.endpoint.protocol import ChatRequest, CompletionRequest, Sampled
from rayrft.endpoint.recording import Conversation, OpenCall, Prefix
from rayrft.experience import TRUNCATED
from rayrft.explorer.engines.exchange import Chunk, Completion, Sampling
from rayrft.explorer.tools.call_formats import CallFormat
from rayrft.runtime.serving.http import ApiError


@dataclass(frozen=True)
class CheckedRequest:
    """One prompt of a checked request; ``turns`` are the messages after the prefix."""

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
    first: int = 0
    """The index of its first answer in the response."""
    images: tuple[str, ...] = ()
    """The data URLs of all images in the prompt."""

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
    stopped_by: str | None = None
    """The stop string that ended it."""

    @property
    def is_truncated(self) -> bool:
        return self.completion.stop_reason in TRUNCATED


class ReplyForm(ABC):
    """The form of a response to the prompts of a request: whole, or as the events of a stream, in the order of the
    methods."""

    def __init__(self, asks: Sequence[CheckedRequest], model: str, tokenizer: ChatTokenizer) -> None:
        self._asks, self._tokenizer = asks, tokenizer
        self._ask = asks[0]
        self._common: dict[str, Any] = {"id": self._ask.response, "model": model}

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
        if self._ask.body.alternatives is None:
            return None
        others = tokens.alternatives or ((),) * len(tokens.token_ids)
        return [
            {**self._entry(token, value), "top_logprobs": [self._entry(*each) for each in best]}
            for token, value, best in zip(tokens.token_ids, tokens.logprobs, others, strict=True)
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _usage(self, answers: list[DecodedAnswer]) -> tuple[int, int]:
        """Return the numbers of tokens of the prompt and of the answers."""
        prompts = sum(len(ask.prompt) for ask in self._asks)
        return prompts, sum(len(answer.completion.token_ids) for answer in answers)


class ChoicesReply(ReplyForm):
    """The form of ``/v1/chat/completions`` and ``/v1/completions``."""

    def __init__(self, asks: Sequence[CheckedRequest], model: str, tokenizer: ChatTokenizer) -> None:
        super().__init__(asks, model, tokenizer)
        self._chat = isinstance(self._ask.body, ChatRequest)
        self._common["created"] = int(time.time())

    def whole(self, answers: list[DecodedAnswer]) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(answers):
            logprobs = self._logprobs(answer.completion, self._of(index).prompt)
            choice = {"index": index, "logprobs": logprobs, "finish_reason": _finish_reason(answer)}
            if self._chat:
                calls = list(answer.message.tool_calls)
                content = answer.message.content or (None if calls else "")
                said = {"role": "assistant", "content": content, "refusal": None}
                said |= {"reasoning_content": answer.message.reasoning} if answer.message.reasoning else {}
                choices.append({**choice, "message": {**said, **({"tool_calls": calls} if calls else {})}})
            else:
                choices.append({**choice, "text": self._echo(index) + answer.text})
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._common, "object": kind, "choices": choices, "usage": self._counts(answers)}

    def begin(self) -> list[str]:
        said = {"role": "assistant", "content": ""}
        count = 0 if self._ask.body.scored else len(self._asks) * self._ask.body.n
        return [self._choice(index, said if self._chat else self._echo(index)) for index in range(count)]

    def piece(self, piece: TextPiece) -> list[str]:
        if not self._chat:
            return [self._choice(piece.index, piece.text, logprobs=self._logprobs(piece.chunk))]
        said = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        said |= {"content": piece.text} if piece.text or not said else {}
        return [self._choice(piece.index, said, logprobs=self._logprobs(piece.chunk))]

    def end(self, answer: DecodedAnswer) -> list[str]:
        tail, events = answer.tail, list[str]()
        if self._ask.body.scored:
            logprobs = self._logprobs(answer.completion, self._of(tail.index).prompt)
            events = [self._choice(tail.index, self._echo(tail.index) + answer.text, logprobs=logprobs)]
        elif tail.text or tail.reasoning or (tail.chunk.token_ids and self._ask.body.alternatives is not None):
            events = self.piece(tail)
        for number, call in enumerate(answer.message.tool_calls):
            events.append(self._choice(tail.index, {"tool_calls": [{"index": number, **call}]}))
        return [*events, self._choice(tail.index, {} if self._chat else "", _finish_reason(answer))]

    def done(self, answers: list[DecodedAnswer]) -> list[str]:
        include = self._ask.body.stream_options.include_usage
        return [self._chunk(choices=[], usage=self._counts(answers))] if include else []

    def _choice(self, index: int, said: Any, reason: str | None = None, logprobs: Any = None) -> str:
        choice = {"index": index, "delta" if self._chat else "text": said, "logprobs": logprobs}
        return self._chunk(choices=[{**choice, "finish_reason": reason}])

    def _chunk(self, **fields: Any) -> str:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return as_event({**self._common, "object": kind, **fields})

    def _logprobs(self, tokens: Chunk | Completion, prompt: Sequence[int] = ()) -> dict[str, Any] | None:
        entries = self._entries(tokens)
        if entries is None:
            return None
        if self._chat:
            return {"content": entries, "refusal": None}
        echoed = list[dict[str, Any]]()
        if isinstance(tokens, Completion) and tokens.prompt is not None:
            first = {**self._entry(prompt[0], 0.0), "logprob": None, "top_logprobs": None}
            echoed = [first, *(self._entries(tokens.prompt) or [])]
        shown = [*echoed, *entries]
        texts = [each["token"] for each in shown]
        best = [
            each["top_logprobs"] and {other["token"]: other["logprob"] for other in [*each["top_logprobs"], each]}
            for each in shown
        ]
        return {
            "tokens": texts,
            "token_logprobs": [each["logprob"] for each in shown],
            "top_logprobs": best if self._ask.body.alternatives else None,
            "text_offset": [*accumulate(map(len, texts[:-1]), initial=0)] if texts else [],
        }

    def _of(self, index: int) -> CheckedRequest:
        """Return the prompt of an answer."""
        return self._asks[index // self._ask.body.n]

    def _echo(self, index: int) -> str:
        """Return the text before an answer: its prompt, if the request wants it."""
        ask = self._of(index)
        if not isinstance(ask.body, CompletionRequest) or not ask.body.echo:
            return ""
        return ask.conversation if isinstance(ask.conversation, str) else self._tokenizer.decode(ask.prompt)

    def _counts(self, answers: list[DecodedAnswer]) -> dict[str, int]:
        prompt, sampled = self._usage(answers)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _finish_reason(answer: DecodedAnswer) -> str:
    return "length" if answer.is_truncated else "tool_calls" if answer.message.tool_calls else "stop"


def as_event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
