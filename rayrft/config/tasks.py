"""Config of tasks: sources, their weights, the order of draws, and benches, which evaluate models on task sets."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from pydantic import Field, field_validator, model_validator

from rayrft.config.base import NAME, LocalPath, Section, invalid, section_rule
from rayrft.config.rows import ORIGINS, RowsConfig, RowSelection

_REQUIRED = {
    "reasoning_gym": {"dataset": "the name of a data set", "size": "a number of tasks"},
    "gymnasium": {"dataset": "the id of an environment", "size": "a number of tasks"},
    "verifiers": {"dataset": "the id of a taskset"},
    "datasets": {"dataset": "an id on the hub, or a folder"},
    "file": {"path": "a JSONL, CSV or Parquet file"},
    "tasks": {"path": "a file of tasks that rayrft wrote"},
    "ray": {"read": "a function of ray.data, such as read_parquet"},
    "squares": {"path": "a folder for the images", "size": "a number of images"},
}
"""Keys that each source needs, with what they hold."""


class TaskSourceConfig(RowsConfig, RowSelection):
    """A source of tasks: rows of a file, data set or Ray Dataset, generated tasks, or your own reader.

    ``dataset`` is also a data set's name (reasoning_gym) or an environment's id (gymnasium, verifiers), and ``options``
    are its own. ``path`` is also a file of tasks that rayrft wrote (tasks), or the folder to draw in (squares).
    """

    name: str | None = None
    """Name for overrides (``tasks.sources.gsm8k.size``), which also take the source's number."""
    source: str
    """reasoning_gym, datasets, file, ray, tasks, squares, gymnasium, verifiers, or ``package.module:attribute``; by
    default file, datasets or ray, by the key ``path``, ``dataset`` or ``read``."""
    eval_split: str | None = None
    """datasets: a split of held-out tasks, used like ``eval_path``."""
    eval_path: LocalPath | None = None
    """A separate file of held-out tasks, of the same kinds, of which the source's share of ``eval_size`` is taken."""
    question: str | None = None
    answer: str | None = None
    """file, datasets, ray: the columns with the question and the right answer, or a list of right answers; ``a.b`` is
    field b of object a. By default they are recognised (`rayrft.data.layouts`), and a row may have no answer."""
    answer_after: str | None = None
    """file, datasets, ray: keep only the part of the answer after the last such mark (GSM8K: '####')."""
    difficulty: str | None = None
    """The field of a row (reasoning_gym: of a task's metadata) with the task's difficulty, a number."""
    tries: str | None = None
    pass_rate: str | None = None
    """file, datasets, ray: the fields with the number of earlier scored answers to a task, and their mean reward within
    0 and 1. Task samplers start from them, and operators see them."""
    workflow: str | None = None
    """The workflow of the source's tasks; by default ``explorer.workflow``."""
    system: str | None = None
    """System message before every question."""
    weight: float = Field(1.0, gt=0)
    """Weight of this source, relative to the sum of all, in drawn, held-out and demonstrated tasks."""

    @model_validator(mode="before")
    @classmethod
    def _by_origin(cls, value: Any) -> Any:
        if isinstance(value, dict) and "source" not in value:
            found = [source for key, source in ORIGINS.items() if value.get(key) is not None]
            return {**value, "source": found[0]} if len(found) == 1 else value
        return value

    @section_rule
    def _source_fields(self) -> None:
        for key, remedy in _REQUIRED.get(self.source, {}).items():
            if getattr(self, key) is None:
                raise invalid(key, f"is required by source {self.source!r}", f"give {remedy}")
        if self.source == "datasets" and self.path is not None:
            raise invalid("path", "is not valid with source 'datasets'", "use dataset", value=str(self.path))
        if self.eval_split is not None and (self.source != "datasets" or self.eval_path is not None):
            problem = "is only valid with source 'datasets', and without eval_path"
            raise invalid("eval_split", problem, "remove one of them", value=self.eval_split)

    @property
    def has_held_out(self) -> bool:
        """Whether the source comes with separate held-out tasks."""
        return self.eval_path is not None or self.eval_split is not None


class TasksConfig(Section):
    """The task set. Of equal tasks, over all sources, the first is kept and the others are counted. No training task
    shows the question of a held-out task in the same environment."""

    sources: list[TaskSourceConfig] = Field(min_length=1)
    sampler: str = "shuffled"
    """Order in a source: sequential, shuffled, easy_to_hard, failure, near_half, priority, or ``module:attribute``."""
    epochs: int | None = Field(None, ge=1)
    """Number of passes over a source before it ends; none: unlimited."""
    eval_size: int = Field(500, ge=1)
    """Number of held-out tasks to evaluate on, from the sources in proportion to their weights."""

    @section_rule
    def _names_and_difficulties(self) -> None:
        counts = Counter(source.name for source in self.sources if source.name is not None)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise invalid("sources", "contains two sources of this name", "use different names", value=twice[0])
        # A custom reader may know difficulties without a field.
        for number, each in enumerate(self.sources) if self.sampler == "easy_to_hard" else ():
            if each.difficulty is None and each.source in ("reasoning_gym", "datasets", "file", "squares"):
                problem = "is required by sampler 'easy_to_hard'"
                raise invalid(f"sources.{number}.difficulty", problem, "name the field, or use another sampler")


class TasksetConfig(Section):
    """Tasks to evaluate on: a source's held-out tasks, or all if it has none. One source may replace the section."""

    sources: list[TaskSourceConfig] = Field(min_length=1)
    size: int | None = Field(None, ge=1)
    """Number of tasks to take, drawn by the run's seed; all by default."""

    @model_validator(mode="before")
    @classmethod
    def _one_source(cls, value: Any) -> Any:
        return {"sources": [value]} if isinstance(value, dict) and {"source", *ORIGINS} & value.keys() else value


class BenchConfig(Section):
    """Evaluation of models on task sets (`rayrft bench`), by the run's workflow, environment, reward and engines."""

    models: dict[str, str] = Field(default_factory=dict)
    """By name: a Hugging Face folder or hub id, a run (its folder, or its name in ``storage``) for its final or else
    latest weights, or ``RUN@WHICH``: a checkpoint's step, a stage, or ``start``. By default ``model``."""
    tasksets: dict[str, TasksetConfig] = Field(default_factory=dict)
    """By name. The held-out tasks of ``tasks``, if any, are added as ``held_out``."""
    temperature: float = Field(1.0, ge=0, le=2)
    samples: int = Field(default_factory=lambda given: 8 if given["temperature"] else 1, ge=1)
    """Attempts per task; by default 1 at temperature 0."""
    k: tuple[int, ...] = Field(
        default_factory=lambda given: tuple(k for k in (1, 4, 8) if k <= given["samples"]), min_length=1
    )
    """The k of pass@k and majority@k; by default 1, 4 and 8, up to ``samples``."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest answer, in tokens; by default ``explorer.sampling.max_tokens``."""

    @field_validator("models", "tasksets")
    @classmethod
    def _names(cls, named: dict[str, Any]) -> dict[str, Any]:
        for name in named:
            if name == "held_out" or not re.fullmatch(NAME, name):
                problem = "must consist of letters, digits, '-' and '_', and cannot be held_out"
                raise invalid(name, problem, "use another name", value=name)
        return named

    @section_rule
    def _samples(self) -> None:
        if min(self.k) < 1 or max(self.k) > self.samples:
            raise invalid("k", f"must lie in 1 to samples, {self.samples}", "raise samples", value=list(self.k))
        if self.temperature == 0 and self.samples > 1:
            remedy = "set samples: 1 and k: [1], or raise the temperature"
            raise invalid("samples", "must be 1 at temperature 0", remedy, value=self.samples)
