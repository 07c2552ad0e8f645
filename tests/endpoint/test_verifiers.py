"""Environments of verifiers as they are: played by their own harness in processes of their own, each worth one attempt.

Of the library itself the newest release is tested; of its host and processes alone, a stand-in.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import rayrft
from rayrft.config.tasks import TaskSourceConfig
from rayrft.data import verifiers_host
from rayrft.data.task_sources import read_source
from rayrft.endpoint.verifiers import Verifiers
from rayrft.errors import DataError
from rayrft.experience import Task
from rayrft.monitor.records import StepRecord
from tests.e2e.conftest import small_config
from tests.endpoint.scripted import Ran, running
from tests.errors import about
from tests.newest import environment

FOLDER = Path(__file__).parent


@pytest.fixture(scope="module", params=["stand-in", pytest.param("newest", marks=pytest.mark.slow)])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "stand-in":
            patch.setenv("PYTHONPATH", str(FOLDER / "stand_in"), prepend=os.pathsep)
            yield sys.executable
        else:
            made = environment(tmp_path_factory.mktemp("verifiers") / "venv", "verifiers")
            [packages] = made.parent.parent.glob("lib/*/site-packages")
            (packages / "tasksets.pth").write_text(str(FOLDER / "tasksets"))
            yield str(made)


def settings(**taskset: Any) -> dict[str, Any]:
    agent = {"harness": {"id": "letters"}, "runtime": {"type": "subprocess"}}
    return {"taskset": {"id": "letters", **taskset}, "agent": agent}


def tasks(python: str, **options: Any) -> list[Task]:
    source = {"source": "verifiers", "dataset": "letters", "options": {"python": python, **options}}
    return read_source(TaskSourceConfig(**source), "tasks.sources.0")


@contextlib.asynccontextmanager
async def playing(folder: Path, python: str, **limits: Any) -> AsyncIterator[Ran]:
    chosen = {"python": python, "environment": settings(), "processes": 2}
    async with running(folder, "verifiers", chosen, lambda prompt: "aab", **limits) as ran:
        yield ran
    assert hosts() == []


def hosts() -> list[psutil.Process]:
    """The processes that play episodes."""
    children = psutil.Process().children(recursive=True)
    return [each for each in children if each.status() != "zombie" and verifiers_host.__file__ in each.cmdline()]


async def test_an_episode_is_a_row_with_the_reward_and_the_metrics_of_its_taskset(
    python: str, tiny_model: Path
) -> None:
    listed = tasks(python, count=2)
    assert [task.question for task in listed] == ["Say a", "Say b"]
    async with playing(tiny_model, python) as ran:
        for task, reward in zip(listed, (4 / 3, 2 / 3), strict=True):
            rollout = await ran(task, n=3)
            assert rollout.problem is None and len(rollout.rows) == 3 and len(hosts()) == 2
            for row in rollout.rows:
                assert [turn["content"] for turn in row.turns] == [task.question, "aab", "Sure?", "aab"]
                assert row.reward == pytest.approx(reward) and row.action_mask.sum() == 8
            for result in rollout.results:
                assert result.components == pytest.approx({"share": reward, "letters": 3.0})


async def test_an_episode_that_fails_costs_its_attempt_alone(python: str, tiny_model: Path) -> None:
    problems = {"raises": "LookupError: no such letter", "dies": "its process ended with status 3", "hangs": ""}
    bad = [task for what in problems for task in tasks(python, count=1, what=what)]
    [good] = tasks(python, count=1)
    async with playing(tiny_model, python, **{"explorer.deadline_s": 5.0}) as ran:
        *failed, rollout = await asyncio.gather(*map(ran, [*bad, good]))
        reasons = [{"workflow_error": 1}, {"workflow_error": 1}, {"timeout": 1}]
        assert [each.failed for each in failed] == reasons
        assert all(problem in str(each.problem) for problem, each in zip(problems.values(), failed, strict=True))
        for _ in range(2):
            assert [row.reward for row in rollout.rows] == [pytest.approx(4 / 3)]
            rollout = await ran(good)


async def test_a_killed_process_costs_its_attempt_alone_and_another_one_takes_its_place(
    python: str, tiny_model: Path
) -> None:
    [task] = tasks(python, count=1)
    async with playing(tiny_model, python) as ran:
        ran.policy.holding.clear()
        episodes = [asyncio.ensure_future(ran(task)) for _ in range(2)]
        while len(ran.policy.requests) < 2:  # noqa: ASYNC110 - the episodes are in other processes
            await asyncio.sleep(0.01)
        os.kill(hosts()[0].pid, signal.SIGKILL)
        ended, _ = await asyncio.wait(episodes, return_when=asyncio.FIRST_COMPLETED)
        ran.policy.holding.set()
        rollouts = await asyncio.gather(*episodes)
        assert [rollout.failed for rollout in rollouts if rollout.failed] == [{"workflow_error": 1}] and len(ended) == 1
        assert [row.reward for rollout in rollouts for row in rollout.rows] == [pytest.approx(4 / 3)]
        assert len((await ran(task, n=2)).rows) == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("python", ["newest"], indirect=True)
def test_a_model_learns_from_the_rewards_of_an_environment(
    seed: int, python: str, ray_cluster: Any, tmp_path: Path
) -> None:
    letters = {"source": "verifiers", "dataset": "letters", "options": {"python": python, "count": 8}}
    chosen = {"python": python, "environment": settings(count=8), "processes": 8}
    changes = {
        "model": {"tiny": {"layers": 2, "hidden_size": 64, "heads": 2}, "max_length": 64},
        "tasks": {"sources": [letters], "eval_size": 2},
        "stages": [
            {
                "name": "grpo",
                "algorithm": {"name": "grpo"},
                "steps": 30,
                "batch_size": 64,
                "group_size": 8,
                "optimizer": {"lr": 3e-3},
            }
        ],
        "evaluation": {"enabled": False},
        "seed": seed,
    }
    run_config = small_config(tmp_path, "letters", **changes)
    run_config["explorer"] |= {"workflow": "verifiers", "workflow_options": {"verifiers": chosen}}
    del run_config["demonstrations"]
    run = rayrft.start(run_config, say=lambda text: None)
    summary = run.result()
    rewards = [record.reward for record in run.records() if isinstance(record, StepRecord)]
    assert summary.status == "finished" and summary.ledger is not None and summary.ledger.closes
    assert np.mean(rewards[-5:]) > 1.5 * np.mean(rewards[:5]) > 0, rewards


async def test_a_task_from_elsewhere_is_refused(python: str, tiny_model: Path) -> None:
    async with playing(tiny_model, python) as ran:
        rollout = await ran(Task.create("test", "Say a", ""))
        assert rollout.failed == {"workflow_error": 1} and "tasks of source verifiers" in str(rollout.problem)


def test_an_environment_that_cannot_be_loaded_is_an_error_before_the_start(python: str) -> None:
    for options, problem in [
        ({"python": "/no/python"}, "cannot be started"),
        ({"python": python, "wrong": 1}, "wrong"),
        ({"python": python, "count": "many"}, "count|slice"),
    ]:
        with pytest.raises(DataError, match=problem, check=about("tasks.sources.0")):
            tasks(**options)
    with pytest.raises(DataError, match=r"letterz|not found", check=about("explorer.workflow_options.verifiers")):
        Verifiers(python, {"taskset": {"id": "letterz"}})


def test_a_python_without_the_library_or_with_another_interface_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="is required", check=about("tasks.sources.0.options.python")):
        read_source(TaskSourceConfig(source="verifiers", dataset="letters"), "tasks.sources.0")
    (tmp_path / "verifiers.py").write_text("__version__ = '0.1.10'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(DataError, match=r"v1 interface \(0.4 or later\)"):
        tasks(sys.executable)
