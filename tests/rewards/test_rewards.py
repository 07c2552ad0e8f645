"""Reward functions, and the pool that runs them under a deadline."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest
import ray

from rayrft.config.reward import RewardConfig
from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.rewards import RewardResult, build_reward
from rayrft.rewards.base import score
from rayrft.rewards.worker import RewardPool, RewardWorker
from tests.errors import about
from tests.scripted import handle, remote


def task(answer: str, **metadata: Any) -> Task:
    return Task.create("test", "question", answer, metadata=metadata)


def value(name: str, answer: str, response: str, **metadata: Any) -> float | None:
    result = build_reward(name, {})(task(answer, **metadata), response)
    return result.value if isinstance(result, RewardResult) else result


def test_exact_match_ignores_surrounding_space_alone() -> None:
    assert value("exact", "tac", " tac\n") == 1.0
    assert value("exact", "tac", "tacx") == 0.0
    assert value("exact", "tac", "Tac") == 0.0


@pytest.mark.parametrize(
    ("truth", "response", "right"),
    [
        ("72", "48 + 24 = 72, so\n#### 72", 1.0),
        ("72", "#### 72.0", 1.0),
        ("72", "#### 71", 0.0),
        ("1000", "The answer is 1,000.", 1.0),
        (r"\frac{1}{2}", "$0.5$", 1.0),
        ("72", "no idea", 0.0),
    ],
)
def test_math_answers_are_compared_as_mathematics(truth: str, response: str, right: float) -> None:
    assert value("math", truth, response) == right


def test_a_ground_truth_that_is_not_mathematics_makes_the_reward_unknown() -> None:
    result = build_reward("math", {})(task("no number at all"), "5")
    assert isinstance(result, RewardResult) and result.value is None and "ground truth" in str(result.reason)


def test_reasoning_gym_verifies_its_own_tasks() -> None:
    assert value("reasoning_gym", "tac", "tac", source_dataset="spell_backward", word="cat") == 1.0
    assert value("reasoning_gym", "tac", "xyz", source_dataset="spell_backward", word="cat") < 0.5  # type: ignore[operator]


@pytest.mark.parametrize("found", [float("nan"), float("inf"), RewardResult(float("-inf"), {"part": 1.0})])
def test_a_reward_that_is_no_number_is_unknown_and_says_so(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrft.rewards.worker.build_reward", lambda name, options: lambda task, response: found)
    [result] = RewardWorker(RewardConfig(name="exact"), []).score(task("a"), ["a"])
    value = found.value if isinstance(found, RewardResult) else found
    assert result.value is None and result.reason == f"the reward is {value}"


def test_an_unknown_reward_names_the_nearest() -> None:
    with pytest.raises(ConfigError, check=about("reward.name", "exatc")):
        build_reward("exatc", {})


def test_options_a_reward_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, check=about("reward.options")):
        build_reward("exact", {"strict": True})


def test_a_reward_by_path_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, check=about("reward.name")):
        build_reward("no.such.module:reward", {})


def moody() -> Any:
    """A reward that does what the response says."""

    def score(task: Task, response: str) -> float:
        if response == "raise":
            raise ZeroDivisionError("division by zero")
        if response == "hang":
            time.sleep(60)
        if response == "die":
            os._exit(1)
        return 1.0

    return score


@pytest.mark.usefixtures("ray_cluster")
async def test_a_reward_that_raises_hangs_or_dies_is_unknown_and_the_pool_goes_on() -> None:
    import sys

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    config = RewardConfig(name="math", deadline_s=5.0)

    class MoodyWorker(RewardWorker):
        def __init__(self) -> None:
            self._reward = moody()

    pool = RewardPool(config, lambda: handle(ray.remote(MoodyWorker).options(num_cpus=0).remote()))
    await pool.open()
    raised, fine = await pool.score(task("a"), ["raise", "fine"])
    assert raised.value is None and raised.reason == "ZeroDivisionError: division by zero"
    assert fine.value == 1.0
    [hung] = await pool.score(task("a"), ["hang"])
    assert hung.value is None and hung.reason == "timeout: no reward within 5 s"
    [dead] = await pool.score(task("a"), ["die"])
    assert dead.value is None and "reward worker died" in str(dead.reason)
    results = await asyncio.gather(*(pool.score(task("a"), ["fine"]) for _ in range(5)))
    assert [each[0].value for each in results] == [1.0] * 5


async def test_a_worker_that_still_works_for_nobody_is_not_free_and_one_that_does_not_return_is_an_error() -> None:
    working, ended, ready, broken = asyncio.Event(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Worker:
        async def score(self, task: Task, responses: list[str]) -> list[RewardResult]:
            working.set()
            await ready.wait()
            return [RewardResult(1.0)] * len(responses)

        async def ready(self) -> None:
            await ready.wait()
            if broken.is_set():
                raise ConfigError("no such file", field="reward.options")
            ended.set()

    pool = RewardPool(RewardConfig(name="math"), lambda: remote(Worker()))
    ready.set()
    await pool.open()
    ready.clear()
    abandoned = asyncio.ensure_future(pool.score(task("a"), ["a"]))
    await working.wait()
    abandoned.cancel()
    following = asyncio.ensure_future(pool.score(task("a"), ["b"]))
    working.clear()
    await asyncio.wait({following}, timeout=0.1)
    assert not working.is_set()
    ready.set()
    assert [result.value for result in await following] == [1.0] and ended.is_set()
    broken.set()
    ready.clear()
    working.clear()
    abandoned = asyncio.ensure_future(pool.score(task("a"), ["a"]))
    await working.wait()
    abandoned.cancel()
    waiters = [asyncio.ensure_future(pool.score(task("a"), ["b"])) for _ in range(2)]
    ready.set()
    for waiting in waiters:
        with pytest.raises(ConfigError, check=about("reward.options")):
            await asyncio.wait_for(waiting, 20)


async def test_a_reward_that_runs_inline_has_no_worker() -> None:
    pool = RewardPool(RewardConfig(name="exact"), None)
    await pool.open()
    right, wrong = await pool.score(task("a"), ["a", "b"])
    assert (right.value, wrong.value) == (1.0, 0.0)


@pytest.mark.parametrize("result", [RewardResult("good"), RewardResult(1.0, {"part": "some"}), "good", None])  # type: ignore[arg-type]
def test_what_is_no_number_is_an_unknown_reward_and_not_the_end_of_the_run(result: Any) -> None:
    found = score(lambda task, response: result, task("a"), "a")
    assert found.value is None and ("Error" in str(found.reason))
