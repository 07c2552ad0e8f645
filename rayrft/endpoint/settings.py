"""What the endpoint's processes are told of their run."""

from __future__ import annotations

from dataclasses import dataclass

from rayrft.config.explorer import SamplingConfig
from rayrft.config.model import TemplateConfig
from rayrft.config.serve import ServeConfig


@dataclass(frozen=True)
class EndpointSettings:
    """What a run's endpoint is told by its config. Without digests of API keys, requests need no key."""

    config: ServeConfig
    model: str
    """What requests call the model."""
    max_length: int
    sampling: SamplingConfig
    key_digests: tuple[str, ...] = ()
    template: TemplateConfig | None = None
    any_model: bool = False
    """Whether requests may call the model what they will."""


@dataclass(frozen=True)
class EndpointActors:
    """Names of the actors of a run that its endpoint calls, in their namespace; no ``keeper``: nothing is recorded."""

    namespace: str
    engine_pool: str
    keeper: str | None
