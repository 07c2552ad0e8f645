"""The table of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

RULES: dict[type, Callable[[Any, Any], Any]] = {}
"""By kind of event: a function of the state and the event."""


def rule(kind: type) -> Callable[[Callable[[Any, Any], Any]], Callable[[Any, Any], Any]]:
    """Decorator: this is what events of that kind do."""

    def add(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        RULES[kind] = function
        return function

    return add
