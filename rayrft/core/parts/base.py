"""Part: all that a run knows about one kind of actor; and RunParts, the parts of one run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, Literal, TypeVar

from rayrft.buffer.shared import SharedBuffer
from rayrft.config import RunConfig
from rayrft.core.bundles import Bundles
from rayrft.core.placement import Placement
from rayrft.core.preflight import PreparedRun
from rayrft.errors import RayrftError
from rayrft.runtime.handle import Handle, TrackedHandle, Watched
from rayrft.runtime.waits import Waits

A = TypeVar("A")
K = TypeVar("K", bound="Part[Any]")


class Part(Generic[A]):
    """One kind of actor: its resources, how its actors are created, started and closed, and what their death means.

    Placement, start-up, supervision and the end of a run loop over the subclasses in `KINDS`, and name no kind.
    """

    name: ClassVar[str]
    """Name of its placement group."""
    on_death: ClassVar[Literal["end", "restart", "replace"]] = "end"
    """Effect of an actor's death: the run ends; Ray restarts the actor under its handle; or the Master replaces it."""
    rewinds: ClassVar[bool] = False
    """Whether the steps since the latest checkpoint are repeated after a replacement, whose state is lost."""
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

    def prepare_successor(self, cause: RayrftError) -> str | None:
        """Prepare the successor for why its predecessor died; return what changes, if anything. Raises the cause if the
        run cannot continue."""
        return None

    async def replace(self, actor: Handle[A]) -> None:
        """Create and start the successor of an actor that is dead, under the same handle: see `Handle.succeed`."""
        raise NotImplementedError

    async def lost(self, actor: Handle[A]) -> None:
        """Let the other parts do without an actor that has died, until it is replaced."""

    async def drain(self, nodes: set[str]) -> None:
        """Let the other parts do without the actors on nodes that Ray drains."""

    async def restarted(self, actor: Handle[A]) -> None:
        """Restore what an actor that Ray has restarted needs of the other parts."""

    @cached_property
    def actors(self) -> list[Handle[A]]:
        """Its actors, which are created at the first access."""
        return self.create() if self.exists else []

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
    prepared: PreparedRun
    placement: Placement
    waits: Waits
    """Waits of the Master, in which calls of the actors are recorded."""
    logged: list[int]
    """See `Buffer`."""
    shared: Handle[SharedBuffer] | None = None
    """The Buffer that the config names."""
    taken_over: bool = False
    """Whether another Master, which has died, has created the actors."""
    admit: Callable[[list[Handle[Any]]], Awaitable[Any]] | None = None
    """Sends the current weights to policy engines, and lets them take requests; None before the run is up."""
    idle_ranks: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext
    """A context in which the ranks do nothing."""

    def __post_init__(self) -> None:
        self._parts = [kind(self) for kind in self.kinds]

    def __getitem__(self, kind: type[K]) -> K:
        return next(part for part in self if isinstance(part, kind))

    def __iter__(self) -> Iterator[Part[Any]]:
        return iter(self._parts)

    def actors(self) -> list[Handle[Any]]:
        """Return all actors; create those that do not exist yet."""
        return [actor for part in self for actor in part.actors]

    def supervised(self) -> dict[str, tuple[Part[Any], Handle[Any]]]:
        """Return each supervised actor with its part, by the actor's name."""
        return {actor.name: (part, actor) for part in self for actor in part.actors}

    def heartbeats(self) -> dict[str, Callable[[], Awaitable[Any]]]:
        """Return the heartbeat of each supervised actor, which does not count as a wait of the Master."""

        def heartbeat(actor: Handle[Any], method: Any) -> Awaitable[Any]:
            return actor.untracked.call(method)  # of the successor, once the actor was replaced

        return {name: partial(heartbeat, actor, part.heartbeat) for name, (part, actor) in self.supervised().items()}

    async def start(self) -> list[str]:
        """Start all parts concurrently; return their warnings."""
        return list(filter(None, await asyncio.gather(*(part.start() for part in self))))


def has_explorers(config: RunConfig) -> bool:
    """Return whether the run samples groups by itself."""
    return config.rolls_out and config.mode != "serve"
