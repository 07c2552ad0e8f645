"""The whole configuration of a run, and the rules across its sections."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.base import NAME, Section, invalid, local_folder
from rayrft.config.bench import BenchConfig
from rayrft.config.buffer import BufferConfig
from rayrft.config.demonstrations import DemonstrationsConfig
from rayrft.config.explorer import ExplorerConfig
from rayrft.config.model import ModelConfig
from rayrft.config.pipelines import PipelinesConfig
from rayrft.config.reward import RewardConfig
from rayrft.config.serve import EDITED, ServeConfig
from rayrft.config.stage import CheckpointConfig, EvaluationConfig, MonitorConfig, StageConfig
from rayrft.config.tasks import TasksConfig
from rayrft.config.trainer import ProbeBounds, TrainerConfig, WeightSyncConfig
from rayrft.errors import ConfigError, nearest
from rayrft.weights import Layout, choose_transport, transports


class RunConfig(Section):
    """One run: one YAML file."""

    name: str = Field(pattern=NAME)
    mode: Literal["both", "train", "explore", "serve", "bench"] = "both"
    """``train``: no engines. Stages train on files, or on groups that other jobs put into the Buffer. ``explore``: no
    trainer. The stage with groups says which groups are sampled for the Buffer ``buffer.name``, with fixed weights.
    ``serve``: no tasks are acted on; stages train on the sessions of applications, which call the endpoint. ``bench``:
    only engines. Models are evaluated, and nothing is trained."""
    storage: Path = Path("runs")
    """The run folder is ``<storage>/<name>``."""
    seed: int = 0
    max_staleness: int = Field(0, ge=0)
    """Largest number of optimiser steps between sampling a token and training on it: 0 is synchronous."""
    model: ModelConfig
    tasks: TasksConfig | None = None
    pipelines: PipelinesConfig = PipelinesConfig()
    demonstrations: dict[str, DemonstrationsConfig] = Field(default_factory=dict)
    reward: RewardConfig = RewardConfig()
    explorer: ExplorerConfig = ExplorerConfig()
    auxiliary: dict[Annotated[str, Field(pattern=NAME)], AuxiliaryConfig] = Field(default_factory=dict)
    """Frozen models for workflows and judges, by name: ``model.auxiliary("judge")``."""
    buffer: BufferConfig = BufferConfig()
    trainer: TrainerConfig = TrainerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    stages: list[StageConfig] = Field(default_factory=list)
    """Required but for mode ``bench``."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    bench: BenchConfig = BenchConfig()
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
        if self.buffer.name is not None:
            return (self.buffer.storage or self.storage) / f"buffer.{self.buffer.name}"
        return self.buffer.storage / self.name if self.buffer.storage else self.folder / "buffer"

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
        """Index of the stage after which answers can be scored; -1 if they always can."""
        trained = [number for number, stage in enumerate(self.stages) if stage.name in self.reward.stages]
        return max(trained, default=-1)

    @property
    def scored_demonstrations(self) -> set[str]:
        """The entries of ``demonstrations`` that reward models are trained on."""
        return {stage.demonstrations or "" for stage in self.stages if stage.trains_reward_model}

    def grows(self, stage: StageConfig) -> bool:
        """Return whether the demonstrations of a stage are those that operators on experiences make, or answers that
        people edit on the feedback page, so that there may be none yet."""
        return bool(stage.expert_rows) and stage.demonstrations in (self.pipelines.made, EDITED)

    def holds_out(self, stage: StageConfig) -> bool:
        """Whether there are held-out pairs beside those that the stage trains on."""
        entry = self.demonstrations.get(stage.demonstrations or "")
        return entry is not None and entry.held_out > 0 and stage.algorithm.build().needs_pairs

    @property
    def labelled_demonstrations(self) -> set[str]:
        """The entries of ``demonstrations`` whose answers are labelled good or bad."""
        return {stage.demonstrations or "" for stage in self.stages if stage.algorithm.build().needs_labels}

    @property
    def explored_stage(self) -> StageConfig:
        """Mode ``explore``: the stage that says which groups are sampled."""
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
    def _one_model_by_name(self) -> RunConfig:
        if both := sorted(self.auxiliary.keys() & self.pipelines.endpoints.keys()):
            problem = "is the name of an auxiliary model, too"
            raise invalid(f"pipelines.endpoints.{both[0]}", problem, remedy="give it another")
        return self

    @model_validator(mode="after")
    def _mode(self) -> RunConfig:
        if self.mode == "both" and self.tasks is None:
            raise invalid("tasks", "a required key is missing", remedy="modes 'train' and 'serve' do without")
        if self.mode == "explore" and self.buffer.name is None:
            raise invalid("buffer.name", "mode 'explore' needs it: the Buffer that it fills", remedy="give it a name")
        if self.mode == "both" and self.buffer.name is not None:
            remedy = "leave it out, or use modes 'explore' and 'train'"
            raise invalid("buffer.name", "is for two jobs that meet", value=self.buffer.name, remedy=remedy)
        if self.buffer.max_age is not None and self.mode == "both":
            raise invalid("buffer.max_age", "is for mode 'train'", remedy="use max_staleness")
        if self.mode != "bench" and not self.stages:
            raise invalid("stages", "a required key is missing", remedy="give at least one stage")
        if self.mode == "bench" and self.tasks is None and not self.bench.tasksets:
            raise invalid("bench.tasksets", "a required key is missing", remedy="add it, or 'tasks'")
        if self.mode == "bench" and self.model.path is None and not self.bench.models:
            raise invalid("bench.models", "a required key is missing", remedy="name a model, as in 'model.path'")
        if self.mode != "bench" and self.model.path is None and self.model.tiny is None:
            problem = "give exactly one of 'path' (a Hugging Face model) and 'tiny' (a generated one)"
            raise invalid("model.path", problem)
        if self.serve is not None and self.mode not in ("both", "serve"):
            raise invalid("serve", f"is for modes 'both' and 'serve', not {self.mode!r}", remedy="leave it out")
        for stage in self.stages:
            if self.mode not in ("both", "bench") and stage.evaluate_every:
                problem = f"is for mode 'both', and not {self.mode!r}"
                raise invalid(f"stages.{stage.name}.evaluate_every", problem, remedy="leave it out")
        if self.mode == "explore" and sum(bool(stage.groups) for stage in self.stages) != 1:
            sampled = [stage.name for stage in self.stages if stage.groups]
            problem = "mode 'explore' needs one stage that trains on own rows, which says how they are sampled"
            raise invalid("stages", problem, value=sampled, remedy="leave out the others")
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
            grows = self.grows(stage)
            if stage.expert_rows and stage.demonstrations not in self.demonstrations and not grows:
                raise invalid(
                    f"stages.{stage.name}.demonstrations",
                    "no such entry in 'demonstrations'",
                    value=stage.demonstrations,
                    remedy=nearest(stage.demonstrations or "", self.demonstrations)
                    if self.demonstrations
                    else "add it",
                )
            units = stage.groups
            if not (grows and stage.groups):  # else there may be none yet
                units += stage.expert_rows // (2 if stage.algorithm.build().needs_pairs else 1)
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
    def _experience_pipeline(self) -> RunConfig:
        """Check that somebody sends groups through the operators on experiences, and who trains on what they make."""
        made = self.pipelines.made
        if not self.pipelines.experiences:
            for name in ("made", "actors"):
                if getattr(self.pipelines, name) is not None:
                    raise invalid(f"pipelines.{name}", "there are no operators on experiences", remedy="leave it out")
        elif self.mode in ("train", "serve"):
            raise invalid(
                "pipelines.experiences",
                f"work on what an Explorer samples, and there is none in mode {self.mode!r}",
                remedy="leave them out; `rayrft data process` works on the rows of a run",
            )
        for stage in self.stages:
            if made is not None and stage.trains_reward_model and stage.demonstrations == made:
                raise invalid(
                    f"stages.{stage.name}.demonstrations",
                    "a reward model is trained on pairs from a file, whose tokens are the chat template's",
                    value=made,
                    remedy="export the pairs (rayrft data export) and name the file in 'demonstrations'",
                )
        return self

    @model_validator(mode="after")
    def _reward_models(self) -> RunConfig:
        """Check who trains reward models, on what, and who uses them; and who trains on labelled answers."""
        trains = {stage.name: stage.trains_reward_model for stage in self.stages}
        ranked = {stage.demonstrations for stage in self.stages if stage.algorithm.build().needs_pairs}
        for name, demonstrations in self.demonstrations.items():
            if demonstrations.held_out and name not in ranked:
                problem = "is not used: no stage trains on these as preference pairs"
                raise invalid(f"demonstrations.{name}.held_out", problem, value=demonstrations.held_out)
        for stage in self.stages:
            if stage.evaluate_every and trains[stage.name] and not self.holds_out(stage):
                problem = f"is not used: {stage.algorithm.name} does not change the policy, and no pairs are held out"
                remedy = f"leave it out, or set demonstrations.{stage.demonstrations}.held_out"
                raise invalid(f"stages.{stage.name}.evaluate_every", problem, remedy=remedy)
            if stage.start_from is not None and trains[stage.start_from]:
                raise invalid(
                    f"stages.{stage.name}.start_from",
                    "trains a reward model, which no stage can start from",
                    value=stage.start_from,
                    remedy="leave it out: the policy is as it was before that stage",
                )
            labels = stage.algorithm.build().needs_labels
            scored, labelled = (
                stage.demonstrations in names for names in (self.scored_demonstrations, self.labelled_demonstrations)
            )
            if stage.expert_rows and (scored > trains[stage.name] or labelled > labels):
                raise invalid(
                    f"stages.{stage.name}.demonstrations",
                    "are those of a reward model, whose tokens are the chat template's to their very end"
                    if scored
                    else "are labelled answers, the bad ones among them",
                    value=stage.demonstrations,
                    remedy="give the file a second entry in 'demonstrations'",
                )
        if not self.reward.stages:
            return self
        if unknown := sorted(name for name in self.reward.stages if not trains.get(name, False)):
            known = [name for name, trained in trains.items() if trained]
            raise invalid(
                "reward.options.stage",
                "is no stage that trains a reward model",
                value=unknown[0],
                remedy=f"choose one of: {', '.join(known)}" if known else "add one, or give 'model', a folder",
            )
        if self.mode not in ("both", "bench"):
            problem = f"is trained in mode 'both', and not {self.mode!r}"
            raise invalid("reward.options.stage", problem, remedy="give 'model', the folder of a trained one")
        if self.mode == "both" and self.reward.placement == "serve":
            problem = "is started with the run, before the reward model is trained"
            raise invalid("reward.placement", problem, value="serve", remedy="set it to beside or pool")
        for stage in self.stages[: self.scored_after + 1]:
            if stage.groups or (stage.evaluate_every and not trains[stage.name]):
                raise invalid(
                    f"stages.{stage.name}.{'algorithm' if stage.groups else 'evaluate_every'}",
                    "needs rewards before the reward model is trained",
                    remedy=f"put it after stage {self.stages[self.scored_after].name!r}, or leave it out",
                )
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
        for section in ("evaluation", "bench") if self.rolls_out else ():
            longest = getattr(self, section).max_tokens or 0
            if sampling.max_prompt_tokens + longest > self.model.max_length:
                raise invalid(
                    f"{section}.max_tokens",
                    f"with explorer.sampling.max_prompt_tokens, {sampling.max_prompt_tokens}, is more than "
                    f"model.max_length, {self.model.max_length}",
                    value=longest,
                    remedy="lower it, or raise model.max_length",
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
        if self.mode == "explore":
            problem = "is for groups that go on under newer weights, and mode 'explore' has none"
            raise invalid("explorer.partial", problem, remedy="leave it out")
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
        if self.mode == "bench":  # nothing is trained
            return self._tensor_parallel()
        if self.mode == "both" and (engine.gpus > 0) != (trainer.gpus > 0):
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
            colocated = self.mode == "both" and self.colocated
        except ConfigError as error:
            raise ValueError(error) from None
        if engine.sleep and (not colocated or self.max_staleness or self.explorer.over_sampling > 1):
            raise invalid(
                "explorer.engine.sleep",
                "is for engine and trainer taking turns on one GPU",
                remedy="use weight_sync.backend ipc, max_staleness 0 and explorer.over_sampling 1 with it",
            )
        if self.evaluation_engines and colocated:
            raise invalid(
                "evaluation.engines",
                f"weights over {self.sync_backend} reach only engines beside a rank",
                value=self.evaluation_engines,
                remedy="give engines and ranks whole GPUs, or let the rollout engines evaluate (0)",
            )
        return self._tensor_parallel()

    def _tensor_parallel(self) -> RunConfig:
        engine = self.explorer.engine
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
