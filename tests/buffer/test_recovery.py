"""A Buffer that is killed again and again beside a twin that never is: nothing that is asked of them tells them apart.

Both are held against a model that knows of every group what was put, and how often it was trained on.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rayrft.buffer.events import GroupReport
from rayrft.buffer.log import journal
from rayrft.buffer.schedule import Ticket
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.experience import Experience, Task
from tests.buffer.in_process import InlineLoop, LocalBuffer, ObjectTable, small
from tests.buffer.rows import group, plan

TASKS = TaskSetSpec(
    [str(number) for number in range(9)], [0] * 6 + [1] * 3, [2.0, 1.0], sampler="failure", seed=1, epochs=4
)
FAULT = "rejected: missing reward"
SAMPLERS: dict[str, dict[str, Any]] = {
    "fifo": {"name": "fifo"},
    "uniform": {"name": "uniform", "max_uses": 2, "replay_ratio": 1.5},
    "priority": {"name": "priority", "max_uses": 3, "cooldown": 1, "tau": 2.0, "use_decay": 0.5, "replay_ratio": 2.0},
    "critic": {"name": "priority", "score": "td_error", "max_uses": 3, "replay_ratio": 2.0},
}


class Inline(LocalBuffer):
    make_loop = InlineLoop


@dataclass
class Known:
    """A group as its producer knows it."""

    rows: list[Experience]
    ticket: Ticket | None
    arrival: int
    uses: int = 0
    rewards: dict[str, float] = field(default_factory=dict)


@dataclass
class Lent:
    """A step's lease as the trainer knows it."""

    groups: list[str]
    seen: Any
    acked: bool = False


class Twins(RuleBasedStateMachine):
    sampler: str
    scheduled: bool

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        ObjectTable(self.patch)
        self.folder = tempfile.TemporaryDirectory()
        self.groups: dict[str, Known] = {}
        self.tickets: dict[int, Ticket] = {}
        self.leases: dict[int, Lent] = {}
        self.sampled = self.rejected = self.calls = self.version = self.step = self.numbers = self.lives = 0
        self.failed: Counter[str] = Counter()

    @initialize(
        staleness=st.integers(0, 2),
        log_bytes=st.sampled_from([20_000, 1 << 30]),
        full=st.sampled_from([None, "evict_oldest", "evict_lowest_priority"]),
        journal_bytes=st.sampled_from([0, 3000, 1 << 30]),
    )
    def begin(self, staleness: int, log_bytes: int, full: str | None, journal_bytes: int) -> None:
        self.patch.setattr(journal, "SNAPSHOT_BYTES", journal_bytes)
        self.patch.setattr(journal, "SNAPSHOT_RATIO", 0)
        bounds = {"when_full": full, "max_rows": 20} if full else {}
        sizes = {"segment_bytes": 6000, "memory_bytes": 10_000, "log_bytes": log_bytes}
        config = small(**sizes, **bounds, sampler=SAMPLERS[self.sampler])
        self.roomy, self.staleness, self.max_uses = log_bytes > 20_000, staleness, config.sampler.max_uses
        self.twin, self.killed = (Inline(Path(self.folder.name) / name, config, TASKS) for name in "ab")
        self.open_stage()

    def both(self, method: str, *arguments: Any, **named: Any) -> Any:
        came, again = (getattr(buffer, method)(*arguments, **named) for buffer in (self.twin, self.killed))
        assert came == again, f"{method}{arguments}"
        return came

    # What the producer does.

    @precondition(lambda self: self.scheduled)
    @rule(count=st.integers(1, 6))
    def admit(self, count: int) -> None:
        if self.both("may_admit"):
            self.calls += 1
            tickets = self.both("do", "admit", f"producer {self.lives}", self.calls, count)
            assert self.both("do", "admit", f"producer {self.lives}", self.calls, count) == tickets
            self.tickets |= {ticket.sequence: ticket for ticket in tickets}

    @precondition(lambda self: self.scheduled)
    @rule(source=st.integers(0, 1), numbers=st.lists(st.integers(5, 20), min_size=1, max_size=3, unique=True))
    def add_tasks(self, source: int, numbers: list[int]) -> None:
        tasks = [Task(str(number), "question", "answer") for number in numbers]
        self.both("do", "add_tasks", tasks, source)
        assert self.both("do", "add_tasks", tasks, 1 - source) == 0, "they are known by their ids"
        known = [task.id for task in self.both("do", "added_tasks", 0)]
        assert len(known) == len(set(known)) and {str(number) for number in numbers if number > 8} <= set(known)

    @precondition(lambda self: self.scheduled)
    @rule(data=st.data())
    def roll_out(self, data: st.DataObject) -> None:
        self.admit(4)
        for sequence in data.draw(st.permutations(sorted(self.tickets))):
            ticket = self.tickets.pop(sequence)
            self._put([(ticket, ticket.version, 1.0, 0)], reward_sum=1.0, scored=2)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), faults=st.sampled_from([0, 0, 0, 1, 2]), scored=st.integers(0, 2), old=st.integers(0, 1))
    def put(self, data: st.DataObject, faults: int, scored: int, old: int) -> None:
        ticket = self.tickets.pop(data.draw(st.sampled_from(sorted(self.tickets))))
        self._put([(ticket, max(0, ticket.version - old), 1.0, faults)], reward_sum=scored / 2, scored=scored)

    @rule(deviations=st.lists(st.sampled_from([0.0, 0.5, 1.0, 4.0]), min_size=1, max_size=4), faults=st.integers(0, 2))
    def put_without_ticket(self, deviations: list[float], faults: int) -> None:
        self._put([(None, self.version, each, faults if i == 0 else 0) for i, each in enumerate(deviations)])

    def _put(self, groups: list[tuple[Ticket | None, int, float, int]], **said: Any) -> None:
        sent = []
        for ticket, version, deviation, faults in groups:
            self.numbers += 1
            rows = group(self.numbers, version=version, deviation=deviation)
            broken = [dataclasses.replace(row, reward=None) for row in rows[:faults]]
            sent.append(([*broken, *rows[faults:]], ticket))
            taken = 2 - faults if ticket is not None or not faults else 0
            self.sampled, self.rejected = self.sampled + 2, self.rejected + 2 - taken
            if taken:
                self.groups[str(self.numbers)] = Known(rows[faults:], ticket, self.numbers)
        self.both("put", sent, **said)

    @precondition(lambda self: self.roomy and self.groups)
    @rule(data=st.data())
    def put_again(self, data: st.DataObject) -> None:
        known = self.groups[data.draw(st.sampled_from(sorted(self.groups)))]
        self.both("put", [(known.rows, known.ticket)])

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), fails=st.booleans())
    def give_ticket_up(self, data: st.DataObject, fails: bool) -> None:
        ticket = self.tickets.pop(data.draw(st.sampled_from(sorted(self.tickets))))
        if fails:
            self.both("do", "fail", ticket, "prompt_too_long")
            self.failed["prompt_too_long"] += 1
        else:
            self.both("do", "drop", ticket, {"zero_variance": 2}, GroupReport(rows=2, reward_sum=2.0, scored=2))
            self.sampled, self.rejected = self.sampled + 2, self.rejected + 2

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), reward=st.sampled_from([None, 0.0, 1.0, 7.0]))
    def feedback(self, data: st.DataObject, reward: float | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.groups)))
        row = data.draw(st.sampled_from(self.groups[name].rows)).experience_id
        came = self.both("do", "feedback", row, reward, {"said": "so"})
        if came is None and reward is not None:
            self.groups[name].rewards[row] = reward

    # What the trainer does.

    @rule(ranks=st.integers(1, 3))
    def lease(self, ranks: int) -> None:
        before = self.both("held")
        came = self.both("lease", self.step, ranks)
        if came[0] == "LeaseEnded":
            return
        names = [row.split("/")[0] for share in came[1] for row, _, _ in share]
        lent = sorted(set(names), key=lambda name: self.groups[name].arrival)
        rows = sorted(row for share in came[1] for row, _, _ in share)
        assert rows == sorted(row.experience_id for name in lent for row in self.groups[name].rows), "whole groups"
        assert set(rows) <= {row for row, _ in before}
        busy = {name for lease in self.leases.values() if not lease.acked for name in lease.groups}
        assert not busy & set(lent) and all(self.groups[name].uses < self.max_uses for name in lent)
        assert not self.scheduled or max(came[4]) <= self.staleness
        if self.sampler == "fifo":
            ready = sorted((set(self._held()) | set(lent)) - busy, key=self._turn)
            if self.scheduled:  # groups with and without tickets, by deadline
                latest = max(self._turn(name) for name in lent)
                assert all(self._turn(name) >= latest for name in set(ready) - set(lent))
            else:
                ready = [name for name in ready if self.groups[name].ticket is None]
                assert lent == sorted(ready[: len(lent)], key=lambda name: self.groups[name].arrival)
        self.leases[self.step] = Lent(lent, came)
        self.step += 1

    def _turn(self, name: str) -> int:
        """Number by which a group is taken: its deadline, or that of its arrival where nothing is scheduled."""
        known = self.groups[name]
        if not self.scheduled:
            return known.arrival
        due = min(span.version for row in known.rows for span in row.weight_versions) + self.staleness
        return due if known.ticket is None else min(known.ticket.deadline, due)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        self._ack(data.draw(st.sampled_from(sorted(self.leases))))

    def _ack(self, step: int) -> None:
        missed = {name: (7 * int(name) + 3 * step) % 5 / 2 for name in self.leases[step].groups}
        self.both("do", "ack", step, missed)
        if not self.leases[step].acked:
            self.leases[step].acked = True
            for name in self.leases[step].groups:
                self.groups[name].uses += 1

    @precondition(lambda self: self.version < self.step)
    @rule()
    def advance(self) -> None:
        self.version += 1
        self.both("do", "advance", self.version)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def cover(self, data: st.DataObject) -> None:
        self._cover(data.draw(st.integers(min(self.leases), self.step)))

    def _cover(self, step: int) -> None:
        self.both("do", "cover", step)
        self.leases = {s: lease for s, lease in self.leases.items() if s >= step or not lease.acked}

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(s for s, lease in self.leases.items() if not lease.acked) or [-1]))
        drawn = self.twin.buffer.state.training.leases
        self.both("do", "requeue", step, drawn[step].draw if step in drawn else 0)
        self.leases.pop(step, None)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """The run goes on from a checkpoint; tickets of its former life are issued again."""
        trained = self.twin.buffer.state.newest_version
        step = data.draw(st.sampled_from(sorted(s for s in self.leases if s <= trained) or [0]))
        self.lives += 1
        self.both("resume", step, str(self.lives))
        self.tickets = {}
        for lent in (lease for s, lease in self.leases.items() if s >= step and lease.acked):
            lent.acked = False
            for name in lent.groups:
                self.groups[name].uses -= 1

    @rule(covered=st.sampled_from([True, True, False]))
    def train(self, covered: bool) -> None:
        step = self.step
        self.lease(2)
        if step in self.leases:
            self._ack(step)
            self.advance()
            if covered:
                self._cover(step + 1)

    # What befalls both, and one.

    @precondition(lambda self: self.step >= self.stage_began + 3)
    @rule()
    def next_stage(self) -> None:
        self.both("do", "close_stage")
        self.open_stage()

    def open_stage(self) -> None:
        stage = plan(2, max_staleness=self.staleness, scheduled=self.scheduled, version=self.version)
        self.both("do", "open_stage", stage)
        self.stage_began = self.step

    @rule()
    def kill(self) -> None:
        self.killed.restart()
        for step, lent in self.leases.items():
            assert self.killed.lease(step, len(lent.seen[1])) == lent.seen
        a, b = self.twin.buffer.state, self.killed.buffer.state
        for state in (a, b):
            state.feeds[""].tasks = {}  # set in snapshots, whose times differ
        assert a.meta == b.meta
        assert a.groups.to_table().equals(b.groups.to_table())
        assert a.tasks[""].state() == b.tasks[""].state() and a.capacity == b.capacity

    def _held(self) -> list[str]:
        return list({row.split("/")[0]: None for row, _ in self.twin.held()})

    @invariant()
    def every_row_is_held_or_trained_or_dropped(self) -> None:
        if not hasattr(self, "killed"):
            return
        standing = self.both("standing")
        held, ledger = set(self._held()), standing["stats"].ledger
        trained = [name for name, known in self.groups.items() if known.uses and name not in held]
        assert ledger.sampled == self.sampled
        assert ledger.held == len(standing["rows"]) == sum(len(self.groups[name].rows) for name in held)
        assert ledger.trained == sum(len(self.groups[name].rows) for name in trained)
        assert ledger.dropped_tasks == self.failed
        rewards = {row.experience_id: row.reward for name in held for row in self.groups[name].rows}
        rewards |= {row: reward for name in held for row, reward in self.groups[name].rewards.items()}
        assert dict(standing["rows"]) == rewards
        busy = {name for lease in self.leases.values() if not lease.acked for name in lease.groups}
        assert busy <= held

    def teardown(self) -> None:
        if hasattr(self, "killed"):
            self.twin.kill()
            self.killed.kill()
        self.folder.cleanup()
        self.patch.undo()


@pytest.mark.parametrize("scheduled", [True, False], ids=["scheduled", "unscheduled"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_kill_cannot_be_told(sampler: str, scheduled: bool) -> None:
    machine = type("Machine", (Twins,), {"sampler": sampler, "scheduled": scheduled})
    unhurried = settings(max_examples=20, stateful_step_count=40, deadline=None, suppress_health_check=[*HealthCheck])
    run_state_machine_as_test(machine, settings=unhurried)
