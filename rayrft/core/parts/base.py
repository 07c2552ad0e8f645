"""Part: all that a run knows about one kind of actor; and RunParts, the parts of one run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, Literal, TypeVar

from rayrft.buffer.shared import SharedBuffer
from rayrft.config import RunConfig
from rayrft.core.placement import Bundles, Placement
from rayrft.core.preflight import Prepared
from rayrft.runtime.handle import Handle, TrackedHandle, Watched, until_dead_for_good, until_failed
from rayrft.runtime.waits import Waits

A = TypeVar("A")
K = TypeVar("K", bound="Part[Any]")


class Part(Generic[A]):
    """One kind of actor: its resources, how its actors are created, started and closed, and what their death means.

    Placement, start-up, supervision and the end of a run loop over the subclasses in `KINDS`, and name no kind.
    """

    name: ClassVar[str]
    """Name of its placement group."""
    on_death: ClassVar[Literal["end", "restart", "continue"]] = "end"
    """Effect of an actor's death: the run ends; it is restarted, or the run ends; the run continues without it."""
    budget: ClassVar[int] = 0
    """Number of times that an actor is restarted; -1: no limit."""
    loads: ClassVar[bool] = False
    """Whether its start loads a model, which takes long."""

    def __init__(self, run: RunParts) -> None:
        self.run = run

    @property
    def config(self) -> RunConfig:
        """The run's config, which may change while it is running."""
        return self.run.config

    @classmethod
    def bundles(cls, config: RunConfig) -> list[Bundles]:
        """Return its placement groups; none if a run of this config has no such actors."""
        raise NotImplementedError

    @property
    def exists(self) -> bool:
        """Whether the run has such actors."""
        return bool(self.bundles(self.config))

    def create(self) -> list[Handle[A]]:
        """Create its actors; they are not started yet, but can be watched. Called only if they exist."""
        return []

    @cached_property
    def actors(self) -> list[Handle[A]]:
        """Its actors, which are created at the first access."""
        return self.create() if self.exists else []

    @property
    def supervised(self) -> list[Handle[Any]]:
        """The actors that the run cannot do without."""
        return [] if self.on_death == "continue" else self.actors

    @property
    def heartbeat(self) -> Any:
        """The method that an actor answers at once, with its `WaitReport` if it keeps one."""
        return Watched.waiting

    async def start(self) -> str | None:
        """Start its actors; return a warning for the user, if there is one."""
        return None

    async def open(self) -> str | None:
        """Open services for users once the run is up; return a message about them."""
        return None

    async def close(self) -> None:
        """Close services for users before the run ends."""

    def kill(self) -> None:
        """Kill the actors that would outlive their placement group."""

    def track(self, actor: Handle[A], **options: Any) -> TrackedHandle[A]:
        """Return a handle whose calls are waits of the Master; ``options``: see `TrackedHandle`."""
        return TrackedHandle(actor, self.run.waits, **options)


@dataclass
class RunParts:
    """The parts of a run. A part may use others: actors are created on demand."""

    kinds: list[type[Part[Any]]]
    config: RunConfig
    prepared: Prepared
    placement: Placement
    waits: Waits
    """Waits of the Master, in which calls of the actors are recorded."""
    logged: list[int]
    """See `Buffer`."""
    shared: Handle[SharedBuffer] | None = None
    """The Buffer that the config names."""

    def __post_init__(self) -> None:
        self._parts = [kind(self) for kind in self.kinds]

    def __getitem__(self, kind: type[K]) -> K:
        return next(part for part in self if isinstance(part, kind))

    def __iter__(self) -> Iterator[Part[Any]]:
        return iter(self._parts)

    def actors(self) -> list[Handle[Any]]:
        """Return all actors; create those that do not exist yet."""
        return [actor for part in self for actor in part.actors]

    def watches(self) -> dict[str, Awaitable[Any]]:
        """Return for each supervised actor a call that ends only when the actor fails for good."""
        watch = {"end": until_failed, "restart": until_dead_for_good, "continue": until_failed}
        return {actor.name: watch[part.on_death](actor) for part in self for actor in part.supervised}

    def heartbeats(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        """Return the heartbeat of each supervised actor, which is no wait of the Master."""
        return {actor.name: partial(actor.untracked.call, part.heartbeat) for part in self for actor in part.supervised}

    async def start(self) -> list[str]:
        """Start all parts concurrently; return their warnings."""
        return list(filter(None, await asyncio.gather(*(part.start() for part in self))))


def has_explorers(config: RunConfig) -> bool:
    """Return whether the run samples groups by itself."""
    return config.rolls_out and config.mode != "serve"
