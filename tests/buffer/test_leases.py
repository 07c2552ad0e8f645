"""What a step gets, and gets again, on a real actor with rows in the object store."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rayrft.algorithms import build
from rayrft.buffer.client import BufferWriter
from rayrft.buffer.ledger import Ledger
from rayrft.errors import LeaseEnded, RayrftError
from rayrft.experience import MASKED, pack, to_batch
from rayrft.trainer.batches import fetch_rows
from tests.buffer.actor import admit, ledger, put, rows_of
from tests.buffer.in_process import LocalBuffer, ObjectTable, small
from tests.buffer.rows import expert_rows, group, plan, trained_ids
from tests.scripted import remote


def test_the_rows_of_a_group_are_dealt_over_ranks_with_the_advantages_of_the_whole_group(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(admit(buffer, 10))
    rows = [replace(row, status=MASKED if number == 3 else "finished") for number, row in enumerate(group(0, 5))]
    put(buffer, ticket, rows, {"truncated": 1})
    lease = ray.get(buffer.lease.remote(0, 4, 5))
    assert [len(fetch_rows(share, build("dr_grpo"))) for share in lease.shares] == [1] * 4
    found = {row.experience: row.advantages.tolist() for row in rows_of(lease, "dr_grpo")}
    # The rewards are 0 to 4. The masked row with 3 counts in their mean, 2, and is not trained.
    assert found == {f"0/{number}": [0.0, *[number - 2.0] * 3] for number in (0, 1, 2, 4)}
    assert lease.usual_rows == 4
    counted = ledger(buffer)
    assert (counted.sampled, counted.held, counted.dropped) == (5, 4, {"truncated": 1})
    ray.get(buffer.ack.remote(0))
    assert ledger(buffer).trained == 4


def test_a_lease_is_idempotent_by_step_and_counts_as_trained_once(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(admit(buffer, 10))
    put(buffer, ticket)
    first, again = (ray.get(buffer.lease.remote(0, 1, 5)) for _ in range(2))
    assert trained_ids(first) == trained_ids(again)
    assert ledger(buffer).held == 2
    ray.get(buffer.ack.remote(0))
    assert ledger(buffer) == Ledger(sampled=2, trained=2)


def test_a_waiting_lease_is_woken_by_the_last_group(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(2)))
    first, second = ray.get(admit(buffer, 10))
    waiting = buffer.lease.remote(0, 1, 60)
    put(buffer, first)
    assert ray.wait([waiting], timeout=0)[0] == []
    put(buffer, second)
    assert trained_ids(ray.get(waiting, timeout=120)) == [0, 1, 10, 11]


def test_a_lease_that_waits_too_long_says_what_for(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(2)))
    [ticket] = ray.get(admit(buffer, 1))
    ray.get(buffer.fail.remote(ticket, "prompt_too_long"))
    with pytest.raises(LeaseEnded, match=r"step 0 needs 2 groups, and .*: 0 ready, 0 running.*prompt_too_long"):
        ray.get(buffer.lease.remote(0, 1, 0.1))


def test_groups_that_are_dropped_are_no_progress_of_a_step_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("rayrft.runtime.waits.time", SimpleNamespace(monotonic=lambda: now[0]))
    ObjectTable(monkeypatch)
    local = LocalBuffer(tmp_path, small())

    async def wait() -> None:
        await local.buffer.open_stage(plan(2))
        first, second = await local.buffer.admit("life", 0, 2)
        leasing = asyncio.ensure_future(local.buffer.lease(0, 1, 60))
        while not (await local.buffer.waiting()).waits:  # noqa: ASYNC110
            await asyncio.sleep(0)
        now[0] = 10.0
        await local.buffer.fail(first, "zero_variance")
        [waits] = (await local.buffer.waiting()).waits
        assert waits.quiet_s == 10 and "zero_variance" in waits.what
        await BufferWriter(remote(local.buffer)).put(to_batch(group(0)), ticket=second)
        [waits] = (await local.buffer.waiting()).waits
        assert waits.quiet_s == 0
        leasing.cancel()

    local.run(wait())
    local.kill()


def test_a_step_may_take_long_as_long_as_groups_become_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its deadline is on progress: from one group that is ready to the next."""
    ObjectTable(monkeypatch)
    local, limits = LocalBuffer(tmp_path, small()), list[float]()
    reschedule = asyncio.Timeout.reschedule

    def noted(self: asyncio.Timeout, when: float | None) -> None:
        if when is not None and when > local.loop.time() + 50:  # the lease's, of 60 s
            limits.append(when)
        reschedule(self, when)

    monkeypatch.setattr(asyncio.Timeout, "reschedule", noted)

    async def wait() -> None:
        writer = BufferWriter(remote(local.buffer))
        await local.buffer.open_stage(plan(3))
        tickets = await local.buffer.admit("life", 0, 3)
        leasing = asyncio.ensure_future(local.buffer.lease(0, 1, 60))
        while not (await local.buffer.waiting()).waits:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await writer.put(to_batch(group(0)), ticket=tickets[0])
        await writer.put(to_batch(group(1)), ticket=tickets[1])
        assert len(limits) == 3 and limits[0] < limits[1] < limits[2]
        await local.buffer.fail(tickets[2], "workflow_error")
        assert len(limits) == 3, "a group that failed brings the step no nearer"
        leasing.cancel()

    local.run(wait())
    local.kill()


def test_staleness_is_counted_from_the_oldest_token(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1, max_staleness=2, version=7)))
    [ticket, *_] = ray.get(admit(buffer, 10))
    put(buffer, ticket, group(ticket.sequence, version=6))
    assert ray.get(buffer.lease.remote(7, 1, 5)).staleness == (1,)


def test_expert_rows_join_a_batch_as_configured(buffer: Any) -> None:
    assert ray.get(buffer.load.remote("gold", [pack(to_batch(expert_rows(5)))])) == 5
    ray.get(buffer.open_stage.remote(plan(1, expert_rows=3, demonstrations="gold")))
    [ticket] = ray.get(admit(buffer, 10))
    put(buffer, ticket)
    lease = ray.get(buffer.lease.remote(0, 2, 5))
    rows = rows_of(lease)
    assert (lease.usual_rows, lease.expert_rows) == (2, 3)
    assert sum(row.expert for row in rows) == 3
    assert all(not row.advantages.any() for row in rows if row.expert)
    assert ledger(buffer).sampled == 2, "expert rows are not sampled rows"


def test_a_requeued_step_gives_its_groups_to_another(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(admit(buffer))
    put(buffer, ticket)
    lease = ray.get(buffer.lease.remote(0, 1, 5))
    rows = trained_ids(lease)
    ray.get(buffer.requeue.remote(0, lease.draw))
    assert trained_ids(ray.get(buffer.lease.remote(7, 1, 5))) == rows
    assert ledger(buffer).held == 2


def test_a_trainer_that_starts_again_gets_the_same_batches_in_the_same_order(buffer: Any) -> None:
    ray.get(buffer.load.remote("gold", [pack(to_batch(expert_rows(5)))]))
    ray.get(buffer.open_stage.remote(plan(1, expert_rows=2, demonstrations="gold")))
    before = []
    for step in range(4):
        [ticket] = ray.get(admit(buffer))
        put(buffer, ticket)
        before.append([row.token_ids.tolist() for row in rows_of(ray.get(buffer.lease.remote(step, 1, 5)))])
        if step < 3:
            ray.get([buffer.ack.remote(step), buffer.advance.remote(step + 1)])
        if step == 1:
            ray.get(buffer.cover.remote(1))
    ray.get(buffer.resume.remote(1, "again"))
    assert ledger(buffer).trained == 2, "only step 0 is in the checkpoint"
    for step in (1, 2, 3):
        lease = ray.get(buffer.lease.remote(step, 1, 5))
        assert [row.token_ids.tolist() for row in rows_of(lease)] == before[step]
        ray.get([buffer.ack.remote(step), buffer.advance.remote(step + 1)])
    assert ledger(buffer).trained == 8
    with pytest.raises(RayrftError, match=r"deleted, because a checkpoint covers it .* of step 1 or later"):
        ray.get(buffer.lease.remote(0, 1, 0.1))


@pytest.mark.parametrize("ends", ["its steps", "its producers"])
def test_groups_are_held_for_people_as_long_as_more_can_come(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ObjectTable(monkeypatch)
    buffer = LocalBuffer(tmp_path, small(max_rows=10_000, max_bytes=1 << 30, memory_bytes=1 << 30))
    steps = 5 if ends == "its steps" else None
    buffer.do("open_stage", plan(1, max_staleness=2, hold_steps=2, steps=steps))
    waits, stale, calls = ("LeaseEnded", "deadline"), list[int](), itertools.count()
    for step in range(5):
        ended = ends == "its producers" and step == 3
        tickets = [] if ended or not buffer.may_admit() else buffer.do("admit", "explorer", next(calls), 10)
        if ended:
            buffer.do("finish")
        for ticket in tickets:
            assert buffer.lease(step) == waits, "another group is running"
            buffer.put([(group(ticket.sequence, version=ticket.version), ticket)])
        leased = buffer.lease(step)
        assert leased[2] == 2, leased
        stale += leased[4]
        buffer.do("ack", step)
        buffer.do("advance", step + 1)
    assert stale == [0, 1, 2, 2, 2], "each waits for two steps, and none is older than the bound"
    buffer.kill()
