"""Environments of other libraries, played for real by the runner."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayrft.config.tasks import TaskSourceConfig
from rayrft.data.task_sources import read_source
from rayrft.errors import ConfigError, DataError
from rayrft.experience import Task
from rayrft.explorer.environments import Environments
from rayrft.explorer.replay import replay
from tests.conftest import ROOT
from tests.errors import about
from tests.explorer.attempts import earned, play, said, stored, where
from tests.explorer.scripted import config

PLAYED = Path(__file__).parent / "played"


def played(name: str, **options: Any) -> dict[str, Any]:
    return where() | {"explorer.environment": {"name": name, "options": options, "deadline_s": 100.0, "spares": 0}}


@pytest.mark.parametrize(
    ("answers", "rewards", "solved"),
    [(["cat", "<answer>tac</answer>"], 1.0, True), (["cat", "tca", "act"], None, False)],
)
async def test_a_task_of_reasoning_gym_is_tried_until_it_is_solved(
    answers: list[str], rewards: float | None, solved: bool, tiny_model: Path
) -> None:
    source = TaskSourceConfig(source="reasoning_gym", dataset="spell_backward", size=5)
    task = read_source(source, "tasks.sources.0")[0]
    word = re.findall(r": (\w+)", task.question)[-1]
    says = iter([answer.replace("tac", word[::-1]).replace("cat", word) for answer in answers])
    place = played("reasoning_gym", dataset="spell_backward", attempts=3)
    rollout, _ = await play(tiny_model, "episode", lambda _: next(says), task=task, **place)
    [row] = stored(rollout)
    assert ("solved" in row.metrics) == solved and len(said(rollout)[0]) == len(answers)
    assert (earned(rollout)[0] == pytest.approx(1.0)) == solved
    assert "best answer" in row.turns[2]["content"]
    assert (await replay(row, task, config(**place))).differences == ()


@pytest.fixture
def verifiers_words(monkeypatch: pytest.MonkeyPatch) -> TaskSourceConfig:
    monkeypatch.syspath_prepend(PLAYED)
    return TaskSourceConfig(source="verifiers", dataset="guess-the-word", options={"words": ["cat", "dog"]})


async def test_a_dialogue_of_verifiers_is_played_by_our_model_and_scored_by_its_rubric(
    verifiers_words: TaskSourceConfig, tiny_model: Path
) -> None:
    tasks = read_source(verifiers_words, "tasks.sources.0")
    assert {task.answer for task in tasks} == {"cat", "dog"}
    task = next(task for task in tasks if task.answer == "cat")
    place = played("verifiers", id="guess-the-word", arguments={"words": ["cat", "dog"]})
    says = iter(["cow", "cat"])
    rollout, _ = await play(tiny_model, "episode", lambda _: next(says), task=task, **place)
    [row] = stored(rollout)
    assert [turn["role"] for turn in row.turns] == ["system", "user", "assistant", "user", "assistant"]
    assert row.turns[0]["content"] == "Say one word." and row.turns[3]["content"] == "1 letters are right."
    assert earned(rollout) == [2.0] and row.metrics == {"right": 1.0, "num_turns": 2.0}
    assert (await replay(row, task, config(**place))).differences == ()
    rollout, _ = await play(tiny_model, "episode", lambda _: "cow", task=task, **place)
    assert earned(rollout) == [0.0] and said(rollout) == [["cow"] * 3], "it ends by its max_turns"


async def test_a_dialogue_of_verifiers_that_rewrites_itself_is_an_error(
    verifiers_words: TaskSourceConfig, tiny_model: Path
) -> None:
    task = read_source(verifiers_words, "tasks.sources.0")[0]
    place = played("verifiers", id="guess-the-word", arguments={"rewrites": True})
    rollout, _ = await play(tiny_model, "episode", lambda _: "cow", task=task, failures=True, **place)
    assert rollout.failed == {"environment_error": 1} and "earlier messages" in str(rollout.problem)


def test_an_environment_of_verifiers_that_is_not_installed_is_refused() -> None:
    with pytest.raises(ConfigError, check=about("explorer.environment.options.id")):
        Environments(config(**played("verifiers", id="no-such-words")).explorer.environment)  # type: ignore[arg-type]
    with pytest.raises(DataError, check=about("tasks.sources.0.dataset")):
        read_source(TaskSourceConfig(source="verifiers", dataset="no-such-words"), "tasks.sources.0")


@pytest.fixture(scope="module")
def echo_server() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "tests.explorer.played.echo_server", str(port)], cwd=ROOT)
    deadline = time.monotonic() + 120
    while server.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


async def test_an_openenv_server_is_acted_in(echo_server: str, tiny_model: Path) -> None:
    task = Task.create("test", "echo", "", metadata={"environment": {"greeting": "good day"}})
    place = played("openenv", url=echo_server, action="text", observation="echo", fixed={"loud": True})
    rollout, _ = await play(tiny_model, "episode", lambda _: "tac", n=3, task=task, **place)
    assert earned(rollout) == [6.0] * 3 and said(rollout) == [["tac", "tac"]] * 3
    assert all([turn["content"] for turn in row.turns[:3]] == ["good day True", "tac", "TAC"] for row in rollout.rows)
    row = stored(rollout)[0]
    assert (await replay(row, task, config(**place))).differences == ()
    whole = played("openenv", url=echo_server)
    says = iter(["what", '{"text": "tac"}', '{"text": "act"}'])
    rollout, _ = await play(tiny_model, "episode", lambda _: next(says), task=task, **whole)
    assert earned(rollout) == [6.0] and rollout.rows[0].metrics == {"invalid_actions": 1.0}


async def test_an_openenv_server_that_is_not_there_fails_the_attempt(tiny_model: Path) -> None:
    place = played("openenv", url="http://127.0.0.1:9")
    rollout, _ = await play(tiny_model, "episode", lambda _: "tac", failures=True, **place)
    assert rollout.failed == {"environment_error": 1} and "connect" in str(rollout.problem)
