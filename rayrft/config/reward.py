"""Config of rewards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rayrft.config.base import Changeable, Section, check_device, invalid, section_rule
from rayrft.errors import ConfigError


class RewardPart(Section):
    """A reward in a sum of several."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    role: Literal["add", "gate", "shape"] = "add"
    """``add``: ``weight`` times its value is added to the others. ``gate``: where its value is 0 or below, the sum
    counts 0. ``shape``: like ``add``, but kept out of the value that filters and evaluations look at."""
    weight: Changeable[float] = 1.0
    label: str = ""
    """The name of its value among the components; by default ``name``. No two parts have the same."""

    @property
    def component(self) -> str:
        """The name of its value among the components."""
        return self.label or self.name


class ReplicasConfig(Section):
    """The replicas of a domain on Ray Serve, each with ``workers`` processes for each part."""

    min: int = Field(1, ge=1)
    max: int = Field(1, ge=1)
    pending: int = Field(16, ge=1)
    """Pending answers per replica above which another replica starts, and below which one ends."""
    cpus: float = Field(0.1, ge=0)
    gpus: float = Field(0.0, ge=0)
    """For a learned reward model with ``device: cuda``."""
    memory_gib: float = Field(0.25, gt=0)

    @section_rule
    def _range(self) -> None:
        if self.max < self.min:
            raise invalid("max", f"must be at least min, {self.min}", "raise it", value=self.max)


def trained_by(part: RewardPart | RewardModelConfig) -> str | None:
    """Return the stage of this run that trains the reward model of a part, if any: option ``stage`` of ``model``."""
    stage = part.options.get("stage") if part.name == "model" else None
    return None if stage is None else str(stage)


class RewardModelConfig(Section):
    """Scoring of answers: by a reward named ``name``, or by several ``parts``."""

    name: str = "exact"
    options: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the reward. Reward ``model`` takes ``model``, or ``stage``: an earlier one that trains it."""
    parts: list[RewardPart] = Field(default_factory=list)
    """Several rewards instead of one. If one is unknown, so is the sum, unless a gate is 0 or below."""
    reasoning: Literal["hide", "show"] | None = None
    """Whether rewards see the reasoning in answers. By default functions of the last answer do not, and functions of
    TRL and verl and rewards of whole transcripts do, as there."""
    deadline_s: float = Field(10.0, gt=0)
    """Seconds for scoring one answer, from the start of execution, without waits of its process for a core."""
    workers: int = Field(1, ge=1)
    """Processes that score answers, for each Explorer or reward actor and each part that does not run inline."""
    spare_workers: int = Field(8, ge=0)
    """Further processes, started when calls take far longer than usual, so that a hanging call does not delay others.
    Use 0 for processes with much memory, such as a model's."""
    replicas: ReplicasConfig = ReplicasConfig()
    """With ``placement: serve``, and for `rayrft serve rewards`."""

    @section_rule
    def _either(self) -> None:
        if self.parts and self.changed & {"name", "options"}:
            raise invalid("parts", "cannot be combined with name or options", "make that reward one of the parts")
        names = [part.component for part in self.parts]
        if len(set(names)) < len(names):
            raise invalid("parts", "must have different names or labels", "give one a label", value=names)
        if self.parts and all(part.role != "add" for part in self.parts):
            raise invalid("parts", "must contain a part with role add", "change the role of one", value=names)
        if self.replicas.gpus and all(part.options.get("device", "cpu") == "cpu" for part in self.scored_by):
            remedy = "set option device: cuda of a reward model, or remove it"
            raise invalid("replicas.gpus", "are not used by any reward", remedy, value=self.replicas.gpus)

    @property
    def changed(self) -> set[str]:
        """The keys whose value is not the default: a config that was written has all keys."""
        fields = RewardModelConfig.model_fields.items()
        return {name for name, field in fields if getattr(self, name) != field.get_default(call_default_factory=True)}

    @property
    def scored_by(self) -> list[RewardPart]:
        """The parts, or the one reward."""
        return self.parts or [RewardPart(name=self.name, options=self.options)]


class RewardModelsConfig(RewardModelConfig):
    """Scoring of the tasks of all domains: by one reward, or by one per domain."""

    domains: dict[str, RewardModelConfig] = Field(default_factory=dict)
    """Scoring by domain, instead of ``name`` or ``parts`` for all tasks. Each domain has its own workers."""

    @section_rule
    def _one_way(self) -> None:
        if self.domains and (given := self.changed):
            problem = f"cannot be combined with {', '.join(sorted(given))}, which no task would use"
            raise invalid("domains", problem, "move these keys into each domain, or remove domains")

    @property
    def models(self) -> Mapping[str, RewardModelConfig]:
        """By domain; by the empty name if one reward scores all tasks."""
        return self.domains or {"": self}

    def domain_of(self, domain: str) -> str:
        """Return the key in `models` for tasks of a domain. Raises ConfigError if there is none."""
        if self.domains and domain not in self.domains:
            remedy = f"add the domain, or give the task one of: {', '.join(sorted(self.domains))}"
            raise ConfigError("does not contain the domain of a task", remedy, field="reward.domains", value=domain)
        return domain if self.domains else ""


class LengthReward(Section):
    """Kimi k1.5's length reward (Kimi Team 2025, arXiv:2501.12599, sec. 2.3.3): shorter answers of a group earn more. A
    group's rows have between ``min`` and ``max`` sampled tokens. A row of length ``l`` earns ``weight`` times
    ``lambda = 0.5 - (l - min) / (max - min)`` if it is right, else ``weight`` times ``min(0, lambda)``."""

    weight: Changeable[float] = Field(1.0, gt=0)
    warm_up: int = Field(0, ge=0)
    """Optimiser steps over which the weight grows from 0, since a length reward slows down early learning."""
    right: float = 1.0
    """The lowest value of a right answer."""


class RewardConfig(RewardModelsConfig):
    """Scoring of a run's answers."""

    placement: Literal["beside", "pool", "serve"] = "beside"
    """``beside``: in the Explorer and processes on its node. ``pool``: in ``actors`` on any node, with processes.
    ``serve``: on Ray Serve, a deployment for each domain with autoscaled replicas, which all Explorers share."""
    actors: int = Field(1, ge=1)
    """Reward actors of each Explorer, with ``placement: pool``."""
    on_unknown: Literal["drop_row", "drop_group", "fallback"] = "drop_row"
    """Policy for an answer (with all its rows) whose reward raised or timed out."""
    fallback: Changeable[float] = 0.0
    truncated: Literal["zero", "score", "mask", "soft"] = "zero"
    """Policy for an answer truncated at max_tokens or for repetition. ``zero``: its reward is at most 0. ``score``:
    scored like others. Of DAPO (arXiv:2503.14476), ``mask``: scored, but not trained on (overlong filtering); ``soft``:
    every answer loses up to 1 over the last ``overlong_buffer`` tokens before max_tokens (overlong punishment)."""
    overlong_buffer: int | None = Field(None, ge=1)
    """Tokens over which ``truncated: soft`` grows from 0 to 1; a fifth of max_tokens in the paper."""
    repetition_penalty: Changeable[float] = Field(0.0, ge=0)
    """Subtracted from the reward of an answer that was stopped for repetition (`explorer.sampling.repetition`)."""
    length: LengthReward | None = None
    """Additional reward of short answers."""

    @section_rule
    def _overlong(self) -> None:
        if (self.truncated == "soft") != (self.overlong_buffer is not None):
            problem = "is required by truncated: soft, and only valid with it"
            raise invalid("overlong_buffer", problem, "give both or neither", value=self.overlong_buffer)
        if self.actors > 1 and self.placement != "pool":
            remedy = "set placement: pool, or remove actors"
            raise invalid("actors", "is only valid with placement: pool", remedy, value=self.actors)
        for domain, model in self.models.items():
            prefix = f"domains.{domain}." if domain else ""
            if self.placement != "serve" and model.replicas != ReplicasConfig():
                remedy = "set placement: serve, or remove replicas"
                raise invalid(f"{prefix}replicas", "is only valid with placement: serve", remedy)
            for number, part in enumerate(model.scored_by):
                field = f"{prefix}parts.{number}.options" if model.parts else f"{prefix}options"
                check_device(part.options, field, model.replicas.gpus, "set placement: serve and replicas.gpus")

    @property
    def stages(self) -> set[str]:
        """The stages of this run whose reward models score."""
        parts = [part for model in self.models.values() for part in model.scored_by]
        return {stage for part in parts if (stage := trained_by(part)) is not None}

    def resolved(self, checkpoints: Path) -> RewardConfig:
        """Return the config with folders in ``checkpoints`` instead of the stages that train reward models."""
        domains = {name: each.model_copy(update=_folders(each, checkpoints)) for name, each in self.domains.items()}
        return self.model_copy(update={**_folders(self, checkpoints), "domains": domains})


def _folders(reward: RewardPart | RewardModelConfig, checkpoints: Path) -> dict[str, Any]:
    """Return the keys of a reward that change where folders replace stages."""
    changes: dict[str, Any] = {}
    if isinstance(reward, RewardModelConfig):
        changes["parts"] = [part.model_copy(update=_folders(part, checkpoints)) for part in reward.parts]
    if (stage := trained_by(reward)) is not None:
        others = {name: option for name, option in reward.options.items() if name != "stage"}
        changes["options"] = {**others, "model": str(checkpoints / stage)}
    return changes
