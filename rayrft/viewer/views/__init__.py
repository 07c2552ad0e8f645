"""The views of the page: each is a file with its queries here, and a module of the same name in `static/views`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from rayrft.viewer.folders import Runs

Query = tuple[type[BaseModel], Callable[[Runs, Any], Any]]
"""The parameters of a request, and the function that answers it in a thread: with JSON, or a response."""


Whole = Annotated[int, Field(ge=0, lt=1 << 63)]


class StorageRequest(BaseModel):
    """Parameters of a query, whose names a request may have; this one has none."""

    model_config = ConfigDict(extra="forbid")


class RunRequest(StorageRequest):
    """Parameters of a query about one run."""

    run: str


UPDATE_S = 1.0
"""Seconds that a query waits for the rows which were appended to the log; without them it answers with those before."""
POINTS = 1500
"""Most points of a curve: of a longer one each is the mean of several steps."""


def dicts(found: Any) -> list[dict[str, Any]]:
    """Return the rows of an executed query by the names of its columns."""
    names = [column[0] for column in found.description]
    return [dict(zip(names, row, strict=True)) for row in found.fetchall()]
