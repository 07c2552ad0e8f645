"""The Buffer's contract, on a real actor with rows in the object store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ray

from rayrft.buffer.buffer import Buffer, StagePlan
from rayrft.buffer.experience import Experience, VersionSpan, to_batch
from rayrft.buffer.lease import Lease
from rayrft.buffer.schedule import Ticket
from rayrft.buffer.store import GroupReport
from rayrft.errors import DataError, RayrftError
from rayrft.trainer.batches import fetch_rows

pytestmark = pytest.mark.usefixtures("ray_cluster")


def group(ticket: Ticket, rows: int = 2, *, length: int = 4, version: int | None = None) -> list[Experience]:
    mask = np.array([0] + [1] * (length - 1), dtype=np.uint8)
    return [
        Experience(
            experience_id=f"{ticket.sequence}/{row}",
            group_id=str(ticket.sequence),
            task_id="t",
            token_ids=np.full(length, ticket.sequence * 10 + row, dtype=np.int32),
            prompt_length=1,
            action_mask=mask,
            logprobs=-mask.astype(np.float32),
            weight_versions=(VersionSpan(1, length, ticket.version if version is None else version),),
            reward=float(row),
            advantages=mask.astype(np.float32),
        )
        for row in range(rows)
    ]


def expert(count: int) -> list[Experience]:
    rows = group(Ticket(90, 0, 0), count)
    return [Experience(**{**vars(row), "source": "expert", "advantages": None, "weight_versions": ()}) for row in rows]


def plan(groups: int = 2, **changes: Any) -> StagePlan:
    defaults = {"expert_rows": 0, "demonstrations": None, "max_staleness": 0, "over_sampling": 1.0, "version": 0}
    return StagePlan(groups=groups, **{**defaults, **changes})


@pytest.fixture
def buffer() -> Any:
    actor = ray.remote(Buffer).options(num_cpus=0, max_concurrency=100).remote(seed=0)
    yield actor
    ray.kill(actor)


def put(buffer: Any, ticket: Ticket, rows: list[Experience] | None = None) -> None:
    rows = group(ticket) if rows is None else rows
    report = GroupReport(rows=len(rows), reward_sum=1.0, scored=len(rows), tokens=6)
    ray.get(buffer.put.remote(ticket, [ray.put(to_batch(rows))], report))


def trained_ids(lease: Lease) -> list[int]:
    return sorted(int(row.token_ids[0]) for share in lease.shares for row in fetch_rows(share))


def ledger(buffer: Any) -> dict[str, Any]:
    stats = ray.get(buffer.stats.remote())
    assert stats["sampled"] == stats["trained"] + sum(stats["dropped"].values()) + stats["held"]
    return stats


def test_a_step_gets_whole_groups_dealt_over_ranks(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(4)))
    for ticket in ray.get(buffer.admit.remote(10)):
        put(buffer, ticket)
    lease = ray.get(buffer.lease.remote(0, 2, 5))
    assert trained_ids(lease) == [0, 1, 10, 11, 20, 21, 30, 31]
    for share in lease.shares:
        assert share.tokens == 16
        firsts = [int(row.token_ids[0]) // 10 for row in fetch_rows(share)]
        assert all(firsts.count(first) == 2 for first in firsts), "a group was split over ranks"


def test_a_lease_is_idempotent_by_step_and_counts_as_trained_once(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(buffer.admit.remote(10))
    put(buffer, ticket)
    first, again = (ray.get(buffer.lease.remote(0, 1, 5)) for _ in range(2))
    assert trained_ids(first) == trained_ids(again)
    assert ledger(buffer)["held"] == 2
    ray.get(buffer.ack.remote(0))
    assert ledger(buffer) == ledger(buffer) | {"sampled": 2, "trained": 2, "held": 0}


def test_a_waiting_lease_is_woken_by_the_last_group(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(2)))
    first, second = ray.get(buffer.admit.remote(10))
    waiting = buffer.lease.remote(0, 1, 60)
    put(buffer, first)
    assert ray.wait([waiting], timeout=0)[0] == []
    put(buffer, second)
    assert trained_ids(ray.get(waiting, timeout=10)) == [0, 1, 10, 11]


def test_a_lease_that_waits_too_long_says_what_for(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(2)))
    [ticket] = ray.get(buffer.admit.remote(1))
    ray.get(buffer.fail.remote(ticket, "prompt_too_long"))
    with pytest.raises(
        RayrftError, match=r"waited 0\.1 s for 2 groups for step 0: 0 ready, 0 running.*prompt_too_long"
    ):
        ray.get(buffer.lease.remote(0, 1, 0.1))


def test_admission_waits_for_new_weights_and_is_woken_by_them(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(buffer.admit.remote(10))
    put(buffer, ticket)
    waiting = buffer.admit.remote(10)
    ray.get(buffer.lease.remote(0, 1, 5))
    ray.get(buffer.ack.remote(0))
    assert ray.wait([waiting], timeout=0)[0] == []
    ray.get(buffer.advance.remote(1))
    [later] = ray.get(waiting, timeout=10)
    assert (later.version, later.deadline) == (1, 1)


def test_a_closed_stage_wakes_the_producer_with_nothing(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    ray.get(buffer.admit.remote(10))
    waiting = buffer.admit.remote(10)
    ray.get(buffer.close_stage.remote())
    assert ray.get(waiting, timeout=10) == []


def test_a_faulty_row_is_rejected_counted_and_never_trained(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(buffer.admit.remote(10))
    good, bad = group(ticket)
    put(buffer, ticket, [good, Experience(**{**vars(bad), "logprobs": bad.logprobs * np.nan})])
    assert trained_ids(ray.get(buffer.lease.remote(0, 1, 5))) == [0]
    assert ledger(buffer)["dropped"] == {"rejected: logprobs is not finite": 1}


def test_a_group_without_a_good_row_gives_its_place_back(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(buffer.admit.remote(10))
    put(buffer, ticket, [Experience(**{**vars(row), "advantages": None}) for row in group(ticket)])
    assert len(ray.get(buffer.admit.remote(10), timeout=10)) == 1
    assert ledger(buffer)["dropped"] == {"rejected: an own row needs advantages": 2}


def test_rows_of_another_schema_are_refused(buffer: Any) -> None:
    import pyarrow as pa

    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(buffer.admit.remote(10))
    batch = pa.RecordBatch.from_pydict({"x": [1]})
    with pytest.raises(DataError, match="not of the experience schema"):
        ray.get(buffer.put.remote(ticket, [ray.put(batch)], GroupReport(rows=1)))


def test_a_group_of_an_ended_stage_is_not_taken_for_one_of_the_next(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [old] = ray.get(buffer.admit.remote(10))
    ray.get(buffer.close_stage.remote())
    ray.get(buffer.open_stage.remote(plan(1, version=5)))
    [new] = ray.get(buffer.admit.remote(10))
    put(buffer, old)
    put(buffer, new)
    lease = ray.get(buffer.lease.remote(0, 1, 5))
    assert trained_ids(lease) == [new.sequence * 10, new.sequence * 10 + 1]
    assert ledger(buffer)["dropped"] == {"late": 2}


def test_groups_left_over_from_a_stage_are_dropped_and_counted(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1, max_staleness=1)))
    for ticket in ray.get(buffer.admit.remote(10)):
        put(buffer, ticket)
    ray.get(buffer.lease.remote(0, 1, 5))
    ray.get(buffer.ack.remote(0))
    ray.get(buffer.close_stage.remote())
    ray.get(buffer.open_stage.remote(plan(1)))
    assert ledger(buffer)["dropped"] == {"stage_ended": 2}


def test_staleness_is_counted_from_the_oldest_token(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1, max_staleness=2, version=7)))
    [ticket, *_] = ray.get(buffer.admit.remote(10))
    put(buffer, ticket, group(ticket, version=6))
    assert ray.get(buffer.lease.remote(7, 1, 5)).staleness == (1,)


def test_expert_rows_join_a_batch_as_configured(buffer: Any) -> None:
    assert ray.get(buffer.load.remote("gold", [ray.put(to_batch(expert(5)))])) == 5
    ray.get(buffer.open_stage.remote(plan(1, expert_rows=3, demonstrations="gold")))
    [ticket] = ray.get(buffer.admit.remote(10))
    put(buffer, ticket)
    lease = ray.get(buffer.lease.remote(0, 2, 5))
    rows = [row for share in lease.shares for row in fetch_rows(share)]
    assert (lease.usual_rows, lease.expert_rows) == (2, 3)
    assert sum(row.expert for row in rows) == 3
    assert all(not row.advantages.any() for row in rows if row.expert)
    assert ledger(buffer)["sampled"] == 2, "expert rows are not sampled rows"


def test_faulty_demonstrations_are_refused(buffer: Any) -> None:
    bad = Experience(**{**vars(expert(1)[0]), "prompt_length": 4})
    with pytest.raises(DataError, match=r"demonstrations\.gold: row 0 is faulty: prompt_length 4"):
        ray.get(buffer.load.remote("gold", [ray.put(to_batch([bad]))]))


def test_unknown_demonstrations_are_refused(buffer: Any) -> None:
    with pytest.raises(DataError, match="no such demonstrations"):
        ray.get(buffer.open_stage.remote(plan(0, expert_rows=3, demonstrations="gold")))
