"""Tickets, what comes of them, and producers that end or die, on a real actor."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray

from rayrft.buffer import client
from rayrft.buffer.client import BufferWriter
from rayrft.buffer.ledger import Ledger
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.errors import DataError, LeaseEnded
from rayrft.experience import Experience, pack, to_batch
from tests.buffer.actor import Start, admit, ledger, put
from tests.buffer.rows import expert_rows, group, plan, trained_ids
from tests.errors import about
from tests.scripted import handle


def test_admission_waits_for_new_weights_and_is_woken_by_them(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(admit(buffer, 10))
    put(buffer, ticket)
    waiting = admit(buffer)
    ray.get(buffer.lease.remote(0, 1, 5))
    ray.get(buffer.ack.remote(0))
    assert ray.wait([waiting], timeout=0)[0] == []
    ray.get(buffer.advance.remote(1))
    [later] = ray.get(waiting, timeout=120)
    assert (later.version, later.deadline) == (1, 1)


def test_a_closed_stage_wakes_all_that_a_producer_waits_for(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(admit(buffer, 10))
    put(buffer, ticket)
    waiting = [admit(buffer), buffer.leased.remote(0), buffer.closed.remote()]
    ray.get(buffer.lease.remote(0, 1, 5))
    assert ray.get(buffer.leased.remote(-1)) == 0
    assert ray.wait(waiting, timeout=0)[0] == []
    ray.get(buffer.close_stage.remote())
    assert ray.get(waiting, timeout=120) == [[], 0, None]


def test_a_faulty_row_is_rejected_counted_and_never_trained(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(admit(buffer, 10))
    good, bad = group(ticket.sequence)
    put(buffer, ticket, [good, Experience(**{**vars(bad), "logprobs": bad.logprobs * np.nan})])
    assert trained_ids(ray.get(buffer.lease.remote(0, 1, 5))) == [0]
    assert ledger(buffer).dropped == {"rejected: logprobs not finite": 1}


def test_a_group_without_a_good_row_gives_its_place_back(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(admit(buffer, 10))
    put(
        buffer,
        ticket,
        [Experience(**{**vars(row), "reward": None}) for row in group(ticket.sequence)],
    )
    assert len(ray.get(admit(buffer), timeout=120)) == 1
    assert ledger(buffer).dropped == {"rejected: missing reward": 2}


def test_rows_of_another_schema_are_refused(buffer: Any) -> None:
    with pytest.raises(DataError, check=about("schema")):
        asyncio.run(BufferWriter(buffer).put(pa.RecordBatch.from_pydict({"group_id": ["x"]})))


def test_a_group_that_cannot_be_sent_is_an_error_of_its_own(buffer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full object store, for example: who waits for the receipt must not wait for ever."""
    payload, errors = client._payload, [OSError("full")]

    def sometimes(message: pa.Buffer) -> Any:
        if errors:
            raise errors.pop()
        return payload(message)

    async def put_two() -> list[Any]:
        writer = BufferWriter(handle(buffer))
        async with asyncio.timeout(60):
            first = await asyncio.gather(writer.put(to_batch(group(0)), ticket=one), return_exceptions=True)
            return [*first, await writer.put(to_batch(group(1)), ticket=two)]

    monkeypatch.setattr(client, "_payload", sometimes)
    ray.get(buffer.open_stage.remote(plan(2)))
    one, two = ray.get(admit(buffer, 10))
    refused, receipt = asyncio.run(put_two())
    assert isinstance(refused, OSError) and receipt.faults == ()


def test_a_group_of_an_ended_stage_is_not_taken_for_one_of_the_next(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [old] = ray.get(admit(buffer, 10))
    ray.get(buffer.close_stage.remote())
    ray.get(buffer.open_stage.remote(plan(1, version=5)))
    [new] = ray.get(admit(buffer, 10))
    put(buffer, old)
    put(buffer, new)
    lease = ray.get(buffer.lease.remote(0, 1, 5))
    assert trained_ids(lease) == [new.sequence * 10, new.sequence * 10 + 1]
    assert ledger(buffer).dropped == {"late": 2}


def test_groups_left_over_from_a_stage_are_dropped_and_counted(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1, max_staleness=1)))
    for ticket in ray.get(admit(buffer, 10)):
        put(buffer, ticket)
    ray.get(buffer.lease.remote(0, 1, 5))
    ray.get(buffer.ack.remote(0))
    ray.get(buffer.close_stage.remote())
    ray.get(buffer.open_stage.remote(plan(1)))
    assert ledger(buffer).dropped == {"stage_ended": 2}


def test_faulty_demonstrations_are_refused(buffer: Any) -> None:
    bad = Experience(**{**vars(expert_rows(1)[0]), "prompt_length": 4})
    with pytest.raises(DataError, match=r"demonstrations\.gold: row 0 is invalid: empty prompt"):
        ray.get(buffer.load.remote("gold", [pack(to_batch([bad]))]))


def test_unknown_demonstrations_are_refused(buffer: Any) -> None:
    with pytest.raises(DataError, check=about("demonstrations", "gold")):
        ray.get(buffer.open_stage.remote(plan(0, expert_rows=3, demonstrations="gold")))


def test_a_group_that_is_sent_again_is_taken_once(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(admit(buffer))
    put(buffer, ticket)
    put(buffer, ticket)
    assert ledger(buffer).sampled == 2
    ray.get(buffer.lease.remote(0, 1, 5))
    ray.get(buffer.ack.remote(0))
    put(buffer, ticket)
    assert ledger(buffer) == Ledger(sampled=2, trained=2)


def test_a_request_for_tickets_that_is_made_again_gets_the_same(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(2)))
    first = ray.get(buffer.admit.remote("one", 1, 1))
    assert ray.get(buffer.admit.remote("one", 1, 1)) == first
    assert ray.get(buffer.admit.remote("one", 2, 1)) != first


def test_a_request_for_tickets_that_comes_after_a_later_one_gets_none(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(3)))
    [later] = ray.get(buffer.admit.remote("one", 2, 1))
    assert ray.get(buffer.admit.remote("one", 1, 1)) == []
    assert ray.get(buffer.admit.remote("one", 2, 1)) == [later]


def test_no_group_starts_while_the_trainer_repeats_steps(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    for step in range(2):
        [ticket] = ray.get(admit(buffer))
        put(buffer, ticket)
        ray.get(buffer.lease.remote(step, 1, 5))
        ray.get([buffer.ack.remote(step), buffer.advance.remote(step + 1)])
    ray.get(buffer.resume.remote(0, "again"))
    waiting = buffer.admit.remote("of the resumed run", 1, 10)
    for step in range(2):
        assert ray.wait([waiting], timeout=0)[0] == []
        ray.get(buffer.lease.remote(step, 1, 5))
        ray.get([buffer.ack.remote(step), buffer.advance.remote(step + 1)])
    assert ray.get(waiting, timeout=120)[0].version == 2


def test_tickets_of_the_life_before_go_to_the_next(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    first = ray.get(buffer.admit.remote("one", 1, 1))
    ray.get(buffer.resume.remote(0, "again"))
    assert ray.get(buffer.admit.remote("two", 1, 1)) == first
    with pytest.raises(DataError, check=about("producer", "one")):
        ray.get(buffer.admit.remote("one", 2, 1))


def test_the_end_of_the_tasks_ends_the_lease_that_cannot_be_filled(start: Start) -> None:
    tasks = TaskSetSpec(["a", "b", "c"], [0, 0, 0], [1.0], sampler="sequential", seed=0, epochs=1)
    buffer = start(tasks=tasks)
    ray.get(buffer.open_stage.remote(plan(2)))
    tickets = ray.get(admit(buffer))
    assert [ticket.task for ticket in tickets] == ["a", "b"]
    for ticket in tickets:
        put(buffer, ticket)
    ray.get(buffer.lease.remote(0, 1, 5))
    ray.get([buffer.ack.remote(0), buffer.advance.remote(1)])
    [last] = ray.get(admit(buffer))
    assert last.task == "c"
    waiting = buffer.lease.remote(1, 1, 60)
    assert ray.get(admit(buffer)) == []
    put(buffer, last)
    with pytest.raises(LeaseEnded, match="1 ready, 0 running") as caught:
        ray.get(waiting, timeout=120)
    assert caught.value.cause.value == "end_of_data"


def test_what_rollouts_say_of_a_task_reaches_the_task_sampler(start: Start) -> None:
    buffer = start(tasks=TaskSetSpec(["a", "b"], [0, 0], [1.0], sampler="tests.buffer.rows:hardest", seed=0))
    ray.get(buffer.open_stage.remote(plan(1)))
    [first] = ray.get(admit(buffer))
    put(buffer, first, scored=2, reward_sum=2.0)
    ray.get(buffer.lease.remote(0, 1, 5))
    ray.get([buffer.ack.remote(0), buffer.advance.remote(1)])
    [second] = ray.get(admit(buffer))
    assert {first.task, second.task} == {"a", "b"}
