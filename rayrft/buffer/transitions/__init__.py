"""The events of the Buffer, each with how it changes the state, which nothing else does."""

from __future__ import annotations

from typing import Annotated, Any, Union

from pydantic import ConfigDict, Discriminator, Tag, TypeAdapter

from rayrft.buffer.events import EVENT_TAGS, Event
from rayrft.buffer.transitions import admission, contents, leases

__all__ = ["admission", "contents", "decode", "encode", "leases"]

_tagged: Any = Union[tuple(Annotated[kind, Tag(tag)] for kind, tag in EVENT_TAGS.items())]  # noqa: UP007 - not written out
# Rows with non-finite rewards are rejected, but reports may contain such rewards.
_config = ConfigDict(ser_json_inf_nan="constants")
# The kind of an event, or of its JSON.
_kind = Discriminator(lambda event: EVENT_TAGS.get(type(event)) if isinstance(event, Event) else event.get("event"))
_adapter: TypeAdapter[Any] = TypeAdapter(Annotated[_tagged, _kind], config=_config)


def encode(event: Event) -> bytes:
    """Encode an event as one line of JSON."""
    body = _adapter.dump_json(event)[1:]
    return b'{"event":"%s"%s%s' % (EVENT_TAGS[type(event)].encode(), b"" if body == b"}" else b",", body)


def decode(line: bytes) -> Event:
    """Decode an event from a line. Raises pydantic's ValidationError."""
    return _adapter.validate_json(line)
