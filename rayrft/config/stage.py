"""Config of stages: algorithm, batch, optimiser and length; checkpoints, evaluation and monitoring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import ConfigDict, Field

from rayrft.config.base import Changeable, ModelPath, Name, Section, invalid, section_rule
from rayrft.config.trainer import OptimizerConfig
from rayrft.errors import ConfigError

if TYPE_CHECKING:
    from rayrft.algorithms import Algorithm

_BUILT: dict[str, Algorithm] = {}
"""Algorithms by their config."""


class AlgorithmConfig(Section):
    """A preset by name. Every other key overrides one of its pieces (``policy_loss: gspo``) or coefficients
    (``clip_low: 0.1``); see `rayrft.algorithms.presets` and `rayrft.algorithms.Algorithm`."""

    # Other keys belong to the pieces: `build` rejects those that no piece takes.
    model_config = ConfigDict(extra="allow")

    name: str

    def build(self) -> Algorithm:
        """Return the algorithm, built once per process. Raises ConfigError for an unknown name or key, or its value."""
        key = repr((self.name, self.model_extra))
        if key not in _BUILT:
            # Imported here: actors that only pass the config on need not load torch.
            from rayrft.algorithms import build

            _BUILT[key] = build(self.name, self.model_extra)
        return _BUILT[key]

    def set_coefficient(self, key: str, value: float) -> None:
        """Set a coefficient that is derived from other sections."""
        assert self.model_extra is not None  # other keys are allowed
        self.model_extra[key] = value


class UpdateConfig(Section):
    """Updates on a batch: ``epochs`` times ``mini_batches``."""

    epochs: int = Field(1, ge=1)
    mini_batches: int = Field(1, ge=1)
    """Parts of a batch, with nearly equal numbers of groups and expert rows and one update per part."""
    reference_refresh: int | None = Field(None, ge=1)
    """Steps after which the reference is set to the current policy; by default it stays that of the stage's start."""
    reset_optimizer: bool = False
    """Discard the optimiser's moments at every such refresh."""
    critic_warmup_steps: int = Field(0, ge=0)
    """Initial steps in which only the critic is trained; the policy's schedule starts after them."""

    @property
    def updates_per_step(self) -> int:
        """Updates of the policy on a batch."""
        return self.epochs * self.mini_batches


class StageConfig(Section):
    """One stage of a run. A batch is ``expert_rows`` demonstrations and ``groups`` groups of ``group_size`` answers."""

    name: Name
    algorithm: Changeable[AlgorithmConfig]
    steps: Changeable[int] = Field(ge=1)
    batch_size: int = Field(256, ge=1, le=1 << 20)
    """Rows of one optimiser step, over all ranks and both streams."""
    group_size: int = Field(8, ge=1)
    """Answers sampled per task."""
    expert_share: float | None = Field(None, ge=0, le=1)
    """Fraction of expert rows in the batch: fixed at 1 for sft and 0 for grpo, required for mixes of both."""
    demonstrations: str | None = None
    """The entry of ``demonstrations`` that supplies the expert rows."""
    optimizer: OptimizerConfig = OptimizerConfig()
    critic_optimizer: OptimizerConfig = OptimizerConfig()
    """The critic's optimiser, for algorithms that have one."""
    update: UpdateConfig = UpdateConfig()
    teacher: ModelPath | None = None
    """The model to distil from, with the same tokenizer: a Hugging Face folder or hub id. Each rank holds a shard."""
    start_from: str | None = None
    """Earlier stage whose final weights this stage starts from; the previous one by default."""
    evaluate_every: Changeable[int | None] = Field(None, ge=1)
    """Evaluate at every n-th step of the stage, in addition to its start and end."""

    @section_rule
    def _batch_arithmetic(self) -> None:
        try:
            algorithm = self.algorithm.build()
        except ConfigError as error:
            raise ValueError(error) from None
        name, needs, share = self.algorithm.name, algorithm.needs, self.expert_share
        if "teacher" in needs and not self.teacher:
            raise invalid("teacher", f"is required by {name}, which distils from it", "add 'teacher: …'")
        if self.teacher and "teacher" not in needs:
            raise invalid("teacher", f"is not used: {name} has no teacher", "remove it", value=self.teacher)
        self._check_update(algorithm)
        if algorithm.mixes and share is None:
            raise invalid("expert_share", f"is required by {name}", "add 'expert_share: …', the share of expert rows")
        if not algorithm.mixes and share not in (None, self._fixed_share):
            raise invalid("expert_share", f"is {self._fixed_share:g} with {name!r}", "remove it", value=share)
        if {"expert", "pairs"} & needs.keys() and not self.demonstrations:
            raise invalid("demonstrations", f"is required by {name}", "name an entry of 'demonstrations'")
        if "pairs" in needs and self.batch_size % 2:
            raise invalid("batch_size", "must be even, to hold whole pairs", "raise it by 1", value=self.batch_size)
        rows_of_share = self.batch_size * self._share
        if abs(rows_of_share - round(rows_of_share)) > 1e-6:
            problem = f"of batch_size {self.batch_size} is {rows_of_share:g} rows, not a whole number"
            remedy = f"give {round(rows_of_share) / self.batch_size:.6g}, which is {round(rows_of_share)}"
            raise invalid("expert_share", problem, remedy, value=self._share)
        for need, kind, count in (("expert", "expert", self.expert_rows), ("rollouts", "usual", self.usual_rows)):
            if need in needs and not count:
                problem = f"leaves no {kind} rows in the batch, and mu is {algorithm.mu():g}"
                raise invalid("expert_share", problem, "change it, or mu", value=self._share)
        if self.demonstrations and not self.expert_rows:
            problem = f"is not used: {name} has no expert rows"
            raise invalid("demonstrations", problem, "remove it", value=self.demonstrations)
        if not self.usual_rows and self.group_size != type(self).model_fields["group_size"].default:
            raise invalid("group_size", f"is not used: {name} samples no answers", "remove it", value=self.group_size)
        if self.groups and self.group_size == 1 and algorithm.compares_answers:
            problem = f"must be at least 2: advantage {algorithm.advantage!r} compares the answers to a task"
            remedy = "raise it, or use an advantage of single answers (remax, reinforce_pp, gae)"
            raise invalid("group_size", problem, remedy, value=1)
        if self.usual_rows % self.group_size:
            near = max(1, round(self.usual_rows / self.group_size)) * self.group_size
            problem = f"has {self.usual_rows} usual rows, not whole groups of group_size {self.group_size}"
            remedy = f"give {near + self.expert_rows} with {self.expert_rows} expert rows"
            raise invalid("batch_size", problem, remedy, value=self.batch_size)

    def _check_update(self, algorithm: Algorithm) -> None:
        """Check that options of the update have an effect."""
        update, name = self.update, self.algorithm.name
        warmup = update.critic_warmup_steps
        if "critic" not in algorithm.needs and (warmup or self.critic_optimizer != OptimizerConfig()):
            key = "update.critic_warmup_steps" if warmup else "critic_optimizer"
            raise invalid(key, f"is not used: {name} has no critic", "remove it")
        if warmup >= self.steps:
            problem = f"must be less than steps, {self.steps}"
            raise invalid("update.critic_warmup_steps", problem, "lower it", value=warmup)
        if update.reference_refresh and "reference" not in algorithm.needs:
            remedy = "remove it, or add a KL term"
            raise invalid("update.reference_refresh", f"is not used: {name} has no reference", remedy)
        if update.reset_optimizer and not update.reference_refresh:
            remedy = "remove it, or set reference_refresh"
            raise invalid("update.reset_optimizer", "is not used without reference_refresh", remedy)

    @property
    def trains_reward_model(self) -> bool:
        """Whether the stage trains a reward model, and leaves the policy as it is."""
        return self.algorithm.build().trains_reward_model

    @property
    def _fixed_share(self) -> float:
        algorithm = self.algorithm.build()
        return 1.0 if {"pairs", "labels"} & algorithm.needs.keys() else algorithm.mu()

    @property
    def _share(self) -> float:
        return self._fixed_share if self.expert_share is None else self.expert_share

    @property
    def expert_rows(self) -> int:
        """Expert rows in one batch."""
        return round(self.batch_size * self._share)

    @property
    def usual_rows(self) -> int:
        """Usual rows in one batch."""
        return self.batch_size - self.expert_rows

    @property
    def groups(self) -> int:
        """Groups of usual rows in one batch."""
        return self.usual_rows // self.group_size


class CheckpointConfig(Section):
    """Checkpoints, from which a run resumes. One is also written at the end of every stage."""

    every: Changeable[int | None] = Field(50, ge=1)
    """Steps of a stage between checkpoints; none: only at the end of a stage."""
    keep_last: Changeable[int] = Field(2, ge=1)
    keep_best: Changeable[int] = Field(0, ge=0)
    """Number of best checkpoints by ``best_by`` to keep besides the last; of equals, the earlier."""
    best_by: Literal["accuracy", "reward"] = "accuracy"
    """Accuracy of an evaluation of the step (let ``every`` divide ``evaluate_every``), or mean reward of its rows."""


class EvaluationConfig(Section):
    """Accuracy on the held-out tasks."""

    temperatures: Changeable[tuple[Annotated[float, Field(ge=0, le=2)], ...]] = (0.0, 1.0)
    """One evaluation each; 0 is greedy."""
    samples: Changeable[int] = Field(1, ge=1)
    """Attempts per task, at temperatures above 0: accuracy is then mean@samples, beside pass@samples."""
    max_tokens: Changeable[int | None] = Field(None, ge=1)
    """Longest answer, in tokens; by default ``explorer.sampling.max_tokens``."""
    engines: int = Field(0, ge=0)
    """Engines like ``explorer.engine`` that evaluate during training. 0: rollout engines evaluate between steps."""
    enabled: Changeable[bool] = True
    """While the run is running it can only be disabled."""


class MonitorConfig(Section):
    """Metric sinks besides ``metrics.jsonl`` and Ray's metrics, the trace, and limits on waits."""

    trace: bool = True
    """Whether actors record for the viewer and ``rayrft trace`` what they worked on or waited for, and answers that the
    Buffer does not store: of dropped groups and evaluations."""
    sinks: tuple[str, ...] = ()
    """Such as ``wandb``, ``tensorboard``, ``mlflow`` and ``trackio``."""
    project: str = "rayrft"
    """The project, or MLflow's experiment, that the run is part of."""
    sample_rows: int = Field(16, ge=0)
    """Rows in a table of the newest answers that wandb and MLflow get every ``samples_every`` steps; 0 for none."""
    samples_every: int = Field(50, ge=1)
    stall_s: Changeable[float] = Field(1800.0, gt=0)
    """Seconds without progress after which a wait ends the run. It must exceed ``explorer.deadline_s``. A write waits
    for half as long if the disk is full or read-only, and the end of a run this long for its sinks."""
    patience_s: Changeable[float] = Field(30.0, gt=0)
    """Seconds without progress of an engine, a rank or another awaited part after which a note names it."""
