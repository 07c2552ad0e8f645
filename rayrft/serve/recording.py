"""What is recorded of the calls of a session: each continues a row, whose answers stay as they were sampled, or begins
another one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from rayrft.explorer.engines.exchange import Completion

Conversation = str | tuple[str, ...] | tuple[int, ...]
"""What a client has sent and got: a text, canonical messages (the first entry stands for their tools), or token ids.
One continues another if it begins with it."""


@dataclass(frozen=True)
class Prefix:
    """A row that a call continues: its tokens, and how long a part of the conversation they are."""

    token_ids: tuple[int, ...]
    length: int
    engine: str | None
    """The engine that has it in its cache."""


@dataclass(frozen=True)
class Begun:
    """A call in progress, by session and number."""

    session: str
    number: int
    prefix: Prefix | None = None


@dataclass(frozen=True)
class Choice:
    """An answer: as it was sampled, how it continues the conversation, and as text."""

    completion: Completion
    said: Conversation
    text: str


@dataclass(frozen=True)
class Call:
    """A call that was answered. ``turns`` are its messages, for display, since those of the prefix."""

    response: str
    prompt: tuple[int, ...]
    conversation: Conversation
    turns: tuple[dict[str, str], ...]
    choices: tuple[Choice, ...]
    trained: bool
    """Whether it was sampled from the distribution that is trained."""
    engine: str | None = None


@dataclass
class Row:
    """A row in the making. ``turns`` are its messages, for display."""

    token_ids: tuple[int, ...]
    prompt_length: int
    known: Conversation
    turns: list[dict[str, str]]
    answers: list[tuple[int, Completion]]
    """Those to train on, by their start index."""
    stop_reason: str
    engine: str | None
    busy: bool = False
    """Whether a call in progress continues it."""
    responses: list[str] = field(default_factory=list)
    """Ids of the responses whose answers it has."""


@dataclass
class SessionRows:
    """The rows of one session."""

    rows: list[Row] = field(default_factory=list)
    running: dict[int, Row | None] = field(default_factory=dict)
    """Calls in progress by number, with what they continue."""

    def begin(self, number: int, conversation: Conversation) -> Prefix | None:
        """Begin a call. It continues the longest row that it can and no other call does; None: it begins another."""
        fitting = [
            row
            for row in self.rows
            if not row.busy
            and isinstance(conversation, type(row.known))
            and len(conversation) > len(row.known)
            and conversation[: len(row.known)] == row.known
        ]
        longest = max(fitting, key=lambda row: len(row.known), default=None)
        self.running[number] = longest
        if longest is None:
            return None
        longest.busy = True
        return Prefix(longest.token_ids, len(longest.known), longest.engine)

    def answered(self, number: int, call: Call) -> None:
        """End a call with its answers; the first continues the row, others are rows of their own."""
        row = self.running.pop(number)
        for choice in call.choices:
            ids = (*call.prompt, *choice.completion.token_ids)
            if row is None:
                row = Row(ids, len(call.prompt), "", [], [], "", None)
                self.rows.append(row)
            row.token_ids = ids
            row.responses.append(call.response)
            row.turns += [*call.turns, {"role": "assistant", "content": choice.text}]
            if call.trained and choice.completion.token_ids:
                row.answers.append((len(call.prompt), choice.completion))
            row.known = call.conversation + choice.said  # type: ignore[operator]
            row.stop_reason, row.engine, row.busy = choice.completion.stop_reason, call.engine, False
            row = None

    def failed(self, number: int) -> None:
        """End a call without an answer."""
        if (row := self.running.pop(number)) is not None:
            row.busy = False


def canonical(messages: Sequence[dict[str, object]]) -> tuple[str, ...]:
    """Return messages in a form in which equal ones are equal, whatever a client adds or leaves out."""
    return tuple(json.dumps(message, sort_keys=True) for message in messages)
