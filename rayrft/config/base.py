"""The base of every config section."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rayrft.errors import ConfigError

NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
"""The pattern of names that become parts of the names of folders, actors and URLs."""


REFERENCE = re.compile(r"env:[A-Za-z_]\w*")
"""A reference to an environment variable."""


class Section(BaseModel):
    """A frozen config section. Unknown keys are errors, so that a misspelt key does not silently keep its default."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def invalid(field: str, problem: str, remedy: str = "", *, value: Any = None) -> ValueError:
    """Create the error that a validator raises for ``field``, a dotted key relative to its section.

    `load_config` prepends the path of the section and raises ConfigError.
    """
    return ValueError(ConfigError(problem, remedy, field=field, value=value))


def resolved(value: Any) -> Any:
    """Replace each text ``env:NAME`` in options by that environment variable of this process.

    Raises ConfigError if there is no such variable.
    """
    if isinstance(value, dict):
        return {key: resolved(each) for key, each in value.items()}
    if isinstance(value, list):
        return [resolved(each) for each in value]
    if not isinstance(value, str) or not REFERENCE.fullmatch(value):
        return value
    if (secret := os.environ.get(value[4:])) is None:
        remedy = "set it for the driver and on every node before Ray starts, or in env_vars of the job's runtime_env"
        raise ConfigError("refers to an environment variable that is not set", remedy, field="env", value=value)
    return secret


def local_folder(value: Any) -> Any:
    """Return the absolute path of a folder, since actors do not share the driver's working directory; refuse a URI.

    For a field's ``before`` validator.
    """
    if not isinstance(value, str | Path):
        return value
    if "://" in str(value):
        remedy = "give a folder, local or mounted on every node, such as /mnt/runs"
        raise invalid("", "must be a folder, not a URI", remedy, value=value)
    return Path(value).expanduser().absolute()
