"""Rewards."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rayrft.config.base import Section, misfit


class RewardConfig(Section):
    """How answers are scored."""

    name: str = "exact"
    options: dict[str, Any] = Field(default_factory=dict)
    deadline_s: float = Field(10.0, gt=0)
    """Seconds that scoring one group may take, counted from the start of execution."""
    on_unknown: Literal["drop_row", "drop_group", "fallback"] = "drop_row"
    """What becomes of an answer whose reward raised or timed out, with all its rows where it has several."""
    fallback: float = 0.0
    truncated: Literal["zero", "score", "mask", "soft"] = "zero"
    """An answer cut at max_tokens, without its end. ``zero``: its reward is 0, or less where it is worth less.
    ``score``: scored like any other. ``mask``: so, too, and its group is compared with it, but it is not trained on
    (overlong filtering). ``soft``: scored, and every answer loses up to 1 over its last ``overlong_buffer`` tokens
    before max_tokens (soft overlong punishment). The last two are DAPO's (arXiv:2503.14476)."""
    overlong_buffer: int | None = Field(None, ge=1)
    """Tokens over which ``truncated: soft`` grows from 0 to 1; the paper's are a fifth of max_tokens."""
    workers: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _overlong(self) -> RewardConfig:
        if (self.truncated == "soft") != (self.overlong_buffer is not None):
            raise misfit(
                "overlong_buffer",
                "truncated: soft and overlong_buffer, its number of tokens, need each other",
                remedy="give both or none",
            )
        return self
