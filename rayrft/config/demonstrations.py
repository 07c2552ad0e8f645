"""Config of demonstrations: sources of expert and offline data, and the format of their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from rayrft.config.base import Section, invalid


class RowFormat(Section):
    """Field names of demonstration rows, and the selection of rows.

    A row with both ``chosen`` and ``rejected`` is a preference pair, else one with ``messages`` is a conversation, else
    it is a ``prompt`` with its ``response``. A side is a text or a list of chat messages
    (``{"role": …, "content": …}``); a list that does not begin with the assistant contains its own prompt.
    """

    messages: str = "messages"
    prompt: str = "prompt"
    response: str = "response"
    chosen: str = "chosen"
    rejected: str = "rejected"
    margin: str = "margin"
    label: str = "label"
    images: str = "images"
    tools: str = "tools"
    """The names of the fields. ``margin``, for reward models, is by how much a pair's chosen answer is better, if
    known. ``label``, true or false, says whether an answer is good, for algorithms such as ``kto`` (TRL's files name
    ``response`` ``completion``). ``images`` are paths, relative to the folder of the file, or bytes; they replace
    ``<image>`` in user messages, else precede the first user text. ``tools`` are JSON schemas of functions, a list or
    its JSON, which the chat template shows."""
    images_folder: Path | None = None
    """Folder for images that are given as bytes; every node must have it at this path."""
    size: int | None = Field(None, ge=1)
    """Number of rows to take, from the start; all by default. For demonstrations from tasks: number of tasks to
    reserve, which are never sampled for rollouts."""
    on_broken: Literal["fail", "skip"] = "fail"
    """Whether an invalid row fails the start of the run, or is skipped and counted with its line number."""


class DemonstrationsConfig(RowFormat):
    """Expert rows from files, or from the answers of reserved tasks."""

    path: Path | None = None
    """A JSONL or Parquet file, a folder of Parquet files, or a data set saved by ``datasets.Dataset.save_to_disk``."""
    held_out: float = Field(0.0, ge=0.0)
    """Share (below 1) or number (from 1) of preference pairs that no stage trains on: all pairs of a prompt, or none. A
    stage that trains on the other pairs ranks them when it evaluates, and at its end."""
    wrong_share: float = Field(0.0, ge=0.0, le=1.0)
    """Fraction of rows with a wrong answer instead, to imitate a base model of mixed quality."""
    wrong_field: str | None = None
    """The field of a task's metadata that holds the wrong answer."""

    @model_validator(mode="after")
    def _one_origin(self) -> DemonstrationsConfig:
        if self.path is None and self.size is None:
            raise invalid("path", "is required without 'size'", "give a file or folder, or size, a number of tasks")
        if (pairs := self.held_out) >= 1 and pairs % 1:
            problem = "must be a share below 1, or a whole number of pairs"
            raise invalid("held_out", problem, f"give {round(pairs)}", value=pairs)
        if self.wrong_share and (self.wrong_field is None or self.path is not None):
            problem = "is only valid with wrong_field, for demonstrations made from tasks"
            raise invalid("wrong_share", problem, "set wrong_field and remove path", value=self.wrong_share)
        return self
