"""Stages that draw from a pool: groups come back until they were used enough."""

from __future__ import annotations

import pytest
import ray

from rayrft.errors import DataError
from tests.buffer.actor import Start, admit, ledger, put, rows_of
from tests.buffer.rows import group, plan, trained_ids
from tests.errors import about

REPLAY = {"sampler": {"name": "uniform", "max_uses": 2, "replay_ratio": 2}}


def test_a_group_is_trained_on_as_often_as_it_may_be(start: Start) -> None:
    buffer = start(**REPLAY)
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


def test_producers_without_tickets_fill_a_stage(start: Start) -> None:
    buffer = start(sampler={"name": "priority", "max_uses": 1})
    for number in range(4):
        put(buffer, None, group(number))
    ray.get(buffer.open_stage.remote(plan(2, scheduled=False)))
    first = trained_ids(ray.get(buffer.lease.remote(0, 1, 5)))
    ray.get(buffer.ack.remote(0))
    second = trained_ids(ray.get(buffer.lease.remote(1, 1, 5)))
    assert sorted(first + second) == [0, 1, 10, 11, 20, 21, 30, 31]
    ray.get(buffer.ack.remote(1))
    assert ledger(buffer).trained == 8


def test_oldest_first_is_the_order_of_plain_producers(start: Start) -> None:
    buffer = start()
    for number in (3, 1, 2):
        put(buffer, None, group(number))
    ray.get(buffer.open_stage.remote(plan(1, scheduled=False)))
    drawn = [trained_ids(ray.get(buffer.lease.remote(step, 1, 5)))[0] for step in range(3)]
    assert drawn == [30, 10, 20]


def test_a_group_too_old_for_the_bound_leaves_the_pool(start: Start) -> None:
    buffer = start(sampler={"name": "priority"})
    ray.get(buffer.open_stage.remote(plan(1, max_staleness=1)))
    old, _ = ray.get(admit(buffer))
    put(buffer, old)
    ray.get([buffer.advance.remote(1), buffer.advance.remote(2)])
    assert ledger(buffer).dropped == {"stale": 2}


def test_groups_are_drawn_by_how_far_the_critic_missed_them_and_again_after_a_restart(start: Start) -> None:
    sampler = {"name": "priority", "score": "td_error", "alpha": 3.0, "max_uses": 100}
    buffer = start(sampler=sampler)
    for number in range(4):
        put(buffer, None, group(number))
    ray.get(buffer.open_stage.remote(plan(4, scheduled=False)))
    assert len(rows_of(ray.get(buffer.lease.remote(0, 1, 5)))) == 8, "what is not trained yet is drawn, too"
    missed = {str(number): 0.0 for number in range(4)} | {"2": 0.7, "of a group that is not here": 1.0}
    ray.get(buffer.ack.remote(0, missed))
    ray.get([buffer.open_stage.remote(plan(1, scheduled=False, name="one"))])
    for step in (1, 2):
        assert trained_ids(ray.get(buffer.lease.remote(step, 1, 5))) == [20, 21]
        ray.get(buffer.ack.remote(step, {"2": 0.7}))
        ray.kill(buffer)
        buffer = start(sampler=sampler)
    ray.get(buffer.lease.remote(3, 1, 5))
    ray.get(buffer.ack.remote(3, {"2": 5.0}))
    put(buffer, None, group(7))
    ray.get(buffer.feedback.remote("7/0", labels={"quality": "good"}))
    drawn = []
    for step in range(4, 20):
        drawn += trained_ids(ray.get(buffer.lease.remote(step, 1, 5)))
        ray.get(buffer.ack.remote(step))
    assert set(drawn) == {20, 21, 70, 71}, "what is new counts as much as what was missed most; unreported scores stay"


def test_an_error_that_is_no_number_is_refused_and_the_step_stays_leased(start: Start) -> None:
    buffer = start(sampler={"name": "priority", "score": "td_error", "max_uses": 2})
    put(buffer, None, group(1))
    ray.get(buffer.open_stage.remote(plan(1, scheduled=False)))
    ray.get(buffer.lease.remote(0, 1, 5))
    with pytest.raises(DataError, check=about("buffer.sampler.score")):
        ray.get(buffer.ack.remote(0, {"1": float("nan")}))
    assert ledger(buffer).held == 2
    ray.get(buffer.ack.remote(0, {"1": 0.5}))
