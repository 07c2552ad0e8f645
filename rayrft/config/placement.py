"""Config of placement: on which nodes of a cluster a run's actors are placed, and how long it waits for them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rayrft.config.base import Section


class WaitConfig(Section):
    """Waiting for room on the cluster."""

    wait_s: float = Field(0.0, ge=0)
    """Seconds to wait for nodes that the cluster does not have yet, such as those of an autoscaler, which sees the
    demand meanwhile. 0: what does not fit is refused at once."""


class PlacementConfig(WaitConfig):
    """Nodes of a run's placement groups, which the table at its start names."""

    engines: Literal["pack", "spread"] = "pack"
    """Engines on as few nodes as possible, or as evenly as possible over the nodes."""
    labels: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Node labels that a placement group requires, by its name: ``engines: {ray.io/accelerator-type: H100}``. A value
    may be negated (``"!spot"``) or a choice (``"in(a,b)"``, ``"!in(a,b)"``), as in Ray's label selectors."""
