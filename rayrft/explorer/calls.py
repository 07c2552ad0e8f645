"""The model's calls of a group: equal first ones travel as one request, and unfinished ones can be parked.

A group is parked as rows, one per call, in the Buffer. When the group is continued its workflow runs again. A finished
call returns its recorded answer; an unfinished one continues from its tokens, on any engine and under the new weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from rayrft.experience import Experience
from rayrft.explorer.engines.exchange import INTERRUPTED, UNBEGUN, Completion, Request, Sampling, Session
from rayrft.explorer.trajectory import Generate, action_columns
from rayrft.runtime.waits import settle

log = logging.getLogger(__name__)


class Engines(Protocol):
    """Anything that answers requests."""

    async def generate(self, request: Request, sessions: Sequence[Session] = ()) -> list[Completion]: ...


@dataclass(frozen=True)
class Parking:
    """How to park a group: on request, or after ``budget`` sampled tokens of an attempt. It resumes ``begun``."""

    budget: int | None = None
    begun: Sequence[Experience] = ()


class _Call(NamedTuple):
    """A call of the model, and what was sampled for it: it is not finished while the stop reason is `INTERRUPTED`."""

    prompt: list[int]
    images: tuple[str, ...] = ()
    schema: str = ""
    """The JSON schema of the answer. Such an answer cannot be continued: if it is interrupted, it is sampled again."""
    alternatives: int = 0
    """Number of most probable tokens that the answer has per token."""
    answer: Completion = UNBEGUN

    @property
    def finished(self) -> bool:
        return self.answer.stop_reason != INTERRUPTED

    def to_experience(self, experience_id: str, group_id: str, task_id: str) -> Experience:
        token_ids = [*self.prompt, *self.answer.token_ids]
        mask, logprobs, versions = action_columns([(len(self.prompt), self.answer)], len(token_ids))
        asked = {"json_schema": self.schema} if self.schema else {}
        if self.alternatives:
            asked["alternatives"] = json.dumps([self.alternatives, self.answer.alternatives])
        return Experience(
            experience_id=experience_id,
            group_id=group_id,
            task_id=task_id,
            token_ids=np.array(token_ids, np.int32),
            prompt_length=len(self.prompt),
            action_mask=mask,
            logprobs=logprobs,
            weight_versions=versions,
            stop_reason=self.answer.stop_reason if self.finished else None,
            images=self.images,
            labels=asked,
        )

    @classmethod
    def of(cls, row: Experience) -> _Call:
        at = row.prompt_length
        spans = tuple((span.start - at, span.end - at, span.version) for span in row.weight_versions)
        tokens = tuple(row.token_ids[at:].tolist())
        logprobs = tuple(row.logprobs[at:].tolist())
        count, best = json.loads(row.labels.get("alternatives", "[0, []]"))
        others = tuple(tuple((token, logprob) for token, logprob in each) for each in best)
        answer = Completion(tokens, logprobs, spans, row.stop_reason or INTERRUPTED, others)
        return cls(row.token_ids[:at].tolist(), row.images, row.labels.get("json_schema", ""), count, answer)


@dataclass
class AttemptCalls:
    """The calls of one repeat, by their number from 1."""

    on_park: Callable[[], object] = lambda: None
    """Called when the attempt is parked: none of its open calls will be answered."""
    session: Session = field(default_factory=Session)
    recorded: dict[int, _Call] = field(default_factory=dict)
    """Those of before that were not made again yet."""
    made: dict[int, _Call] = field(default_factory=dict)
    open: set[asyncio.Task[Any]] = field(default_factory=set)
    """Those that wait for an answer."""
    suspended: int = 0
    """Number of open calls that are not answered any more."""
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

    def answered(self, prompt: list[int], answer: Completion) -> bool:
        """Return whether the model answered this to the prompt, perhaps at more length."""
        end = len(answer.token_ids)
        for call in self.made.values():
            if call.prompt == prompt:
                made = call.answer
                if made is answer or (made.token_ids[:end], made.logprobs[:end]) == (answer.token_ids, answer.logprobs):
                    return True
        return False

    def end(self) -> None:
        """Cancel the tasks that still wait for an answer: the attempt has ended, and nobody will train it."""
        self.ended = True
        for task in self.open:
            task.cancel()


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
        self.attempts = [AttemptCalls() for _ in range(n)]
        for row in parking.begun if parking else ():
            repeat, number = map(int, row.experience_id.removeprefix(row.group_id).strip("/").split("/"))
            self.attempts[repeat].recorded[number] = _Call.of(row)
        self._interrupting = False
        self._waiting: dict[int, tuple[_Call, int, asyncio.Future[Completion]]] = {}
        self._in_flight: dict[asyncio.Task[None], list[asyncio.Future[Completion]]] = {}
        """The requests, with what waits for their answers."""

    @property
    def parked(self) -> bool:
        """Whether an attempt is parked."""
        return any(attempt.parked for attempt in self.attempts)

    def park(self) -> None:
        """Park all attempts, with the tokens that they have."""
        self._interrupting = True
        for attempt in self.attempts:
            attempt.session.interrupt()

    def to_rows(self, group_id: str, task_id: str) -> list[Experience]:
        """Return the calls with sampled tokens, as rows."""
        return [
            call.to_experience(f"{group_id}/{repeat}/{number}", group_id, task_id)
            for repeat, attempt in enumerate(self.attempts)
            for number, call in sorted({**attempt.recorded, **attempt.made}.items())
            if call.answer.token_ids
        ]

    def cancel(self) -> None:
        """Abort what is in flight."""
        for request in self._in_flight:
            request.cancel()

    def of(self, repeat: int) -> Generate:
        """Return the `Generate` function of one repeat."""
        attempt = self.attempts[repeat]

        async def generate(
            prompt: list[int], max_tokens: int, images: tuple[str, ...], schema: str = "", alternatives: int = 0
        ) -> Completion:
            if attempt.ended:
                raise RuntimeError("the attempt has ended: await all that a workflow begins")
            number = len(attempt.made) + 1
            call = _Call(prompt, images, schema, alternatives)
            if recorded := attempt.recorded.pop(number, None):
                if recorded._replace(answer=UNBEGUN) == call:
                    call = recorded
                else:
                    log.warning(
                        "a continued attempt differs from its recorded calls from call %d on: they are sampled again",
                        number,
                    )
                    attempt.recorded.clear()
                    attempt.diverged = True
            attempt.made[number] = call
            if not call.finished:
                task = asyncio.current_task()
                assert task is not None  # a coroutine is running
                attempt.open.add(task)
                try:
                    call = await self._finish(attempt, repeat, number, call, max_tokens)
                finally:
                    attempt.open.remove(task)
                    if attempt.suspended:  # once the calls that are cancelled with this one have ended, too
                        asyncio.get_running_loop().call_soon(attempt.park_if_idle)
            return call.answer

        return generate

    async def _finish(self, attempt: AttemptCalls, repeat: int, number: int, call: _Call, max_tokens: int) -> _Call:
        """Return the call when it is finished. It never returns once the attempt is to be parked."""
        room = max_tokens - len(call.answer.token_ids)
        budget = None if attempt.diverged or call.schema else self._budget
        left = room if budget is None else min(room, budget - attempt.sampled)
        if left > 0 and not self._interrupting:
            if number == 1 and self._n > 1:
                completion = await self._first(repeat, call, left)
            else:
                request = self._request(call, 1, left, number=number, repeat=repeat)
                [completion] = await self._engines.generate(request, [attempt.session])
            attempt.sampled += len(completion.token_ids)
            if completion.stop_reason == "length" and left < room:  # cut by the budget
                completion = replace(completion, stop_reason=INTERRUPTED)
            if not call.schema or completion.stop_reason != INTERRUPTED:
                attempt.made[number] = call = call._replace(answer=call.answer.continued(completion))
            if call.finished:
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
            begun = len(call.answer.token_ids)
            seed = derive_seed(seed, f"{number}/{begun}" if begun else str(number)) + repeat
        sampling = replace(self._sampling, max_tokens=max_tokens, seed=seed, json_schema=call.schema)
        prompt = [*call.prompt, *call.answer.token_ids]
        return Request(prompt, n, sampling, call.images, alternatives=call.alternatives)

    async def _first(self, repeat: int, call: _Call, max_tokens: int) -> Completion:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)  # after all repeats that are ready have run
        answer = loop.create_future()
        self._waiting[repeat] = (call, max_tokens, answer)
        try:
            return await answer
        except asyncio.CancelledError:
            for request, answers in self._in_flight.items():
                if all(each.cancelled() for each in answers):  # nothing waits for it
                    request.cancel()
            raise

    def _send(self) -> None:
        waiting = [(repeat, *rest) for repeat, rest in sorted(self._waiting.items()) if not rest[-1].done()]
        self._waiting = {}
        merged = len(waiting) == self._n and all(each[1:3] == waiting[0][1:3] for each in waiting)
        for group in [waiting] if merged else [[each] for each in waiting]:
            repeat, call, max_tokens, _ = group[0]
            request = self._request(call, len(group), max_tokens, number=1, repeat=repeat)
            sessions = [self.attempts[each[0]].session for each in group]
            answers = [each[-1] for each in group]
            task = asyncio.create_task(self._answer(answers, request, sessions))
            self._in_flight[task] = answers  # the event loop keeps only weak references
            task.add_done_callback(self._in_flight.pop)

    async def _answer(
        self, answers: list[asyncio.Future[Completion]], request: Request, sessions: list[Session]
    ) -> None:
        outcomes: Sequence[Completion | Exception]
        try:
            outcomes = await self._engines.generate(request, sessions)
        except Exception as error:  # raised in the repeats that wait for the answers
            outcomes = [error] * len(answers)
        for answer, outcome in zip(answers, outcomes, strict=True):
            settle(answer, outcome)


def derive_seed(seed: int, name: str) -> int:
    """Derive a seed from a base seed and a name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "little") >> 1
