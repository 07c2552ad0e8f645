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
    """The names of the fields. ``margin`` is by how much a pair's chosen answer is better, if it is known, for reward
    models. ``label``, true or false, says whether an answer is good, for algorithms such as ``kto`` (in TRL's files of
    this kind ``response`` is ``completion``). ``images`` are paths, relative to the folder of the file, or bytes; they
    replace ``<image>`` in user messages, else precede the first user text. ``tools`` are JSON schemas of functions, a
    list or its JSON, which the chat template shows."""
    images_folder: Path | None = None
    """Where images are kept that are bytes; every node must find it."""
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
    """Of preference pairs, the share (below 1) or the number (from 1) that no stage trains on, chosen by ``seed``: all
    pairs of a prompt, or none. They are ranked where a stage that trains on the others evaluates, and at its end."""
    wrong_share: float = Field(0.0, ge=0.0, le=1.0)
    """Fraction of rows with a wrong answer instead, to imitate a base model of mixed quality."""
    wrong_field: str | None = None
    """The field of a task's metadata that holds the wrong answer."""

    @model_validator(mode="after")
    def _one_origin(self) -> DemonstrationsConfig:
        if self.path is None and self.size is None:
            raise invalid("path", "give 'path' (a file or folder) or 'size' (how many tasks to set apart)")
        if self.held_out >= 1 and self.held_out % 1:
            raise invalid("held_out", "is neither a share below 1 nor a number of pairs", value=self.held_out)
        if self.wrong_share and (self.wrong_field is None or self.path is not None):
            raise invalid(
                "wrong_share", "needs wrong_field, and demonstrations made from tasks", value=self.wrong_share
            )
        return self
