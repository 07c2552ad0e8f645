"""Parked groups lose no token: what goes on is what would have been sampled without a break."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrft.experience import Experience, from_batch, to_batch
from rayrft.explorer.calls import GroupCalls, Parking
from rayrft.explorer.engines.exchange import INTERRUPTED, Completion, Request, Sampling, Session

EOS = 0
COMMON = Sampling(1.0, 50, (EOS,), seed=1)


class Model:
    """Continues a sequence by tokens that follow from it alone; an answer ends after ``length`` tokens."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.sampled = self.version = 0
        self.requests: list[Request] = []
        self.asked = asyncio.Event()
        self.held = False
        self.slow: dict[int, asyncio.Event] = {}

    async def generate(self, request: Request, sessions: Sequence[Session] = ()) -> list[Completion]:
        self.requests.append(request)
        self.asked.set()
        if request.prompt[0] in self.slow:
            await self.slow[request.prompt[0]].wait()
        interrupted = asyncio.Event()
        sessions[0].interrupts[interrupted.set] = None
        if self.held:
            await interrupted.wait()
        return [self._answer(request, cut=interrupted.is_set()) for _ in range(request.n)]

    def _answer(self, request: Request, *, cut: bool) -> Completion:
        begin, *rest = request.prompt
        length = self.lengths[begin % len(self.lengths)]
        whole = [100 * begin + place for place in range(1, length)] + [EOS]
        done = len(rest)
        most = min(request.sampling.max_tokens, 2 if cut else 50)
        ids = tuple(whole[done : done + most])
        self.sampled += len(ids)
        ended = "stop" if ids and ids[-1] == EOS else INTERRUPTED if cut else "length"
        return Completion(ids, tuple(-float(i) for i in ids), ((0, len(ids), self.version),) if ids else (), ended)


async def attempt(calls: GroupCalls, repeat: int, prompts: list[list[int]], max_tokens: int) -> list[Completion] | None:
    """Make calls one after another; None if the attempt is parked."""
    generate = calls.of(repeat)

    async def work() -> list[Completion]:
        return [await generate(prompt, max_tokens, ()) for prompt in prompts]

    task = asyncio.ensure_future(work())
    calls.attempts[repeat].on_park = task.cancel
    await asyncio.wait({task})
    return None if task.cancelled() else task.result()


async def iteration(
    model: Model, n: int, prompts: list[list[int]], budget: int | None, begun: list[Experience], max_tokens: int = 50
) -> tuple[list[list[Completion] | None], list[Experience]]:
    """One life of a group: the answers of its attempts, and what it is parked with, as it comes back from the store."""
    calls = GroupCalls(model, n, COMMON, Parking(budget, begun))
    found = await asyncio.gather(*(attempt(calls, repeat, prompts, max_tokens) for repeat in range(n)))
    rows = calls.to_rows("group", "task")
    assert calls.parked == (None in found)
    return found, from_batch(to_batch(rows)) if calls.parked else []


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    n=st.integers(1, 3),
    turns=st.integers(1, 3),
    budget=st.integers(1, 12),
    most=st.integers(1, 40),
)
def test_in_however_many_pieces_an_answer_comes_it_is_the_same_and_no_token_is_sampled_twice(
    lengths: list[int], n: int, turns: int, budget: int, most: int
) -> None:
    async def history() -> None:
        prompts = [[number + 1] for number in range(turns)]
        whole, _ = await iteration(Model(lengths), n, prompts, None, [], most)
        model, begun, found = Model(lengths), list[Experience](), list[list[Completion] | None]()
        for version in range(200):
            model.version = version // 2  # some pieces are of one version
            before = model.sampled
            found, begun = await iteration(model, n, prompts, budget, begun, most)
            assert model.sampled - before <= n * budget
            if not begun:
                break
            assert sum(int(row.action_mask.sum()) for row in begun) == model.sampled
        for parts, answers in zip(found, whole, strict=True):
            assert parts is not None and answers is not None
            for part, answer in zip(parts, answers, strict=True):
                assert (part.token_ids, part.stop_reason) == (answer.token_ids, answer.stop_reason)
                assert part.logprobs == answer.logprobs
                assert [place for start, end, _ in part.versions for place in range(start, end)] == list(
                    range(len(part.token_ids))
                )
                versions = [version for _, _, version in part.versions]
                assert versions == sorted(set(versions)), "a span for each version"
        assert model.sampled == sum(len(c.token_ids) for answers in whole for c in answers or ())

    asyncio.run(history())


async def test_the_first_answers_of_a_group_are_one_request_and_what_goes_on_draws_other_numbers() -> None:
    model = Model([10])
    _, begun = await iteration(model, 3, [[1]], 4, [])
    [first] = model.requests
    assert (first.n, first.sampling.max_tokens) == (3, 4)
    await iteration(model, 3, [[1]], 4, begun)
    seeds = [request.sampling.seed for request in model.requests]
    assert len(model.requests) == 1 + 1 and len(set(seeds)) == 2  # equal answers go on as one request, too
    assert model.requests[1].prompt == [1, 101, 102, 103, 104]


async def test_a_group_told_to_park_keeps_what_its_answers_have() -> None:
    model = Model([10])
    model.held = True
    calls = GroupCalls(model, 2, COMMON, Parking())
    running = [asyncio.ensure_future(attempt(calls, repeat, [[1], [2]], 50)) for repeat in range(2)]
    await model.asked.wait()
    calls.park()
    assert await asyncio.gather(*running) == [None, None] and calls.parked
    begun = from_batch(to_batch(calls.to_rows("group", "task")))
    assert [row.experience_id for row in begun] == ["group/0/1", "group/1/1"]
    assert all(row.token_ids.tolist() == [1, 101, 102] and row.stop_reason is None for row in begun)
    model.held = False
    found, _ = await iteration(model, 2, [[1], [2]], None, begun)
    assert all(answers and len(answers[0].token_ids) == 10 for answers in found)
    assert model.sampled == 2 * (10 + 10)


async def test_an_attempt_that_goes_another_way_samples_anew_from_there_on() -> None:
    model = Model([6])
    _, begun = await iteration(model, 1, [[1], [2], [3]], 14, [])
    assert [row.prompt_length for row in begun] == [1, 1, 1]
    found, _ = await iteration(model, 1, [[1], [7], [3]], None, begun)
    assert found[0] is not None
    assert [answer.token_ids[0] for answer in found[0]] == [101, 701, 301]
    assert model.sampled == 14 + 6 + 6


async def test_an_answer_that_follows_a_schema_is_sampled_whole_and_known_by_the_schema() -> None:
    model = Model([10])
    model.held = True
    calls = GroupCalls(model, 1, COMMON, Parking(budget=3))

    async def follow(calls: GroupCalls, schema: str) -> list[Completion]:
        return [await calls.of(0)([begin], 50, (), schema) for begin in (1, 2)]

    running = asyncio.ensure_future(follow(calls, "{}"))
    calls.attempts[0].on_park = running.cancel
    await model.asked.wait()
    calls.park()
    await asyncio.wait({running})
    assert calls.parked and calls.to_rows("group", "task") == [], "no engine can continue it"
    model.held = False
    await follow(calls := GroupCalls(model, 1, COMMON, Parking(budget=3)), "{}")
    assert [request.sampling.json_schema for request in model.requests] == ["{}"] * 3
    begun, asked = from_batch(to_batch(calls.to_rows("group", "task"))), len(model.requests)
    assert len(begun) == 2 and all(len(row.token_ids) == 11 for row in begun)
    for schema, again in (("{}", 0), ('{"type": "object"}', 2)):
        await follow(GroupCalls(model, 1, COMMON, Parking(begun=begun)), schema)
        assert len(model.requests) - asked == again


async def one_is_suspended(n: int = 1) -> tuple[Model, GroupCalls, list[asyncio.Future[Completion]]]:
    """Two open calls of attempt 0: one is sampled, and the other has spent the budget."""
    model = Model([3, 9])
    model.slow[2] = asyncio.Event()
    calls = GroupCalls(model, n, COMMON, Parking(5))
    opened = [asyncio.ensure_future(calls.of(0)([prompt], 50, ())) for prompt in (2, 1)]
    for _ in range(10):
        await asyncio.sleep(0)
    return model, calls, opened


async def test_an_attempt_is_parked_when_none_of_its_concurrent_calls_goes_on() -> None:
    model, calls, opened = await one_is_suspended()
    calls.attempts[0].on_park = asyncio.gather(*opened, return_exceptions=True).cancel
    assert not calls.parked
    model.slow[2].set()
    await asyncio.wait(opened)
    assert opened[1].cancelled() and calls.attempts[0].parked
    rows = calls.to_rows("group", "task")
    assert {row.experience_id: row.stop_reason for row in rows} == {"group/0/1": "stop", "group/0/2": None}


async def test_an_attempt_whose_deadline_is_over_is_not_parked_for_its_suspended_call() -> None:
    _, calls, opened = await one_is_suspended()
    work = asyncio.gather(*opened, return_exceptions=True)
    work.cancel()
    await asyncio.wait(opened)
    assert not calls.parked


async def test_a_suspended_call_that_is_given_up_does_not_park_the_one_that_goes_on() -> None:
    _, calls, (goes_on, suspended) = await one_is_suspended()
    suspended.cancel()
    await asyncio.wait({suspended})
    await asyncio.sleep(0)
    assert suspended.cancelled() and not goes_on.done() and not calls.parked
    goes_on.cancel()


async def test_an_attempt_that_has_ended_makes_no_calls() -> None:
    _, calls, opened = await one_is_suspended(n=2)
    calls.attempts[0].end()
    await asyncio.wait(opened)
    assert all(each.cancelled() for each in opened) and not calls.parked
    with pytest.raises(RuntimeError):
        await calls.of(0)([3], 50, ())


async def test_an_attempt_that_goes_another_way_is_not_parked_for_its_budget_and_recorded_calls_are_kept() -> None:
    model = Model([9])
    _, begun = await iteration(model, 1, [[1], [2]], 10, [])
    calls = GroupCalls(model, 1, COMMON, Parking(5, begun))
    assert [row.experience_id for row in calls.to_rows("group", "task")] == ["group/0/1", "group/0/2"]
    answer = await asyncio.wait_for(calls.of(0)([7], 50, ()), 10)
    assert answer.stop_reason == "stop" and len(answer.token_ids) == 9 and not calls.parked


@pytest.mark.parametrize("merged", [True, False])
async def test_a_request_is_aborted_when_no_attempt_waits_for_it_and_not_before(merged: bool) -> None:
    aborted = list[int]()

    class Endless(Model):
        async def generate(self, request: Request, sessions: Sequence[Session] = ()) -> list[Completion]:
            self.requests.append(request)
            try:
                return await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                aborted.append(request.prompt[0])
                raise

    async def turns() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    model = Endless([5])
    calls = GroupCalls(model, 2, COMMON)
    prompts = [[1], [1]] if merged else [[1], [2]]
    first, second = (asyncio.ensure_future(calls.of(k)(prompts[k], 5, ())) for k in range(2))
    await turns()
    assert [request.n for request in model.requests] == ([2] if merged else [1, 1])
    first.cancel()
    await turns()
    assert aborted == ([] if merged else [1])
    second.cancel()
    await turns()
    assert aborted == ([1] if merged else [1, 2])
