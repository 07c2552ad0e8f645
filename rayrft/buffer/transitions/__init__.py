"""What each event does to the state: one function an event."""

from __future__ import annotations

from typing import Any

from rayrft.buffer.events import Event
from rayrft.buffer.state import RULES, State
from rayrft.buffer.transitions import stages, steps

__all__ = ["apply", "stages", "steps"]


def apply(state: State, event: Event) -> Any:
    """Change the state, which nothing else does; gives what the event's rule gives, such as the tickets of an
    admission."""
    return RULES[type(event)](state, event)
