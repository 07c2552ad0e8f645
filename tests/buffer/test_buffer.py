"""The Buffer's contract, on a real actor with rows in the object store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.experience import Experience, pack, to_batch
from rayrft.buffer.log.events import GroupReport
from rayrft.buffer.schedule import Ticket
from rayrft.buffer.tasks.sampler import TaskSet
from rayrft.buffer.writer import BufferWriter
from rayrft.config.buffer import BufferConfig
from rayrft.errors import DataError, FeedbackRefused, LeaseEnded, RayrftError
from rayrft.trainer.batches import fetch_rows
from tests.buffer.rows import expert_rows, group, plan, trained_ids

pytestmark = pytest.mark.usefixtures("ray_cluster")
Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a Buffer actor with the given settings; a second call with the same folder opens the same log."""
    actors: list[Any] = []

    def begin(tasks: Any = None, folder: str = "buffer", **settings: Any) -> Any:
        config = BufferConfig.model_validate(settings)
        actor = ray.remote(Buffer).options(num_cpus=0, max_concurrency=100)
        actors.append(actor.remote("run", str(tmp_path / folder), config, 0, tasks))
        return actors[-1]

    yield begin
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def buffer(start: Start) -> Any:
    return start()


def admit(buffer: Any, count: int = 10, call: list[int] = [0]) -> Any:  # noqa: B006 - counts its calls
    call[0] += 1
    return buffer.admit.remote("test", call[0], count)


def put(buffer: Any, ticket: Ticket | None, rows: list[Experience] | None = None, **report: Any) -> None:
    if rows is None:
        assert ticket is not None
        rows = group(ticket.sequence, version=ticket.version)
    said = GroupReport(**{"rows": len(rows), "reward_sum": 1.0, "scored": len(rows), "tokens": 6, **report})
    asyncio.run(BufferWriter(buffer).put(to_batch(rows), said, ticket=ticket))


def ledger(buffer: Any) -> dict[str, Any]:
    stats = ray.get(buffer.stats.remote())
    assert stats["sampled"] == stats["trained"] + sum(stats["dropped"].values()) + stats["held"]
    return stats


def test_a_step_gets_whole_groups_dealt_over_ranks(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(4)))
    for ticket in ray.get(admit(buffer, 10)):
        put(buffer, ticket)
    lease = ray.get(buffer.lease.remote(0, 2, 5))
    assert trained_ids(lease) == [0, 1, 10, 11, 20, 21, 30, 31]
    for share in lease.shares:
        assert share.tokens == 16
        firsts = [int(row.token_ids[0]) // 10 for row in fetch_rows(share)]
        assert all(firsts.count(first) == 2 for first in firsts), "a group was split over ranks"


def test_a_lease_is_idempotent_by_step_and_counts_as_trained_once(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(admit(buffer, 10))
    put(buffer, ticket)
    first, again = (ray.get(buffer.lease.remote(0, 1, 5)) for _ in range(2))
    assert trained_ids(first) == trained_ids(again)
    assert ledger(buffer)["held"] == 2
    ray.get(buffer.ack.remote(0))
    assert ledger(buffer) == ledger(buffer) | {"sampled": 2, "trained": 2, "held": 0}


def test_a_waiting_lease_is_woken_by_the_last_group(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(2)))
    first, second = ray.get(admit(buffer, 10))
    waiting = buffer.lease.remote(0, 1, 60)
    put(buffer, first)
    assert ray.wait([waiting], timeout=0)[0] == []
    put(buffer, second)
    assert trained_ids(ray.get(waiting, timeout=10)) == [0, 1, 10, 11]


def test_a_lease_that_waits_too_long_says_what_for(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(2)))
    [ticket] = ray.get(admit(buffer, 1))
    ray.get(buffer.fail.remote(ticket, "prompt_too_long"))
    with pytest.raises(LeaseEnded, match=r"waited 0\.1 s for 2 groups for step 0: 0 ready, 0 running.*prompt_too_long"):
        ray.get(buffer.lease.remote(0, 1, 0.1))


def test_admission_waits_for_new_weights_and_is_woken_by_them(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(admit(buffer, 10))
    put(buffer, ticket)
    waiting = admit(buffer)
    ray.get(buffer.lease.remote(0, 1, 5))
    ray.get(buffer.ack.remote(0))
    assert ray.wait([waiting], timeout=0)[0] == []
    ray.get(buffer.advance.remote(1))
    [later] = ray.get(waiting, timeout=10)
    assert (later.version, later.deadline) == (1, 1)


def test_a_closed_stage_wakes_the_producer_with_nothing(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    ray.get(admit(buffer, 10))
    waiting = admit(buffer)
    ray.get(buffer.close_stage.remote())
    assert ray.get(waiting, timeout=10) == []


def test_a_faulty_row_is_rejected_counted_and_never_trained(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(admit(buffer, 10))
    good, bad = group(ticket.sequence)
    put(buffer, ticket, [good, Experience(**{**vars(bad), "logprobs": bad.logprobs * np.nan})])
    assert trained_ids(ray.get(buffer.lease.remote(0, 1, 5))) == [0]
    assert ledger(buffer)["dropped"] == {"rejected: logprobs is not finite": 1}


def test_a_group_without_a_good_row_gives_its_place_back(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(admit(buffer, 10))
    put(
        buffer,
        ticket,
        [Experience(**{**vars(row), "advantages": None, "reward": None}) for row in group(ticket.sequence)],
    )
    assert len(ray.get(admit(buffer), timeout=10)) == 1
    assert ledger(buffer)["dropped"] == {"rejected: an own row needs advantages or a reward": 2}


def test_rows_of_another_schema_are_refused(buffer: Any) -> None:
    import pyarrow as pa

    with pytest.raises(DataError, match="not of the experience schema"):
        asyncio.run(BufferWriter(buffer).put(pa.RecordBatch.from_pydict({"group_id": ["x"]})))


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
    assert ledger(buffer)["dropped"] == {"late": 2}


def test_groups_left_over_from_a_stage_are_dropped_and_counted(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1, max_staleness=1)))
    for ticket in ray.get(admit(buffer, 10)):
        put(buffer, ticket)
    ray.get(buffer.lease.remote(0, 1, 5))
    ray.get(buffer.ack.remote(0))
    ray.get(buffer.close_stage.remote())
    ray.get(buffer.open_stage.remote(plan(1)))
    assert ledger(buffer)["dropped"] == {"stage_ended": 2}


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
    rows = [row for share in lease.shares for row in fetch_rows(share)]
    assert (lease.usual_rows, lease.expert_rows) == (2, 3)
    assert sum(row.expert for row in rows) == 3
    assert all(not row.advantages.any() for row in rows if row.expert)
    assert ledger(buffer)["sampled"] == 2, "expert rows are not sampled rows"


def test_faulty_demonstrations_are_refused(buffer: Any) -> None:
    bad = Experience(**{**vars(expert_rows(1)[0]), "prompt_length": 4})
    with pytest.raises(DataError, match=r"demonstrations\.gold: row 0 is faulty: prompt_length leaves no prompt"):
        ray.get(buffer.load.remote("gold", [pack(to_batch([bad]))]))


def test_unknown_demonstrations_are_refused(buffer: Any) -> None:
    with pytest.raises(DataError, match="no such demonstrations"):
        ray.get(buffer.open_stage.remote(plan(0, expert_rows=3, demonstrations="gold")))


def test_a_group_that_is_sent_again_is_taken_once(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(admit(buffer))
    put(buffer, ticket)
    put(buffer, ticket)
    assert ledger(buffer)["sampled"] == 2
    ray.get(buffer.lease.remote(0, 1, 5))
    ray.get(buffer.ack.remote(0))
    put(buffer, ticket)
    assert ledger(buffer) == ledger(buffer) | {"sampled": 2, "trained": 2, "held": 0}


def test_a_request_for_tickets_that_is_made_again_gets_the_same(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(2)))
    first = ray.get(buffer.admit.remote("one", 1, 1))
    assert ray.get(buffer.admit.remote("one", 1, 1)) == first
    assert ray.get(buffer.admit.remote("one", 2, 1)) != first


def test_a_requeued_step_gives_its_groups_to_another(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    [ticket] = ray.get(admit(buffer))
    put(buffer, ticket)
    rows = trained_ids(ray.get(buffer.lease.remote(0, 1, 5)))
    ray.get(buffer.requeue.remote(0))
    assert trained_ids(ray.get(buffer.lease.remote(7, 1, 5))) == rows
    assert ledger(buffer)["held"] == 2


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
    ray.get(buffer.rollback.remote(1))
    assert ledger(buffer)["trained"] == 2, "only step 0 is in the checkpoint"
    for step in (1, 2, 3):
        lease = ray.get(buffer.lease.remote(step, 1, 5))
        assert [row.token_ids.tolist() for row in rows_of(lease)] == before[step]
        ray.get([buffer.ack.remote(step), buffer.advance.remote(step + 1)])
    assert ledger(buffer)["trained"] == 8
    with pytest.raises(RayrftError, match=r"gone, for a checkpoint holds its work .* of step 1 or later"):
        ray.get(buffer.lease.remote(0, 1, 0.1))


def rows_of(lease: Any) -> list[Any]:
    return [row for share in lease.shares for row in fetch_rows(share)]


def test_no_group_starts_while_the_trainer_repeats_steps(buffer: Any) -> None:
    ray.get(buffer.open_stage.remote(plan(1)))
    for step in range(2):
        [ticket] = ray.get(admit(buffer))
        put(buffer, ticket)
        ray.get(buffer.lease.remote(step, 1, 5))
        ray.get([buffer.ack.remote(step), buffer.advance.remote(step + 1)])
    ray.get(buffer.rollback.remote(0))
    waiting = admit(buffer)
    for step in range(2):
        assert ray.wait([waiting], timeout=0)[0] == []
        ray.get(buffer.lease.remote(step, 1, 5))
        ray.get([buffer.ack.remote(step), buffer.advance.remote(step + 1)])
    assert ray.get(waiting, timeout=10)[0].version == 2


def test_a_dead_producer_wakes_the_lease_that_waits_for_it_alone(buffer: Any) -> None:
    class Producer:
        async def watch(self) -> None:
            await asyncio.Event().wait()

    producer = ray.remote(Producer).options(num_cpus=0, max_concurrency=2).remote()
    ray.get(buffer.open_stage.remote(plan(1)))
    ray.get(buffer.attach.remote("test", [producer]))
    ray.get(admit(buffer))
    waiting = buffer.lease.remote(0, 1, 60)
    ray.kill(producer)
    with pytest.raises(LeaseEnded) as caught:
        ray.get(waiting, timeout=20)
    assert caught.value.cause.value == "producer_died"


def test_tickets_of_a_dead_producer_go_to_another(buffer: Any) -> None:
    class Producer:
        async def watch(self) -> None:
            await asyncio.Event().wait()

    one, two = (ray.remote(Producer).options(num_cpus=0, max_concurrency=2).remote() for _ in range(2))
    ray.get(buffer.open_stage.remote(plan(1)))
    ray.get([buffer.attach.remote("one", [one]), buffer.attach.remote("two", [two])])
    first = ray.get(buffer.admit.remote("one", 1, 1))
    waiting = buffer.admit.remote("two", 1, 1)
    ray.kill(one)
    assert ray.get(waiting, timeout=20) == first
    ray.kill(two)


def test_the_end_of_the_tasks_ends_the_lease_that_cannot_be_filled(start: Start) -> None:
    tasks = partial(TaskSet, [0, 0, 0], [1.0], sampler="sequential", seed=0, epochs=1)
    buffer = start(tasks=tasks)
    ray.get(buffer.open_stage.remote(plan(2)))
    tickets = ray.get(admit(buffer))
    assert [ticket.task for ticket in tickets] == [0, 1]
    for ticket in tickets:
        put(buffer, ticket)
    ray.get(buffer.lease.remote(0, 1, 5))
    ray.get([buffer.ack.remote(0), buffer.advance.remote(1)])
    [last] = ray.get(admit(buffer))
    assert last.task == 2
    waiting = buffer.lease.remote(1, 1, 60)
    assert ray.get(admit(buffer)) == []
    put(buffer, last)
    with pytest.raises(LeaseEnded, match="1 ready, 0 running") as caught:
        ray.get(waiting, timeout=20)
    assert caught.value.cause.value == "end_of_data"


def test_what_rollouts_say_of_a_task_reaches_the_task_sampler(start: Start) -> None:
    buffer = start(tasks=partial(TaskSet, [0, 0], [1.0], sampler="tests.buffer.rows:hardest", seed=0))
    ray.get(buffer.open_stage.remote(plan(1)))
    [first] = ray.get(admit(buffer))
    put(buffer, first, scored=2, reward_sum=2.0)
    ray.get(buffer.lease.remote(0, 1, 5))
    ray.get([buffer.ack.remote(0), buffer.advance.remote(1)])
    [second] = ray.get(admit(buffer))
    assert {first.task, second.task} == {0, 1}


class TestPool:
    """Stages that draw from a pool: groups come back until they were used enough."""

    settings: dict[str, Any] = {"sampler": {"name": "uniform", "max_uses": 2, "replay_ratio": 2}}  # noqa: RUF012

    def test_a_group_is_trained_on_as_often_as_it_may_be(self, start: Start) -> None:
        buffer = start(**self.settings)
        ray.get(buffer.open_stage.remote(plan(2, max_staleness=10)))
        uses: dict[int, int] = {}
        for step in range(6):
            waiting = buffer.lease.remote(step, 1, 20)
            while not ray.wait([waiting], timeout=0)[0]:
                tickets = admit(buffer)
                done, _ = ray.wait([waiting, tickets], num_returns=1)
                if waiting in done:
                    break
                for ticket in ray.get(tickets):
                    put(buffer, ticket)
            for token in trained_ids(ray.get(waiting)):
                uses[token] = uses.get(token, 0) + 1
            ray.get([buffer.ack.remote(step), buffer.advance.remote(step + 1)])
        assert sum(uses.values()) == 24 and max(uses.values()) == 2

    def test_producers_without_tickets_fill_a_stage(self, start: Start) -> None:
        buffer = start(sampler={"name": "priority", "max_uses": 1})
        for number in range(4):
            put(buffer, None, group(number))
        ray.get(buffer.open_stage.remote(plan(2, scheduled=False)))
        first = trained_ids(ray.get(buffer.lease.remote(0, 1, 5)))
        ray.get(buffer.ack.remote(0))
        second = trained_ids(ray.get(buffer.lease.remote(1, 1, 5)))
        assert sorted(first + second) == [0, 1, 10, 11, 20, 21, 30, 31]
        ray.get(buffer.ack.remote(1))
        assert ledger(buffer)["trained"] == 8

    def test_oldest_first_is_the_order_of_plain_producers(self, start: Start) -> None:
        buffer = start()
        for number in (3, 1, 2):
            put(buffer, None, group(number))
        ray.get(buffer.open_stage.remote(plan(1, scheduled=False)))
        drawn = [trained_ids(ray.get(buffer.lease.remote(step, 1, 5)))[0] for step in range(3)]
        assert drawn == [30, 10, 20]

    def test_a_group_too_old_for_the_bound_leaves_the_pool(self, start: Start) -> None:
        buffer = start(sampler={"name": "priority"})
        ray.get(buffer.open_stage.remote(plan(1, max_staleness=1)))
        old, _ = ray.get(admit(buffer))
        put(buffer, old)
        ray.get([buffer.advance.remote(1), buffer.advance.remote(2)])
        assert ledger(buffer)["dropped"] == {"stale": 2}


class TestBounds:
    def test_a_full_buffer_makes_producers_wait_until_there_is_room(self, start: Start) -> None:
        buffer = start(max_rows=4)
        for number in range(2):
            put(buffer, None, group(number))
        ray.get(buffer.open_stage.remote(plan(1, scheduled=False)))

        async def third() -> None:
            writing = asyncio.ensure_future(BufferWriter(buffer).put(to_batch(group(2))))
            await asyncio.wait({writing}, timeout=0.3)
            assert not writing.done()
            await buffer.lease.remote(0, 1, 5)
            await buffer.ack.remote(0)
            await asyncio.wait_for(writing, 10)

        asyncio.run(third())
        assert ledger(buffer)["sampled"] == 6

    @pytest.mark.parametrize(("rule", "gone"), [("evict_oldest", [0, 1]), ("evict_lowest_priority", [20, 21])])
    def test_a_full_buffer_evicts_by_rule_and_counts(self, start: Start, rule: str, gone: list[int]) -> None:
        buffer = start(max_rows=6, when_full=rule)
        for number, advantage in ((0, 3.0), (1, 2.0), (2, 1.0), (3, 4.0)):
            put(buffer, None, group(number, advantage=advantage))
        assert ledger(buffer)["dropped"] == {rule.replace("evict", "evicted"): 2}
        ray.get(buffer.open_stage.remote(plan(3, scheduled=False)))
        rows = trained_ids(ray.get(buffer.lease.remote(0, 1, 5)))
        assert set(rows) == {0, 1, 10, 11, 20, 21, 30, 31} - set(gone)

    def test_a_group_that_was_used_is_evicted_before_others(self, start: Start) -> None:
        sampler = {"name": "priority", "max_uses": 2, "use_decay": 1e-3}
        buffer = start(max_rows=6, when_full="evict_lowest_priority", sampler=sampler)
        for number, advantage in ((0, 1.0), (1, 1e3), (2, 1.0)):
            put(buffer, None, group(number, advantage=advantage))
        ray.get(buffer.open_stage.remote(plan(1, scheduled=False)))
        assert trained_ids(ray.get(buffer.lease.remote(0, 1, 5))) == [10, 11]
        ray.get(buffer.ack.remote(0))
        put(buffer, None, group(3, advantage=1.0))
        after = ledger(buffer)
        assert (after["trained"], after["dropped"], after["held"]) == (2, {}, 6)


class TestFeedback:
    def test_a_reward_given_before_training_changes_the_groups_advantages(self, start: Start) -> None:
        buffer = start(sampler={"name": "priority"})
        put(buffer, None, group(1, rows=3))
        ray.get(buffer.feedback.remote("1/0", reward=7.0, labels={"quality": "good"}))
        ray.get(buffer.open_stage.remote(plan(1, scheduled=False)))
        rows = rows_of(ray.get(buffer.lease.remote(0, 1, 5)))
        advantages = [float(row.advantages[-1]) for row in rows]
        assert advantages[0] > 0 > advantages[1], "rewards are 7, 1 and 2 now"
        assert abs(sum(advantages)) < 1e-5

    def test_feedback_after_training_is_refused_with_the_version_and_recorded(self, buffer: Any) -> None:
        ray.get(buffer.open_stage.remote(plan(1, version=5)))
        [ticket] = ray.get(admit(buffer))
        put(buffer, ticket)
        ray.get(buffer.lease.remote(5, 1, 5))
        ray.get(buffer.ack.remote(5))
        with pytest.raises(FeedbackRefused, match="recorded") as caught:
            ray.get(buffer.feedback.remote("0/1", reward=1.0))
        assert caught.value.cause.value == 5
        assert ledger(buffer)["late_feedback"] == 1

    def test_feedback_on_an_unknown_row_names_it(self, buffer: Any) -> None:
        put(buffer, None, group(1))
        for unknown in ("2/0", "1/9"):
            with pytest.raises(DataError, match=f"found '{unknown}'"):
                ray.get(buffer.feedback.remote(unknown, reward=1.0))

    def test_a_reward_that_is_not_a_number_is_refused(self, buffer: Any) -> None:
        put(buffer, None, group(1))
        with pytest.raises(DataError, match="not finite"):
            ray.get(buffer.feedback.remote("1/0", reward=float("nan")))
