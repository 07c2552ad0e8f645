"""Config of data pipelines: operators, one after another, on tasks and on files of rows."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.base import LocalPath, Name, Section, check_device, invalid, section_rule
from rayrft.config.placement import WaitConfig
from rayrft.config.reward import RewardModelsConfig
from rayrft.config.rows import RowsConfig


class OperatorConfig(Section):
    """An operator of pipelines/README.md, with its options beside it: ``{name: near_duplicates, threshold: 0.8}``."""

    model_config = ConfigDict(extra="allow", frozen=True, validate_default=True)

    name: str
    """A registered name, or ``package.module:attribute``. Without it, ``juicer`` names an operator of Data-Juicer."""

    @model_validator(mode="before")
    @classmethod
    def _of_data_juicer(cls, given: Any) -> Any:
        return {"name": "juicer", **given} if isinstance(given, dict) and "juicer" in given else given

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class EndpointConfig(Section):
    """A model with an OpenAI-compatible API, for operators."""

    url: str
    """The base URL, which ends in ``/v1``."""
    model: str
    key_variable: str = "OPENAI_API_KEY"
    """The environment variable with the key."""
    temperature: float = Field(1.0, ge=0)
    max_tokens: int = Field(1024, ge=1)
    """Temperature and longest answer of requests that do not set them."""
    calls: int = Field(64, ge=1)
    """Concurrent requests."""
    retries: int = Field(4, ge=0)
    """How often an unanswered request is repeated, after a pause that doubles, or that the endpoint asks for."""


class PipelineConfig(Section):
    """The file of ``rayrft data process``: operators, in their order, and models for them."""

    operators: list[OperatorConfig] = Field(min_length=1)
    rows: list[RowsConfig] = Field(default_factory=list)
    """Rows to process, besides the files and runs that the command names: data sets of the hub, Ray Datasets, files."""
    models: dict[Name, AuxiliaryConfig] = Field(default_factory=dict)
    """Models for operators, by name, each on its own engines while the pipeline runs."""
    endpoints: dict[Name, EndpointConfig] = Field(default_factory=dict)
    """Further models, which run elsewhere."""
    placement: WaitConfig = WaitConfig()
    reward: RewardModelsConfig | None = None
    """Rewards by which operators check answers again; by default those of the config that ``--config`` names."""
    answer_s: float = Field(300.0, gt=0)
    """Seconds for an answer of a model. An operator's ``deadline_s`` does not count while it waits for answers."""
    batch_rows: int = Field(1000, ge=1)
    """Most rows that an operator gets at once; an operator on groups gets whole groups."""
    deadline_s: float = Field(60.0, gt=0)
    """Seconds that an operator may take for one batch."""
    workers: int = Field(1, ge=1)
    """Processes of operators on single rows, which Ray Data spreads over the cluster. They do not change the result."""
    on_error: Literal["stop", "leave_out"] = "stop"
    """Policy for a row on which an operator on single rows raises: ``leave_out`` drops, counts and lists it."""
    on_broken: Literal["fail", "skip"] = "skip"
    """Policy for rows that cannot be read, or hold a list or object where an operator reads text or numbers."""
    samples: int = Field(3, ge=0)
    """Sample rows to show per operator, of the rows that it changed, made and dropped."""
    plugins: list[LocalPath] = Field(default_factory=list)
    """Python files that register your own operators and rewards."""

    @section_rule
    def _one_model_by_name(self) -> None:
        for number, each in enumerate(self.rows):
            if len(each.origins) != 1:
                problem = f"must name one of path, dataset and read, not {len(each.origins)}"
                raise invalid(f"rows.{number}", problem, "give one")
        for number, operator in enumerate(self.operators if self.workers > 1 else ()):
            check_device(operator.options, f"operators.{number}", 0.0, "use one worker, which is this process")
        if both := sorted(self.models.keys() & self.endpoints.keys()):
            raise invalid(f"endpoints.{both[0]}", "is also the name of one of 'models'", "use another name")


class OperatorActorsConfig(Section):
    """Actors that run operators, on any node."""

    count: int = Field(1, ge=1)
    """Actors of each Explorer."""
    cpus: float = Field(1.0, ge=0)
    gpus: float = Field(0.0, ge=0)
    memory_gib: float = Field(1.0, gt=0)
    """Of each actor, with its processes."""


class PipelinesConfig(Section):
    """Operators on the data of a run."""

    tasks: list[OperatorConfig] = Field(default_factory=list)
    """Operators on the tasks of all sources, after duplicates are removed and before tasks are held out. They see the
    columns id, source, question, answer, system, difficulty, tries, pass_rate, priority, and metadata as JSON."""
    task_workers: int = Field(1, ge=1)
    """Processes of operators of ``tasks`` on single rows, which Ray Data spreads over the cluster."""
    decontaminate: bool = True
    """Drop training and demonstrated tasks that show the question or answer of an evaluation task."""
    endpoints: dict[Name, EndpointConfig] = Field(default_factory=dict)
    """Models elsewhere for operators, by name, besides the run's ``auxiliary`` models. Answers for ``tasks`` are kept
    in ``<storage>/answers.<name>.jsonl``, so that a resumed run has the same tasks."""
    answer_s: float = Field(300.0, gt=0)
    """Seconds for an answer of a model. An operator's ``deadline_s`` does not count while it waits for answers."""
    experiences: list[OperatorConfig] = Field(default_factory=list)
    """Operators on each group of answers, after its rewards and before the Buffer. They see the columns of
    ``experience.SCHEMA``, ``response`` (the last answer), and the task's question, answer, domain and difficulty. Rows
    that they drop are counted by operator and reason."""
    made: Name | None = None
    """Demonstrations to which rows made by operators of ``experiences`` are added: expert rows or preference pairs. A
    stage that also trains on groups may start while there are none."""
    workers: int = Field(1, ge=1)
    """Processes for operators on groups, of each Explorer, or of each of the ``actors``."""
    actors: OperatorActorsConfig | None = None
    """Actors for heavy operators of ``experiences``; by default operators run in processes on the Explorer's node."""
    batch: list[OperatorConfig] = Field(default_factory=list)
    """Operators on the batch of each step, between its lease and its training. They see the columns of
    ``experience.SCHEMA``, and each row's ``place``, ``step``, ``trained`` (if false, only its reward counts, in its
    group's advantages), and ``weight`` in the loss. A row that they drop is not trained in this step; its group counts
    as used."""
    on_error: Literal["leave_out", "stop"] = "leave_out"
    """Policy for a group (of an operator on single rows: for a row) on which an operator of ``experiences`` fails:
    ``leave_out`` drops and counts it. A batch on which an operator fails is trained unchanged. Too many consecutive
    failures stop the run."""
    deadline_s: float = Field(60.0, gt=0)
    """Seconds that an operator may take for one batch of 1,000 tasks, for one group, or for one training batch."""

    @section_rule
    def _devices(self) -> None:
        gpus = self.actors.gpus if self.actors is not None else 0.0
        for number, operator in enumerate(self.experiences):
            check_device(operator.options, f"experiences.{number}", gpus, "set pipelines.actors.gpus")
        for number, operator in enumerate(self.batch):
            check_device(operator.options, f"batch.{number}", 0.0, "move it to experiences with actors that have GPUs")
        for number, operator in enumerate(self.tasks if self.task_workers > 1 else ()):
            check_device(operator.options, f"tasks.{number}", 0.0, "set task_workers to 1")
