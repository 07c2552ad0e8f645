"""Settings of the endpoint's processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

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
    def of(cls, config: RunConfig, key_digests: tuple[str, ...], trace: Path | None = None) -> Self:
        """Return the settings of the endpoint that a run's config has."""
        http, model, sampling = config.endpoint, config.model, config.explorer.sampling
        assert http is not None
        given = (http, http.model_name or config.name, model.max_length, sampling, key_digests, model.template)
        return cls(*given, trace=trace, plugins=tuple(config.plugins))
