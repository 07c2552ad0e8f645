"""Config of auxiliary models: frozen, served besides the policy."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

from pydantic import Field

from rayrft.config.base import ModelPath, Section, invalid, section_rule
from rayrft.config.explorer import EngineConfig
from rayrft.config.model import TemplateConfig
from rayrft.errors import ConfigError, nearest


class AuxiliaryConfig(Section):
    """A frozen model for workflows and judges, such as a simulated user, on its own engines."""

    model: ModelPath
    """A Hugging Face folder or hub id, with its own tokenizer."""
    template: TemplateConfig = TemplateConfig()
    engine: EngineConfig = EngineConfig(count=1)
    dtype: Literal["float32", "bfloat16"] = Field(
        default_factory=lambda given: "bfloat16" if given["engine"].gpus else "float32"
    )
    """On GPUs by default bfloat16."""
    max_length: int = Field(512, ge=8)
    """Longest sequence, prompt and answer together, in tokens."""
    temperature: float = Field(1.0, ge=0, le=2)
    """Default of calls; 0 is greedy."""
    max_tokens: int = Field(128, ge=1)
    """Default of calls: longest answer, in tokens."""

    @section_rule
    def _awake(self) -> None:
        if self.engine.sleep:
            raise invalid("engine.sleep", "is only valid for the policy's engines", "remove it")
        self.engine.check_alone("engine")


def require_auxiliary(names: Iterable[str], known: Collection[str]) -> None:
    """Raise ConfigError unless all these auxiliary models are ``known`` ones of the config."""
    for name in names:
        if name not in known:
            remedy = nearest(name, known) if known else "add it to the config"
            raise ConfigError("does not contain the model", remedy, field="auxiliary", value=name)
