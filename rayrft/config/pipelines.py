"""Config of data pipelines: operators, one after another, on tasks and on files of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from rayrft.config.base import NAME, Section


class OperatorConfig(Section):
    """One operator: its name, and its options beside it: ``{name: near_duplicates, threshold: 0.8}``.

    pipelines/README.md lists those that are there."""

    model_config = ConfigDict(extra="allow", frozen=True, validate_default=True)

    name: str
    """Or ``package.module:attribute``."""

    @property
    def options(self) -> dict[str, Any]:
        """The operator's own options."""
        return dict(self.model_extra or {})


class PipelineConfig(Section):
    """The file of ``rayrft data process``: operators, in their order."""

    operators: list[OperatorConfig] = Field(min_length=1)
    batch_rows: int = Field(1000, ge=1)
    """Rows that an operator gets at once, at most; whole groups where it works on groups."""
    deadline_s: float = Field(60.0, gt=0)
    """Seconds that an operator may take for one batch."""
    on_error: Literal["stop", "leave_out"] = "stop"
    """What becomes of a row on which an operator of single rows raises: ``leave_out`` counts and lists it."""
    samples: int = Field(3, ge=0)
    """Rows that are shown by operator, of those that it changed, made and left out."""
    plugins: list[Path] = Field(default_factory=list)
    """Python files that register operators of your own."""

    @field_validator("plugins")
    @classmethod
    def _all_absolute(cls, plugins: list[Path]) -> list[Path]:
        return [path.expanduser().absolute() for path in plugins]


class OperatorActorsConfig(Section):
    """Actors in which operators work, on any node."""

    count: int = Field(1, ge=1)
    """Actors of each Explorer."""
    cpus: float = Field(1.0, ge=0)
    gpus: float = Field(0.0, ge=0)
    memory_gib: float = Field(1.0, gt=0)
    """Of each actor, with its processes."""


class PipelinesConfig(Section):
    """What is done with data within a run."""

    tasks: list[OperatorConfig] = Field(default_factory=list)
    """Operators on the tasks of all sources, after duplicates are removed and before tasks are held out. They see the
    columns id, source, question, answer, system, difficulty, and metadata as JSON."""
    decontaminate: bool = True
    """Leave out tasks for training and demonstrating that show what a task of an evaluation set asks or answers."""
    experiences: list[OperatorConfig] = Field(default_factory=list)
    """Operators on each group of answers, after its rewards and before the Buffer. They see the columns of
    ``experience.SCHEMA``, and the task's question, answer, domain and difficulty. Rows that they leave out are counted
    as dropped, by operator and reason."""
    made: str | None = Field(None, pattern=NAME)
    """The demonstrations that rows join which operators of ``experiences`` make: expert rows, or preference pairs. A
    stage names them like others; if it trains on groups, too, it may begin while there are none."""
    workers: int = Field(1, ge=1)
    """Processes in which operators work on groups, of each Explorer, or of each of the ``actors``."""
    actors: OperatorActorsConfig | None = None
    """Where operators of ``experiences`` work that are heavy; by default in processes on the Explorer's node."""
    on_error: Literal["leave_out", "stop"] = "leave_out"
    """What becomes of a group on which an operator of ``experiences`` fails: ``leave_out`` drops and counts it, or only
    the rows on which one raises that looks at single rows. Too many consecutive ones stop the run."""
    deadline_s: float = Field(60.0, gt=0)
    """Seconds that an operator may take for one batch of 1,000 tasks, or for one group."""
