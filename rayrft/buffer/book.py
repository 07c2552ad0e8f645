"""The part of the Buffer's state that is not a column: what a snapshot keeps beside the group table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field

from rayrft.buffer.ledger import Ledger
from rayrft.buffer.log.events import FeedbackNoted, GroupReport
from rayrft.buffer.log.segments import Extent
from rayrft.buffer.replay import ReplaySchedule
from rayrft.buffer.schedule import Schedule, StagePlan, Ticket


@dataclass
class ExpertCursor:
    """Draws demonstrations without replacement, in an order that is shuffled anew every epoch.

    ``unit`` rows that follow one another are drawn together: 2 for preference pairs.
    """

    extent: Extent
    seed: int
    unit: int = 1
    epoch: int = 0
    cursor: int = 0
    drawn: int = 0
    failed: list[int] = field(default_factory=list)
    """Rows on which training failed twice: they are passed over."""

    def peek(self, count: int) -> list[int]:
        """The next ``count`` row indices (whole units); an epoch that ends goes over into the next."""
        return self._walk(count)[0]

    def advance(self, count: int) -> None:
        """These rows are drawn."""
        self.drawn += count
        if self.failed:
            _, self.epoch, self.cursor = self._walk(count)
        else:
            epochs, self.cursor = divmod(self.cursor + count, self.extent.rows)
            self.epoch += epochs

    def _walk(self, count: int) -> tuple[list[int], int, int]:
        """The next ``count`` rows, and epoch and cursor behind them."""
        rows: list[int] = []
        epoch, cursor = self.epoch, self.cursor
        while len(rows) < count and len(self.failed) < self.extent.rows:
            units = np.random.default_rng([self.seed, epoch]).permutation(self.extent.rows // self.unit)
            order = (units[:, None] * self.unit + np.arange(self.unit)).ravel()[cursor:]
            places = np.flatnonzero(~np.isin(order, self.failed))[: count - len(rows)]
            rows += order[places].tolist()
            taken = int(places[-1]) + 1 if len(rows) == count else len(order)
            epoch, cursor = (epoch, cursor + taken) if taken < len(order) else (epoch + 1, 0)
        return rows, epoch, cursor


@dataclass
class LeaseRecord:
    """A step's batch: kept until a checkpoint covers the step, so that the same batch can be had again."""

    step: int
    draw: int
    version: int
    slots: list[int]
    weights: list[float]
    demonstrations: str | None
    extent: Extent
    """Of the demonstrations as they were."""
    expert: list[int]
    unit: int
    """Demonstrations that belong together."""
    mini_batches: int
    staleness: list[int]
    rollouts: GroupReport
    acked: bool = False
    blamed: list[int] = field(default_factory=list)
    """Slots of groups on one of which training failed, and"""
    blamed_expert: list[int] = field(default_factory=list)
    """rows of demonstrations; since"""
    blamed_in: str = ""
    """this life of the run."""


@dataclass(frozen=True)
class Outstanding:
    """A ticket that a producer has and has not reported on."""

    ticket: Ticket
    producer: str


@dataclass
class Book:
    """Everything but the groups. ``run`` is the run that the log belongs to, empty before it began."""

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="constants")  # rewards that were reported may be anything

    run: str = ""
    schema: str = ""
    version: int = 0
    step: int = 0
    """The latest that was leased."""
    plan: StagePlan | None = None
    schedule: Annotated[Schedule | ReplaySchedule, Field(discriminator="kind")] | None = None
    behind: bool = False
    """Whether the trainer repeats steps that it had taken before: no new groups until its weights have caught up."""
    covered: int = 0
    """Batches of steps before this one are not kept."""
    open: bool = False
    """Whether the stage takes groups."""
    ended: str | None = None
    """Why no more groups will come."""
    ledger: Ledger = field(default_factory=Ledger)
    leases: dict[int, LeaseRecord] = field(default_factory=dict)
    outstanding: dict[int, Outstanding] = field(default_factory=dict)
    returned: list[Ticket] = field(default_factory=list)
    """Tickets of a producer that is gone."""
    calls: dict[str, tuple[int, list[Ticket]]] = field(default_factory=dict)
    """The last request for tickets of each producer, and what it got."""
    gone: set[str] = field(default_factory=set)
    """Producers that were given up."""
    lives: set[str] = field(default_factory=set)
    """Lives of the trainer and of the run that began with a rollback."""
    opened: dict[str, int] = field(default_factory=dict)
    """Stages that this life of the run opened, by name, with their first version."""
    next_sequence: int = 0
    refused: dict[int, int] = field(default_factory=dict)
    """Groups that came without a ticket and were refused: digests of what came last, by key."""
    experts: dict[str, ExpertCursor] = field(default_factory=dict)
    extents: dict[int, dict[int, Extent]] = field(default_factory=dict)
    """By shard and segment."""
    greatest_error: float = 0.0
    """Of the errors that the trainer reported of groups."""
    reports: GroupReport = field(default_factory=GroupReport)
    """Sum since the last lease."""
    arrivals: int = 0
    draws: int = 0
    late_feedback: list[FeedbackNoted] = field(default_factory=list)
    tasks: dict[str, Any] = field(default_factory=dict)
    """State of the task set; filled in for a snapshot."""
