"""Who is a member; requests go to members alone, the least loaded first, and no more than an engine has room for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError, TaskCancelledError

from rayrft.errors import ActorDied, EngineFailed
from rayrft.explorer.engines.client import EngineClient
from rayrft.explorer.engines.exchange import (
    INTERRUPTED,
    Answering,
    Capacity,
    Chunk,
    Completion,
    Request,
    Sampling,
    Session,
)
from rayrft.explorer.engines.pool import EnginePool, Member, Membership
from rayrft.runtime.waits import Waits
from tests.errors import about
from tests.scripted import remote

SAMPLING = Sampling(1.0, 8, (1,))
ANSWER = Completion((5, 1), (-0.5, -0.5), ((0, 2, 0),), "stop")


class HeldEngine(Answering):
    """Holds its requests until it is released; ``arrived`` counts them."""

    def __init__(self, *failures: Exception, **capacity: int) -> None:
        """Its first calls fail with ``failures``."""
        super().__init__()
        self._capacity, self._failures = Capacity(**capacity), list(failures)
        self.asked: list[int] = []
        self.ended: asyncio.Queue[bool] = asyncio.Queue()
        """For each request that has ended, whether it was aborted."""
        self.arrived, self.released = asyncio.Semaphore(0), asyncio.Event()

    async def exchange(self, *call: Any) -> Any:
        if self._failures:
            raise self._failures.pop()
        return await super().exchange(*call)

    async def generate(self, request: Request) -> list[Completion]:
        self.asked.append(request.n)
        self.arrived.release()
        try:
            await self.released.wait()
            self.ended.put_nowait(False)
        except asyncio.CancelledError:
            self.ended.put_nowait(True)
            raise
        return [ANSWER] * request.n

    async def capacity(self) -> Capacity:
        return self._capacity

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
        self.requests: list[asyncio.Task[list[Completion]]] = []

    async def join(self, name: str, engine: Any) -> Any:
        await self.pool.join([Member(remote(engine, name), 0)])
        return engine

    def ask(self, n: int = 1, *sessions: Session) -> asyncio.Task[list[Completion]]:
        self.requests.append(asyncio.create_task(self.client.generate(Request([5], n, SAMPLING), sessions)))
        return self.requests[-1]

    async def leave(self, name: str) -> None:
        [handle] = [member.handle for member in (await self.pool.members()).members if member.name == name]
        await self.pool.leave(handle, "scaled down")

    async def known(self) -> None:
        """Until the client knows who the members are now."""
        generation = self.pool.membership.generation
        async with asyncio.timeout(20):
            while await self.pool.polls.get() != generation:
                pass

    async def close(self) -> None:
        for task in (*self.requests, self.client.following):
            if task is not None:
                task.cancel()


@pytest.fixture
async def subject() -> AsyncIterator[Subject]:
    subject = Subject()
    yield subject
    await subject.close()


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


async def test_a_full_engine_is_passed_over_though_it_owes_the_fewest_answers(subject: Subject) -> None:
    small = await subject.join("engine-0", HeldEngine(answers=1))
    subject.ask(1)
    await small.has_one_more()
    large = await subject.join("engine-1", HeldEngine())
    await subject.known()
    for count in (2, 3):
        subject.ask(count)
        await large.has_one_more()
    assert (small.asked, large.asked) == ([1], [2, 3])


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
    await subject.leave("engine-0")
    await subject.known()
    subject.ask(1, group[1])
    await second.has_one_more()
    assert group[1].engine == "engine-1"


async def test_an_engine_that_left_gets_no_new_request_and_finishes_what_it_has(subject: Subject) -> None:
    leaving = await subject.join("engine-0", HeldEngine())
    held = subject.ask(1)
    await leaving.has_one_more()
    stays = await subject.join("engine-1", HeldEngine())
    await subject.leave("engine-0")
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


class DeadCore(Answering):
    async def generate(self, request: Request, stream: Any = None) -> list[Completion]:
        raise ActorDied("the core ended", field="engine")


@pytest.mark.parametrize("dead", [HeldEngine(ActorDiedError()), DeadCore()], ids=["actor", "core"])
async def test_requests_of_an_engine_that_dies_are_answered_by_another(subject: Subject, dead: Answering) -> None:
    await subject.join("engine-7", dead)
    asked = subject.ask()
    left = await asyncio.wait_for(subject.pool.members(subject.pool.membership.generation), 20)
    assert left.members == () and not asked.done(), "it waits for another to join"
    successor = HeldEngine()
    successor.released.set()
    await subject.join("engine-7", successor)
    assert await asyncio.wait_for(asked, 20) == [ANSWER] and successor.asked == [1]
    assert subject.client._engines["engine-7"].answers == 0, "it owes nothing of its predecessor"


async def test_a_request_whose_engines_die_ends_alone_and_ends_no_third(subject: Subject) -> None:
    for name in ("engine-0", "engine-1"):
        await subject.join(name, DeadCore())
    with pytest.raises(EngineFailed, match="the core ended"):
        await asyncio.wait_for(subject.ask(), 20)
    assert (await subject.pool.members()).members == ()
    third = HeldEngine()
    third.released.set()
    await subject.join("engine-2", third)
    assert await subject.ask() == [ANSWER] and third.asked == [1]


class Unreached(Answering):
    """Died as soon as it was a member."""

    async def generate(self, request: Request, stream: Any = None) -> list[Completion]:
        raise AssertionError("it is dead")

    async def capacity(self) -> Capacity:
        raise ActorDiedError


@pytest.mark.parametrize("dead", [Unreached(), DeadCore()], ids=["before it was asked", "as it answers"])
async def test_where_engines_are_not_replaced_the_death_of_the_last_one_ends_every_request(
    subject: Subject, dead: Answering
) -> None:
    subject.pool.membership = replace(subject.pool.membership, replaced=False)
    asked = [subject.ask() for _ in range(3)]
    await subject.join("engine-7", dead)
    for each in asked:
        with pytest.raises(ActorDied, check=about("engine-7")):
            await asyncio.wait_for(each, 20)


class DiesWhileItStreams(Answering):
    """Brings tokens with weights of version 3, and dies once they have arrived."""

    def __init__(self, *token_ids: int) -> None:
        super().__init__()
        self._token_ids, self.arrived = token_ids, asyncio.Event()

    async def generate(self, request: Request, stream: Any = None) -> list[Completion]:
        for token in self._token_ids:
            stream.add(Chunk((token,), (-0.5,), (3,)))
        await self.arrived.wait()
        raise ActorDied("the core ended", field="engine")


class Streams(Answering):
    """Answers with two tokens of weights of version 4, the first of which streams."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Request] = []

    async def generate(self, request: Request, stream: Any = None) -> list[Completion]:
        self.asked.append(request)
        stream.add(Chunk((8,), (-1.0,), (4,)))
        return [Completion((8, 1), (-1.0, -2.0), ((0, 2, 4),), "stop")]


async def stream(
    subject: Subject, dies: DiesWhileItStreams, **sampling: Any
) -> tuple[asyncio.Future[list[Completion]], list[int]]:
    """Return the answer to a request that streams, and the tokens that arrived before it; its first engine dies."""
    await subject.join("engine-0", dies)
    brought = list[int]()

    def receive(chunk: Chunk) -> None:
        brought.extend(chunk.token_ids)
        dies.arrived.set()

    request = Request([5], 1, replace(SAMPLING, **sampling), stream=True)
    asked = asyncio.ensure_future(subject.client.generate(request, (), receive))
    await asyncio.wait_for(subject.pool.members(subject.pool.membership.generation), 20)
    return asked, brought


async def test_an_answer_whose_engine_dies_while_it_streams_is_continued_by_another(subject: Subject) -> None:
    asked, brought = await stream(subject, DiesWhileItStreams(6, 7), seed=40)
    successor = await subject.join("engine-1", Streams())
    [answer] = await asyncio.wait_for(asked, 20)
    assert answer == Completion((6, 7, 8, 1), (-0.5, -0.5, -1.0, -2.0), ((0, 2, 3), (2, 4, 4)), "stop")
    assert (6, 7, 8)[: len(brought)] == tuple(brought) and len(brought) >= 2, "each once; the last come with the answer"
    [rest] = successor.asked
    assert rest.prompt == [5, 6, 7] and rest.sampling == replace(SAMPLING, max_tokens=6, seed=42)


@pytest.mark.parametrize(("tokens", "reason"), [((6, 1), "stop"), (range(10, 18), "length")])
async def test_an_answer_that_has_all_its_tokens_when_its_engine_dies_is_not_continued(
    subject: Subject, tokens: Sequence[int], reason: str
) -> None:
    asked, _ = await stream(subject, DiesWhileItStreams(*tokens))
    [answer] = await asyncio.wait_for(asked, 20)
    assert answer == Completion((*tokens,), (-0.5,) * len(tokens), ((0, len(tokens), 3),), reason)


async def test_an_answer_that_follows_a_schema_is_not_continued(subject: Subject) -> None:
    asked, _ = await stream(subject, DiesWhileItStreams(6), json_schema="{}")
    with pytest.raises(EngineFailed, check=about("engine-0")):
        await asyncio.wait_for(asked, 20)


async def test_the_death_of_a_successor_that_joined_before_its_predecessor_was_missed_is_reported_too(
    subject: Subject,
) -> None:
    first = await subject.join("engine-0", HeldEngine())
    first.released.set()
    await subject.ask()
    [handle] = (await subject.pool.members()).engines
    await asyncio.gather(subject.pool.leave(handle, "it died"), subject.join("engine-0", DeadCore()))
    await subject.known()
    asked = subject.ask()
    generation = subject.pool.membership.generation
    assert (await asyncio.wait_for(subject.pool.members(generation), 20)).members == ()
    await subject.join("engine-0", first)
    assert await asyncio.wait_for(asked, 20) == [ANSWER]


async def test_a_cancelled_or_lost_call_is_no_death_and_the_next_request_is_answered(subject: Subject) -> None:
    cancelled = RayTaskError("exchange", "", TaskCancelledError()).as_instanceof_cause()
    engine = HeldEngine(ActorUnavailableError("lost", None), cancelled, TaskCancelledError())
    engine.released.set()
    await subject.join("engine-0", engine)
    members = await subject.pool.members()
    for _ in range(3):
        with pytest.raises(EngineFailed, check=about("engine-0")):
            await subject.ask()
    assert await subject.ask() == [ANSWER] and await subject.pool.members() == members


async def test_calls_that_requests_share_are_in_the_context_of_none(subject: Subject) -> None:
    """Ray cancels the calls of a request's context together with the request."""
    request, seen = ContextVar[str]("request", default=""), list[str]()

    class Pool(WatchedPool):
        async def members(self, after: int = -1) -> Membership:
            seen.append(request.get())
            return await super().members(after)

    class Engine(HeldEngine):
        async def exchange(self, *call: Any) -> Any:
            seen.append(request.get())
            return await super().exchange(*call)

    subject.pool = Pool()
    subject.client = EngineClient(remote(subject.pool, "engine_pool"), subject.waits)
    engine = await subject.join("engine-0", Engine())
    engine.released.set()
    request.set("first")
    assert await subject.ask() == [ANSWER]
    await subject.join("engine-1", engine)
    await subject.known()
    assert await subject.ask() == [ANSWER]
    assert len(seen) >= 4 and set(seen) == {""}


async def test_a_pool_that_died_ends_every_request_for_its_members_are_no_longer_known(subject: Subject) -> None:
    engine = await subject.join("engine-0", HeldEngine())
    engine.released.set()
    assert await subject.ask()

    async def dead(*_: Any) -> Any:
        raise ActorDiedError()

    subject.pool.members = dead  # type: ignore[method-assign]
    await subject.join("engine-1", HeldEngine())  # answers the poll that runs; the next one finds the pool dead
    assert subject.client.following is not None
    await asyncio.wait({subject.client.following}, timeout=20)
    for _ in range(2):
        with pytest.raises(ActorDied, check=about("engine_pool")):
            await subject.ask()


async def begun(engine: HeldEngine, count: int) -> None:
    """Until the engine has so many more requests, and those that could follow at once would have come, too."""
    for _ in range(count):
        await engine.has_one_more()
    for _ in range(20):
        await asyncio.sleep(0)
    assert engine.arrived.locked(), "more requests have begun than there is room for"


async def test_a_request_waits_until_an_engine_has_room_and_next_turns_of_sessions_are_first(subject: Subject) -> None:
    engine = await subject.join("engine-0", HeldEngine(answers=4))
    held = [subject.ask(2), subject.ask(1), subject.ask(3)]
    await begun(engine, 3)
    turn = Session(engine="engine-0")
    later, next_turn = subject.ask(1), subject.ask(1, turn)
    await begun(engine, 0)
    [wait] = [wait for wait in subject.waits.report().waits if wait.target == "engines"]
    assert (wait.what, wait.count) == ("room in their caches", 2)
    held[2].cancel()
    await begun(engine, 1)
    assert engine.asked == [2, 1, 3, 1] and next_turn in subject.requests and not later.done()
    engine.released.set()
    assert await next_turn == await later == [ANSWER]


async def test_tokens_that_are_expected_in_the_cache_are_limited_but_one_request_always_fits(subject: Subject) -> None:
    engine = await subject.join("engine-0", HeldEngine(tokens=15))
    first = subject.ask(8)  # 1 token of the prompt, and 2 for each answer, which has 8 at most
    await begun(engine, 1)
    small = subject.ask(1)
    await begun(engine, 0)
    assert not small.done()
    engine.released.set()
    await asyncio.gather(first, small)
    engine.released.clear()
    for _ in range(7):
        subject.ask(1)
    await begun(engine, 6)  # small, and five of three tokens
    assert engine.asked == [8] + [1] * 6


async def test_a_client_uses_its_share_of_the_engines(subject: Subject) -> None:
    subject.client = EngineClient(remote(subject.pool, "engine_pool"), subject.waits, share=0.5)
    engine = await subject.join("engine-0", HeldEngine(answers=4))
    for _ in range(3):
        subject.ask(1)
    await begun(engine, 2)


async def test_a_client_without_patience_for_a_pool_without_engines_fails_its_requests_and_no_others(
    subject: Subject,
) -> None:
    subject.client = EngineClient(remote(subject.pool, "engine_pool"), subject.waits, patience_s=0.05)
    with pytest.raises(EngineFailed, check=about("engine_pool")):
        await subject.ask()
    engine = await subject.join("engine-0", HeldEngine(answers=1))
    await subject.known()
    first = subject.ask()
    await begun(engine, 1)
    waits = subject.ask()
    with pytest.raises(EngineFailed):  # as long after that request
        await EngineClient(remote(EnginePool()), Waits("test"), patience_s=0.05).generate(Request([5], 1, SAMPLING))
    engine.released.set()
    assert await first == await waits == [ANSWER]
    engine.released.clear()
    subject.ask()
    await begun(engine, 2)
    waits = subject.ask()
    await subject.leave("engine-0")
    with pytest.raises(EngineFailed):
        await waits


async def test_what_waits_for_room_may_be_interrupted_or_cancelled_and_says_when_it_begins(subject: Subject) -> None:
    engine = await subject.join("engine-0", HeldEngine(answers=1))
    subject.ask(1)
    await begun(engine, 1)
    told: list[str] = []
    sessions = [Session(on_queue=lambda: told.append("waits"), on_dequeue=lambda: told.append("goes on"))] * 2
    cut, cancelled, kept = subject.ask(1, *sessions), subject.ask(2), subject.ask(1)
    await begun(engine, 0)
    assert told == ["waits", "waits"]
    sessions[0].interrupt()
    [answer] = await cut
    assert (answer.stop_reason, answer.token_ids) == (INTERRUPTED, ()) and told[2:] == ["goes on", "goes on"]
    cancelled.cancel()
    engine.released.set()
    assert await kept == [ANSWER] and engine.asked == [1, 1]


async def test_room_that_was_given_to_a_request_as_it_was_cancelled_is_free_again(subject: Subject) -> None:
    engine = await subject.join("engine-0", HeldEngine(answers=1))
    first = subject.ask(1)
    await begun(engine, 1)
    given, last = subject.ask(1), subject.ask(1)
    await begun(engine, 0)
    [(_, _, waits, _), _] = sorted(subject.client._queue, key=lambda waiting: waiting[1])

    def cancel(_: object) -> None:
        engine.released.clear()
        given.cancel()

    waits.add_done_callback(cancel)  # runs before the request goes on
    engine.released.set()
    assert await first == [ANSWER]
    assert [await asyncio.wait_for(engine.ended.get(), 20) for _ in range(2)] == [False, True]
    engine.released.set()
    assert await asyncio.wait_for(last, 20) == [ANSWER]
    assert given.cancelled() and subject.client._engines["engine-0"].answers == 0


async def test_a_request_that_waited_leaves_before_the_work_on_the_answer_that_made_room(subject: Subject) -> None:
    order = list[str]()

    class Noting(HeldEngine):
        def exchange(self, client: str, requests: dict[int, Request], *lists: Any) -> Any:
            order.extend("left" for _ in requests)
            return super().exchange(client, requests, *lists)

    engine = await subject.join("engine-0", Noting(answers=1))
    first, second = subject.ask(1), subject.ask(1)
    await begun(engine, 1)
    first.add_done_callback(lambda _: order.append("worked on"))
    engine.released.set()
    await second
    assert order == ["left", "left", "worked on"]


class Decoding(Answering):
    """Decodes a token of every answer at each `step`; their lengths are log-normal, the longest 20 times the median."""

    def __init__(self, rng: np.random.Generator, tokens: int) -> None:
        super().__init__()
        self._rng, self._tokens = rng, tokens
        self.running: dict[asyncio.Future[None], list[int]] = {}

    async def capacity(self) -> Capacity:
        return Capacity(self._tokens)

    async def generate(self, request: Request) -> list[Completion]:
        lengths = np.exp(self._rng.normal(3.0, 1.0, request.n)).clip(1, 400).astype(int)
        for length in lengths:
            self.running[asyncio.get_running_loop().create_future()] = [0, length]
        await asyncio.gather(*list(self.running)[-request.n :])
        return [Completion((5,) * int(length), (0.0,) * int(length), (), "stop") for length in lengths]

    def step(self) -> int:
        """Return the tokens in the cache after a step."""
        for ended, answer in list(self.running.items()):
            answer[0] += 1
            if answer[0] >= answer[1]:
                del self.running[ended]
                ended.set_result(None)
        return sum(age for age, _ in self.running.values())


@pytest.mark.parametrize("n", [1, 8])
async def test_long_tailed_answers_fill_the_cache_and_seldom_overflow_it(subject: Subject, n: int) -> None:
    tokens, sampling = 4000, Sampling(1.0, 400, (1,))
    engine = await subject.join("engine-0", Decoding(np.random.default_rng(n), tokens))
    for _ in range(8000 // n):
        subject.requests.append(asyncio.create_task(subject.client.generate(Request([5], n, sampling))))
    await subject.known()
    used = []
    while subject.client._queue:
        used.append(engine.step())
        for _ in range(12):  # as many turns of the loop as answers take to the client, and new requests to the engine
            await asyncio.sleep(0)
    used = used[len(used) // 3 :]  # by then the long ones of the first answers are known
    assert np.mean(used) > 0.65 * tokens
    assert np.mean(np.array(used) > tokens) < 0.1


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
    await pool.leave(remote(None, "engine-0"), "another one of this name")
    assert (await pool.members()).generation == second.generation
    await pool.leave(second.engines[0], "scaled down")
    third = await pool.members(second.generation)
    assert third.names == ("engine-1",) and third.generation == second.generation + 1
    assert await pool.newer(second.generation) == third and await pool.newer(third.generation) is None
    successor = Member(remote(None, "engine-1"), 5)
    fourth = await pool.join([Member(remote(None, "engine-0"), 4), successor])
    assert fourth.names == ("engine-0", "engine-1") and fourth.members[1] == successor, "its predecessor leaves"
