"""Rewards."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rayrft.config.base import Section


class RewardConfig(Section):
    """How answers are scored."""

    name: str = "exact"
    options: dict[str, Any] = Field(default_factory=dict)
    deadline_s: float = Field(10.0, gt=0)
    """Seconds that scoring one group may take, counted from the start of execution."""
    on_unknown: Literal["drop_row", "drop_group", "fallback"] = "drop_row"
    """What becomes of an answer whose reward raised or timed out."""
    fallback: float = 0.0
    truncated: Literal["zero", "score"] = "zero"
    """An answer cut at max_tokens, without its end: reward 0, or scored like any other."""
    workers: int = Field(1, ge=1)
