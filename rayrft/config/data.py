"""Tasks, demonstrations and rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from rayrft.config.base import Section


class TasksConfig(Section):
    """Where tasks come from. Duplicates are removed before the held-out tasks are cut off."""

    source: Literal["reasoning_gym", "file"]
    dataset: str | None = None
    """reasoning_gym: the name of the data set."""
    options: dict[str, Any] = Field(default_factory=dict)
    """reasoning_gym: options of the data set."""
    size: int | None = Field(None, ge=1)
    """How many rows to take before duplicates are removed; all of a file by default."""
    path: Path | None = None
    """file: JSONL or Parquet, a file or a folder."""
    eval_path: Path | None = None
    """file: held-out tasks in a file of their own."""
    question: str = "question"
    answer: str = "answer"
    """file: the fields that hold the question and the ground truth."""
    answer_after: str | None = None
    """file: keep of the answer only what follows the last such mark (GSM8K: '####')."""
    system: str | None = None
    """System message put before every question."""
    eval_size: int = Field(500, ge=1)
    """How many held-out tasks to evaluate on."""

    @model_validator(mode="after")
    def _source_fields(self) -> TasksConfig:
        if self.source == "reasoning_gym" and (self.dataset is None or self.size is None):
            raise ValueError("source 'reasoning_gym' needs 'dataset' (its name) and 'size' (how many tasks to make)")
        if self.source == "file" and self.path is None:
            raise ValueError("source 'file' needs 'path' (a JSONL or Parquet file)")
        return self


class DemonstrationsConfig(Section):
    """Expert rows: from a JSONL/Parquet file of prompts and responses, or the answers of tasks set apart for it."""

    path: Path | None = None
    prompt: str = "prompt"
    response: str = "response"
    """file: the fields that hold the two sides."""
    size: int | None = Field(None, ge=1)
    """Rows to take; for demonstrations from tasks, that many tasks are set apart and never sampled for rollouts."""
    wrong_share: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the rows that show a wrong answer instead: the stand-in for a base model of mixed habits."""
    wrong_field: str | None = None
    """The field of a task's metadata whose value is shown as the wrong answer."""

    @model_validator(mode="after")
    def _one_origin(self) -> DemonstrationsConfig:
        if self.path is None and self.size is None:
            raise ValueError("give 'path' (a file) or 'size' (how many tasks to set apart)")
        if self.wrong_share and (self.wrong_field is None or self.path is not None):
            raise ValueError("wrong_share needs wrong_field, and demonstrations made from tasks")
        return self


class RewardConfig(Section):
    """How answers are scored."""

    name: str = "exact"
    options: dict[str, Any] = Field(default_factory=dict)
    deadline_s: float = Field(10.0, gt=0)
    """Seconds that scoring one group may take, counted from the start of execution."""
    on_unknown: Literal["drop_row", "drop_group", "fallback"] = "drop_row"
    """What becomes of an answer whose reward raised or timed out."""
    fallback: float = 0.0
    truncated: Literal["zero", "score"] = "zero"
    """An answer cut at max_tokens, without its end: reward 0, or scored like any other."""
    workers: int = Field(1, ge=1)
