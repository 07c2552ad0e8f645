"""Config of a bench: which models are evaluated on which task sets, and how."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, field_validator, model_validator

from rayrft.config.base import NAME, Section, invalid
from rayrft.config.tasks import TaskSourceConfig


class TasksetConfig(Section):
    """Tasks to evaluate on: a source's held-out tasks, or all if it has none. One source may replace the section."""

    sources: list[TaskSourceConfig] = Field(min_length=1)
    size: int | None = Field(None, ge=1)
    """Number of tasks to take, drawn by the run's seed; all by default."""

    @model_validator(mode="before")
    @classmethod
    def _one_source(cls, value: Any) -> Any:
        return {"sources": [value]} if isinstance(value, dict) and "source" in value else value


class BenchConfig(Section):
    """Evaluation of models on task sets (`rayrft bench`), by the run's workflow, environment, reward and engines."""

    models: dict[str, str] = Field(default_factory=dict)
    """By name: a Hugging Face folder or hub id, a run (its folder, or its name in ``storage``) for its final or else
    latest weights, or ``RUN@WHICH``: a checkpoint's step, a stage, or ``start``. By default ``model``."""
    tasksets: dict[str, TasksetConfig] = Field(default_factory=dict)
    """By name. The held-out tasks of ``tasks``, if any, are added as ``held_out``."""
    samples: int = Field(8, ge=1)
    """Attempts per task; by default 1 at temperature 0."""
    k: tuple[int, ...] = Field((1, 4, 8), min_length=1)
    """The k of pass@k and majority@k; by default 1, 4 and 8, up to ``samples``."""
    temperature: float = Field(1.0, ge=0, le=2)
    max_tokens: int | None = Field(None, ge=1)
    """Longest answer, in tokens; by default ``explorer.sampling.max_tokens``."""

    @model_validator(mode="before")
    @classmethod
    def _derived(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        samples = value.get("samples", 1 if value.get("temperature") == 0 else 8)
        k = [number for number in (1, 4, 8) if isinstance(samples, int) and number <= samples] or [1]
        return {"samples": samples, "k": k, **value}

    @field_validator("models", "tasksets")
    @classmethod
    def _names(cls, named: dict[str, Any]) -> dict[str, Any]:
        for name in named:
            if name == "held_out" or not re.fullmatch(NAME, name):
                problem = "must consist of letters, digits, '-' and '_', and cannot be held_out"
                raise invalid(name, problem, "use another name", value=name)
        return named

    @model_validator(mode="after")
    def _samples(self) -> BenchConfig:
        if min(self.k) < 1 or max(self.k) > self.samples:
            raise invalid("k", f"must lie in 1 to samples, {self.samples}", "raise samples", value=list(self.k))
        if self.temperature == 0 and self.samples > 1:
            remedy = "set samples: 1 and k: [1], or raise the temperature"
            raise invalid("samples", "must be 1 at temperature 0", remedy, value=self.samples)
        return self
