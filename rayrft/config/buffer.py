"""Config of the Buffer: capacity, log on disk, and sampling of batches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rayrft.config.base import Changeable, LocalPath, Name, Section, invalid, section_rule


class SamplerConfig(Section):
    """Sampling of a step's groups. ``fifo`` uses every group once; the others draw from a pool of recent groups."""

    name: Changeable[str] = "fifo"
    """fifo, uniform, priority, or ``package.module:attribute``. While the run is running, uniform and priority can be
    exchanged."""
    score: str = "reward_deviation"
    """priority: a group's base score: reward_deviation, failure, td_error (of a critic, after a first training),
    priority (which operators of ``pipelines.experiences`` write), or ``package.module:attribute``."""
    alpha: Changeable[float] = Field(0.6, ge=0)
    """priority: exponent of the score; 0 draws uniformly."""
    tau: Changeable[float | None] = Field(None, gt=0)
    """priority: optimiser steps in which a group's weight decays by 1/e; none: no decay."""
    beta: Changeable[float] = Field(0.4, ge=0, le=1)
    """priority: exponent of the importance weights at the first draw."""
    beta_steps: Changeable[int] = Field(1, ge=1)
    """priority: steps over which beta rises to 1."""
    max_uses: Changeable[int] = Field(1, ge=1)
    """Steps that may train on a group before it leaves the pool."""
    cooldown: Changeable[int] = Field(0, ge=0)
    """Steps after a use in which a group is not drawn."""
    use_decay: Changeable[float] = Field(1.0, gt=0, le=1)
    """priority: factor on a group's weight per use."""
    replay_ratio: Changeable[float] = Field(1.0, ge=1)
    """Groups drawn per newly sampled group: 2 trains on a group twice on average."""

    @section_rule
    def _reuse(self) -> None:
        if self.name == "fifo" and (self.max_uses > 1 or self.replay_ratio > 1):
            key = "max_uses" if self.max_uses > 1 else "replay_ratio"
            remedy = "use sampler uniform or priority, or remove it"
            raise invalid(key, "must be 1 with sampler fifo, which uses every group once", remedy)
        if self.replay_ratio > self.max_uses:
            problem = f"must be at most max_uses, {self.max_uses}"
            raise invalid("replay_ratio", problem, "lower it, or raise max_uses", value=self.replay_ratio)


class BufferConfig(Section):
    """Storage, capacity and durability of experiences."""

    name: Name | None = None
    """Name of a Buffer that jobs of modes ``explore`` and ``train`` share, with the same ``buffer`` section and model.
    The first job starts it, and ``rayrft buffer stop NAME`` ends it."""
    storage: LocalPath | None = None
    """A folder, local or mounted, with the log: ``<storage>/<run>``, by default in the run's folder. The log of a
    Buffer with a ``name`` is ``<storage>/buffer.<name>``, by default in the run's ``storage``."""
    max_age: int | None = Field(None, ge=0)
    """Mode ``train``: versions by which a group may be older than the trainer, else it is dropped as ``stale``."""
    sampler: SamplerConfig = SamplerConfig()
    max_rows: int = Field(1_000_000, ge=1)
    max_bytes: int = Field(32 << 30, ge=1 << 20)
    """Bounds on held rows, which wait for training or are in training. At a bound no group is admitted; groups in
    flight are still accepted, at most those of ``max_staleness + 1`` steps."""
    when_full: Literal["wait", "evict_lowest_priority", "evict_oldest"] = "wait"
    """At a bound producers wait, or groups are dropped by this rule and counted."""
    memory_bytes: int = Field(4 << 30, ge=1 << 20)
    """Row data cached in the object store (LRU); other rows are read back from the log."""
    segment_bytes: int = Field(32 << 20, ge=1 << 12)
    """Size at which a segment of the log is closed and a new one started."""
    log_bytes: int = Field(64 << 30, ge=1 << 20)
    """Size of the log beyond which segments without held rows are deleted, oldest first, and sparse ones rewritten."""
    fsync: Literal["always", "interval", "never"] = "interval"
    """When the log is synced to disk. A killed process loses no data, and a power failure none that a checkpoint needs.
    Of other data it loses none with ``always``, the last ``fsync_s`` seconds with ``interval``, and what the operating
    system had not written with ``never``."""
    fsync_s: float = Field(1.0, gt=0)

    @property
    def needs_scores(self) -> bool:
        """Whether sampling or eviction uses a group's score, or may after a change of the sampler."""
        return self.sampler.name != "fifo" or self.when_full == "evict_lowest_priority"

    @section_rule
    def _sizes(self) -> None:
        if self.log_bytes < 2 * self.segment_bytes:
            remedy = f"give at least {2 * self.segment_bytes}, or lower segment_bytes"
            raise invalid("log_bytes", "must hold at least two segments", remedy, value=self.log_bytes)
