"""From the tokens of an answer to what a client gets: text in whole characters, stop strings, and calls of tools."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayrft.data.reasoning import split_reasoning
from rayrft.data.tokenizer import INCOMPLETE, ChatTokenizer
from rayrft.explorer.engines.exchange import Completion
from rayrft.explorer.tools.parsing import CallForm, ToolCall, parse_calls

_CALL_BEGINS = "<tool_call>"


@dataclass(frozen=True)
class DecodedMessage:
    """An answer as a client gets it: its text, and calls of tools in the API's form."""

    content: str
    tool_calls: tuple[dict[str, Any], ...] = ()


class AnswerText:
    """The text of an answer that grows by tokens, up to a stop string after its reasoning. It begins with ``opening``.

    ``holds_calls`` holds text back from the beginning of a call of tools on, or all of it in the form ``json``.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stops: Sequence[str] = (),
        holds_calls: CallForm | None = None,
        opening: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._holds_calls = holds_calls
        self._ids: list[int] = []
        self._first, self._read = 0, 0
        """The window of tokens that is decoded together with what follows, and its end, up to which text is known."""
        self._shown = 0
        self.text = opening
        """Without what is not a whole character yet, and without the stop string."""
        self.stopped_at: int | None = None
        """Number of tokens after which there was a stop string."""

    @property
    def tokens(self) -> int:
        """Number of tokens added."""
        return len(self._ids)

    def add(self, token_ids: Sequence[int]) -> bool:
        """Append tokens; return whether there is a stop string. What follows that is not added."""
        for token in token_ids:
            if self.stopped_at is None:
                self._ids.append(token)
                self._decode(whole=True)
        return self.stopped_at is not None

    def end(self) -> str:
        """Return the text that was not shown yet, when no token follows."""
        if self.stopped_at is None:
            self._decode(whole=False)
        self._shown, shown = len(self.text), self._shown
        return self.text[shown:]

    def show(self) -> str:
        """Return the text since the last call, but for what may become a stop string or a call of tools."""
        end = len(self.text)
        if self.stopped_at is None:
            end -= max((_overlap(self.text, stop) for stop in self._stops), default=0)
        if self._holds_calls == "json":
            end = 0
        elif self._holds_calls:
            begins = self.text.find(_CALL_BEGINS)
            end = min(end, begins if begins >= 0 else len(self.text) - _overlap(self.text, _CALL_BEGINS))
        first, self._shown = self._shown, max(self._shown, end)
        return self.text[first : self._shown]

    def _decode(self, *, whole: bool) -> None:
        """Append the text of the tokens after the window, if it ends with a ``whole`` character."""
        known = self._tokenizer.decode(self._ids[self._first : self._read])
        text = self._tokenizer.decode(self._ids[self._first :])
        if len(text) <= len(known) or (whole and text.endswith(INCOMPLETE)):
            return
        before = len(self.text)
        self.text += text[len(known) :]
        self._first, self._read = self._read, len(self._ids)
        answer = len(split_reasoning(self.text)[0]) if self._stops else 0
        found = [at for stop in self._stops if (at := self.text.find(stop, max(answer, before - len(stop) + 1))) >= 0]
        if found:
            self.text, self.stopped_at = self.text[: min(found)], len(self._ids)


def truncate_answer(completion: Completion, tokens: int | None) -> Completion:
    """Return an answer up to a number of tokens, at which it was stopped; the answer itself if there is none."""
    if tokens is None:
        return completion
    versions = tuple((start, min(end, tokens), version) for start, end, version in completion.versions)
    return replace(
        completion,
        token_ids=completion.token_ids[:tokens],
        logprobs=completion.logprobs[:tokens],
        versions=tuple(span for span in versions if span[0] < span[1]),
        stop_reason="stop",
    )


def decode_message(text: str, form: CallForm | None) -> DecodedMessage:
    """Return the message of an answer, with its calls of tools if there is a ``form`` of them. An answer whose calls
    cannot all be read is text."""
    calls = parse_calls(text, form) if form else []
    read = [call for call in calls if isinstance(call, ToolCall)]
    if not read or len(read) < len(calls):
        return DecodedMessage(text)
    reasoning, answer = split_reasoning(text)
    content = reasoning + answer.partition(_CALL_BEGINS)[0] if form == "hermes" else ""
    return DecodedMessage(content, tuple(map(_tool_call, read)))


def _tool_call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text that begins, but is not, ``stop``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-size:])), 0)
