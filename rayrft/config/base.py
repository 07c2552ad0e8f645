"""The base of every config section."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, and unknown keys are errors: a misspelt key must not silently keep its default."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
