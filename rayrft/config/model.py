"""Config of the trained model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from rayrft.config.base import LocalFile, Section, invalid, section_rule


class TinyModelConfig(Section):
    """A generated Qwen3-architecture model with random weights and a tokenizer for the tasks."""

    vision: bool = False
    """Use the Qwen2-VL architecture, which takes images."""

    layers: int = Field(3, ge=1)
    hidden_size: int = Field(128, ge=8)
    heads: int = Field(4, ge=1)
    intermediate_size: int = Field(384, ge=8)
    experts: int = Field(0, ge=0)
    """Experts in every layer but the first, of which a token uses two; 0 for a dense model."""

    @section_rule
    def _head_size(self) -> None:
        # vLLM's CPU attention supports no other head sizes.
        if self.hidden_size % (32 * self.heads):
            remedy = f"give {max(1, round(self.hidden_size / (32 * self.heads))) * 32 * self.heads}"
            problem = f"must be a multiple of 32 times heads, {self.heads}"
            raise invalid("hidden_size", problem, remedy, value=self.hidden_size)
        if self.experts and (self.vision or self.experts < 2):
            raise invalid("experts", "must be 0, or at least 2 without vision", "set it to 0", value=self.experts)


class TemplateConfig(Section):
    """The chat template of training, evaluation, endpoint and exported models."""

    file: LocalFile | None = None
    """A Jinja chat template instead of the tokenizer's."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Values of variables of the chat template, such as ``enable_thinking: false``."""


class ModelConfig(Section):
    """A Hugging Face folder or hub id (``path``), or a generated ``tiny`` model; neither in a bench of other models."""

    path: str | None = None
    tiny: TinyModelConfig | None = None
    template: TemplateConfig = TemplateConfig()
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the engines and of the trainer's compute; the trainer's master weights are float32."""
    max_length: int = Field(512, ge=8)
    """Longest sequence, prompt and answer together, in tokens."""

    @section_rule
    def _one_origin(self) -> None:
        if self.path is not None and self.tiny is not None:
            raise invalid("path", "cannot be combined with 'tiny'", "remove one of them", value=self.path)
