"""The model's calls of a group: equal first ones travel as one request, and unfinished ones can be parked.

A group is parked as rows, one per call, in the Buffer. When the group is continued its workflow runs again. A finished
call returns its recorded answer; an unfinished one continues from its tokens, on any engine and under the new weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from rayrft.experience import Experience, VersionSpan
from rayrft.explorer.engines.exchange import INTERRUPTED, Completion, Request, Sampling, Session
from rayrft.explorer.trajectory import Generate

log = logging.getLogger(__name__)


class Engines(Protocol):
    """Anything that answers requests."""

    async def generate(self, request: Request, sessions: Sequence[Session] = ()) -> list[Completion]: ...


@dataclass(frozen=True)
class Parking:
    """How a group may be parked: after ``budget`` sampled tokens of an attempt, or when it is told to. ``begun`` holds
    the calls that it resumes from."""

    budget: int | None = None
    begun: Sequence[Experience] = ()


@dataclass(frozen=True)
class _Call:
    """A call of the model, and what was sampled for it. ``stop_reason`` is None while it is not finished."""

    prompt: list[int]
    images: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[tuple[int, int, int], ...] = ()
    stop_reason: str | None = None

    def extended(self, by: Completion) -> _Call:
        if not self.token_ids:
            return _Call(self.prompt, self.images, by.token_ids, by.logprobs, by.versions, by.stop_reason)
        start, spans = len(self.token_ids), [*self.versions]
        for first, last, version in by.versions:
            if spans and spans[-1][2] == version:
                spans[-1] = (spans[-1][0], start + last, version)
            else:
                spans.append((start + first, start + last, version))
        return replace(
            self,
            token_ids=self.token_ids + by.token_ids,
            logprobs=self.logprobs + by.logprobs,
            versions=tuple(spans),
            stop_reason=by.stop_reason,
        )

    def to_experience(self, experience_id: str, group_id: str, task_id: str) -> Experience:
        prompt, answer = len(self.prompt), len(self.token_ids)
        return Experience(
            experience_id=experience_id,
            group_id=group_id,
            task_id=task_id,
            token_ids=np.array([*self.prompt, *self.token_ids], np.int32),
            prompt_length=prompt,
            action_mask=np.repeat(np.array([0, 1], np.uint8), [prompt, answer]),
            logprobs=np.array([0.0] * prompt + [*self.logprobs], np.float32),
            weight_versions=tuple(
                VersionSpan(prompt + start, prompt + end, version) for start, end, version in self.versions
            ),
            stop_reason=self.stop_reason,
            images=self.images,
        )

    @classmethod
    def of(cls, row: Experience) -> _Call:
        at = row.prompt_length
        spans = tuple((span.start - at, span.end - at, span.version) for span in row.weight_versions)
        answer = tuple(row.token_ids[at:].tolist()), tuple(row.logprobs[at:].tolist())
        return cls(row.token_ids[:at].tolist(), row.images, *answer, spans, row.stop_reason)


@dataclass
class _Attempt:
    """The calls of one repeat, by their number from 1."""

    on_park: Callable[[], object] = lambda: None
    session: Session = field(default_factory=Session)
    recorded: dict[int, _Call] = field(default_factory=dict)
    """Those of before that were not made again yet."""
    made: dict[int, _Call] = field(default_factory=dict)
    open: set[asyncio.Task[Any]] = field(default_factory=set)
    """Those that wait for an answer."""
    suspended: int = 0
    """Of the open ones, those that are not answered any more."""
    sampled: int = 0
    """Tokens, since it was resumed."""
    parked: bool = False
    diverged: bool = False
    """The replay differs from the recorded calls. No budget parks the attempt then, so that it cannot loop."""
    ended: bool = False

    def park_if_idle(self) -> None:
        if self.suspended and self.suspended == len(self.open) and not self.parked and not self.ended:
            self.parked = True
            self.on_park()


class GroupCalls:
    """Calls of the n repeats of a group.

    Answer k of a request with a seed equals the one answer to a request with the seed plus k, so the samples do not
    depend on whether requests were merged. The requests' seeds are derived from that of the group, in ``sampling``.
    """

    def __init__(self, engines: Engines, n: int, sampling: Sampling, parking: Parking | None = None) -> None:
        self._engines = engines
        self._n = n
        self._sampling = sampling
        self._budget = parking.budget if parking else None
        self._attempts = [_Attempt() for _ in range(n)]
        for row in parking.begun if parking else ():
            repeat, number = map(int, row.experience_id.removeprefix(row.group_id).strip("/").split("/"))
            self._attempts[repeat].recorded[number] = _Call.of(row)
        self._interrupting = False
        self._waiting: dict[int, tuple[_Call, int, asyncio.Future[Completion]]] = {}
        self._in_flight: set[asyncio.Future[None]] = set()

    @property
    def parked(self) -> bool:
        """Whether an attempt is parked."""
        return any(attempt.parked for attempt in self._attempts)

    def is_parked(self, repeat: int) -> bool:
        return self._attempts[repeat].parked

    def session(self, repeat: int) -> Session:
        """Return the session of the attempt's requests."""
        return self._attempts[repeat].session

    def on_park(self, repeat: int, call: Callable[[], object]) -> None:
        """Set what is called when the attempt is parked: none of its open calls will be answered."""
        self._attempts[repeat].on_park = call

    def park(self) -> None:
        """Park all attempts, with the tokens that they have."""
        self._interrupting = True
        for attempt in self._attempts:
            attempt.session.interrupt()

    def to_rows(self, group_id: str, task_id: str) -> list[Experience]:
        """Return the calls with sampled tokens, as rows."""
        return [
            call.to_experience(f"{group_id}/{repeat}/{number}", group_id, task_id)
            for repeat, attempt in enumerate(self._attempts)
            for number, call in sorted({**attempt.recorded, **attempt.made}.items())
            if call.token_ids
        ]

    def answered(self, repeat: int, prompt: list[int], answer: Completion) -> bool:
        """Return whether the model answered this to the prompt in that attempt, perhaps at more length."""
        end = len(answer.token_ids)
        return any(
            call.prompt == prompt
            and call.token_ids[:end] == answer.token_ids
            and call.logprobs[:end] == answer.logprobs
            for call in self._attempts[repeat].made.values()
        )

    def end(self, repeat: int) -> None:
        """Cancel the tasks of an attempt that has ended which wait for an answer still: nobody will train it."""
        attempt = self._attempts[repeat]
        attempt.ended = True
        for task in attempt.open:
            task.cancel()

    def cancel(self) -> None:
        """Abort what is in flight."""
        for future in self._in_flight:
            future.cancel()

    def of(self, repeat: int) -> Generate:
        """Return the `Generate` function of one repeat."""
        attempt = self._attempts[repeat]

        async def generate(prompt: list[int], max_tokens: int, images: tuple[str, ...]) -> Completion:
            if attempt.ended:
                raise RuntimeError("the attempt has ended: await all that a workflow begins")
            number = len(attempt.made) + 1
            call = attempt.recorded.pop(number, _Call(prompt, images))
            if call.prompt != prompt or call.images != images:
                log.warning(
                    "a continued attempt differs from its recorded calls from call %d on: they are sampled again",
                    number,
                )
                attempt.recorded.clear()
                attempt.diverged = True
                call = _Call(prompt, images)
            attempt.made[number] = call
            if call.stop_reason is None:
                task = asyncio.current_task()
                assert task is not None  # a coroutine is running
                attempt.open.add(task)
                try:
                    call = await self._finish(attempt, repeat, number, call, max_tokens)
                finally:
                    attempt.open.remove(task)
                    if attempt.suspended:  # once those that are cancelled with this one have ended, too
                        asyncio.get_running_loop().call_soon(attempt.park_if_idle)
            assert call.stop_reason is not None  # it is finished
            return Completion(call.token_ids, call.logprobs, call.versions, call.stop_reason)

        return generate

    async def _finish(self, attempt: _Attempt, repeat: int, number: int, call: _Call, max_tokens: int) -> _Call:
        """Return the call when it is finished. It never returns once the attempt is to be parked."""
        room = max_tokens - len(call.token_ids)
        budget = None if attempt.diverged else self._budget
        left = room if budget is None else min(room, budget - attempt.sampled)
        if left > 0 and not self._interrupting:
            if number == 1 and self._n > 1:
                completion = await self._first(repeat, call, left)
            else:
                request = self._request(call, 1, left, number=number, repeat=repeat)
                [completion] = await self._engines.generate(request, [attempt.session])
            attempt.sampled += len(completion.token_ids)
            cut = completion.stop_reason == INTERRUPTED or (completion.stop_reason == "length" and left < room)
            call = call.extended(completion)
            attempt.made[number] = call = replace(call, stop_reason=None) if cut else call
            if not cut:
                return call
        attempt.suspended += 1
        try:
            attempt.park_if_idle()
            await asyncio.Event().wait()
        finally:
            attempt.suspended -= 1
        raise AssertionError("a parked attempt is cancelled")

    def _request(self, call: _Call, n: int, max_tokens: int, *, number: int, repeat: int) -> Request:
        seed = self._sampling.seed
        if seed is not None:
            # A continued call must not draw the same random numbers again.
            seed = derive_seed(seed, f"{number}/{len(call.token_ids)}" if call.token_ids else str(number)) + repeat
        sampling = replace(self._sampling, max_tokens=max_tokens, seed=seed)
        return Request([*call.prompt, *call.token_ids], n, sampling, call.images)

    async def _first(self, repeat: int, call: _Call, max_tokens: int) -> Completion:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)  # after all repeats that are ready have run
        self._waiting[repeat] = (call, max_tokens, loop.create_future())
        return await self._waiting[repeat][-1]

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, {}
        repeats = sorted(waiting)
        asked = [waiting[repeat][:-1] for repeat in repeats]
        if len(repeats) == self._n and all(each == asked[0] for each in asked):
            groups = [repeats]
        else:
            groups = [[repeat] for repeat in repeats]
        for group in groups:
            call, max_tokens, _ = waiting[group[0]]
            request = self._request(call, len(group), max_tokens, number=1, repeat=group[0])
            futures = {repeat: waiting[repeat][-1] for repeat in group}
            task = asyncio.ensure_future(self._answer(futures, request))
            self._in_flight.add(task)  # the event loop keeps only weak references
            task.add_done_callback(self._in_flight.discard)
            for future in futures.values():
                future.add_done_callback(partial(_abandon, task, futures.values()))

    async def _answer(self, futures: dict[int, asyncio.Future[Completion]], request: Request) -> None:
        try:
            sessions = [self._attempts[repeat].session for repeat in futures]
            completions = await self._engines.generate(request, sessions)
        except Exception as error:  # raised in the repeats that wait for the answers
            for future in futures.values():
                if not future.done():
                    future.set_exception(error)
        else:
            for future, completion in zip(futures.values(), completions, strict=True):
                if not future.done():
                    future.set_result(completion)


def _abandon(task: asyncio.Future[None], futures: Collection[asyncio.Future[Completion]], _: object) -> None:
    """Abort a request when nobody waits for it any more."""
    if all(future.cancelled() for future in futures):
        task.cancel()


def derive_seed(seed: int, name: str) -> int:
    """Derive a seed from a base seed and a name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "little") >> 1
