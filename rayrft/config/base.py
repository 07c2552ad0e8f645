"""The base of every config section."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, FilePath, model_validator

from rayrft.errors import ConfigError
from rayrft.files import local_path

REFERENCE = re.compile(r"env:[A-Za-z_]\w*")
"""A reference to an environment variable."""


T = TypeVar("T")
CHANGEABLE = object()
Changeable = Annotated[T, CHANGEABLE]
"""The type of a key that `rayrft.core.run.Run.set` may change while the run is running."""


class Section(BaseModel):
    """A frozen config section. Unknown keys are errors, so that a misspelt key does not silently keep its default."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def invalid(field: str, problem: str, remedy: str = "", *, value: Any = None) -> ValueError:
    """Create the error that a validator raises for ``field``, a dotted key relative to its section, whose path
    `load_config` prepends."""
    return ValueError(ConfigError(problem, remedy, field=field, value=value))


def check_device(options: dict[str, Any], field: str, gpus: float, remedy: str) -> None:
    """Raise `invalid` if option ``device`` of a reward or operator names a GPU, and its processes have no ``gpus``."""
    device = options.get("device")
    if isinstance(device, str) and device.startswith("cuda") and not gpus:
        problem = "needs a GPU of its own: those of the machine belong to engines and ranks"
        raise invalid(f"{field}.device", problem, f"{remedy}, or set it to cpu", value=device)


def section_rule(check: Callable[[Any], None]) -> Any:
    """Make a method that raises `invalid` a validator of its whole section."""

    def validate(section: Any) -> Any:
        check(section)
        return section

    return model_validator(mode="after")(validate)


def resolved(value: Any) -> Any:
    """Replace each text ``env:NAME`` in options by that environment variable. Raises ConfigError if it is not set."""
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


def _absolute(value: Any) -> Any:
    """Make a path absolute; refuse an address."""
    if not isinstance(value, str | Path):
        return value
    try:
        return local_path(value, "").expanduser().absolute()
    except ConfigError as error:
        raise ValueError(error) from None


def local_model(model: str) -> str:
    """Return the folder of a model as an absolute path, a hub id as it is."""
    folder = os.path.expanduser(model)
    return os.path.abspath(folder) if os.path.isdir(folder) else model


NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
Name = Annotated[str, Field(pattern=NAME)]
"""A name that becomes a part of the names of folders, actors and URLs."""

# Paths are made absolute: actors do not share the driver's working directory.
LocalPath = Annotated[Path, BeforeValidator(_absolute)]
LocalFile = Annotated[FilePath, BeforeValidator(_absolute)]
ModelPath = Annotated[str, AfterValidator(local_model)]
"""A Hugging Face folder or hub id."""
