"""Config of auxiliary models: frozen ones, served beside the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from rayrft.config.base import Section
from rayrft.config.explorer import EngineConfig
from rayrft.config.model import TemplateConfig


class AuxiliaryConfig(Section):
    """A frozen model that workflows may talk to, such as a judge or a simulated user, on engines of its own."""

    model: str
    """A Hugging Face folder or hub id; it has a tokenizer of its own."""
    template: TemplateConfig = TemplateConfig()
    engine: EngineConfig = EngineConfig(count=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_length: int = Field(512, ge=8)
    """Longest sequence, prompt and answer together, in tokens."""
    temperature: float = Field(1.0, ge=0)
    """For calls that do not say one; 0 is greedy."""
    max_tokens: int = Field(128, ge=1)
    """Longest answer, in tokens, for calls that do not say one."""

    @field_validator("model")
    @classmethod
    def _absolute(cls, model: str) -> str:
        # Actors do not share the driver's working directory.
        folder = Path(model).expanduser()
        return str(folder.absolute()) if folder.is_dir() else model
