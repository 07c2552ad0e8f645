"""Settings of the endpoint's processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rayrft.config import RunConfig
from rayrft.config.explorer import SamplingConfig
from rayrft.config.model import TemplateConfig
from rayrft.config.serve import ServeConfig


@dataclass(frozen=True)
class EndpointSettings:
    """Settings of an endpoint that follow from its run's config. Without ``key_digests``, requests need no key."""

    config: ServeConfig
    model: str
    """The model's name in requests."""
    max_length: int
    sampling: SamplingConfig
    key_digests: tuple[str, ...] = ()
    template: TemplateConfig | None = None
    any_model: bool = False
    """Whether requests may name any model."""
    trace: Path | None = None
    """The run folder, if replicas record when engines work for them."""
    plugins: tuple[Path, ...] = ()
    """Files that may register the format of calls."""

    @classmethod
    def of(cls, config: RunConfig, key_digests: tuple[str, ...], trace: Path | None = None) -> EndpointSettings:
        """Return the settings of the endpoint that a config has."""
        assert config.endpoint is not None  # checked by the caller
        http, model, plugins = config.endpoint, config.model, tuple(config.plugins)
        name, sampling = http.model_name or config.name, config.explorer.sampling
        return cls(http, name, model.max_length, sampling, key_digests, model.template, trace=trace, plugins=plugins)
