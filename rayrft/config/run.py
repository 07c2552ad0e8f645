"""The whole configuration of a run, and the rules across its sections."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from rayrft.config.base import Section, invalid, local_folder
from rayrft.config.buffer import BufferConfig
from rayrft.config.demonstrations import DemonstrationsConfig
from rayrft.config.explorer import ExplorerConfig
from rayrft.config.model import ModelConfig
from rayrft.config.reward import RewardConfig
from rayrft.config.serve import ServeConfig
from rayrft.config.stage import CheckpointConfig, EvaluationConfig, MonitorConfig, StageConfig
from rayrft.config.tasks import TasksConfig
from rayrft.config.trainer import ProbeBounds, TrainerConfig, WeightSyncConfig
from rayrft.errors import ConfigError, nearest
from rayrft.weights import Layout, choose_transport, transports


class RunConfig(Section):
    """One run: one YAML file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    mode: Literal["both", "train", "serve"] = "both"
    """``serve``: no tasks are acted on; stages train on the sessions of applications, which call the endpoint.
    ``train``: no engines. Stages train on files, or on groups that other jobs put into the run's Buffer."""
    storage: Path = Path("runs")
    """The run folder is ``<storage>/<name>``."""
    seed: int = 0
    max_staleness: int = Field(0, ge=0)
    """Largest number of optimiser steps between sampling a token and training on it: 0 is synchronous."""
    model: ModelConfig
    tasks: TasksConfig | None = None
    demonstrations: dict[str, DemonstrationsConfig] = Field(default_factory=dict)
    reward: RewardConfig = RewardConfig()
    explorer: ExplorerConfig = ExplorerConfig()
    buffer: BufferConfig = BufferConfig()
    trainer: TrainerConfig = TrainerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    stages: list[StageConfig] = Field(min_length=1)
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    serve: ServeConfig | None = None
    """An endpoint for applications, beside the run; mode ``serve`` has one in any case."""
    monitor: MonitorConfig = MonitorConfig()
    plugins: list[Path] = Field(default_factory=list)
    """Python files that register your own losses, advantages, rewards, workflows or weight transports, at paths that
    every node can read. The Buffer does not load them: name its samplers and scores by ``package.module:attribute``."""

    _local_storage = field_validator("storage", mode="before")(local_folder)

    @field_validator("plugins")
    @classmethod
    def _all_absolute(cls, plugins: list[Path]) -> list[Path]:
        return [path.expanduser().absolute() for path in plugins]

    @property
    def folder(self) -> Path:
        return self.storage / self.name

    @property
    def buffer_folder(self) -> Path:
        """The folder of the Buffer's log."""
        return self.buffer.storage / self.name if self.buffer.storage else self.folder / "buffer"

    @property
    def rolls_out(self) -> bool:
        """Whether the run has engines, to sample groups or to evaluate."""
        if self.endpoint is not None:
            return True
        return self.mode == "both" and (any(stage.groups for stage in self.stages) or self.evaluation.enabled)

    @property
    def endpoint(self) -> ServeConfig | None:
        """The endpoint's config, if the run has one."""
        return self.serve or (ServeConfig() if self.mode == "serve" else None)

    @property
    def records_sessions(self) -> bool:
        """Whether the endpoint's sessions become groups."""
        return self.endpoint is not None and self.endpoint.record and any(stage.groups for stage in self.stages)

    @property
    def seeds_requests(self) -> bool:
        """Whether answers are determined by the seed."""
        seeded = self.explorer.sampling.seeded
        return self.explorer.engine.gpus == 0 if seeded is None else seeded

    @property
    def sync_backend(self) -> str:
        """The name of the weight transport, derived if the config says ``auto``. Raises ConfigError if none fits."""
        engine, trainer = self.explorer.engine, self.trainer
        layout = Layout(engine.count, engine.gpus, trainer.ranks, trainer.gpus)
        return choose_transport(self.weight_sync.backend, layout)

    @property
    def colocated(self) -> bool:
        """Whether each engine shares a GPU with a trainer rank."""
        return transports.get(self.sync_backend).colocated

    @property
    def probe_bounds(self) -> ProbeBounds:
        """Required agreement of engine and trainer log-probs, by compute precision."""
        given = self.weight_sync.tolerance
        if self.model.dtype == "float32":
            return ProbeBounds(given or 1e-4, given or 1e-4, 1.0)
        return ProbeBounds(0.15 * (given or 0.2), given or 0.2, 0.99)

    @model_validator(mode="after")
    def _mode(self) -> RunConfig:
        if self.mode == "both" and self.tasks is None:
            raise invalid("tasks", "a required key is missing", remedy="modes 'train' and 'serve' do without")
        if self.mode == "train" and self.serve is not None:
            raise invalid("serve", "needs engines, and mode 'train' has none", remedy="leave it out")
        for stage in self.stages:
            if self.mode != "both" and stage.evaluate_every:
                problem = f"needs an Explorer, and mode {self.mode!r} has none"
                raise invalid(f"stages.{stage.name}.evaluate_every", problem, remedy="leave it out")
        for name, demonstrations in self.demonstrations.items():
            if demonstrations.path is None and self.tasks is None:
                problem = "a required key is missing: there are no tasks to take them from"
                raise invalid(f"demonstrations.{name}.path", problem, remedy="give a file or folder")
        return self

    @model_validator(mode="after")
    def _stages(self) -> RunConfig:
        seen: list[str] = []
        for stage in self.stages:
            if stage.name in seen:
                raise invalid("stages", "two stages of one name", value=stage.name, remedy="give them different names")
            if stage.name == "final" or stage.name.startswith(("step-", "stopped-")):
                problem = "is reserved for checkpoints"
                raise invalid(f"stages.{stage.name}.name", problem, value=stage.name, remedy="give another")
            if stage.start_from is not None and stage.start_from not in seen:
                raise invalid(
                    f"stages.{stage.name}.start_from",
                    "is not an earlier stage",
                    value=stage.start_from,
                    remedy=f"earlier: {', '.join(seen) or 'none'}",
                )
            if stage.expert_rows and stage.demonstrations not in self.demonstrations:
                raise invalid(
                    f"stages.{stage.name}.demonstrations",
                    "no such entry in 'demonstrations'",
                    value=stage.demonstrations,
                    remedy=nearest(stage.demonstrations or "", self.demonstrations)
                    if self.demonstrations
                    else "add it",
                )
            units = stage.groups + stage.expert_rows // (2 if stage.algorithm.build().needs_pairs else 1)
            parts = stage.update.mini_batches
            if units // parts < self.trainer.ranks:
                raise invalid(
                    f"stages.{stage.name}.batch_size",
                    f"{parts} mini-batches of {stage.groups} groups and {stage.expert_rows} expert rows cannot be "
                    f"dealt to {self.trainer.ranks} ranks",
                    value=stage.batch_size,
                    remedy="enlarge it or lower trainer.ranks",
                )
            seen.append(stage.name)
        return self

    @model_validator(mode="after")
    def _sessions(self) -> RunConfig:
        if self.endpoint is not None and self.explorer.engine.sleep:
            raise invalid(
                "explorer.engine.sleep", "leaves nobody to answer the endpoint's requests", remedy="leave it out"
            )
        if not self.records_sessions:
            return self
        if self.max_staleness == 0:
            raise invalid(
                "max_staleness",
                "drops every session that was begun before the latest step",
                value=0,
                remedy="raise it, for applications do not wait for the trainer; or give serve.record: false",
            )
        sizes = sorted({stage.group_size for stage in self.stages if stage.groups})
        if len(sizes) > 1:
            raise invalid("stages", "have groups of several sizes, and those of sessions have one", value=sizes)
        return self

    @model_validator(mode="after")
    def _lora(self) -> RunConfig:
        for stage in self.stages:
            if self.trainer.lora is not None and stage.update.reference_refresh:
                raise invalid(
                    f"stages.{stage.name}.update.reference_refresh",
                    "is not possible with trainer.lora, where the reference is the model without its adapter",
                    remedy="leave it out, or split the stage in two: a stage starts with the policy as its reference",
                )
        return self

    @model_validator(mode="after")
    def _answer_length(self) -> RunConfig:
        """Set the longest answer that may be sampled, which some algorithms divide by."""
        for stage in self.stages:
            if not stage.algorithm.build().needs_answer_length:
                continue
            if self.mode == "train":
                raise invalid(
                    f"stages.{stage.name}.algorithm.constant_length",
                    "aggregation 'constant' needs it in mode 'train', where nothing is sampled",
                    remedy="give the longest answer that may have been sampled, in tokens",
                )
            stage.algorithm.set_coefficient("constant_length", self.explorer.sampling.max_tokens)
        return self

    @model_validator(mode="after")
    def _scores(self) -> RunConfig:
        needed = self.buffer.needs_scores and self.buffer.sampler.score == "td_error"
        if needed and not any(stage.algorithm.build().needs_critic for stage in self.stages):
            raise invalid(
                "buffer.sampler.score",
                "needs a critic, and no stage has one",
                value="td_error",
                remedy="use algorithm ppo, or a score of reward_deviation or failure",
            )
        return self

    @model_validator(mode="after")
    def _lengths(self) -> RunConfig:
        sampling = self.explorer.sampling
        # An answer of the endpoint is as long as its prompt lets it be.
        bounded = self.rolls_out and self.mode == "both"
        if bounded and sampling.max_prompt_tokens + sampling.max_tokens > self.model.max_length:
            raise invalid(
                "model.max_length",
                f"is less than explorer.sampling's max_prompt_tokens, {sampling.max_prompt_tokens}, + max_tokens, "
                f"{sampling.max_tokens}",
                value=self.model.max_length,
                remedy="raise it or lower one of them",
            )
        if (self.reward.overlong_buffer or 0) > sampling.max_tokens:
            raise invalid(
                "reward.overlong_buffer",
                f"exceeds explorer.sampling.max_tokens, {sampling.max_tokens}, of which it is the last part",
                value=self.reward.overlong_buffer,
                remedy="lower it",
            )
        return self

    @model_validator(mode="after")
    def _partial(self) -> RunConfig:
        partial = self.explorer.partial
        if partial is None:
            return self
        if partial.budget is None and self.explorer.over_sampling == 1.0:
            raise invalid(
                "explorer.partial.budget",
                "without it, groups are parked only if more are in flight than a step takes",
                remedy="give a budget in tokens, or raise explorer.over_sampling",
            )
        if partial.old_tokens == "train" and self.max_staleness == 0:
            raise invalid(
                "explorer.partial.old_tokens",
                "are older than max_staleness 0 allows",
                value="train",
                remedy="raise max_staleness, or give mask",
            )
        return self

    @model_validator(mode="after")
    def _devices(self) -> RunConfig:
        engine, trainer = self.explorer.engine, self.trainer
        if (engine.gpus > 0) != (trainer.gpus > 0):
            raise invalid(
                "explorer.engine.gpus",
                f"engines take {engine.gpus:g} GPUs and trainer ranks {trainer.gpus:g}",
                value=engine.gpus,
                remedy="give GPUs to both or to neither",
            )
        for key, gpus in (("explorer.engine.gpus", engine.gpus), ("trainer.gpus", trainer.gpus)):
            if gpus > 1 and gpus % 1:
                raise invalid(key, "more than one GPU is a whole number of them", value=gpus)
        if trainer.cpu_offload and not trainer.gpus:
            raise invalid(
                "trainer.cpu_offload",
                "needs trainer.gpus above 0: without GPUs everything is in CPU memory",
                remedy="leave it out",
            )
        try:
            colocated = self.colocated
        except ConfigError as error:
            raise ValueError(error) from None
        if engine.sleep and (not colocated or self.max_staleness or self.explorer.over_sampling > 1):
            raise invalid(
                "explorer.engine.sleep",
                "is for engine and trainer taking turns on one GPU",
                remedy="use weight_sync.backend ipc, max_staleness 0 and explorer.over_sampling 1 with it",
            )
        if engine.tensor_parallel > 1 and engine.gpus not in (0, engine.tensor_parallel):
            raise invalid(
                "explorer.engine.gpus",
                f"explorer.engine.tensor_parallel {engine.tensor_parallel} needs as many",
                value=engine.gpus,
            )
        if engine.tensor_parallel > 1 and engine.gpus == 0:
            problem = "needs GPUs if it is above 1"
            raise invalid(
                "explorer.engine.tensor_parallel",
                problem,
                value=engine.tensor_parallel,
                remedy="use more engines on a CPU",
            )
        return self
