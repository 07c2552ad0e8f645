"""Requests and answers of many groups in few calls: none is lost, none is mixed up, whatever comes between."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrft.errors import EngineFailed, RayrftError, RequestRefused
from rayrft.explorer.engines import exchange
from rayrft.explorer.engines.exchange import INTERRUPTED, Answering, Completion, Request, Requester, Sampling, Session
from tests.errors import about
from tests.scripted import remote

SAMPLING = Sampling(1.0, 8, (1,))
Answers = dict[int, exchange.EngineAnswer | exchange.Chunk]


class Held(Answering):
    """Answers a request, with its prompt, when its event is set; counts calls and what was aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.aborted, self.interrupted = 0, list[int](), list[int]()
        self.events: dict[int, asyncio.Event] = {}
        self.problems: dict[int, Exception] = {}

    async def generate(self, request: Request, stream: exchange.Stream | None = None) -> list[Completion]:
        [number] = request.prompt
        try:
            await self.events.setdefault(number, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.aborted.append(number)
            raise
        if number in self.problems:
            raise self.problems[number]
        reason = INTERRUPTED if number in self.interrupted else "stop"
        return [Completion((number,), (-1.0,), ((0, 1, 0),), reason)] * request.n

    async def interrupt(self, request: Request) -> None:
        self.interrupted.append(request.prompt[0])
        self.events[request.prompt[0]].set()

    async def exchange(self, client: str, requests: dict[int, Request], *lists: Any) -> Answers:
        self.calls += 1
        return await super().exchange(client, requests, *lists)


def ask(requester: Requester, number: int) -> asyncio.Future[list[Completion]]:
    return requester.ask(Request([number], 1, SAMPLING))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):  # turns of the event loop
        if condition():
            return
        await asyncio.sleep(0)
    raise TimeoutError


async def test_what_is_asked_together_and_answered_together_travels_together() -> None:
    engine = Held()
    requester = Requester(remote(engine))
    asked = [ask(requester, number) for number in range(100)]
    await until(lambda: len(engine.events) == 100)
    assert engine.calls == 1
    for number in range(50):
        engine.events[number].set()
    for number, answer in enumerate(await asyncio.gather(*asked[:50])):
        assert answer[0].token_ids == (number,)
    await until(lambda: engine.calls == 2)
    assert not any(task.done() for task in asked[50:])
    for task in asked[50:]:
        task.cancel()
    await until(lambda: sorted(engine.aborted) == list(range(50, 100)))
    assert engine.calls == 3


async def test_an_error_of_a_request_is_its_own() -> None:
    engine = Held()
    requester = Requester(remote(engine))
    asked = [ask(requester, number) for number in range(4)]
    await until(lambda: len(engine.events) == 4)
    engine.problems = {
        0: RequestRefused("too long", field="request"),
        1: RuntimeError("out of luck"),
        2: asyncio.CancelledError(),  # type: ignore[dict-item]
    }
    for number, (error, says) in enumerate(
        [(RequestRefused, "long"), (EngineFailed, "luck"), (EngineFailed, "Cancelled")]
    ):
        engine.events[number].set()
        with pytest.raises(error, match=says, check=about("request")):
            await asyncio.wait_for(asked[number], 20)
    assert not asked[3].done()
    engine.events[3].set()
    assert (await asked[3])[0].token_ids == (3,)


async def test_a_call_that_fails_ends_what_it_carried_here_and_at_the_engine_and_nothing_else() -> None:
    class Torn(Held):
        """Does not answer its first call."""

        def __init__(self) -> None:
            super().__init__()
            self.torn = asyncio.Event()

        async def exchange(self, client: str, requests: dict[int, Request], *lists: Any) -> Answers:
            answering = super().exchange(client, requests, *lists)
            if self.calls:
                return await answering
            carried = asyncio.ensure_future(answering)
            await self.torn.wait()
            carried.cancel()
            raise ConnectionError

    engine = Torn()
    requester = Requester(remote(engine))
    carried = ask(requester, 0)
    await until(lambda: 0 in engine.events)
    engine.torn.set()
    with pytest.raises(ConnectionError):
        await carried
    after = ask(requester, 1)
    await until(lambda: engine.aborted == [0] and 1 in engine.events)
    engine.events[1].set()
    assert (await after)[0].token_ids == (1,)


async def test_a_call_that_cannot_be_made_is_the_error_of_who_asked() -> None:
    class Broken(Held):
        exchange = property()  # type: ignore[assignment]

    with pytest.raises(AttributeError):
        await ask(Requester(remote(Broken())), 0)


async def test_an_interrupted_session_has_what_its_requests_have_and_others_go_on() -> None:
    engine, session = Held(), Session()
    requester = Requester(remote(engine))
    cut = [requester.ask(Request([number], 1, SAMPLING), session) for number in range(3)]
    other = ask(requester, 3)
    await until(lambda: len(engine.events) == 4)
    engine.events[1].set()
    await cut[1]
    session.interrupt()
    assert [answer.stop_reason for task in cut for answer in await task] == [INTERRUPTED, "stop", INTERRUPTED]
    assert engine.interrupted == [0, 2] and not engine.aborted and not other.done()
    session.interrupt()  # nothing is in flight
    engine.events[3].set()
    assert (await other)[0].stop_reason == "stop"


async def test_an_abort_that_overtakes_its_request_leaves_nothing_running() -> None:
    engine = Held()
    assert await engine.exchange("client", {}, [7]) == {}
    assert await engine.exchange("client", {7: Request([7], 1, SAMPLING)}, []) == {}
    assert not engine.events and not engine._mailboxes["client"].running


@given(seed=st.integers(0, 10**6), count=st.integers(1, 40))
def test_in_any_order_every_request_of_two_clients_has_its_answer_or_is_aborted(seed: int, count: int) -> None:
    asyncio.run(history(random.Random(seed), count))


async def history(rng: random.Random, count: int) -> None:
    """Two clients ask and cancel; answer, refuse, and let calls arrive late, in random order."""

    class Late(Held):
        async def exchange(self, client: str, requests: dict[int, Request], *lists: Any) -> Answers:
            for _ in range(rng.choice([0, 0, 1, 3])):
                await asyncio.sleep(0)
            return await super().exchange(client, requests, *lists)

    engine = Late()
    clients = [Requester(remote(engine)) for _ in range(2)]
    asked: dict[int, asyncio.Future[list[Completion]]] = {}
    cancelled, refused = set[int](), set[int]()
    while len(asked) < count or not all(number in engine.events or number in cancelled for number in asked):
        match rng.choice(["ask", "answer", "cancel", "turn"]):
            case "ask" if len(asked) < count:
                asked[len(asked)] = ask(rng.choice(clients), len(asked))
            case "answer" if engine.events:
                number = rng.choice(list(engine.events))
                if rng.random() < 0.2 and not engine.events[number].is_set():
                    engine.problems[number] = RequestRefused("no", field="request")
                    refused.add(number)
                engine.events[number].set()
            case "cancel" if asked and rng.random() < 0.3:
                number = rng.choice(list(asked))
                if not asked[number].done():
                    asked[number].cancel()
                    cancelled.add(number)
            case _:
                await asyncio.sleep(0)
    for event in engine.events.values():
        event.set()
    async with asyncio.timeout(20):
        found = await asyncio.gather(*asked.values(), return_exceptions=True)
    for number, answer in enumerate(found):
        if isinstance(answer, asyncio.CancelledError):
            assert number in cancelled
        elif isinstance(answer, RayrftError):
            assert number in refused
        else:
            assert not isinstance(answer, BaseException) and answer[0].token_ids == (number,)
    await until(lambda: not any(box.running for box in engine._mailboxes.values()))


class Endless(Answering):
    """Brings one token at a time, counting up from the prompt, until the limit or an interruption."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng, self.running, self.interrupted = rng, 0, set[int]()

    async def generate(self, request: Request, stream: exchange.Stream | None = None) -> list[Completion]:
        assert stream is not None
        [first] = request.prompt
        self.running += 1
        try:
            while first not in self.interrupted and len(stream.chunks) < request.sampling.max_tokens:
                stream.add(exchange.Chunk((first + len(stream.chunks),), (-1.0,), (0,)))
                for _ in range(self.rng.choice([0, 0, 1, 5])):
                    await asyncio.sleep(0)
        finally:
            self.running -= 1
        tokens = exchange.Chunk.joined(stream.chunks)
        return [Completion(tokens.token_ids, tokens.logprobs, ((0, len(tokens.token_ids), 0),), "stop")]

    async def interrupt(self, request: Request) -> None:
        self.interrupted.add(request.prompt[0])


@given(seed=st.integers(0, 10**6), count=st.integers(1, 12))
def test_streams_bring_every_token_once_and_in_order_until_they_are_interrupted(seed: int, count: int) -> None:
    async def one(rng: random.Random, requester: Requester, number: int) -> None:
        first, enough, limit = 1000 * number, rng.randrange(1, 30), rng.randrange(1, 60)
        session, told = Session(), list[int]()

        def tell(chunk: exchange.Chunk) -> None:
            assert len(chunk.token_ids) == len(chunk.logprobs) > 0
            told.extend(chunk.token_ids)
            if len(told) >= enough:
                session.interrupt()

        request = Request([first], 1, Sampling(1.0, limit, (1,)), stream=True)
        asked = requester.ask(request, session, tell)
        if rng.random() < 0.3:
            for _ in range(rng.randrange(20)):
                await asyncio.sleep(0)
            asked.cancel()
        try:
            [answer] = await asked
        except asyncio.CancelledError:
            return
        assert answer.token_ids == tuple(range(first, first + len(answer.token_ids)))
        assert told == list(answer.token_ids[: len(told)])
        assert len(told) >= enough or len(answer.token_ids) == limit

    async def play() -> None:
        rng = random.Random(seed)
        engine = Endless(rng)
        requester = Requester(remote(engine))
        async with asyncio.timeout(20):
            await asyncio.gather(*(one(rng, requester, number) for number in range(count)))
        await until(lambda: engine.running == 0)
        await until(lambda: not any(box._brought or box.running for box in engine._mailboxes.values()))

    asyncio.run(play())
