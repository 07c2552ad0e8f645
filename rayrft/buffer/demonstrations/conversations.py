"""Conversations: what a row of demonstrations shows, whichever of the known shapes it has."""

from __future__ import annotations

from typing import Any

from rayrft.config.demonstrations import RowFormat
from rayrft.errors import DataError

Message = dict[str, str]


def conversations(row: dict[str, Any], form: RowFormat) -> list[tuple[bool | None, list[Message]]]:
    """The conversations of a row, each ending with the assistant: one with None, or a pair with True (chosen) and
    False (rejected).

    Raises DataError, which says what is wrong, for a row that has none of the shapes.
    """
    chosen, rejected = row.get(form.chosen), row.get(form.rejected)
    prompt, response = row.get(form.prompt), row.get(form.response)
    if chosen is not None and rejected is not None:
        sides = [
            _joined(prompt, chosen, form.prompt, form.chosen),
            _joined(prompt, rejected, form.prompt, form.rejected),
        ]
        if sides[0] == sides[1]:
            raise DataError(f"{form.chosen!r} and {form.rejected!r} are the same")
        return [(True, sides[0]), (False, sides[1])]
    if row.get(form.messages) is not None:
        return [(None, _whole(_messages(row[form.messages], "assistant", form.messages), form.messages))]
    if not prompt or not response:
        raise DataError(
            f"needs text in {form.prompt!r} and {form.response!r}, or messages in {form.messages!r}, "
            f"or both {form.chosen!r} and {form.rejected!r}"
        )
    return [(None, _joined(prompt, response, form.prompt, form.response))]


def _joined(prompt: Any, answer: Any, prompt_field: str, answer_field: str) -> list[Message]:
    """Prompt and answer as one conversation. An answer that does not begin with the assistant holds its own prompt."""
    said = _messages(answer, "assistant", answer_field)
    if said[0]["role"] == "assistant":
        said = [*_messages(prompt, "user", prompt_field), *said]
    return _whole(said, answer_field)


def _messages(value: Any, role: str, field: str) -> list[Message]:
    """A text said by ``role``, or a list of messages."""
    if isinstance(value, str) and value:
        return [{"role": role, "content": _text(value, field)}]
    if not isinstance(value, list) or not value:
        raise DataError(f"needs text or messages in {field!r}")
    return [_message(each, f"{field}[{index}]") for index, each in enumerate(value)]


def _message(value: Any, place: str) -> Message:
    """A message; fields besides role and content are the template's to use, and nothing else can hold them but text."""
    if not isinstance(value, dict):
        raise DataError(f"{place} is not a message with 'role' and 'content'")
    # Arrow gives every message the fields of all messages, null where it has none.
    message = {key: _text(each, f"{place}.{key}") for key, each in value.items() if each is not None}
    if not {"role", "content"} <= message.keys():
        raise DataError(f"{place} needs 'role' and 'content'")
    if message["role"] == "assistant" and not message["content"]:
        raise DataError(f"{place}: the assistant says nothing")
    return message


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{place} is not text")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which no tokenizer takes
        raise DataError(f"{place} is not valid Unicode") from None
    return value


def _whole(messages: list[Message], field: str) -> list[Message]:
    if messages[0]["role"] == "assistant":
        raise DataError(f"{field!r} begins with the assistant, which nothing has asked yet")
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{field!r} does not end with the assistant")
    return messages
