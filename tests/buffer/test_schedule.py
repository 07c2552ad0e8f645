"""The staleness bound, attacked with adversarial completion orders."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrft.buffer.schedule import Draw, PoolSchedule, Ticket, WindowedSchedule


def take(schedule: WindowedSchedule, step: int) -> list[int] | None:
    draw = schedule.choose(step, no_pool)
    if draw is None:
        return None
    schedule.take(draw.slots.tolist())
    return draw.slots.tolist()


@pytest.mark.parametrize("schedule", [WindowedSchedule(1, 0), PoolSchedule(1, 0, fresh=1)], ids=["window", "pool"])
def test_a_group_that_can_no_longer_be_in_time_makes_room_for_another_at_once(
    schedule: WindowedSchedule | PoolSchedule,
) -> None:
    [old] = schedule.admit(1)
    assert schedule.capacity(9) == 0
    schedule.advance(1)
    assert schedule.capacity(9) == 1
    [new] = schedule.admit(1)
    assert (old.deadline, new.deadline) == (0, 1)
    assert not finish(schedule, old) and finish(schedule, new)
    assert not schedule.offer(9, 0)


def no_pool() -> Draw:
    raise AssertionError("there is none")


def finish(schedule: WindowedSchedule | PoolSchedule, ticket: Ticket) -> bool:
    """Groups are stored in the slot of their ticket's number."""
    return schedule.finish(ticket, ticket.sequence)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), groups=st.integers(1, 4), staleness=st.integers(0, 3))
def test_no_group_is_consumed_staler_than_the_bound_whatever_the_completion_order(
    data: st.DataObject, groups: int, staleness: int
) -> None:
    schedule = WindowedSchedule(groups, staleness)
    running: dict[int, Ticket] = {}
    tickets: dict[int, Ticket] = {}

    def admit() -> None:
        for ticket in schedule.admit(data.draw(st.integers(0, 5), label="admit")):
            running[ticket.sequence] = tickets[ticket.sequence] = ticket

    step = 0
    for _ in range(60):
        admit()
        finished = data.draw(st.lists(st.sampled_from(sorted(running)), unique=True), label="finish") if running else []
        for sequence in finished:
            ticket = running.pop(sequence)
            if data.draw(st.booleans(), label="filtered"):
                schedule.release(ticket.sequence)
            else:
                assert finish(schedule, ticket)
        taken = take(schedule, step)
        if taken is None:
            continue
        assert len(taken) == groups
        assert all(step - tickets[sequence].version <= staleness for sequence in taken)
        admit()  # while the step trains, before its weights are published
        step += 1
        assert schedule.advance(step) == [], "a group was thrown away for its age"


@settings(max_examples=200, deadline=None)
@given(rng=st.randoms(use_true_random=False), groups=st.integers(1, 4), staleness=st.integers(0, 3))
def test_a_step_is_never_stuck_once_everything_admitted_has_finished_and_none_is_left_over(
    rng: random.Random, groups: int, staleness: int
) -> None:
    schedule = WindowedSchedule(groups, staleness, version=3, end=3 + 8)
    for step in range(3, 3 + 8):
        while tickets := schedule.admit(100):
            rng.shuffle(tickets)
            for ticket in tickets:
                if rng.random() < 0.8:
                    finish(schedule, ticket)
                else:
                    schedule.release(ticket.sequence)
        assert take(schedule, step) is not None
        schedule.advance(step + 1)
    assert schedule.admit(100) == [] and not schedule.running and not schedule.ready


def test_a_step_waits_for_a_straggler_that_is_due() -> None:
    schedule = WindowedSchedule(1, 1)
    straggler, quick = schedule.admit(2)
    finish(schedule, quick)
    assert take(schedule, 0) == [quick.sequence]
    schedule.advance(1)
    [later] = schedule.admit(1)
    finish(schedule, later)
    assert take(schedule, 1) is None, "the straggler is due at step 1; taking another would make it too old"
    finish(schedule, straggler)
    assert take(schedule, 1) == [straggler.sequence]


def test_over_sampling_takes_the_first_ready_and_no_step_waits_for_nobody() -> None:
    schedule = WindowedSchedule(2, 0, over_sampling=2.0)
    tickets = schedule.admit(10)
    assert len(tickets) == 4
    for ticket in tickets[1:]:
        finish(schedule, ticket)
    assert not schedule.offer(9, 0), "all places are taken"
    assert take(schedule, 0) == [1, 2]
    assert schedule.advance(1) == [3]
    assert not finish(schedule, tickets[0]), "it finished after its deadline"
    schedule = WindowedSchedule(1, 1)
    for ticket in schedule.admit(2):
        assert finish(schedule, Ticket(ticket.sequence, 0, 0))
    assert take(schedule, 0) == [0], "both are due now: one will be late whatever is done, and nobody is under way"
    assert schedule.advance(1) == [1]
    schedule = WindowedSchedule(1, 0, version=5)
    with pytest.raises(ValueError, match="versions only grow"):
        schedule.advance(4)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), groups=st.integers(1, 3), staleness=st.integers(0, 3))
def test_groups_without_a_ticket_take_free_places_and_make_no_admitted_group_late(
    data: st.DataObject, groups: int, staleness: int
) -> None:
    schedule = WindowedSchedule(groups, staleness)
    running: list[Ticket] = []
    versions: dict[int, int] = {}
    slot = 1000
    for step in range(12):
        for _ in range(data.draw(st.integers(0, 4), label="offers")):
            version = data.draw(st.integers(0, step), label="version")
            if schedule.offer(slot, version):
                versions[slot] = version
                assert schedule.offer(slot, version), "asked again"
            slot += 1
        assert not schedule.offer(slot, step - staleness - 1)
        for ticket in schedule.admit(data.draw(st.integers(0, 8), label="admitted")):
            versions[ticket.sequence] = ticket.version
            running.append(ticket)
        taken = None
        for ticket in data.draw(st.permutations(running)):
            assert finish(schedule, ticket)
            running.remove(ticket)
            if (taken := take(schedule, step)) is not None:
                break
        else:
            taken = take(schedule, step)
        assert all(step - versions[slot] <= staleness for slot in taken or ())
        assert schedule.advance(step + 1) == [] or taken is None, "a step that trains makes nothing late"


class TestReplay:
    """The pace of a run that draws from a pool: new groups for every step, and the first step filled."""

    @staticmethod
    def ready(schedule: PoolSchedule) -> bool:
        pool = Draw(np.zeros(0, np.int64), np.zeros(0, np.float32))
        return schedule.choose(0, lambda: pool) is pool

    def test_a_first_step_gets_a_whole_batch_and_later_ones_ask_for_what_is_new(self) -> None:
        schedule = PoolSchedule(groups_per_step=4, fresh=2, max_staleness=0)
        lost, *tickets = schedule.admit(schedule.capacity(eligible=0))
        schedule.release(lost.sequence)
        tickets += schedule.admit(schedule.capacity(eligible=0))
        assert len(tickets) == 4
        for count, ticket in enumerate(tickets, start=1):
            assert finish(schedule, ticket)
            assert self.ready(schedule) == (count >= 2)
        schedule.take([])
        assert schedule.capacity(eligible=4) == 0, "two of the four are not counted for a step yet"
        assert self.ready(schedule)
        schedule.take([])
        assert not self.ready(schedule)
        assert schedule.capacity(eligible=4) == 2

    def test_none_begins_that_the_last_step_cannot_take(self) -> None:
        schedule = PoolSchedule(groups_per_step=2, fresh=1, max_staleness=1, end=9)
        assert schedule.capacity(0) == 2
        schedule.advance(8)
        [ticket] = schedule.admit(schedule.capacity(1))
        assert finish(schedule, ticket)
        schedule.take([])
        assert schedule.capacity(2) == 0, "it has its batch"
        schedule.discard_lease()
        assert self.ready(schedule), "nothing of its batch was left"
        schedule.take([])
        schedule.advance(9)
        assert schedule.capacity(0) == 0
