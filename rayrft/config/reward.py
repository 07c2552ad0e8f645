"""Config of rewards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rayrft.config.base import Section, invalid
from rayrft.errors import ConfigError


class RewardPart(Section):
    """One reward of several."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    role: Literal["add", "gate", "shape"] = "add"
    """``add``: ``weight`` times its value is added to the others. ``gate``: where its value is 0 or below, the sum
    counts 0. ``shape``: like ``add``, but kept out of the value that filters and evaluations look at."""
    weight: float = 1.0
    label: str = ""
    """The name of its value among the components; by default its own, which two parts cannot share."""

    @property
    def component(self) -> str:
        """The name of its value among the components."""
        return self.label or self.name


class ReplicasConfig(Section):
    """The replicas of a domain on Ray Serve, each with ``workers`` processes for each part."""

    min: int = Field(1, ge=1)
    max: int = Field(1, ge=1)
    pending: int = Field(16, ge=1)
    """Answers that are pending for each replica, beyond which another one is started, and below which one ends."""
    cpus: float = Field(0.1, ge=0)
    gpus: float = Field(0.0, ge=0)
    """For a learned reward model with ``device: cuda``."""
    memory_gib: float = Field(0.25, gt=0)

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.max < self.min:
            raise invalid("max", "is below min", value=self.max, remedy=f"use {self.min} or more")
        return self


def trained_by(part: RewardPart | RewardModelConfig) -> str | None:
    """The stage of this run that trains the reward model of a part, if one does: option ``stage`` of ``model``."""
    stage = part.options.get("stage") if part.name == "model" else None
    return None if stage is None else str(stage)


class RewardModelConfig(Section):
    """How answers are scored: by the reward of a name, or by several ``parts``."""

    name: str = "exact"
    options: dict[str, Any] = Field(default_factory=dict)
    """What the reward takes. Reward ``model`` takes ``stage`` instead of ``model``: an earlier stage of this run, which
    trains the reward model."""
    parts: list[RewardPart] = Field(default_factory=list)
    """Instead of ``name`` and ``options``: rewards that are scored side by side. The value of each is a component of
    its name or label. If one is unknown, so is the reward, unless a gate is shut."""
    deadline_s: float = Field(10.0, gt=0)
    """Seconds for scoring one answer, from the start of execution; waits of its process for a core do not count."""
    workers: int = Field(1, ge=1)
    """Processes in which answers are scored, for each Explorer or reward actor and each part; none for a reward that
    runs inline or is a coroutine."""

    spare_workers: int = Field(8, ge=0)
    """Processes beside ``workers``, started where calls take far longer than usual, so that those that hang hold up no
    others. 0 where a process takes much memory, as one with a model does."""
    replicas: ReplicasConfig = ReplicasConfig()
    """With ``placement: serve``, and for `rayrft serve rewards`."""

    @model_validator(mode="after")
    def _either(self) -> RewardModelConfig:
        if self.parts and self.changed & {"name", "options"}:
            raise invalid("parts", "stand beside name or options", remedy="make that reward one of the parts")
        names = [part.component for part in self.parts]
        if len(set(names)) < len(names):
            remedy = "they name components: give one a label"
            raise invalid("parts", "two have one name", value=names, remedy=remedy)
        if self.parts and all(part.role != "add" for part in self.parts):
            raise invalid("parts", "none is added", value=names, remedy="let the role of one be add")
        return self

    @property
    def changed(self) -> set[str]:
        """The keys of this section that have another value than by default. A config that was written has all keys."""
        fields = RewardModelConfig.model_fields.items()
        return {name for name, field in fields if getattr(self, name) != field.get_default(call_default_factory=True)}

    @property
    def scored_by(self) -> list[RewardPart]:
        """The parts, or the one reward."""
        return self.parts or [RewardPart(name=self.name, options=self.options)]


class RewardModelsConfig(RewardModelConfig):
    """How the tasks of all domains are scored: alike, or each domain in its own way."""

    domains: dict[str, RewardModelConfig] = Field(default_factory=dict)
    """How the tasks of each domain are scored, instead of all of them by ``name`` or ``parts``. A domain has workers of
    its own, so that a slow one holds up no other."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.domains and (given := self.changed):
            raise invalid(
                "domains",
                f"stand beside {', '.join(sorted(given))}, which no task would use",
                remedy="say it in each domain, or leave domains out",
            )
        return self

    @property
    def models(self) -> Mapping[str, RewardModelConfig]:
        """By domain; by the empty name where all tasks are scored alike."""
        return self.domains or {"": self}

    def domain_of(self, domain: str) -> str:
        """Return the key in `models` for tasks of a domain. Raises ConfigError if there is none."""
        if self.domains and domain not in self.domains:
            remedy = f"give it one, or give the task another domain than those of {', '.join(sorted(self.domains))}"
            raise ConfigError("no reward scores tasks of this domain", remedy, field="reward.domains", value=domain)
        return domain if self.domains else ""


class LengthReward(Section):
    """Kimi k1.5's length reward (Kimi Team 2025, arXiv:2501.12599, sec. 2.3.3): shorter answers of a group earn more.

    Where a group's rows have between ``min`` and ``max`` sampled tokens, one of length ``l`` earns ``weight`` times
    ``lambda = 0.5 - (l - min) / (max - min)`` if it is right, else ``weight`` times ``min(0, lambda)``.
    """

    weight: float = Field(1.0, gt=0)
    warm_up: int = Field(0, ge=0)
    """Optimiser steps over which the weight grows from 0: from the start, it slows learning down."""
    right: float = 1.0
    """The least value of a right answer."""


class RewardConfig(RewardModelsConfig):
    """Scoring of answers."""

    placement: Literal["beside", "pool", "serve"] = "beside"
    """``beside``: in the Explorer and processes on its node. ``pool``: in ``actors`` on any node, with processes.
    ``serve``: in a deployment on Ray Serve for each domain, which has as many replicas as it needs, for all Explorers
    together."""
    actors: int = Field(1, ge=1)
    """Reward actors of each Explorer, with ``placement: pool``."""
    on_unknown: Literal["drop_row", "drop_group", "fallback"] = "drop_row"
    """Policy for an answer (with all its rows) whose reward raised or timed out."""
    fallback: float = 0.0
    truncated: Literal["zero", "score", "mask", "soft"] = "zero"
    """Policy for an answer truncated at max_tokens or for repetition. ``zero``: its reward is at most 0. ``score``:
    scored like others. ``mask``: scored and used in its group's statistics, but not trained on (overlong filtering).
    ``soft``: scored, and every answer loses up to 1 over the last ``overlong_buffer`` tokens before max_tokens (soft
    overlong punishment). The last two are DAPO's (arXiv:2503.14476)."""
    overlong_buffer: int | None = Field(None, ge=1)
    """Tokens over which ``truncated: soft`` grows from 0 to 1; a fifth of max_tokens in the paper."""
    repetition_penalty: float = Field(0.0, ge=0)
    """What an answer loses that was stopped for repetition (`explorer.sampling.repetition`)."""
    length: LengthReward | None = None
    """What short answers earn beside the reward."""

    @model_validator(mode="after")
    def _overlong(self) -> RewardConfig:
        if (self.truncated == "soft") != (self.overlong_buffer is not None):
            raise invalid(
                "overlong_buffer",
                "truncated: soft and overlong_buffer, its number of tokens, need each other",
                remedy="give both or none",
            )
        if self.actors > 1 and self.placement != "pool":
            raise invalid(
                "actors", "are those of placement: pool", value=self.actors, remedy="set it, or leave this out"
            )
        if self.placement != "serve":
            for domain, model in self.models.items():
                if model.replicas != ReplicasConfig():
                    field = f"domains.{domain}.replicas" if domain else "replicas"
                    raise invalid(field, "are those of placement: serve", remedy="set it, or leave this out")
        return self

    @property
    def stages(self) -> set[str]:
        """The stages of this run whose reward models score."""
        parts = [part for model in self.models.values() for part in model.scored_by]
        return {stage for part in parts if (stage := trained_by(part)) is not None}

    def resolved(self, checkpoints: Path) -> RewardConfig:
        """Return the same with the folders of the reward models that stages train, which are in ``checkpoints``."""
        if not self.stages:
            return self
        domains = {name: each.model_copy(update=_resolved(each, checkpoints)) for name, each in self.domains.items()}
        return self.model_copy(update={**_resolved(self, checkpoints), "domains": domains})


def _resolved(model: RewardModelConfig, checkpoints: Path) -> dict[str, Any]:
    """Return the fields that say what scores, with folders instead of stages."""

    def options(part: RewardPart | RewardModelConfig) -> dict[str, Any]:
        if (stage := trained_by(part)) is None:
            return part.options
        others = {name: option for name, option in part.options.items() if name != "stage"}
        return {**others, "model": str(checkpoints / stage)}

    parts = [part.model_copy(update={"options": options(part)}) for part in model.parts]
    return {"options": options(model), "parts": parts}
