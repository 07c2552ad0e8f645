"""Config of rewards."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rayrft.config.base import Section, invalid


class RewardConfig(Section):
    """Scoring of answers."""

    name: str = "exact"
    options: dict[str, Any] = Field(default_factory=dict)
    deadline_s: float = Field(10.0, gt=0)
    """Seconds allowed for scoring one group, from the start of execution."""
    on_unknown: Literal["drop_row", "drop_group", "fallback"] = "drop_row"
    """Policy for an answer (with all its rows) whose reward raised or timed out."""
    fallback: float = 0.0
    truncated: Literal["zero", "score", "mask", "soft"] = "zero"
    """Policy for an answer truncated at max_tokens or for repetition. ``zero``: its reward is at most 0. ``score``:
    scored like others. ``mask``: scored and used in its group's statistics, but not trained on (overlong filtering).
    ``soft``: scored, and every answer loses up to 1 over the last ``overlong_buffer`` tokens before max_tokens (soft
    overlong punishment). The last two are DAPO's (arXiv:2503.14476)."""
    overlong_buffer: int | None = Field(None, ge=1)
    """Tokens over which ``truncated: soft`` grows from 0 to 1; a fifth of max_tokens in the paper."""
    repetition_penalty: float = Field(0.0, ge=0)
    """What an answer loses that was stopped for repetition (`explorer.sampling.repetition`)."""
    workers: int = Field(1, ge=1)
    """Actors that score, for each Explorer; none if the reward runs inline."""

    @model_validator(mode="after")
    def _overlong(self) -> RewardConfig:
        if (self.truncated == "soft") != (self.overlong_buffer is not None):
            raise invalid(
                "overlong_buffer",
                "truncated: soft and overlong_buffer, its number of tokens, need each other",
                remedy="give both or none",
            )
        return self
