"""Decoding of an answer's tokens: text in whole characters, stop strings, and calls of tools."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayrft.data.chat_template import Tools
from rayrft.data.reasoning import ReasoningSplit, overlap, split_reasoning
from rayrft.data.tokenizer import INCOMPLETE, ChatTokenizer
from rayrft.explorer.engines.exchange import Completion
from rayrft.explorer.tools.call_formats import CallFormat, ToolCall


@dataclass(frozen=True)
class DecodedMessage:
    """The content of an answer, its calls of tools in the API's form, and its reasoning, if that is split off."""

    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    reasoning: str = ""
    malformed: int = 0
    """Number of its calls that cannot be read."""


class AnswerText:
    """The growing text of an answer, from ``opening`` to a stop string after its reasoning.

    Text from ``held`` on, with which calls of tools begin, is held back; all of it if that is empty.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, stops: Sequence[str] = (), held: str | None = None, opening: str = ""
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._held = held
        self._ids: list[int] = []
        self._first, self._read = 0, 0
        """The window of tokens that is decoded again with the next ones; the text is known up to its end."""
        self._shown = 0
        self.text = opening
        """The text so far, in whole characters and without the stop string."""
        self.stopped_at: int | None = None
        """Number of tokens up to the end of the stop string."""
        self.stopped_by: str | None = None
        """The stop string."""

    @property
    def tokens(self) -> int:
        """Number of tokens added."""
        return len(self._ids)

    def add(self, token_ids: Sequence[int]) -> bool:
        """Append tokens up to a stop string; return whether there is one."""
        for token in token_ids:
            if self.stopped_at is None:
                self._ids.append(token)
                self._decode(whole=True)
        return self.stopped_at is not None

    def end(self) -> str:
        """Return the text that was not shown yet; no token may follow."""
        if self.stopped_at is None:
            self._decode(whole=False)
        self._shown, shown = len(self.text), self._shown
        return self.text[shown:]

    def show(self) -> str:
        """Return the text since the last call, without an end that may become a stop string or a call of tools."""
        end = len(self.text)
        if self.stopped_at is None:
            end -= max((overlap(self.text, stop) for stop in self._stops), default=0)
        if self._held is not None:
            begins = self.text.find(self._held)
            end = min(end, begins if begins >= 0 else len(self.text) - overlap(self.text, self._held))
        first, self._shown = self._shown, max(self._shown, end)
        return self.text[first : self._shown]

    def _decode(self, *, whole: bool) -> None:
        """Append the text of the tokens after the window, if it ends with a ``whole`` character."""
        known = self._tokenizer.decode(self._ids[self._first : self._read], self.text)
        text = self._tokenizer.decode(self._ids[self._first :], self.text)
        if len(text) <= len(known) or (whole and text.endswith(INCOMPLETE)):
            return
        before = len(self.text)
        self.text += text[len(known) :]
        self._first, self._read = self._read, len(self._ids)
        answer = len(split_reasoning(self.text)[0]) if self._stops else 0
        places = ((self.text.find(stop, max(answer, before - len(stop) + 1)), stop) for stop in self._stops)
        if found := [place for place in places if place[0] >= 0]:
            at, self.stopped_by = min(found)
            self.text, self.stopped_at = self.text[:at], len(self._ids)


def truncate_answer(completion: Completion, tokens: int | None, stop_reason: str = "stop") -> Completion:
    """Return an answer up to the number of tokens at which it was stopped; without a number, all of it."""
    if tokens is None:
        return completion
    versions = tuple((start, min(end, tokens), version) for start, end, version in completion.versions)
    return replace(
        completion,
        token_ids=completion.token_ids[:tokens],
        logprobs=completion.logprobs[:tokens],
        alternatives=completion.alternatives[:tokens],
        versions=tuple(span for span in versions if span[0] < span[1]),
        stop_reason=stop_reason,
    )


async def decode_message(
    text: str, form: CallFormat | None, tools: Tools = (), *, split: bool = False
) -> DecodedMessage:
    """Return the message of an answer, with its calls of ``tools`` in a ``form``; ``split`` takes its reasoning out of
    the content. An answer with an unreadable call is text."""
    calls = await form.read(text, tools) if form else []
    read = [call for call in calls if isinstance(call, ToolCall)]
    malformed = len(calls) - len(read)
    if form is not None and read and not malformed:
        text = form.content(text)
    else:
        read = []
    parts = ReasoningSplit.of(text) if split else None
    content, reasoning = (parts.content, parts.reasoning) if parts is not None else (text, "")
    return DecodedMessage(content, tuple(map(_tool_call, read)), reasoning, malformed)


def _tool_call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
