"""What a death costs, with scripted actors: a restart within the budget, calls that are made again, and a rewind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError

from rayrft.config.placement import RestartsConfig
from rayrft.core import restarts as module
from rayrft.core.parts.base import Part
from rayrft.core.restarts import Budget, Restarts, Rewound
from rayrft.core.supervision import Stopped
from rayrft.errors import ActorDied, ConfigError, DeviceFailed, RayrftError, RowsFailed
from rayrft.monitor.records import RestartRecord
from rayrft.runtime.handle import Handle, TrackedHandle, Watched
from rayrft.runtime.waits import Waits
from tests.errors import about
from tests.scripted import remote


def died(problem: str) -> ActorDied:
    return ActorDied(problem, field="engine-0")


def test_more_deaths_within_an_hour_than_the_budget_raise_the_cause_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("rayrft.core.restarts.time.monotonic", lambda: now[0])
    budget = Budget(RestartsConfig(per_hour=3, backoff_s=1))
    pauses = [budget.spend(died(f"death {number}")) for number in range(3)]
    assert pauses[0] == 0 and 0.5 <= pauses[1] <= 1 <= pauses[2] <= 2
    now[0] = 3601.0
    assert budget.spend(died("death 3")) == 0, "the earlier ones are forgotten"
    for number in (4, 5):
        budget.spend(died(f"death {number}"))
    with pytest.raises(ActorDied, match=r"death 3 \(the first of 4 deaths within an hour"):
        budget.spend(died("death 6"))


def test_without_a_budget_the_first_death_is_raised_as_it_is() -> None:
    with pytest.raises(ActorDied, check=lambda error: error.problem == "gone"):
        Budget(RestartsConfig(per_hour=0)).spend(died("gone"))


class Mortal(Watched):
    """Answers `work` until it dies; its calls in progress then fail, as Ray's do. It may fail before."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = loop.create_future()
        self.died: asyncio.Future[None] = loop.create_future()

    async def watch(self) -> None:
        await asyncio.shield(self.failed)

    async def idle(self) -> None:
        await asyncio.shield(self.died)

    async def work(self) -> Mortal:
        if self.died.done():
            self.died.result()
        return self

    def fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # retrieved, also where nobody watches

    def die(self, error: Exception | None = None) -> None:
        self.fail(error or ActorDiedError())
        if not self.died.done():
            self.died.set_exception(error or ActorDiedError())
            self.died.exception()


class MortalPart(Part[Mortal]):
    name = "engines"
    on_death = "replace"
    fails: Exception | None = None
    """Error of the next replacement."""

    def __init__(self) -> None:
        self.living, self.events = Mortal(), list[str]()
        self.handle = TrackedHandle(remote(self.living, "engine-0"), Waits("master"))

    @property
    def actors(self) -> list[Handle[Any]]:
        return [self.handle]

    async def lost(self, actor: Handle[Mortal]) -> None:
        self.events.append("lost")

    async def replace(self, actor: Handle[Mortal]) -> None:
        self.events.append("replaced")
        fails, self.fails = self.fails, None
        if fails:
            raise fails
        self.living = Mortal()
        actor.succeed(remote(self.living, "engine-0"))


class Subject:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Sequence[RestartRecord] = (), **settings: Any) -> None:
        monkeypatch.setattr(Handle, "kill", lambda handle, restart=False: handle.actor._target.die())
        monkeypatch.setattr(module, "_GRACE_S", 0.2)
        self.part, self.blamed = MortalPart(), AsyncMock()
        self.said, self.saying = list[tuple[Any, ...]](), asyncio.Condition()
        parts: Any = SimpleNamespace(supervised=lambda: {"engine-0": (self.part, self.part.handle)})
        config = RestartsConfig(**{"per_hour": 3, "backoff_s": 0, **settings})
        self.notes = AsyncMock()
        self.restarts = Restarts(parts, config, self._say, self.blamed, self.notes, before)
        self.restarts.running = True
        self.watch, _ = (asyncio.ensure_future(watch) for watch in self.restarts.watches().values())

    async def restarted(self, count: int = 1) -> None:
        """Wait until there were so many restarts in all."""
        async with asyncio.timeout(20), self.saying:
            await self.saying.wait_for(lambda: len(self.said) >= count)

    async def _say(self, *restart: Any) -> None:
        async with self.saying:
            self.said.append(restart)
            self.saying.notify_all()


@pytest.fixture
async def subject(monkeypatch: pytest.MonkeyPatch) -> Subject:
    return Subject(monkeypatch)


async def test_a_dead_actor_is_fenced_and_replaced_under_its_handle_and_said(subject: Subject) -> None:
    before = subject.part.living
    subject.part.living.die()
    await subject.restarted()
    assert subject.part.events == ["lost", "replaced"] and before.died.done()
    assert await subject.part.handle.call(Mortal.work) is subject.part.living is not before
    [(part, actor, cause, seconds)] = subject.said
    assert (part, actor) == ("engines", "engine-0") and isinstance(cause, ActorDied) and seconds >= 0
    subject.part.living.die()
    await subject.restarted(2)
    assert not subject.watch.done() and not subject.restarts.is_dead("engine-0")


MEMORY = (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 23a1) was "
    "22.9GB used / 23.5GB limit (0.97)\nOOM kill reason: Memory usage exceeded threshold\nTo see more, use `ray logs`"
)
"""Begins the text of Ray's error."""


async def test_an_actor_whose_node_is_short_of_memory_is_restarted_once_and_the_cause_says_what_to_lower(
    subject: Subject,
) -> None:
    subject.part.living.die(OutOfMemoryError(MEMORY))
    await subject.restarted()
    assert subject.part.events == ["lost", "replaced"]
    [(_, _, cause, _)] = subject.said
    assert "used up (22.9GB of 23.5GB on 192.0.2.2), so Ray killed it; lower buffer.memory_bytes" in cause.problem
    assert "\n" not in str(cause) and not subject.watch.done()


async def test_a_call_of_an_actor_that_ray_killed_for_memory_is_made_again_at_the_successor(subject: Subject) -> None:
    calling = asyncio.ensure_future(
        subject.restarts.survive(subject.part.handle, lambda: subject.part.handle.call(Mortal.work))
    )
    subject.part.living.die(OutOfMemoryError(MEMORY))
    assert await asyncio.wait_for(calling, 20) is subject.part.living


async def test_an_actor_that_dies_while_it_is_restarted_is_restarted_again_and_each_death_counts(
    subject: Subject,
) -> None:
    subject.part.fails = ActorDiedError()
    subject.part.living.die()
    await subject.restarted()
    assert subject.part.events == ["lost", "replaced"] * 2
    for number in (2, 3):
        subject.part.living.fail(ActorDied(f"death {number}"))
        if number == 2:
            await subject.restarted(2)
    with pytest.raises(ActorDied, match="the first of 4 deaths"):
        await asyncio.wait_for(subject.watch, 20)


async def test_restarts_by_a_dead_master_count_for_an_hour_with_those_of_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ages = {"engines": (4000.0, 30.0, 20.0), "trainer": (10.0,)}
    before = [
        RestartRecord("mix", 3, time.time() - age, part, f"{part}-0", f"death {age:.0f} s ago", 1.0)
        for part, each in ages.items()
        for age in each
    ]
    subject = Subject(monkeypatch, before)
    subject.part.living.die()
    await subject.restarted()
    subject.part.living.die()
    with pytest.raises(ActorDied, match=r"death 30 s ago \(the first of 4 deaths"):
        await asyncio.wait_for(subject.watch, 20)


@pytest.mark.parametrize("error", [ConfigError("unknown key", field="x"), RayrftError("a bug")])
async def test_an_error_that_no_restart_mends_ends_the_run(subject: Subject, error: RayrftError) -> None:
    subject.part.living.fail(error)
    with pytest.raises(type(error)):
        await asyncio.wait_for(subject.watch, 20)
    assert not subject.part.events


async def test_a_death_before_the_run_is_up_ends_it(subject: Subject) -> None:
    subject.restarts.running = False
    assert not subject.restarts.kill("engine-0")
    subject.part.living.die()
    with pytest.raises(ActorDied):
        await asyncio.wait_for(subject.watch, 20)


async def test_an_actor_that_is_silent_is_killed_and_restarted(subject: Subject) -> None:
    assert subject.restarts.kill("engine-0") and not subject.restarts.kill("nobody")
    await subject.restarted()


async def test_a_call_is_made_again_at_the_successor(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrft.runtime.handle._RETRY_S", 0)
    errors = [ActorUnavailableError("away", None), ActorDiedError()]

    async def call() -> str:
        if errors:
            error = errors.pop(0)
            if isinstance(error, ActorDiedError):
                subject.part.living.die()
            raise error
        return "done"

    assert await asyncio.wait_for(subject.restarts.survive(subject.part.handle, call), 20) == "done"
    assert len(subject.said) == 1


@pytest.mark.parametrize("by_death", [True, False])
async def test_a_call_of_a_dead_actor_ends_with_the_run(monkeypatch: pytest.MonkeyPatch, by_death: bool) -> None:
    """Nobody replaces the actor: the run has ended by this death, or by another failure, which cancels the watches."""
    subject, called = Subject(monkeypatch, per_hour=0), asyncio.Event()

    async def call() -> None:
        called.set()
        raise ActorDiedError

    calling = asyncio.ensure_future(subject.restarts.survive(subject.part.handle, call))
    await called.wait()
    if by_death:
        subject.part.living.die()
    else:
        subject.watch.cancel()
    with pytest.raises(ActorDiedError):
        await asyncio.wait_for(calling, 20)


async def forever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("error", [None, DeviceFailed("Xid 79"), RowsFailed("a row", value=["r"])])
async def test_steps_are_repeated_after_the_death_of_an_actor_whose_state_is_lost(
    subject: Subject, error: RayrftError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MortalPart, "rewinds", True)
    working = asyncio.ensure_future(subject.restarts.unless_rewound(forever(), asyncio.Event()))
    await asyncio.sleep(0)
    subject.part.living.fail(error or ActorDiedError())
    with pytest.raises(Rewound):
        await asyncio.wait_for(working, 20)
    assert subject.part.events == ["lost", "replaced"], "all actors are up before the steps are repeated"
    assert subject.blamed.await_count == isinstance(error, RowsFailed)

    async def finish() -> str:
        return "finished"

    assert await subject.restarts.unless_rewound(finish(), asyncio.Event()) == "finished"


async def test_a_run_that_is_stopped_while_an_actor_is_replaced_whose_state_is_lost_does_not_wait_for_it(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    replacing, stop = asyncio.Event(), asyncio.Event()

    async def replace(part: MortalPart, actor: Handle[Mortal]) -> None:
        replacing.set()
        await forever()

    monkeypatch.setattr(MortalPart, "rewinds", True)
    monkeypatch.setattr(MortalPart, "replace", replace)
    working = asyncio.ensure_future(subject.restarts.unless_rewound(forever(), stop))
    await asyncio.sleep(0)
    subject.part.living.die()
    await asyncio.wait_for(replacing.wait(), 20)
    assert not working.done()
    stop.set()
    with pytest.raises(Stopped):
        await asyncio.wait_for(working, 20)
    subject.watch.cancel()


async def test_a_failure_that_a_death_explains_is_a_rewind_and_any_other_is_raised(subject: Subject) -> None:
    async def fail(error: Exception) -> None:
        raise error

    with pytest.raises(ActorDied, check=about("somebody")):
        await subject.restarts.unless_rewound(fail(ActorDied("gone", field="somebody")), asyncio.Event())

    async def fail_by_death() -> None:
        subject.part.living.die()
        raise ActorDied("gone", field="engine-0")

    with pytest.raises(Rewound):
        await asyncio.wait_for(subject.restarts.unless_rewound(fail_by_death(), asyncio.Event()), 20)
    with pytest.raises(ConfigError):
        await subject.restarts.unless_rewound(fail(ConfigError("unknown key", field="x")), asyncio.Event())
