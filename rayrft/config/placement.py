"""Config of a run's actors: on which nodes they are placed, how long it waits for these, and how often it restarts
actors that died."""

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


class RestartsConfig(Section):
    """Budget of restarts, for each kind of actor. The Master is restarted ``per_hour`` times in all."""

    per_hour: int = Field(20, ge=0)
    """Restarts of a kind of actor within an hour. One more death ends the run, with the cause of the first of them.
    0: the first death ends the run."""
    backoff_s: float = Field(1.0, ge=0)
    """Seconds before the second restart within an hour, doubled for each further one, up to a minute."""
    silent_s: float = Field(180.0, gt=0)
    """Seconds without a heartbeat after which an actor that has started is killed and restarted."""
