"""The whole configuration of a run, and the rules that cross its sections."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from rayrft.config.base import Section
from rayrft.config.buffer import BufferConfig, join
from rayrft.config.data import RewardConfig
from rayrft.config.demonstrations import DemonstrationsConfig
from rayrft.config.explorer import ExplorerConfig
from rayrft.config.model import ModelConfig
from rayrft.config.stage import CheckpointConfig, EvaluationConfig, MonitorConfig, StageConfig
from rayrft.config.tasks import TasksConfig
from rayrft.config.trainer import ProbeBounds, TrainerConfig, WeightSyncConfig


class RunConfig(Section):
    """One run: one YAML file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    mode: Literal["both", "train"] = "both"
    """``train``: no engines. Stages train on files, or on groups that other jobs put into the run's Buffer."""
    storage: Path = Path("runs")
    """The run folder is ``<storage>/<name>``."""
    seed: int = 0
    max_staleness: int = Field(0, ge=0)
    """Optimiser steps that may lie between the sampling of a token and its use: 0 is synchronous."""
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
    monitor: MonitorConfig = MonitorConfig()
    plugins: list[Path] = Field(default_factory=list)
    """Python files that register losses, advantages, rewards or workflows of your own; on a cluster, where every node
    finds them. The Buffer does not load them: its samplers and scores go by ``package.module:attribute``."""

    @field_validator("storage")
    @classmethod
    def _absolute(cls, storage: Path) -> Path:
        # Actors do not share the driver's working directory.
        return storage.expanduser().absolute()

    @field_validator("plugins")
    @classmethod
    def _all_absolute(cls, plugins: list[Path]) -> list[Path]:
        return [path.expanduser().absolute() for path in plugins]

    @property
    def folder(self) -> Path:
        return self.storage / self.name

    @property
    def buffer_location(self) -> str:
        """Where the Buffer's log lies: a path or URI."""
        return join(self.buffer.storage, self.name) if self.buffer.storage else str(self.folder / "buffer")

    @property
    def rolls_out(self) -> bool:
        """Whether there are engines: to sample groups, or to evaluate."""
        return self.mode == "both" and (any(stage.groups for stage in self.stages) or self.evaluation.enabled)

    @property
    def seeds_requests(self) -> bool:
        """Whether each answer follows from the seed."""
        seeded = self.explorer.sampling.seeded
        return self.explorer.engine.gpus == 0 if seeded is None else seeded

    @property
    def sync_backend(self) -> Literal["gloo", "nccl", "ipc"]:
        """The weight-transfer backend, derived where the config says ``auto``."""
        if self.weight_sync.backend != "auto":
            return self.weight_sync.backend
        gpus = self.explorer.engine.gpus
        return "gloo" if gpus == 0 else "ipc" if gpus < 1 else "nccl"

    @property
    def probe_bounds(self) -> ProbeBounds:
        """How closely engine and trainer must agree, by the precision they compute in."""
        given = self.weight_sync.tolerance
        if self.model.dtype == "float32":
            return ProbeBounds(given or 1e-4, given or 1e-4, 1.0)
        return ProbeBounds(0.15 * (given or 0.2), given or 0.2, 0.99)

    @model_validator(mode="after")
    def _mode(self) -> RunConfig:
        if self.mode == "both" and self.tasks is None:
            raise ValueError("'tasks' is missing: only mode 'train' does without tasks")
        for stage in self.stages:
            if self.mode == "train" and stage.evaluate_every:
                raise ValueError(f"stage {stage.name!r}: evaluate_every needs engines, and mode 'train' has none")
        for name, each in self.demonstrations.items():
            if each.path is None and self.tasks is None:
                raise ValueError(f"demonstrations.{name}: give a path, for there are no tasks to take them from")
        return self

    @model_validator(mode="after")
    def _stages(self) -> RunConfig:
        seen: list[str] = []
        for stage in self.stages:
            if stage.name in seen:
                raise ValueError(f"two stages are named {stage.name!r}; names must differ")
            if stage.name == "final" or stage.name.startswith(("step-", "stopped-")):
                raise ValueError(f"a stage cannot be named {stage.name!r}: its weights would lie among checkpoints")
            if stage.start_from is not None and stage.start_from not in seen:
                raise ValueError(
                    f"stage {stage.name!r}: start_from {stage.start_from!r} is not an earlier stage; earlier: {seen}"
                )
            if stage.expert_rows and stage.demonstrations not in self.demonstrations:
                raise ValueError(
                    f"stage {stage.name!r}: no entry {stage.demonstrations!r} in 'demonstrations'; "
                    f"entries: {sorted(self.demonstrations)}"
                )
            units = stage.groups + stage.expert_rows // (2 if stage.algorithm.build().needs_pairs else 1)
            parts = stage.update.mini_batches
            if units // parts < self.trainer.ranks:
                raise ValueError(
                    f"stage {stage.name!r}: {parts} mini-batches of {stage.groups} groups and {stage.expert_rows} "
                    f"expert rows cannot be dealt to {self.trainer.ranks} ranks; enlarge batch_size or lower "
                    "trainer.ranks"
                )
            seen.append(stage.name)
        return self

    @model_validator(mode="after")
    def _lora(self) -> RunConfig:
        for stage in self.stages:
            if self.trainer.lora is not None and stage.update.reference_refresh:
                raise ValueError(
                    f"stage {stage.name!r}: update.reference_refresh is not possible with trainer.lora, where the "
                    "reference is the model without its adapter; leave it out, or split the stage in two: each begins "
                    "with the policy as its reference"
                )
        return self

    @model_validator(mode="after")
    def _answer_length(self) -> RunConfig:
        """Fill in what an algorithm divides by: the longest answer that may be sampled."""
        for stage in self.stages:
            if not stage.algorithm.build().needs_answer_length:
                continue
            if self.mode == "train":
                raise ValueError(
                    f"stage {stage.name!r}: aggregation 'constant' needs algorithm.constant_length, the longest answer "
                    "that may have been sampled: nothing is sampled in mode 'train'"
                )
            stage.algorithm.give("constant_length", self.explorer.sampling.max_tokens)
        return self

    @model_validator(mode="after")
    def _scores(self) -> RunConfig:
        needed = self.buffer.needs_scores and self.buffer.sampler.score == "td_error"
        if needed and not any(stage.algorithm.build().needs_critic for stage in self.stages):
            raise ValueError(
                "buffer.sampler.score 'td_error' needs a critic, and no stage has one: use algorithm ppo, or a score "
                "of abs_advantage, reward_deviation or failure"
            )
        return self

    @model_validator(mode="after")
    def _lengths(self) -> RunConfig:
        sampling = self.explorer.sampling
        if self.rolls_out and sampling.max_prompt_tokens + sampling.max_tokens > self.model.max_length:
            raise ValueError(
                f"max_prompt_tokens {sampling.max_prompt_tokens} + max_tokens {sampling.max_tokens} exceed "
                f"model.max_length {self.model.max_length}; raise max_length or lower one of them"
            )
        if (self.reward.overlong_buffer or 0) > sampling.max_tokens:
            raise ValueError(
                f"reward.overlong_buffer {self.reward.overlong_buffer} exceeds explorer.sampling.max_tokens "
                f"{sampling.max_tokens}: it is the last part of it"
            )
        return self

    @model_validator(mode="after")
    def _devices(self) -> RunConfig:
        engine, trainer, backend = self.explorer.engine, self.trainer, self.sync_backend
        if (engine.gpus > 0) != (trainer.gpus > 0):
            raise ValueError(
                f"engines take {engine.gpus:g} GPUs and trainer ranks {trainer.gpus:g}: give GPUs to both or to neither"
            )
        for key, gpus in (("explorer.engine.gpus", engine.gpus), ("trainer.gpus", trainer.gpus)):
            if gpus > 1 and gpus % 1:
                raise ValueError(f"{key} {gpus:g}: more than one GPU is a whole number of them")
        if trainer.cpu_offload and not trainer.gpus:
            raise ValueError(
                "trainer.cpu_offload is for trainer.gpus above 0: without GPUs everything is in main memory"
            )
        if backend == "gloo" and engine.gpus > 0:
            raise ValueError("weight_sync.backend 'gloo' is for CPU engines; use nccl, ipc or auto")
        if backend in ("nccl", "ipc") and engine.gpus == 0:
            raise ValueError(f"weight_sync.backend {backend!r} needs explorer.engine.gpus and trainer.gpus above 0")
        if backend == "nccl" and (engine.gpus < 1 or trainer.gpus < 1):
            raise ValueError("nccl refuses two ranks on one GPU: give whole GPUs to each side, or use ipc")
        if backend == "ipc" and (trainer.ranks != engine.count or engine.gpus + trainer.gpus > 1):
            raise ValueError(
                f"ipc pairs one engine with one trainer rank on a GPU: needs explorer.engine.count "
                f"({engine.count}) = trainer.ranks ({trainer.ranks}) and engine.gpus + trainer.gpus <= 1"
            )
        if backend == "ipc" and engine.count > 1 and engine.gpus + trainer.gpus <= 0.5:
            raise ValueError(
                f"explorer.engine.gpus {engine.gpus:g} + trainer.gpus {trainer.gpus:g} are half a GPU or less, and two "
                f"of the {engine.count} pairs of engine and rank would lie on one; raise them to more than 0.5 together"
            )
        if engine.sleep and (backend != "ipc" or self.max_staleness or self.explorer.over_sampling > 1):
            raise ValueError(
                "explorer.engine.sleep is for engine and trainer taking turns on one GPU: it needs weight_sync.backend "
                "ipc, max_staleness 0 and explorer.over_sampling 1"
            )
        if engine.tensor_parallel > 1 and engine.gpus not in (0, engine.tensor_parallel):
            raise ValueError(
                f"explorer.engine.tensor_parallel {engine.tensor_parallel} needs explorer.engine.gpus "
                f"{engine.tensor_parallel}, found {engine.gpus:g}"
            )
        if engine.tensor_parallel > 1 and engine.gpus == 0:
            raise ValueError("explorer.engine.tensor_parallel above 1 needs GPUs; use more engines on a CPU")
        return self
