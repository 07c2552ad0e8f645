"""The Buffer: its bounds, its log on disk, and how a batch is drawn from it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from rayrft.config.base import Section, misfit


class SamplerConfig(Section):
    """How a step's groups are chosen. ``fifo`` uses every group once; the others draw from a pool of recent groups."""

    name: str = "fifo"
    """fifo, uniform, priority, or ``package.module:attribute``."""
    score: str = "abs_advantage"
    """priority: what a group's base score is: abs_advantage, reward_deviation, failure, td_error (which needs a critic,
    and is known once a group was trained), or an own one."""
    alpha: float = Field(0.6, ge=0)
    """priority: exponent of the score; 0 draws uniformly."""
    tau: float | None = Field(None, gt=0)
    """priority: optimiser steps in which a group's weight falls to 1/e of what it was; none: it does not age."""
    beta: float = Field(0.4, ge=0, le=1)
    """priority: exponent of the importance weights at the first draw."""
    beta_steps: int = Field(1, ge=1)
    """priority: steps over which beta rises to 1."""
    max_uses: int = Field(1, ge=1)
    """Steps that may train on the same group before it leaves the pool."""
    cooldown: int = Field(0, ge=0)
    """Steps that a group rests after each use."""
    use_decay: float = Field(1.0, gt=0, le=1)
    """priority: factor on a group's weight for every use."""
    replay_ratio: float = Field(1.0, ge=1)
    """Groups drawn per group newly sampled: 2 trains on each group twice on average."""

    @model_validator(mode="after")
    def _reuse(self) -> SamplerConfig:
        if self.name == "fifo" and (self.max_uses > 1 or self.replay_ratio > 1):
            key = "max_uses" if self.max_uses > 1 else "replay_ratio"
            raise misfit(key, "fifo uses every group once", remedy="use sampler uniform or priority, or leave it out")
        if self.replay_ratio > self.max_uses:
            raise misfit(
                "replay_ratio",
                f"asks for more uses per group than max_uses, {self.max_uses}, allows",
                value=self.replay_ratio,
                remedy="raise max_uses",
            )
        return self


class BufferConfig(Section):
    """Where experiences are kept, how many, and how safely."""

    storage: str | None = None
    """A folder or a URI that `pyarrow.fs` knows (``s3://bucket/path``); the run's folder by default."""
    shards: int = Field(1, ge=1)
    """Actors over which rows are spread. One lives in the Buffer's own process."""
    sampler: SamplerConfig = SamplerConfig()
    max_rows: int = Field(1_000_000, ge=1)
    max_bytes: int = Field(32 << 30, ge=1 << 20)
    """Bounds on held rows: those that wait for training or are being trained. No group is admitted at a bound; those
    that were under way when it was reached come in, the groups of ``max_staleness + 1`` steps at most."""
    when_full: Literal["wait", "evict_lowest_priority", "evict_oldest"] = "wait"
    """At a bound: producers wait, or groups are dropped by this rule and counted."""
    memory_bytes: int = Field(4 << 30, ge=1 << 20)
    """Row data kept in the object store; what was used longest ago is read back from the log when it is needed."""
    segment_bytes: int = Field(32 << 20, ge=1 << 12)
    """Size at which a segment of the log is closed and the next one begun."""
    log_bytes: int = Field(64 << 30, ge=1 << 20)
    """Size of the log beyond which segments without held rows are deleted, oldest first, and sparse ones rewritten."""
    fsync: Literal["always", "interval", "never"] = "interval"
    """When the log is forced to the disk. A killed process loses nothing in any case. A machine that loses power loses,
    with ``always``, nothing that was acknowledged; with ``interval``, at most the last ``fsync_s`` seconds; with
    ``never``, whatever the operating system had not written; but in no case what a checkpoint goes on from."""
    fsync_s: float = Field(1.0, gt=0)

    @field_validator("storage")
    @classmethod
    def _absolute(cls, storage: str | None) -> str | None:
        # Actors do not share the driver's working directory.
        return storage if storage is None or "://" in storage else str(Path(storage).expanduser().absolute())

    @property
    def needs_scores(self) -> bool:
        """Whether anything is decided by a group's score."""
        return self.sampler.name not in ("fifo", "uniform") or self.when_full == "evict_lowest_priority"

    @model_validator(mode="after")
    def _sizes(self) -> BufferConfig:
        if self.log_bytes < 2 * self.segment_bytes:
            raise misfit(
                "log_bytes",
                "must hold at least two segments",
                value=self.log_bytes,
                remedy=f"give at least {2 * self.segment_bytes}, or lower segment_bytes",
            )
        return self


def join(location: str, name: str) -> str:
    """The path or URI of what is called ``name`` in a folder; the options behind the ``?`` of a URI stay behind it."""
    path, mark, options = location.partition("?") if "://" in location else (location, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{options}"
