"""Drawing tasks: shares by weight, orders within a source, and draws that go on as if nothing had happened."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrft.data.task_sampler import TaskSet, TaskSetSpec, TaskView, task_samplers
from rayrft.errors import ConfigError, DataError
from tests.errors import about

SAMPLERS = sorted(task_samplers)
SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4)


def layout(sizes: Sequence[int]) -> list[int]:
    """The source of each task, with the tasks of all sources mixed."""
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes)).tolist()


def make(sizes: Sequence[int], weights: Sequence[float] = (), sampler: str = "shuffled", **rest: Any) -> TaskSet:
    sources = layout(sizes)
    difficulties = [float((i * 13) % 5) for i in range(len(sources))]
    priorities = [0.5 + (i * 7) % 3 for i in range(len(sources))]
    values = {"seed": 0, "difficulties": difficulties, "priorities": priorities, **rest}
    return task_set(sources, weights or [1.0] * len(sizes), sampler=sampler, **values)


def task_set(sources: Sequence[int], weights: Sequence[float], **rest: Any) -> TaskSet:
    """Tasks whose ids are their numbers."""
    return TaskSetSpec([str(number) for number in range(len(sources))], list(sources), list(weights), **rest)()


def draw(tasks: TaskSet) -> int | None:
    id = tasks.draw()
    return None if id is None else int(id)


def draws(tasks: TaskSet, count: int) -> list[int | None]:
    return [draw(tasks) for _ in range(count)]


def play(tasks: TaskSet, count: int) -> list[int | None]:
    """Draw, and let statistics flow back from every task drawn."""
    drawn = []
    for number in range(count):
        drawn.append(index := draw(tasks))
        if index is not None:
            tasks.record(str(index), 4, (index * 5 + number) % 5 * 0.8)
    return drawn


def statistics(tasks: TaskSet, count: int) -> list[tuple[int, float]]:
    return [tasks.statistics(str(number)) for number in range(count)]


@pytest.mark.parametrize("sampler", SAMPLERS)
class TestAnySampler:
    def test_draws_follow_from_seed_weights_and_statistics(self, sampler: str) -> None:
        first, again, other = (make([30, 20], [2, 1], sampler, seed=seed) for seed in (1, 1, 2))
        drawn = play(first, 210)
        assert drawn == play(again, 210) and sum(layout([30, 20])[index or 0] for index in drawn) == 70
        assert (drawn == play(other, 210)) == (sampler in ("sequential", "easy_to_hard"))

    def test_epochs_end_and_the_position_stays_and_without_them_there_is_no_end(self, sampler: str) -> None:
        tasks = make([5, 3], [1, 4], sampler, epochs=2)
        drawn = draws(tasks, 20)
        assert None not in drawn[:16] and drawn[16:] == [None] * 4
        assert tasks.position == 16
        assert None not in draws(make([3, 2], sampler=sampler), 500)


@pytest.mark.parametrize("sampler", ["sequential", "shuffled", "easy_to_hard"])
@given(sizes=SIZES, epochs=st.integers(1, 3))
def test_every_epoch_has_each_task_once(sampler: str, sizes: list[int], epochs: int) -> None:
    tasks = make(sizes, [1.0, 2.0, 3.5, 0.3][: len(sizes)], sampler, epochs=epochs)
    sources = layout(sizes)
    by_source: dict[int, list[int]] = {i: [] for i in range(len(sizes))}
    while (index := draw(tasks)) is not None:
        by_source[sources[index]].append(index)
    for source, drawn in by_source.items():
        size, members = sizes[source], [i for i, each in enumerate(sources) if each == source]
        for epoch in range(epochs):
            assert sorted(drawn[epoch * size : (epoch + 1) * size]) == members


def test_shuffled_epochs_and_sources_have_orders_of_their_own() -> None:
    tasks = task_set([0] * 50 + [1] * 50, [1, 1], sampler="shuffled", seed=0)
    drawn = [index for index in draws(tasks, 200) if index is not None]
    orders = {tuple(i % 50 for i in drawn[start:100:2]) for start in (0, 1)}
    orders |= {tuple(i % 50 for i in drawn[100 + start :: 2]) for start in (0, 1)}
    assert len(orders) == 4


def test_sequential_keeps_the_order_of_the_tasks() -> None:
    tasks = task_set([1, 0, 1, 0, 1], [1, 1], sampler="sequential", seed=9, epochs=1)
    drawn = draws(tasks, 5)
    assert [i for i in drawn if i in (1, 3)] == [1, 3] and [i for i in drawn if i in (0, 2, 4)] == [0, 2, 4]


def test_easy_tasks_come_before_hard_ones_and_ties_by_number() -> None:
    tasks = task_set([0] * 6, [1], sampler="easy_to_hard", seed=0, difficulties=[3, 1, 2, 1, 0.5, 3])
    assert draws(tasks, 8) == [4, 1, 3, 2, 0, 5, 4, 1]


@pytest.mark.parametrize("difficulties", [(), [1.0, None, 2.0]])
def test_easy_to_hard_without_difficulties_is_refused_before_the_first_draw(difficulties: list[float | None]) -> None:
    with pytest.raises(DataError, match=r"tasks\.sources\.0\.difficulty: [13] of 3 tasks have no difficulty"):
        task_set([0] * 3, [1], sampler="easy_to_hard", seed=0, difficulties=difficulties)
    tasks = make([3], sampler="easy_to_hard")
    with pytest.raises(DataError, check=about("tasks.sources.0.difficulty")):
        tasks.check(0, [None], [None])
    assert tasks.state() == make([3], sampler="easy_to_hard").state(), "new tasks are only checked"


RECORDS = {0: (20, 20.0), 1: (20, 10.0), 2: (20, 0.0), 3: (8, 2.0)}
"""Tries and passes of four tasks; a fifth stays untried."""


@pytest.mark.parametrize(
    ("sampler", "weights"),
    [
        # Smoothed rates: 21/22, 11/22, 1/22, 3/10, 1/2.
        ("failure", [0.05, 0.5, 21 / 22, 0.7, 0.5]),
        ("near_half", [4 * 21 / 22**2, 1.0, 4 * 21 / 22**2, 0.84, 1.0]),
    ],
)
def test_draws_follow_the_statistics(sampler: str, weights: list[float]) -> None:
    tasks = task_set([0] * 5, [1], sampler=sampler, seed=0)
    for index, (tries, passes) in RECORDS.items():
        tasks.record(str(index), tries, passes)
    counts = Counter(draws(tasks, 8000))
    for index, weight in enumerate(weights):
        share = weight / sum(weights)
        assert counts[index] / 8000 == pytest.approx(share, abs=0.02), index
        assert counts[index] > 0


def test_statistics_of_one_source_do_not_change_the_draws_of_another() -> None:
    plain, told = (make([10, 10], sampler="failure") for _ in range(2))
    for id in map(str, range(20)):
        if told.source(id) == 0:
            told.record(id, 10, 10)
    first, second = (
        [index for index in draws(tasks, 400) if index is not None and plain.source(str(index)) == 1]
        for tasks in (plain, told)
    )
    assert len(first) == 200 and first == second


def test_statistics_belong_to_the_task_they_were_recorded_for() -> None:
    tasks = task_set([1, 0, 1, 0], [1, 1], sampler="sequential", seed=0)
    tasks.record("2", 4, 1.0)
    tasks.record("2", 4, 0.5)
    tasks.record("1", 2, 2)
    assert statistics(tasks, 4) == [(0, 0.0), (2, 2.0), (8, 1.5), (0, 0.0)]
    assert {id for id, *_ in tasks.state()["tried"]} == {"1", "2"}, "only what was tried is written"


@pytest.mark.parametrize(("tries", "passes"), [(1, 2.0), (1, -0.5), (-1, 0.0), (1, float("nan"))])
def test_passes_that_are_no_share_of_the_tries_are_refused(tries: int, passes: float) -> None:
    tasks = make([3])
    with pytest.raises(DataError, check=about("task 1")):
        tasks.record("1", tries, passes)
    assert tasks.state() == make([3]).state()


@pytest.mark.parametrize(("sources", "weights"), [([0, 0], [1.0, 1.0]), ([0, 1], [1.0]), ([], [1.0])])
def test_a_source_without_tasks_or_weight_and_a_state_of_other_tasks_are_refused(
    sources: list[int], weights: list[float]
) -> None:
    with pytest.raises(DataError, check=about("tasks.sources")):
        task_set(sources, weights, sampler="sequential", seed=0)
    with pytest.raises(DataError, check=about("tasks.sources")):
        make([4]).restore(make([3]).state())
    with pytest.raises(DataError, check=about("tasks.sources", "a")):
        TaskSetSpec(["a", "b", "a"], [0, 0, 0], [1.0], sampler="sequential", seed=0)()


@pytest.mark.parametrize("sampler", SAMPLERS)
@given(SIZES, st.data(), st.none() | st.integers(1, 3))
def test_a_set_that_grows_draws_the_new_tasks_and_is_restored_with_them(
    sampler: str, sizes: list[int], data: st.DataObject, epochs: int | None
) -> None:
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 1.7]), min_size=len(sizes), max_size=len(sizes)))
    grown, restored = (make(sizes, weights, sampler, epochs=epochs, seed=5) for _ in range(2))
    count, seen = sum(sizes), set[int | None]()
    for _ in range(data.draw(st.integers(1, 3))):
        seen |= set(play(grown, data.draw(st.integers(0, 20))))
        source, more = data.draw(st.integers(0, len(sizes) - 1)), data.draw(st.integers(1, 4))
        grown.add([str(count + number) for number in range(more)], source, [2.5] * more, [1.0] * more)
        count += more
    play(restored, data.draw(st.integers(0, 10)))
    restored.restore(json.loads(json.dumps(grown.state())))
    assert restored.state() == grown.state() and statistics(restored, count) == statistics(grown, count)
    drawn = play(grown, 400)
    assert play(restored, 400) == drawn
    if sampler in ("sequential", "shuffled", "easy_to_hard"):
        new = set(range(sum(sizes), count))
        assert new <= seen | set(drawn), "every new task is drawn in the epoch that began with it"
    assert (None in drawn) == (epochs is not None)


def test_a_source_that_had_ended_takes_part_again_when_it_grows() -> None:
    tasks = make([2, 3], sampler="sequential", epochs=1)
    assert None not in draws(tasks, 5) and tasks.draw() is None
    tasks.add(["5"], 0, [None], [None])
    assert sorted(draws(tasks, 3)) == sorted([*(i for i, s in enumerate(layout([2, 3])) if s == 0), 5])
    assert tasks.draw() is None


def test_draws_are_in_proportion_to_priorities_and_unknown_ones_are_the_mean() -> None:
    tasks = task_set([0] * 5, [1], sampler="priority", seed=0, priorities=[0.0, 1.0, 4.0, None, 3.0])
    counts = Counter(draws(tasks, 8000))
    assert counts[0] == 0, "a priority of 0 is never drawn"
    for index, share in enumerate([0, 0.1, 0.4, 0.2, 0.3]):
        assert counts[index] / 8000 == pytest.approx(share, abs=0.02)
    tasks.add(["5"], 0, [None], [92.0])
    assert Counter(draws(tasks, 1000))[5] == pytest.approx(1000 * 92 / 120, abs=50), "those of new tasks count, too"


@pytest.mark.parametrize("priorities", [(), [0.0, 0.0], [1.0, -1.0], [1.0, float("inf")]])
def test_priorities_that_nothing_can_be_drawn_by_are_refused_at_once(priorities: list[float | None]) -> None:
    with pytest.raises(DataError, check=about("tasks.sampler")):
        task_set([0] * 2, [1], sampler="priority", seed=0, priorities=priorities)


def test_statistics_begin_with_what_was_measured_before() -> None:
    spec = TaskSetSpec(["a", "b"], [0, 0], [1.0], sampler="near_half", seed=0, tried=[("b", 8, 2.0)])
    assert [spec().statistics(id) for id in "ab"] == [(0, 0.0), (8, 2.0)]
    again = spec()
    again.record("b", 1, 1.0)
    restored = spec()
    restored.restore(json.loads(json.dumps(again.state())))
    assert restored.statistics("b") == (9, 3.0), "and are not counted twice on a resume"


def least_tried(view: TaskView, k: int) -> int:
    return int(np.argmin(view.tries))


def beyond(view: TaskView, k: int) -> int:
    return -1


def meddling(view: TaskView, k: int) -> int:
    view.tries[0] = 1
    return 0


def test_a_sampler_of_ones_own_sees_the_statistics_as_they_are_now() -> None:
    tasks = make([3], sampler=f"{__name__}:least_tried")
    drawn = []
    for _ in range(6):
        drawn.append(index := draw(tasks) or 0)
        tasks.record(str(index), 1, 0)
    assert drawn == [0, 1, 2, 0, 1, 2]


def test_a_sampler_that_is_not_known_chooses_no_task_or_changes_the_statistics_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.sampler: the sampler chose position -1 of 3 tasks .*beyond"):
        make([3], sampler=f"{__name__}:beyond")
    with pytest.raises(ValueError, match="read-only"):
        make([3], sampler=f"{__name__}:meddling")
    with pytest.raises(ConfigError, match="Did you mean 'shuffled'", check=about("tasks.sampler", "shufled")):
        make([3], sampler="shufled")
