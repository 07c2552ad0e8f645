"""Calls of processes in batches: how many wait together, what is made again, and what all calls raise in the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rayrft.errors import CallFailed, ConfigError, ProcessDied
from rayrft.runtime.processes import calls
from rayrft.runtime.processes.calls import CallQueue, QueuedCall


class Pool:
    """Leases stand-ins of processes; ``failures`` are raised by the first leases."""

    def __init__(self, *failures: CallFailed, most: int = 10) -> None:
        self.failures, self.most = list(failures), most
        self.leases, self.idle = 0, True
        self.lowered = asyncio.Event()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Any]:
        self.leases, self.idle = self.leases + 1, True
        if self.failures:
            raise self.failures.pop(0)
        yield self

    @property
    def low_priority(self) -> bool:
        return self.lowered.is_set()

    def lower_priority(self) -> None:
        self.lowered.set()

    def kill(self) -> None:
        self.idle = False

    async def call(self, method: str, deadline_s: float) -> int:
        return self.most

    async def close(self) -> None:
        self.idle = False


class Queue:
    """A queue of calls that take so many seconds each, by the clock of the test, and raise their argument if it is an
    error: the first time, or always if the error is in a list."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pool: Pool, took_s: float = 0.001, **settings: Any) -> None:
        self.batches, self.now = list[list[Any]](), 0.0
        monkeypatch.setattr(calls.time, "perf_counter", lambda: self.now)

        async def make(worker: Any, batch: Sequence[QueuedCall[Any, Any]]) -> list[Any]:
            self.batches.append([call.argument for call in batch])
            self.now += took_s * len(batch)
            for call in batch:
                error = call.argument[0] if isinstance(call.argument, list) else call.argument
                if isinstance(error, Exception) and (error is not call.argument or call.tries == 1):
                    raise error
            return [call.argument for call in batch]

        self.queue = CallQueue[Any, Any](
            pool,  # type: ignore[arg-type]
            make,
            **{"workers": 1, "spare": 0, "deadline_s": 60.0, "start_s": 60.0, "failure": _failure, **settings},
        )

    async def results(self, *arguments: Any) -> list[Any]:
        return await asyncio.gather(*(self.queue.put(each).done for each in arguments), return_exceptions=True)


def _failure(error: CallFailed) -> ConfigError:
    return ConfigError("cannot be built", field="reward.name", value=error.problem)


@pytest.mark.parametrize(("took_s", "most", "together"), [(0.001, 20, 10), (5.0, 20, 3), (100.0, 20, 1), (0.001, 4, 4)])
async def test_calls_that_wait_are_made_together_if_a_part_of_the_deadline_is_enough(
    took_s: float, most: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(monkeypatch, Pool(most=most), took_s)
    await queue.queue.open()
    assert await queue.results("the first shows how long a call takes", *range(10)) == [queue.batches[0][0], *range(10)]
    assert [len(batch) for batch in queue.batches[:2]] == [1, together]
    await queue.queue.close()


async def test_calls_that_fail_together_are_made_again_alone_and_a_lone_one_only_for_some_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    died, wrong = ProcessDied("gone"), CallFailed("wrong")
    queue = Queue(monkeypatch, Pool())
    await queue.queue.open()
    assert await queue.results("one", "two", died, "three") == ["one", "two", died, "three"]
    assert queue.batches[1:] == [["two", died, "three"], ["two"], [died], ["three"]]
    assert await queue.results([died]) == [died] and queue.batches[-2:] == [[[died]]] * 2, "twice in all"
    assert await queue.results([wrong]) == [wrong] and queue.batches[-2:] == [[[died]], [[wrong]]], "once"
    await queue.queue.close()


async def test_each_batch_has_a_new_object_if_it_is_to_be_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(monkeypatch, pool := Pool(), fresh=True)
    await queue.queue.open()
    for number in range(3):
        assert await queue.results(number) == [number] and pool.leases >= number + 1
    await queue.queue.close()
    assert pool.leases >= 3


async def test_the_process_of_a_call_that_takes_half_of_its_deadline_has_low_priority_and_ends_with_the_call() -> None:
    pool = Pool()

    async def make(worker: Any, batch: Sequence[QueuedCall[str, str]]) -> list[str]:
        if batch[0].argument == "slow":
            await asyncio.wait_for(pool.lowered.wait(), 20)
        return [call.argument for call in batch]

    settings: dict[str, Any] = {"workers": 1, "spare": 0, "deadline_s": 0.1, "start_s": 60.0, "failure": _failure}
    queue = CallQueue[str, str](pool, make, **settings)  # type: ignore[arg-type]
    await queue.open()
    assert await queue.put("fine").done == "fine" and pool.idle and pool.leases == 1
    assert await queue.put("slow").done == "slow"
    pool.lowered.clear()
    assert await queue.put("fine").done == "fine" and pool.leases == 2, "in another process"
    await queue.close()


@pytest.mark.parametrize(
    ("failures", "starts"),
    [([CallFailed("no such file")], 1), ([ProcessDied("a"), ProcessDied("b"), ProcessDied("c")], 3)],
)
async def test_a_process_that_cannot_be_started_is_the_error_of_every_call(
    failures: list[CallFailed], starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(monkeypatch, pool := Pool(*failures))
    waiting = queue.queue.put("a call")
    with pytest.raises(ConfigError):
        await queue.queue.open()
    assert isinstance(waiting.done.exception(), ConfigError) and pool.leases == starts
    with pytest.raises(ConfigError):
        queue.queue.put("another")
    await queue.queue.close()
