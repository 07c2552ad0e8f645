"""Who is a member, and that requests go to members alone, the least loaded first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rayrft.errors import ActorDied, WeightSyncError
from rayrft.explorer.engine_pool import EngineClient, EnginePool, Member, Membership
from rayrft.explorer.exchange import Answering, Completion, Request, Sampling, Session
from rayrft.waits import Waits
from tests.errors import about
from tests.scripted import remote

SAMPLING = Sampling(1.0, 8, (1,))
ANSWER = Completion((5, 1), (-0.5, -0.5), ((0, 2, 0),), "stop")


class HeldEngine(Answering):
    """Holds its requests until it is released; ``arrived`` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.arrived, self.released = asyncio.Semaphore(0), asyncio.Event()

    async def generate(self, request: Request) -> list[Completion]:
        self.asked.append(request.n)
        self.arrived.release()
        await self.released.wait()
        return [ANSWER] * request.n

    async def has_one_more(self) -> None:
        """Wait until one more request than at the last call has come."""
        await asyncio.wait_for(self.arrived.acquire(), 20)


class WatchedPool(EnginePool):
    """Tells up to which generation its members are asked for: that one is then known to who asks."""

    def __init__(self) -> None:
        super().__init__()
        self.polls: asyncio.Queue[int] = asyncio.Queue()

    async def members(self, after: int = -1) -> Membership:
        self.polls.put_nowait(after)
        return await super().members(after)


class Subject:
    """A pool and its client in one process."""

    def __init__(self) -> None:
        self.pool, self.waits = WatchedPool(), Waits("explorer")
        self.client = EngineClient(remote(self.pool, "engine_pool"), self.waits)
        self._requests: list[asyncio.Task[list[Completion]]] = []

    async def join(self, name: str, engine: Any) -> Any:
        await self.pool.join([Member(remote(engine, name), 0)])
        return engine

    def ask(self, n: int = 1, *sessions: Session) -> asyncio.Task[list[Completion]]:
        self._requests.append(asyncio.create_task(self.client.generate(Request([5], n, SAMPLING), sessions)))
        return self._requests[-1]

    async def known(self) -> None:
        """Until the client knows who the members are now."""
        generation = self.pool._membership.generation
        async with asyncio.timeout(20):
            while await self.pool.polls.get() < generation:
                pass

    async def close(self) -> None:
        for task in (*self._requests, self.client._following):
            if task is not None:
                task.cancel()


@pytest.fixture
async def subject() -> AsyncIterator[Subject]:
    subject = Subject()
    yield subject
    await subject.close()


async def test_the_long_poll_answers_when_the_membership_changes_and_not_before() -> None:
    pool = EnginePool()
    first = await pool.members()
    later = asyncio.create_task(pool.members(first.generation))
    await asyncio.sleep(0)
    await pool.synced(["engine-0"], 7)
    assert not later.done(), "a new version is no change of members"
    await pool.join([Member(remote(None, "engine-0"), 3), Member(remote(None, "engine-1"), 3)])
    second = await later
    assert second.names == ("engine-0", "engine-1") and second.generation == first.generation + 1
    await pool.synced(["engine-1", "engine-9"], 4)
    assert [member.version for member in (await pool.members()).members] == [3, 4]
    await pool.leave("engine-9", "never was one")
    assert (await pool.members()).generation == second.generation
    await pool.leave("engine-0", "scaled down")
    third = await pool.members(second.generation)
    assert third.names == ("engine-1",) and third.generation == second.generation + 1
    with pytest.raises(WeightSyncError, check=about("engine-1")):
        await pool.join([Member(remote(None, "engine-0"), 4), Member(remote(None, "engine-1"), 4)])
    assert (await pool.members()) == third, "none of a refused change is made"


async def test_requests_go_to_the_engine_that_owes_the_fewest_answers(subject: Subject) -> None:
    first = await subject.join("engine-0", HeldEngine())
    held = [subject.ask(4)]
    await first.has_one_more()
    second = await subject.join("engine-1", HeldEngine())
    await subject.known()
    subject.ask(3)
    subject.ask(2)
    for _ in range(2):
        await second.has_one_more()
    held += [subject.ask(2), subject.ask(1)]
    await first.has_one_more()
    await second.has_one_more()
    assert (first.asked, second.asked) == ([4, 2], [3, 2, 1]), "the n answers of a prompt are one request"
    first.released.set()
    await held[0]
    await held[1]
    for _ in range(3):  # what has been answered no longer counts
        await asyncio.wait_for(subject.ask(1), 20)
    assert first.asked == [4, 2, 1, 1, 1]


async def test_a_session_stays_with_its_engine_until_that_owes_too_much_or_leaves(subject: Subject) -> None:
    first, group = await subject.join("engine-0", HeldEngine()), [Session(), Session()]
    subject.ask(2, *group)
    await first.has_one_more()
    second = await subject.join("engine-1", HeldEngine())
    await subject.known()
    for session in group:
        subject.ask(1, session)
        await first.has_one_more()
    assert (first.asked, second.asked) == ([2, 1, 1], []), "it holds their prefix, though the other owes fewer"
    subject.ask(5, Session(engine="engine-0"))
    await first.has_one_more()
    subject.ask(1, group[0])
    await second.has_one_more()
    assert [session.engine for session in group] == ["engine-1", "engine-0"]
    first.released.set()
    await subject.pool.leave("engine-0", "scaled down")
    await subject.known()
    subject.ask(1, group[1])
    await second.has_one_more()
    assert group[1].engine == "engine-1"


async def test_an_engine_that_left_gets_no_new_request_and_finishes_what_it_has(subject: Subject) -> None:
    leaving = await subject.join("engine-0", HeldEngine())
    held = subject.ask(1)
    await leaving.has_one_more()
    stays = await subject.join("engine-1", HeldEngine())
    await subject.pool.leave("engine-0", "scaled down")
    await subject.known()
    for _ in range(3):
        subject.ask(5)
        await stays.has_one_more()
    assert leaving.asked == [1]
    leaving.released.set()
    assert await held == [ANSWER]


async def test_requests_wait_for_an_engine_to_join_and_the_wait_is_named(subject: Subject) -> None:
    waiting = subject.ask(2)
    await asyncio.wait_for(subject.pool.polls.get(), 20)
    [wait] = subject.waits.report().waits
    assert (wait.target, wait.what) == ("engine_pool", "an engine to join")
    engine = HeldEngine()
    engine.released.set()
    await subject.join("engine-0", engine)
    assert await waiting == [ANSWER, ANSWER]
    assert subject.waits.report().waits == []


async def test_a_dead_engine_ends_its_requests_with_its_name_and_leaves_the_pool(subject: Subject) -> None:
    from ray.exceptions import RayActorError

    class DeadEngine(Answering):
        async def generate(self, request: Request) -> list[Completion]:
            raise RayActorError()

    await subject.join("engine-7", DeadEngine())
    with pytest.raises(ActorDied, check=about("engine-7")):
        await subject.ask()
    assert (await subject.pool.members()).members == ()


async def test_a_pool_that_died_ends_every_request_for_its_members_are_no_longer_known(subject: Subject) -> None:
    from ray.exceptions import RayActorError

    engine = await subject.join("engine-0", HeldEngine())
    engine.released.set()
    assert await subject.ask()

    async def dead(*_: Any) -> Any:
        raise RayActorError()

    subject.pool.members = dead  # type: ignore[method-assign]
    await subject.join("engine-1", HeldEngine())  # answers the poll that runs; the next one finds the pool dead
    assert subject.client._following is not None
    await asyncio.wait({subject.client._following}, timeout=20)
    for _ in range(2):
        with pytest.raises(ActorDied, check=about("engine_pool")):
            await subject.ask()
