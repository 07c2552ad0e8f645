"""Tasks to act on: maps and starts of Gymnasium."""

from __future__ import annotations

from typing import Any

import pytest

from rayrft.config.tasks import TasksConfig, TaskSourceConfig
from rayrft.data.task_sources import read_source
from rayrft.data.task_splits import load_tasks
from rayrft.errors import DataError
from tests.errors import about


def source(id: str, count: int, **options: Any) -> TaskSourceConfig:
    return TaskSourceConfig(source="gymnasium", dataset=id, size=count, options=options)


def test_held_out_maps_are_none_of_those_trained_on() -> None:
    # Of 3x3 maps there are so few that many of 200 are equal.
    config = TasksConfig(sources=[source("FrozenLake-v1", 200, size=3)], eval_size=20)
    splits = load_tasks(config, {}, seed=0)

    def maps(tasks: Any) -> list[tuple[str, ...]]:
        return [tuple(task.metadata["environment"]["desc"]) for task in tasks]

    trained, held_out = maps(splits.train), maps(splits.evaluation)
    assert len(held_out) == 20 and len(trained) > 10 and not {*trained} & {*held_out}
    assert len({*trained, *held_out}) == len(trained) + len(held_out) < 200


def test_maps_are_the_same_every_time_and_of_the_size_asked_for() -> None:
    first, second = (read_source(source("FrozenLake-v1", 5, size=6), "tasks.sources.0") for _ in range(2))
    assert first == second and all(len(task.metadata["environment"]["desc"]) == 6 for task in first)


def test_other_environments_have_a_task_for_each_start() -> None:
    tasks = read_source(source("Taxi-v4", 20), "tasks.sources.0")
    first = {task.question: seed for seed, task in reversed([*enumerate(tasks)])}
    assert [task.metadata["environment"]["seed"] for task in tasks] == [first[task.question] for task in tasks]
    assert len(first) > 10
    cliffs = read_source(source("CliffWalking-v1", 5), "tasks.sources.0")
    assert len({task.key for task in cliffs}) == 1, "it has one start"


@pytest.mark.parametrize(
    ("id", "options", "key"), [("Taxy-v4", {}, "dataset"), ("FrozenLake-v1", {"sise": 4}, "options")]
)
def test_what_gymnasium_does_not_know_is_refused(id: str, options: dict[str, Any], key: str) -> None:
    with pytest.raises(DataError, check=about(f"tasks.sources.0.{key}")):
        read_source(source(id, 5, **options), "tasks.sources.0")
