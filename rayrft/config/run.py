"""The whole configuration of a run: its sections, and values derived from them. `rules` checks them together."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.base import Changeable, LocalPath, Name, Section, section_rule
from rayrft.config.buffer import BufferConfig
from rayrft.config.demonstrations import DemonstrationsConfig
from rayrft.config.explorer import ExplorerConfig
from rayrft.config.guards import GuardConfig
from rayrft.config.model import ModelConfig
from rayrft.config.pipelines import PipelinesConfig
from rayrft.config.placement import PlacementConfig, RestartsConfig
from rayrft.config.reward import RewardConfig
from rayrft.config.rules import RULES
from rayrft.config.serve import EDITED, JudgementConfig, ServeConfig
from rayrft.config.stage import CheckpointConfig, EvaluationConfig, MonitorConfig, StageConfig
from rayrft.config.tasks import BenchConfig, TasksConfig
from rayrft.config.trainer import ProbeBounds, TrainerConfig, WeightSyncConfig
from rayrft.weights import Layout, choose_transport, transports


class FolderConfig(Section):
    """The keys that a reader of a run folder needs. Checking the other ones takes torch, and the run's plug-ins."""

    name: Name
    storage: LocalPath = Path("runs")
    """The run folder is ``<storage>/<name>``."""
    seed: int = 0
    model: ModelConfig
    tasks: TasksConfig | None = None
    buffer: BufferConfig = BufferConfig()
    plugins: list[LocalPath] = Field(default_factory=list)
    """Python files that register your own losses, advantages, rewards, workflows or weight transports, at paths that
    every node can read. The Buffer does not load them: name its samplers and scores by ``package.module:attribute``."""

    @property
    def folder(self) -> Path:
        return self.storage / self.name

    @property
    def buffer_folder(self) -> Path:
        """The folder of the Buffer's log."""
        if self.buffer.name is not None:
            return (self.buffer.storage or self.storage) / f"buffer.{self.buffer.name}"
        return self.buffer.storage / self.name if self.buffer.storage else self.folder / "buffer"


class RunConfig(FolderConfig):
    """One run: one YAML file."""

    mode: Literal["both", "train", "explore", "serve", "bench"] = "both"
    """``train``: no engines; stages train on files, or on groups that other jobs put into the Buffer. ``explore``: no
    trainer; the stage with groups defines the groups that are sampled for the Buffer ``buffer.name``, with fixed
    weights. ``serve``: no tasks; stages train on the sessions of applications that call the endpoint. ``bench``: only
    engines; models are evaluated, and nothing is trained."""
    on_existing: Literal["rename", "resume", "refuse"] = "rename"
    """Effect of a folder of an earlier run of this name. The run renames it by its date, resumes that run (one command
    then starts and resumes, as schedulers need it), or refuses to start."""
    max_staleness: Changeable[int] = Field(0, ge=0)
    """Largest number of optimiser steps between sampling a token and training on it: 0 is synchronous."""
    pipelines: PipelinesConfig = PipelinesConfig()
    demonstrations: dict[str, DemonstrationsConfig] = Field(default_factory=dict)
    reward: RewardConfig = RewardConfig()
    explorer: ExplorerConfig = ExplorerConfig()
    auxiliary: dict[Name, AuxiliaryConfig] = Field(default_factory=dict)
    """Frozen models for workflows and judges, by name: ``model.auxiliary("judge")``."""
    trainer: TrainerConfig = TrainerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    placement: PlacementConfig = PlacementConfig()
    restarts: RestartsConfig = RestartsConfig()
    stages: list[StageConfig] = Field(default_factory=list)
    """Required, except in mode ``bench``."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    bench: BenchConfig = BenchConfig()
    serve: ServeConfig | None = None
    """An endpoint for applications; mode ``serve`` always has one."""
    feedback: JudgementConfig = JudgementConfig()
    monitor: MonitorConfig = MonitorConfig()
    guards: list[GuardConfig] = Field(default_factory=list)

    @property
    def trace_folder(self) -> Path | None:
        """The run folder, if its actors write traces."""
        return self.folder if self.monitor.trace else None

    @property
    def rolls_out(self) -> bool:
        """Whether the run has engines, to sample groups or to evaluate."""
        if self.mode in ("explore", "bench") or self.endpoint is not None:
            return True
        return self.mode == "both" and (any(stage.groups for stage in self.stages) or self.evaluation.enabled)

    @property
    def evaluation_engines(self) -> int:
        """Number of engines that only evaluate."""
        return self.evaluation.engines if self.mode == "both" and self.evaluation.enabled else 0

    @property
    def trains(self) -> bool:
        """Whether the run has a trainer."""
        return self.mode in ("both", "train", "serve")

    @property
    def scoring(self) -> RewardConfig:
        """``reward``, with the folders of the reward models that stages train."""
        return self.reward.resolved(self.folder / "checkpoints")

    @property
    def scored_after(self) -> int:
        """Index of the stage that trains the last reward model of ``reward``; -1 if there is none."""
        trained = [number for number, stage in enumerate(self.stages) if stage.name in self.reward.stages]
        return max(trained, default=-1)

    @property
    def scored_demonstrations(self) -> set[str]:
        """The entries of ``demonstrations`` that reward models are trained on."""
        return {stage.demonstrations or "" for stage in self.stages if stage.trains_reward_model}

    def grows(self, stage: StageConfig) -> bool:
        """Return whether a stage's demonstrations come during the run: from operators, or people's edits."""
        return bool(stage.expert_rows) and stage.demonstrations in (self.pipelines.made, EDITED)

    def holds_out(self, stage: StageConfig) -> bool:
        """Return whether pairs are held out of the stage's demonstrations."""
        entry = self.demonstrations.get(stage.demonstrations or "")
        return entry is not None and entry.held_out > 0 and "pairs" in stage.algorithm.build().needs

    @property
    def labelled_demonstrations(self) -> set[str]:
        """The entries of ``demonstrations`` whose answers are labelled good or bad."""
        return {stage.demonstrations or "" for stage in self.stages if "labels" in stage.algorithm.build().needs}

    @property
    def explored_stage(self) -> StageConfig:
        """Mode ``explore``: the stage with groups."""
        return next(stage for stage in self.stages if stage.groups)

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
        workers, of_one = engine.count * engine.tensor_parallel, min(engine.gpus, 1.0)
        layout = Layout(workers, of_one, trainer.ranks, trainer.gpus)
        return choose_transport(self.weight_sync.backend, layout)

    @property
    def transport_options(self) -> dict[str, Any]:
        """Options of the weight transport: where it writes files, if it does."""
        if self.sync_backend != "files":
            return {}
        files = self.weight_sync.files
        return {"address": files.address or str(self.folder / "weights"), "full_every": files.full_every}

    @property
    def bucket_bytes(self) -> int:
        """Size of the pieces in which weights travel to the engines."""
        default = 512.0 if self.trainer.gpus else 32.0
        return int((self.weight_sync.bucket_mib or default) * 2**20)

    @property
    def colocated(self) -> bool:
        """Whether each engine shares its GPUs with trainer ranks. Raises ConfigError if no weight transport fits."""
        return self.mode == "both" and self.rolls_out and transports.get(self.sync_backend).colocated

    @property
    def lends_gpus(self) -> bool:
        """Whether each engine shares several GPUs with trainer ranks. Ray gives an actor a part of one GPU only, so the
        ranks have them whole, and lend them. Raises ConfigError if no weight transport fits."""
        return self.explorer.engine.tensor_parallel > 1 and self.colocated

    @property
    def probe_bounds(self) -> ProbeBounds:
        """Required agreement of engine and trainer log-probs, by compute precision."""
        given = self.weight_sync.tolerance
        if self.model.dtype == "float32":
            return ProbeBounds(given or 1e-4, given or 1e-4, 1.0)
        return ProbeBounds(0.15 * (given or 0.2), given or 0.2, 0.99)

    @field_validator("explorer")
    @classmethod
    def _answers_on_gpus(cls, explorer: ExplorerConfig, info: ValidationInfo) -> ExplorerConfig:
        """With engines on GPUs, let answers be as long as the model's length allows, unless their length is given."""
        sampling, model = explorer.sampling, info.data.get("model")
        if not explorer.engine.gpus or "max_tokens" in sampling.model_fields_set or model is None:
            return explorer
        most = max(1, model.max_length - sampling.max_prompt_tokens)
        return explorer.model_copy(update={"sampling": sampling.model_copy(update={"max_tokens": most})})

    @section_rule
    def _rules(self) -> None:
        for check in RULES:
            check(self)
        for stage in self.stages:  # the longest answer that may be sampled, which some algorithms divide by
            if "answer_length" in stage.algorithm.build().needs:
                stage.algorithm.set_coefficient("constant_length", self.explorer.sampling.max_tokens)
