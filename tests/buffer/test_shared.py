"""A Buffer that belongs to no run: jobs that come, go and are killed, in any order."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rayrft.buffer.events import ModelTerms
from rayrft.buffer.schedule import Ticket
from rayrft.buffer.shared import SharedBuffer
from rayrft.config.buffer import BufferConfig
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.errors import ConfigError, PlacementError, StorageError
from tests.buffer.in_process import LocalBuffer, small
from tests.buffer.rows import group, plan
from tests.errors import about

MODEL = ModelTerms(1 << 20, 100, "digest")
PLAN = plan(2, group_size=2, name="live", scheduled=False)


def tasks(count: int = 20, prefix: str = "t", **changes: Any) -> TaskSetSpec:
    names = [f"{prefix}{number}" for number in range(count)]
    return TaskSetSpec(names, [0] * count, [1.0], **{"sampler": "sequential", "seed": 0, "epochs": 1, **changes})


class Local(LocalBuffer):
    """The named Buffer in this process. Each life of an explore job has a producer of its own."""

    def __init__(self, folder: Path, config: BufferConfig) -> None:
        self._folder, self._config, self._lives = folder, config, 0
        super().__init__(folder, config)

    def open(self) -> None:
        self.buffer = self.shared = SharedBuffer("b", self._folder, self._config, 0)
        self.loop = asyncio.new_event_loop()

    def join(self, feed: str = "e", spec: TaskSetSpec | None = None, in_flight: int = 4, **changes: Any) -> Explorer:
        self._lives += 1
        life = f"life-{self._lives}"
        model = changes.get("model", MODEL)
        self.run(self.shared.join_feed(feed, life, f"job-{feed}", model, spec or tasks(), in_flight, 2))
        return Explorer(self, feed, f"{feed}-{life}")

    def train(self, run: str, step: int = 0, running: tuple[str, ...] = ()) -> None:
        self.run(self.shared.join_trainer(run, f"job-{run}", MODEL, step, {*running, f"job-{run}"}))
        self.resume(step, f"{run}-{step}-{self._lives}")


class Explorer:
    """One life of an explore job."""

    def __init__(self, local: Local, feed: str, name: str) -> None:
        self._local, self._feed, self._name, self._calls = local, feed, name, 0

    def admit(self, count: int = 100) -> list[Ticket]:
        self._calls += 1
        return self._local.run(self._local.shared.admit(self._name, self._calls, count, self._feed))

    def put(self, *tickets: Ticket, version: int = 0) -> None:
        name = f"{self._feed}/{{0.sequence}}/{{0.task}}"
        groups = [(group(t.sequence, name=name.format(t), version=version), t) for t in tickets]
        self._local.put(groups, reward_sum=2.0, scored=2)

    @property
    def room(self) -> int:
        return self._local.shared.retention.room(self._feed)


@pytest.fixture
def local(request: Any, tmp_path: Path, objects: Any) -> Any:
    """A named Buffer of so many rows."""
    made = Local(tmp_path, small(max_rows=getattr(request, "param", 1000)))
    yield made
    made.kill()


def of_rows(count: int) -> Any:
    return pytest.mark.parametrize("local", [count], indirect=True, ids=str)


def opened(local: Local, run: str, **changes: Any) -> None:
    """A train job of this name opens its stage."""
    local.train(run, **changes)
    local.do("open_stage", PLAN)


def of_task(names: list[str]) -> list[str]:
    return sorted({name.split("/")[2] for name in names})


def test_what_was_explored_before_any_trainer_came_is_trained_in_order(local: Local) -> None:
    explorer = local.join()
    explorer.put(*explorer.admit())
    opened(local, "t")
    trained = [of_task(local.trained(step, advance=True)) for step in range(2)]
    assert trained == [["t0", "t1"], ["t2", "t3"]]


def test_groups_outlive_stages_and_arrive_between_them(local: Local) -> None:
    local.train("t")
    explorer = local.join(in_flight=8)
    tickets = explorer.admit()
    local.do("open_stage", PLAN)
    explorer.put(*tickets[:3])
    local.trained(0)
    local.do("close_stage", "live")
    explorer.put(*tickets[3:5])
    local.do("open_stage", plan(2, group_size=2, name="second", scheduled=False, version=1))
    explorer.put(*tickets[5:])
    rows = [name for step in (1, 2, 3) for name in local.leased(step)]
    assert of_task(rows) == ["t2", "t3", "t4", "t5", "t6", "t7"]
    assert local.do("stats").ledger.dropped == {}


def test_a_killed_explorer_gets_its_unfinished_tasks_again_under_their_tickets(local: Local) -> None:
    first = local.join()
    tickets = first.admit()
    first.put(tickets[1])
    local.restart()
    second = local.join()
    again = second.admit()
    assert [t.task for t in again] == ["t0", "t2", "t3", "t4"]
    assert [t.sequence for t in again[:3]] == [tickets[0].sequence, tickets[2].sequence, tickets[3].sequence]
    second.put(*again)
    first.put(tickets[0])  # of the life that was killed: it has come meanwhile
    assert local.do("stats").ledger.sampled == 10


def test_two_explore_jobs_have_tasks_of_their_own_and_their_groups_do_not_collide(local: Local) -> None:
    one, two = local.join("a", tasks(3)), local.join("b", tasks(3, prefix="u"))
    given = {"a": one.admit(), "b": two.admit()}
    assert [t.task for t in given["a"]] == ["t0", "t1", "t2"] and [t.task for t in given["b"]] == ["u0", "u1", "u2"]
    assert len({t.sequence for each in given.values() for t in each}) == 6
    opened(local, "t")
    one.put(*given["a"])
    assert one.admit() == []
    local.lease(0)
    assert local.lease(1) == ("LeaseEnded", "deadline"), "the other job has groups under way"
    two.put(*given["b"])
    local.lease(1)
    local.lease(2)
    assert two.admit() == []
    assert local.lease(3) == ("LeaseEnded", "end_of_data")


@of_rows(10)
def test_the_rows_held_and_the_groups_under_way_bound_what_is_begun(local: Local) -> None:
    explorer = local.join(in_flight=4)
    tickets = explorer.admit()
    assert (len(tickets), explorer.room) == (4, 0)
    explorer.put(*tickets)
    assert explorer.room == 1, "8 of 10 rows are held"
    explorer.put(*explorer.admit())
    assert explorer.room == 0
    opened(local, "t")
    local.lease(0)
    assert explorer.room == 0, "what is being trained is held"
    local.do("ack", 0)
    assert explorer.room == 2


@of_rows(4)
def test_a_step_gets_its_groups_though_the_held_ones_are_larger_than_usual(local: Local) -> None:
    explorer = local.join()
    [ticket] = explorer.admit(1)
    local.put([(group(0, 4, name="large"), ticket)])
    assert explorer.room == 0
    opened(local, "t")
    assert explorer.room == 1


def test_another_train_job_goes_on_where_the_last_one_ended(local: Local) -> None:
    explorer = local.join(in_flight=8)
    explorer.put(*explorer.admit())
    opened(local, "one")
    local.trained(0, advance=True)
    local.lease(1)
    with pytest.raises(PlacementError, check=about("buffer.name", "job-one")):
        local.train("two", running=("job-one",))
    opened(local, "two")
    rows = [name for step in range(3) for name in local.leased(step)]
    assert of_task(rows) == ["t2", "t3", "t4", "t5", "t6", "t7"], "what the first was training on came back"
    assert local.do("stats").ledger.trained == 4
    with pytest.raises(ConfigError, check=about("buffer.name")):
        local.train("one", step=1)
    local.restart()
    assert local.do("status").trainer == "job-two"


def test_groups_older_than_max_age_are_dropped_and_counted(local: Local) -> None:
    explorer = local.join(in_flight=8)
    tickets = explorer.admit()
    explorer.put(*tickets[:6])
    local.train("t")
    local.do("open_stage", plan(2, group_size=2, name="live", scheduled=False, max_age=1))
    for step in range(2):
        local.trained(step, advance=True)
    assert local.do("stats").ledger.dropped == {"stale": 4}
    explorer.put(tickets[6])
    assert local.do("stats").ledger.dropped == {"stale": 4, "late": 2}
    explorer.put(tickets[7], version=2)
    assert local.do("stats").ledger.held == 2


@pytest.mark.parametrize("change", [{"vocabulary": 5}, {"max_length": 5}, {"tokenizer": "another"}])
def test_a_job_of_another_model_is_refused(change: dict[str, Any], local: Local) -> None:
    local.join()
    local.restart()
    with pytest.raises(ConfigError, check=about("model")):
        local.join("b", model=ModelTerms(**{**vars(MODEL), **change}))


def test_rows_beyond_the_model_are_rejected_also_after_the_buffer_died(local: Local) -> None:
    explorer = local.join()
    [ticket] = explorer.admit(1)
    local.restart()
    local.put([(group(1, length=101), ticket)])
    assert local.do("stats").ledger.dropped == {"rejected: longer than max_length": 2}


def test_a_job_of_other_settings_or_tasks_is_refused(local: Local, tmp_path: Path) -> None:
    settings = local._config
    local.run(local.shared.check(tmp_path, settings))
    with pytest.raises(ConfigError, check=about("buffer.max_rows", 7)):
        local.run(local.shared.check(tmp_path, settings.model_copy(update={"max_rows": 7})))
    with pytest.raises(ConfigError, check=about("buffer.storage")):
        local.run(local.shared.check(tmp_path / "other", settings))
    local.join()
    local.restart()
    with pytest.raises(StorageError):
        local.join(spec=tasks(19))


@pytest.mark.parametrize("seed", range(8))
@of_rows(24)
def test_nothing_is_lost_or_trained_twice_in_any_history(seed: int, local: Local, monkeypatch: Any) -> None:
    """Explorers, a trainer and the Buffer are killed at random, and every task is trained once in the end."""
    chance = random.Random(seed)
    monkeypatch.setattr("rayrft.buffer.log.journal.SNAPSHOT_BYTES", 3000)
    monkeypatch.setattr("rayrft.buffer.log.journal.SNAPSHOT_RATIO", 0)
    specs = {"a": tasks(30), "b": tasks(30, prefix="u")}
    live, open_tickets = {}, {"a": list[Ticket](), "b": list[Ticket]()}
    trained: dict[int, list[str]] = {}
    step, covered, training = 0, 0, False

    def work() -> None:
        nonlocal step, covered, training
        what = chance.choice(["explore"] * 6 + ["train"] * 3 + ["kill explorer", "kill trainer", "kill buffer"])
        if what == "explore":
            feed = chance.choice("ab")
            if feed not in live:
                live[feed] = local.join(feed, specs[feed], in_flight=5)
            explorer = live[feed]
            if explorer.room > 0 and not local.shared.state.feeds[feed].ended:
                open_tickets[feed] += explorer.admit(chance.randint(1, 5))
            chance.shuffle(open_tickets[feed])
            done = chance.randint(0, len(open_tickets[feed]))
            explorer.put(*open_tickets[feed][:done])
            del open_tickets[feed][:done]
        elif what == "train":
            if not training:
                opened(local, "t", step=step)
                training = True
            if local.lease(step)[0] == "LeaseEnded":
                return
            rows = local.leased(step)
            assert trained.setdefault(step, rows) == rows
            local.do("ack", step)
            step += 1
            local.do("advance", step)
            if chance.random() < 0.4:
                covered = step
                local.do("cover", step)
        elif what == "kill explorer":
            feed = chance.choice("ab")
            live.pop(feed, None)
            open_tickets[feed].clear()
        elif what == "kill trainer":
            step, training = covered, False
            local._lives += 1
        else:
            statistics = {feed: known.state() for feed, known in local.shared.state.tasks.items()}
            local.restart()
            assert {feed: known.state() for feed, known in local.shared.state.tasks.items()} == statistics

    while step < 30:
        work()
    assert all(len(known.state()["tried"]) == 30 for known in local.shared.state.tasks.values())
    local.run(local.shared.close_stage())
    assert sorted(of_task([row for rows in trained.values() for row in rows])) == sorted(
        name for spec in specs.values() for name in spec.ids
    )
    assert Counter(row for rows in trained.values() for row in rows).most_common(1)[0][1] == 1
    ledger = local.do("stats").ledger
    assert (ledger.sampled, ledger.trained, ledger.held, ledger.dropped) == (120, 120, 0, {})
