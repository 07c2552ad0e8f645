"""Config of data pipelines: operators, one after another, on tasks and on files of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.base import NAME, Section, invalid
from rayrft.config.reward import RewardModelsConfig


class OperatorConfig(Section):
    """One operator: its name, and its options beside it: ``{name: near_duplicates, threshold: 0.8}``.

    pipelines/README.md lists those that are there."""

    model_config = ConfigDict(extra="allow", frozen=True, validate_default=True)

    name: str
    """Or ``package.module:attribute``. Without it, ``juicer`` names an operator of Data-Juicer."""

    @model_validator(mode="before")
    @classmethod
    def _of_data_juicer(cls, given: Any) -> Any:
        return {"name": "juicer", **given} if isinstance(given, dict) and "juicer" in given else given

    @property
    def options(self) -> dict[str, Any]:
        """The operator's own options."""
        return dict(self.model_extra or {})


class EndpointConfig(Section):
    """A model behind the API of OpenAI, which operators may ask."""

    url: str
    """The base, which ends in ``/v1``."""
    model: str
    key_variable: str = "OPENAI_API_KEY"
    """The environment variable with the key."""
    temperature: float = Field(1.0, ge=0)
    max_tokens: int = Field(1024, ge=1)
    """For requests that do not say them."""
    calls: int = Field(64, ge=1)
    """Requests at a time."""
    retries: int = Field(4, ge=0)
    """How often a request is made again that was not answered, after a pause that doubles, or as long as the endpoint
    asks for."""


class PipelineConfig(Section):
    """The file of ``rayrft data process``: operators, in their order, and what they may ask."""

    operators: list[OperatorConfig] = Field(min_length=1)
    models: dict[Annotated[str, Field(pattern=NAME)], AuxiliaryConfig] = Field(default_factory=dict)
    """Models that operators may ask, by name, each on engines of its own while the pipeline runs."""
    endpoints: dict[Annotated[str, Field(pattern=NAME)], EndpointConfig] = Field(default_factory=dict)
    """Further ones, which run elsewhere."""
    reward: RewardModelsConfig | None = None
    """How operators check answers again; by default as the run does that ``--config`` names."""
    answer_s: float = Field(300.0, gt=0)
    """Seconds for an answer of a model, from when the request is made. The ``deadline_s`` of an operator stands still
    while it waits for answers."""
    batch_rows: int = Field(1000, ge=1)
    """Rows that an operator gets at once, at most; whole groups where it works on groups."""
    deadline_s: float = Field(60.0, gt=0)
    """Seconds that an operator may take for one batch."""
    workers: int = Field(1, ge=1)
    """Processes in which operators of single rows work at once; more than one are spread over the cluster by Ray Data.
    What comes out does not depend on it."""
    on_error: Literal["stop", "leave_out"] = "stop"
    """What becomes of a row on which an operator of single rows raises: ``leave_out`` counts and lists it."""
    on_broken: Literal["fail", "skip"] = "skip"
    """What becomes of rows that cannot be read, or hold a list or object where an operator reads text or numbers:
    ``skip`` counts and lists them."""
    samples: int = Field(3, ge=0)
    """Rows that are shown by operator, of those that it changed, made and left out."""
    plugins: list[Path] = Field(default_factory=list)
    """Python files that register operators, and rewards, of your own."""

    @model_validator(mode="after")
    def _one_model_by_name(self) -> PipelineConfig:
        if both := sorted(self.models.keys() & self.endpoints.keys()):
            raise invalid(f"endpoints.{both[0]}", "is the name of one of 'models'", remedy="give it another")
        return self

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
    columns id, source, question, answer, system, difficulty, tries, pass_rate, priority, and metadata as JSON."""
    task_workers: int = Field(1, ge=1)
    """Processes in which those operators of ``tasks`` work at once that look at single rows; more than one are spread
    over the cluster by Ray Data."""
    decontaminate: bool = True
    """Leave out tasks for training and demonstrating that show what a task of an evaluation set asks or answers."""
    endpoints: dict[Annotated[str, Field(pattern=NAME)], EndpointConfig] = Field(default_factory=dict)
    """Models elsewhere that operators may ask, by name, beside the ``auxiliary`` ones of the run. Of those, what
    ``tasks`` needs has engines before the run starts, too; answers are kept in ``<storage>/answers.<name>.jsonl``, so
    that a resumed run has the same tasks."""
    answer_s: float = Field(300.0, gt=0)
    """Seconds for an answer of a model, from when the request is made. The ``deadline_s`` of an operator stands still
    while it waits for answers."""
    experiences: list[OperatorConfig] = Field(default_factory=list)
    """Operators on each group of answers, after its rewards and before the Buffer. They see the columns of
    ``experience.SCHEMA``, ``response`` (the last answer as a text), and the task's question, answer, domain and
    difficulty. Rows that they leave out are counted as dropped, by operator and reason."""
    made: str | None = Field(None, pattern=NAME)
    """The demonstrations that rows join which operators of ``experiences`` make: expert rows, or preference pairs. A
    stage names them like others; if it trains on groups, too, it may begin while there are none."""
    workers: int = Field(1, ge=1)
    """Processes in which operators work on groups, of each Explorer, or of each of the ``actors``."""
    actors: OperatorActorsConfig | None = None
    """Where operators of ``experiences`` work that are heavy; by default in processes on the Explorer's node."""
    batch: list[OperatorConfig] = Field(default_factory=list)
    """Operators on the batch of each step, between its lease and its training. They see the columns of
    ``experience.SCHEMA``, and of each row its ``place``, the ``step``, whether it is ``trained`` (else its reward alone
    counts, in its group's advantages), and its ``weight`` in the loss. A row that they leave out is not trained in this
    step; its group counts as used."""
    on_error: Literal["leave_out", "stop"] = "leave_out"
    """What becomes of a group on which an operator of ``experiences`` fails: ``leave_out`` drops and counts it, or only
    the rows on which one raises that looks at single rows. A batch on which one fails is trained as it is. Too many
    consecutive ones stop the run."""
    deadline_s: float = Field(60.0, gt=0)
    """Seconds that an operator may take for one batch of 1,000 tasks, for one group, or for one training batch."""
