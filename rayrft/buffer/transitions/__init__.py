"""State transitions of the Buffer: one function per event type."""

from __future__ import annotations

from typing import Any

from rayrft.buffer.events import Event
from rayrft.buffer.state import TRANSITIONS, State
from rayrft.buffer.transitions import admission, contents, leases

__all__ = ["admission", "apply", "contents", "leases"]


def apply(state: State, event: Event) -> Any:
    """Apply an event to the state, the only way to change it; return its rule's result, such as admitted tickets."""
    return TRANSITIONS[type(event)](state, event)
