"""The base of every config section."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from rayrft.errors import ConfigError


class Section(BaseModel):
    """Frozen, and unknown keys are errors: a misspelt key must not silently keep its default."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def misfit(field: str, problem: str, *, value: Any = None, remedy: str = "") -> ValueError:
    """What a validator of a section raises where fields do not go together; ``field`` is one of the section's, dotted.

    `load_config` puts the path of the section in front and raises ConfigError.
    """
    return ValueError(ConfigError(problem, field=field, value=value, remedy=remedy))
