"""Rows of a session: each call continues a row, whose answers stay as they were sampled, or starts another one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from rayrft.explorer.engines.exchange import Completion

Conversation = str | tuple[str, ...] | tuple[int, ...]
"""The messages between client and model: a text, canonical messages (the first entry stands for their tools), or token
ids. A conversation continues another if it begins with it."""


@dataclass(frozen=True)
class Prefix:
    """The row that a call continues: its tokens, and the length of their part of the conversation."""

    token_ids: tuple[int, ...]
    length: int
    engine: str | None
    """The engine whose cache has the row."""


@dataclass(frozen=True)
class OpenCall:
    """A call in progress, by session and number."""

    session: str
    number: int
    prefix: Prefix | None = None


@dataclass(frozen=True)
class Choice:
    """An answer as it was sampled, as a continuation of the conversation, and as text."""

    completion: Completion
    said: Conversation
    text: str


@dataclass(frozen=True)
class Call:
    """An answered call. ``turns`` are its messages after the prefix, for display."""

    response: str
    prompt: tuple[int, ...]
    conversation: Conversation
    turns: tuple[dict[str, str], ...]
    choices: tuple[Choice, ...]
    trained: bool
    """Whether it was sampled from the distribution that is trained."""
    engine: str | None = None
    images: tuple[str, ...] = ()
    """All images in the prompt."""


@dataclass
class Row:
    """A row in the making. ``turns`` are its messages, for display."""

    token_ids: tuple[int, ...]
    prompt_length: int
    known: Conversation
    turns: list[dict[str, str]]
    answers: list[tuple[int, Completion]]
    """Answers to train on, by their start index."""
    stop_reason: str
    engine: str | None
    responses: list[str] = field(default_factory=list)
    """Ids of the responses with its answers."""
    images: tuple[str, ...] = ()


@dataclass
class SessionRows:
    """The rows of one session."""

    rows: list[Row] = field(default_factory=list)
    running: dict[int, Row | None] = field(default_factory=dict)
    """Calls in progress by number, with the rows that they continue."""
    _free: dict[int, dict[Conversation, list[Row]]] = field(default_factory=dict)
    """Rows that no call in progress continues, by the length of their conversation, and by that."""

    def begin(self, number: int, conversation: Conversation) -> Prefix | None:
        """Begin a call. It continues the longest row that it can, unless another call does; None: it starts a row."""
        self.running[number] = None
        for length in sorted(self._free, reverse=True):
            rows = self._free[length].get(conversation[:length])
            if rows and length < len(conversation):
                self.running[number] = row = rows.pop(0)
                if not rows:
                    del self._free[length][row.known]
                if not self._free[length]:
                    del self._free[length]
                return Prefix(row.token_ids, length, row.engine)
        return None

    def answered(self, number: int, call: Call) -> None:
        """End a call with its answers; the first continues the row, each other answer is a further row."""
        row = self.running.pop(number)
        for choice in call.choices:
            ids = (*call.prompt, *choice.completion.token_ids)
            if row is None:
                row = Row(ids, len(call.prompt), "", [], [], "", None)
                self.rows.append(row)
            row.token_ids, row.images = ids, call.images
            row.responses.append(call.response)
            row.turns += [*call.turns, {"role": "assistant", "content": choice.text}]
            if call.trained and choice.completion.token_ids:
                row.answers.append((len(call.prompt), choice.completion))
            row.known = call.conversation + choice.said  # type: ignore[operator]
            row.stop_reason, row.engine = choice.completion.stop_reason, call.engine
            self._release(row)
            row = None

    def failed(self, number: int) -> None:
        """End a call without an answer."""
        if (row := self.running.pop(number)) is not None:
            self._release(row)

    def _release(self, row: Row) -> None:
        self._free.setdefault(len(row.known), {}).setdefault(row.known, []).append(row)


def canonical_messages(messages: Sequence[dict[str, object]]) -> tuple[str, ...]:
    """Return messages as JSON with sorted keys, so that equal messages are equal texts."""
    return tuple(json.dumps(message, sort_keys=True) for message in messages)
