"""Config of restarts: how often actors that died are restarted while a run continues."""

from __future__ import annotations

from pydantic import Field

from rayrft.config.base import Section


class RestartsConfig(Section):
    """Budget of restarts, for each kind of actor. The Master is restarted ``per_hour`` times in all."""

    per_hour: int = Field(20, ge=0)
    """Restarts of a kind of actor within an hour. One more death ends the run, with the cause of the first of them.
    0: the first death ends the run."""
    backoff_s: float = Field(1.0, ge=0)
    """Seconds before the second restart within an hour, doubled for each further one, up to a minute."""
    silent_s: float = Field(180.0, gt=0)
    """Seconds without a heartbeat after which an actor that has started is killed and restarted."""
