"""EngineClient: spreads requests over the members of an EnginePool, no more at once than their KV caches hold."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import ExitStack
from contextvars import Context
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

import numpy as np

from rayrft.errors import ActorDied, EngineFailed
from rayrft.explorer.engines.exchange import (
    INTERRUPTED,
    UNBEGUN,
    Answering,
    Capacity,
    Chunk,
    Completion,
    Request,
    Requester,
    Sampling,
    Session,
    TokenCallback,
)
from rayrft.explorer.engines.pool import EnginePool, Member, Membership
from rayrft.runtime import ray_api
from rayrft.runtime.handle import Handle, TrackedHandle, death_reason, when_reachable
from rayrft.runtime.waits import Waits, settle

_SPILL_ANSWERS, _SPILL_RATIO = 8, 1.5
"""A session leaves its engine for another one if its load is higher by this many answers and by this factor. Decoding
behind these answers would take longer than computing the prefix again."""

_RECENT, _FEWEST = 1024, 8
"""Requests that an estimate is made from, at most and at least."""

_TRIES = 2
"""Engines that a request is sent to, one after another, as they die: one that ends its engines must not end all."""

_DEVIATIONS = 2.0
"""How much room is left for what is held beyond the expectation, in standard deviations."""


class AnswerLengths:
    """Estimates how many tokens the answers to a request hold in the KV cache, from the lengths of recent ones.

    A request of n answers, of lengths l, holds k(t) · t tokens after t steps, of which k(t) answers are longer, and is
    over after max l steps. Among requests that began at different times one holds E[Σ l²/2] / E[max l] tokens on
    average (renewal-reward theorem); requests that began together hold most at the t where E[k(t)] · t is greatest. The
    greater of both is expected.
    """

    def __init__(self) -> None:
        self._recent: deque[Sequence[int]] = deque(maxlen=_RECENT)
        self._added = 0
        self._mean, self._variance = math.nan, 0.0

    def add(self, lengths: Sequence[int]) -> None:
        """Count a request whose answers had so many tokens."""
        self._recent.append(lengths)
        self._added += 1
        if self._added >= _FEWEST and (self._added.bit_count() == 1 or self._added % 256 == 0):
            self._estimate()

    def expected(self, limit: int) -> tuple[float, float]:
        """Return mean and variance of the tokens that the answers hold, which have ``limit`` in all at most. Before any
        are known that is a quarter of it: some are long, and few are at their end at once."""
        return min(limit / 4 if math.isnan(self._mean) else self._mean, limit), min(self._variance, limit**2 / 12)

    def _estimate(self) -> None:
        each = np.sort(np.array(self._recent, float), axis=1).clip(1)  # [requests, answers]
        count = np.arange(each.shape[1], 0, -1)  # those that last until the next one ends
        before = np.pad(each, ((0, 0), (1, 0)))[:, :-1]
        over = each[:, -1].mean()
        age = (each**2).sum(1).mean() / (2 * over)
        square = (count**2 * (each**3 - before**3)).sum(1).mean() / (3 * over)
        flat = np.sort(each, axis=None)
        together = (flat * np.arange(flat.size, 0, -1)).max() / len(each)
        self._mean, self._variance = max(age, together), max(square - age**2, 0.0)


@dataclass(frozen=True)
class _Cost:
    """What a request is expected to take of an engine."""

    answers: int
    tokens: float
    variance: float


class _Engine:
    """A member, and its load: the requests of this client that are in flight."""

    def __init__(self, member: Member, capacity: Capacity, share: float) -> None:
        self.name, self.handle = member.name, member.handle
        self.requester: Requester
        self._most_answers, self._most_tokens = share * capacity.answers, share * capacity.tokens
        self.answers = 0
        self._tokens, self._variance = 0.0, 0.0

    def has_room(self, cost: _Cost) -> bool:
        """Whether the request can begin at once without driving others out of the cache. It always can alone."""
        if self.answers == 0:
            return True
        tokens = self._tokens + cost.tokens + _DEVIATIONS * math.sqrt(self._variance + cost.variance)
        return self.answers < self._most_answers and tokens <= self._most_tokens

    def take(self, cost: _Cost, sign: int = 1) -> None:
        self.answers += sign * cost.answers
        # Without answers in flight, nothing is left of rounding.
        self._tokens = self._tokens + sign * cost.tokens if self.answers else 0.0
        self._variance = max(self._variance + sign * cost.variance, 0.0) if self.answers else 0.0


_Asked = tuple[Request, Session | None, TokenCallback | None]
_Begun = tuple[_Engine, _Cost, "asyncio.Future[list[Completion]]"]
_answers = attrgetter("answers")


def _so_far(chunks: Sequence[Chunk]) -> Completion:
    """Return the begun answer of a request that streams, which another engine can continue."""
    versions = (whole := Chunk.joined(chunks)).versions
    edges = [at for at in range(len(versions) + 1) if versions[at - 1 : at] != versions[at : at + 1]]
    spans = tuple((first, end, versions[first]) for first, end in itertools.pairwise(edges))
    return Completion(whole.token_ids, whole.logprobs, spans, INTERRUPTED, whole.alternatives)


def _why_ended(answer: Completion, sampling: Sampling) -> str | None:
    """Return the stop reason of a begun answer that has all its tokens; None if it can be continued."""
    if answer.token_ids[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if len(answer.token_ids) >= sampling.max_tokens else None


def _continued(request: Request, begun: Completion) -> Request:
    """Return the request for the rest of an answer."""
    count, sampling = len(begun.token_ids), request.sampling
    seed = None if sampling.seed is None else sampling.seed + count
    least = max(0, sampling.min_tokens - count)
    rest = replace(sampling, max_tokens=sampling.max_tokens - count, min_tokens=least, seed=seed)
    return replace(request, prompt=[*request.prompt, *begun.token_ids], sampling=rest)


def _reason(error: Exception) -> str:
    if isinstance(error, ActorDied):
        return error.problem
    died = isinstance(error, ray_api.ACTOR_DEATHS)
    return f"the engine died: {death_reason(error)}" if died else type(error).__name__


class EngineClient:
    """Sends requests to the members, and to no other engine, from one process.

    The n answers to one prompt are one request, so that they share its prefix; it goes to the least-loaded member, or
    to that of its session. A request begins when its engine has room for it, so that no answer is driven out of the
    cache and computed again. Until then it waits here, the next turn of a session before others. An engine that left
    finishes the requests that it has. While there is no member, requests wait for one to join.
    """

    def __init__(
        self, pool: Handle[EnginePool], waits: Waits, share: float = 1.0, patience_s: float | None = None
    ) -> None:
        """``share`` is the part of the engines' capacity that this client may use. Requests that have waited for
        ``patience_s`` fail if there is no member then."""
        self._pool = TrackedHandle(pool, waits, endless=[EnginePool.members])
        self._waits = waits
        self._share, self._patience_s = share, patience_s
        self._engines: dict[str, _Engine] = {}
        self._lengths: defaultdict[int, AnswerLengths] = defaultdict(AnswerLengths)
        """By the number of answers of a request."""
        self._queue: list[tuple[bool, int, asyncio.Future[_Begun | None], _Asked]] = []
        """A heap of what waits, the next turns of sessions first."""
        self._numbers = itertools.count()
        self._replaced = True
        """See `Membership`."""
        self.following: asyncio.Task[None] | None = None

    async def generate(
        self, request: Request, sessions: Sequence[Session] = (), on_tokens: TokenCallback | None = None
    ) -> list[Completion]:
        """Sample the answers to a request on one engine, that of the first of its ``sessions`` if it has one; the
        others follow. For ``on_tokens`` see `Requester.ask`.

        If the engine dies, another one samples the answers from the beginning, with the same seed; an answer that
        streams is continued instead. Raises EngineFailed if that one dies too, if none joins for too long, or if the
        request failed for another reason. Raises ActorDied if engines that die are not replaced, RequestRefused, and
        DataError for images that cannot be read.
        """
        chunks = list[Chunk]()

        def take(chunk: Chunk) -> None:
            chunks.append(chunk)
            if on_tokens is not None:
                on_tokens(chunk)

        stream = take if on_tokens is not None else None
        for tries_left in reversed(range(_TRIES)):
            before = _so_far(chunks) if chunks else UNBEGUN
            rest = request
            if before.token_ids:
                if ended := _why_ended(before, request.sampling):
                    return [replace(before, stop_reason=ended)]
                rest = _continued(request, before)
            completions = await self._try(rest, sessions, stream, tries_left > 0)
            if completions is not None:
                return [before.continued(each) for each in completions]
        raise AssertionError("the last try returns or raises")

    async def _try(
        self, request: Request, sessions: Sequence[Session], stream: TokenCallback | None, again: bool
    ) -> list[Completion] | None:
        """Sample the answers on one engine. Returns None if it dies, and the request may be made ``again``."""
        from ray.exceptions import RayError

        begun = await self._begin((request, sessions[0] if sessions else None, stream), sessions)
        if begun is None:
            return [UNBEGUN] * request.n
        engine, cost, answer = begun
        for session in sessions:
            session.engine = engine.name
        self._waits.trace.begin(engine.name, "generate", request.n)
        try:
            completions = await answer
            self._lengths[request.n].add([len(completion.token_ids) for completion in completions])
            return completions
        except (RayError, ActorDied) as error:
            died = await self._died(engine, error)
            if died and not self._replaced:
                raise ActorDied(_reason(error), "see its log in the Ray dashboard", field=engine.name) from None
            whole = request.sampling.json_schema or request.scored
            if not died or not again or (stream is not None and whole):
                problem = f"the call of the engine failed: {_reason(error)}"
                raise EngineFailed(problem, "ask again", field=engine.name) from None
            return None
        finally:
            self._waits.trace.end(engine.name, "generate", request.n)
            engine.take(cost, -1)
            self._dispatch()

    async def _begin(self, asked: _Asked, sessions: Sequence[Session]) -> _Begun | None:
        """Wait until a request has begun on an engine. Returns None if its first session is interrupted before."""
        if self.following is None:
            # In no request's context: Ray would cancel its calls together with that request.
            self.following = asyncio.create_task(self._follow(), context=Context())
            self.following.add_done_callback(self._fail)
        if self.following.done():  # the pool died, and with it the knowledge of who is a member
            self.following.result()
        (_, session, _), begun = asked, asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (session is None or session.engine is None, next(self._numbers), begun, asked))
        self._dispatch()
        if begun.done():
            return begun.result()
        try:
            with ExitStack() as waiting:
                if self._engines:  # room comes with other answers
                    waiting.enter_context(self._waits.on("engines", "room in their caches", internal=True))
                else:
                    waiting.enter_context(self._waits.on("engine_pool", "an engine to join"))
                for each in sessions:
                    waiting.enter_context(each.queued())
                if session is not None:
                    session.interrupts[interrupt := partial(settle, begun, None)] = None
                    waiting.callback(session.interrupts.pop, interrupt)
                while not begun.done():
                    await asyncio.wait({begun}, timeout=self._patience_s)
                    if not begun.done() and not self._engines:
                        raise EngineFailed("no engine is up", "ask again", field="engine_pool")
                return begun.result()
        except asyncio.CancelledError:
            if begun.done() and not begun.cancelled() and not begun.exception() and (taken := begun.result()):
                engine, cost, answer = taken
                answer.cancel()
                engine.take(cost, -1)
                self._dispatch()
            raise
        finally:
            begun.cancel()

    def _dispatch(self) -> None:
        """Begin what has room, in order, and at once: who waits for it runs only after the work on other answers."""
        while self._queue:
            _, _, begun, asked = self._queue[0]
            if not begun.done():  # else it was interrupted or cancelled
                request, session, _ = asked
                tokens, variance = self._lengths[request.n].expected(request.n * request.sampling.max_tokens)
                cost = _Cost(request.n, len(request.prompt) + tokens, variance)
                engine = self._choose(cost, session.engine if session else None)
                if engine is None:
                    return
                engine.take(cost)
                begun.set_result((engine, cost, engine.requester.ask(*asked)))
            heapq.heappop(self._queue)

    def _choose(self, cost: _Cost, home: str | None) -> _Engine | None:
        """Return the engine named ``home`` if it is a member with room and not much more load than the least-loaded
        one, else the latter; None while there is no room."""
        least = min(self._engines.values(), key=_answers, default=None)
        if least is not None and not least.has_room(cost):  # then all are looked at, which takes longer
            with_room = (engine for engine in self._engines.values() if engine.has_room(cost))
            least = min(with_room, key=_answers, default=None)
        before = self._engines.get(home) if home is not None else None
        if least is None or before is None or not before.has_room(cost):
            return least
        spills = before.answers > max(least.answers + _SPILL_ANSWERS, least.answers * _SPILL_RATIO)
        return least if spills else before

    async def _follow(self) -> None:
        """Keep the members those of the pool. Never returns; raises ActorDied when the pool has died, or all members
        have that are not replaced."""
        membership, known = Membership(-1, ()), set[str]()
        while True:
            poll = partial(self._pool.call, EnginePool.members, membership.generation)
            try:
                membership = await when_reachable(poll)
            except ray_api.ACTOR_DEATHS as error:
                raise ActorDied(f"the actor died: {death_reason(error)}", field="engine_pool") from None
            self._replaced = membership.replaced
            # In an order of its own: of engines with the same load each client takes the first.
            members = random.sample(membership.members, len(membership.members))
            engines = await asyncio.gather(*map(self._engine, members))
            self._engines = {engine.name: engine for engine in engines if engine is not None}
            known.update(member.name for member in members)
            if known and not self._engines and not self._replaced:
                raise ActorDied("all engines have died", "see their logs in the Ray dashboard", field=min(known))
            self._dispatch()

    async def _engine(self, member: Member) -> _Engine | None:
        """Return the record of a member, or None if it has died."""
        handle = TrackedHandle(member.handle, self._waits, untraced=[Answering.exchange])
        engine = self._engines.get(member.name)
        if engine is None or engine.handle.actor != member.handle.actor:  # a successor has the name of its predecessor
            try:
                capacity = await when_reachable(lambda: handle.call(Answering.capacity))
            except ray_api.ACTOR_DEATHS as error:
                await self._pool.call(EnginePool.leave, member.handle, death_reason(error))
                return None
            engine = _Engine(member, capacity, self._share)
        engine.requester = Requester(handle)
        return engine

    async def _died(self, engine: _Engine, error: Exception) -> bool:
        """Return whether an error says that the engine has died, or its core; the pool then learns of it."""
        if died := isinstance(error, (*ray_api.ACTOR_DEATHS, ActorDied)):
            await self._pool.call(EnginePool.leave, engine.handle, _reason(error))
            self._engines = {name: each for name, each in self._engines.items() if each is not engine}
        return died

    def _fail(self, following: asyncio.Task[None]) -> None:
        """End what waits: the pool has died."""
        if not following.cancelled() and (error := following.exception()):
            for _, _, begun, _ in self._queue:
                settle(begun, error)
            self._queue.clear()
