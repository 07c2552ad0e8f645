"""Expert and offline data: where demonstrations come from, and what their rows look like."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from rayrft.config.base import Section, misfit


class RowFormat(Section):
    """The fields of a row of demonstrations, and which rows are taken.

    A row is a preference pair where it has both ``chosen`` and ``rejected``, else a conversation where it has
    ``messages``, else a ``prompt`` with its ``response``. Each side is a text or a list of chat messages
    (``{"role": …, "content": …}``); one that begins before the assistant speaks holds its own prompt.
    """

    messages: str = "messages"
    prompt: str = "prompt"
    response: str = "response"
    chosen: str = "chosen"
    rejected: str = "rejected"
    images: str = "images"
    """The names of the fields. ``images`` are paths, relative ones from where the file lies; they stand where users say
    ``<image>``, else before the first text of a user."""
    size: int | None = Field(None, ge=1)
    """Rows to take, from the first on; all by default. For demonstrations from tasks, that many tasks are set apart and
    never sampled for rollouts."""
    on_broken: Literal["fail", "skip"] = "fail"
    """A row that cannot be understood ends the start of the run, or is left out and counted with its line number."""


class DemonstrationsConfig(RowFormat):
    """Expert rows: from files, or the answers of tasks set apart for it."""

    path: Path | None = None
    """A JSONL or Parquet file, a folder of Parquet files, or what ``datasets.Dataset.save_to_disk`` wrote."""
    wrong_share: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the rows that show a wrong answer instead: the stand-in for a base model of mixed habits."""
    wrong_field: str | None = None
    """The field of a task's metadata whose value is shown as the wrong answer."""

    @model_validator(mode="after")
    def _one_origin(self) -> DemonstrationsConfig:
        if self.path is None and self.size is None:
            raise misfit("path", "give 'path' (a file or folder) or 'size' (how many tasks to set apart)")
        if self.wrong_share and (self.wrong_field is None or self.path is not None):
            raise misfit("wrong_share", "needs wrong_field, and demonstrations made from tasks", value=self.wrong_share)
        return self
