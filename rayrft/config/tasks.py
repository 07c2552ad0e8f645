"""Config of tasks: sources, their weights, and the order of draws."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rayrft.config.base import Section, invalid


class TaskSourceConfig(Section):
    """One source of tasks: a reasoning-gym data set, a file, or a reader of your own."""

    name: str | None = None
    """Name for overrides (``tasks.sources.gsm8k.size``); its number always works."""
    source: str
    """reasoning_gym, datasets, file, ray, tasks, squares, gymnasium, verifiers, or ``package.module:attribute``."""
    dataset: str | None = None
    """reasoning_gym: the name of the data set. datasets: its id on the Hugging Face hub, or a folder with a copy.
    gymnasium, verifiers: the id of the environment."""
    config: str | None = None
    """datasets: the config (subset), if it has several."""
    revision: str | None = None
    """datasets: a branch, tag or commit of the data set on the hub; its newest by default."""
    read: str | None = None
    """ray: a function of ``ray.data`` by name, such as read_parquet, or ``package.module:function`` that gives a
    Dataset; ``options`` are its arguments."""
    split: str = "train"
    """datasets: the split to take tasks from."""
    eval_split: str | None = None
    """datasets: a split of held-out tasks, used like those of ``eval_path``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """reasoning_gym: options of the data set. gymnasium: of random maps, or of the environment. verifiers: arguments of
    the environment. ray: of ``read``."""
    size: int | None = Field(None, ge=1)
    """Number of rows to take before duplicates are removed; all of a file or a split by default."""
    path: Path | None = None
    """file: JSONL, JSON, CSV, TSV or Parquet, a file or a folder. tasks: JSONL or Parquet that ``rayrft data
    difficulty`` or ``rayrft data tasks`` wrote. squares: the folder to draw them in."""
    eval_path: Path | None = None
    """A separate file of held-out tasks, of the same kinds: the source's share of ``eval_size`` is its first rows, or
    all if there are fewer."""
    question: str = "question"
    answer: str = "answer"
    """file, datasets, ray: the fields that hold the question and the ground truth; ``a.b`` is field b of object a."""
    images: str = "images"
    """file, datasets, ray: the field with a task's images, if any: paths, relative to the file's folder, or bytes."""
    images_folder: Path | None = None
    """file, datasets, ray: where images are kept that are bytes; every node must find it."""
    answer_after: str | None = None
    """file, datasets, ray: keep only the part of the answer after the last such mark (GSM8K: '####')."""
    difficulty: str | None = None
    """The field of a row (reasoning_gym: of a task's metadata) with the task's difficulty, a number."""
    tries: str | None = None
    pass_rate: str | None = None
    """file, datasets, ray: the fields with the number of answers to a task that were scored before, and their mean
    reward within 0 and 1. Task samplers begin with them, and operators see them."""
    on_broken: Literal["fail", "skip"] = "fail"
    """file, datasets, ray: whether a row that is no task fails the start of the run, or is skipped and counted."""
    workflow: str | None = None
    """The workflow that acts on the source's tasks; by default ``explorer.workflow``."""
    system: str | None = None
    """System message before every question."""
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Weight of this source, relative to the sum of all, among drawn, held-out and demonstrated tasks."""

    @field_validator("path", "eval_path", "images_folder")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        # They are read again by other processes: on a resume, and where tasks are added.
        return path.expanduser().absolute() if path is not None else None

    @model_validator(mode="after")
    def _source_fields(self) -> TaskSourceConfig:
        if self.source in ("reasoning_gym", "gymnasium") and (self.dataset is None or self.size is None):
            key = "dataset" if self.dataset is None else "size"
            raise invalid(key, f"source {self.source!r} needs 'dataset' (its name) and 'size' (how many tasks to make)")
        if self.source == "verifiers" and self.dataset is None:
            raise invalid("dataset", "source 'verifiers' needs 'dataset' (the id of an environment)")
        if self.source == "datasets" and (self.dataset is None or self.path is not None):
            key = "dataset" if self.dataset is None else "path"
            raise invalid(key, "source 'datasets' needs 'dataset' (an id on the hub, or a folder), and takes no 'path'")
        if self.eval_split is not None and (self.source != "datasets" or self.eval_path is not None):
            problem = "is for source 'datasets', and held-out tasks come from it or from 'eval_path'"
            raise invalid("eval_split", problem, value=self.eval_split)
        if self.source == "file" and self.path is None:
            raise invalid("path", "source 'file' needs 'path' (a JSONL, CSV or Parquet file)")
        if self.source == "tasks" and self.path is None:
            raise invalid("path", "source 'tasks' needs 'path' (a file of tasks that rayrft wrote)")
        if self.source == "ray" and self.read is None:
            raise invalid("read", "source 'ray' needs 'read' (a function of ray.data, such as read_parquet)")
        if self.source == "squares" and (self.path is None or self.size is None):
            key = "path" if self.path is None else "size"
            raise invalid(key, "source 'squares' needs 'path' (a folder for its images) and 'size' (how many to draw)")
        return self

    @property
    def has_held_out(self) -> bool:
        """Whether the source comes with separate held-out tasks."""
        return self.eval_path is not None or self.eval_split is not None


class TasksConfig(Section):
    """The task set. Of tasks that are equal in all that they have, over all sources, the first is kept, and the others
    are counted. No task shows the question of a held-out one, in the same environment."""

    sources: list[TaskSourceConfig] = Field(min_length=1)
    sampler: str = "shuffled"
    """The order within a source: sequential, shuffled, easy_to_hard, failure, near_half, priority, or
    ``package.module:attribute``."""
    epochs: int | None = Field(None, ge=1)
    """Number of passes over a source before it ends; none: unlimited."""
    eval_size: int = Field(500, ge=1)
    """Number of held-out tasks to evaluate on, from the sources in proportion to their weights."""

    @model_validator(mode="after")
    def _names(self) -> TasksConfig:
        counts = Counter(source.name for source in self.sources if source.name is not None)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise invalid("sources", "two task sources of one name", value=twice[0], remedy="give them different names")
        return self

    @model_validator(mode="after")
    def _difficulties(self) -> TasksConfig:
        # A custom reader may know difficulties without a field.
        lacking = [
            number
            for number, source in enumerate(self.sources)
            if source.source in ("reasoning_gym", "datasets", "file", "squares") and source.difficulty is None
        ]
        if self.sampler == "easy_to_hard" and lacking:
            problem = "sampler 'easy_to_hard' needs 'difficulty' in every source"
            raise invalid(f"sources.{lacking[0]}.difficulty", problem)
        return self
