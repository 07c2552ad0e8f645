"""Environments, also of other libraries: where they live, how they fail, their seeds, and replay of their episodes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from websockets.sync.server import ServerConnection
from websockets.sync.server import serve as serve_websockets

from rayrft.config.tasks import TaskSourceConfig
from rayrft.data.task_sources import read_source
from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.explorer.environments import Environments, Step
from rayrft.explorer.environments.gymnasium import GymnasiumEnvironment
from rayrft.explorer.replay import replay
from rayrft.explorer.rollout import Rollout
from rayrft.explorer.workflows.base import check_workflows
from tests.conftest import ROOT
from tests.e2e.conftest import free_port
from tests.errors import about
from tests.explorer.scripted import config, earned, play, said, stored, where

TASK = Task.create("test", "go", "")


async def act(model: Path, says: Any, n: int = 2, **more: Any) -> Rollout:
    return (await play(model, "episode", says, n=n, task=more.pop("task", TASK), **more))[0]


@pytest.mark.parametrize("name", ["Blocking", "Async", "make_async"])
async def test_every_attempt_acts_in_an_environment_of_its_own(name: str, tiny_model: Path) -> None:
    rollout = await act(tiny_model, "go", n=3, **where(name))
    assert earned(rollout) == [pytest.approx(0.6)] * 3 and said(rollout) == [["go"] * 3] * 3
    assert all(row.metrics == {"slips": 6.0} for row in rollout.rows)
    pids = {row.turns[2]["content"].split()[1] for row in rollout.rows}
    assert (pids == {str(os.getpid())}) == (name == "Async"), "what may block lives in other processes"


TROUBLES = {
    "die": "exit code 1",
    "shout": "large|characters",
    "talk": "1000 characters",
    "raise": "no way",
    "nothing": "NoneType",
    "nan": "finite",
}


@pytest.mark.parametrize("name", ["Blocking", "Async"])
async def test_one_that_fails_costs_itself(name: str, tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    troubles = [each for each in TROUBLES if (name, each) != ("Async", "die")]  # would be this process
    settings = where(name, observation_limit=1000, same_episode=False)
    says = [*troubles, *["go"] * 3]  # of the attempts that come first
    rollout = await act(tiny_model, says, n=len(troubles) + 1, failures=True, **settings)
    assert rollout.failed == {"environment_error": len(troubles)} and len(rollout.rows) == 1
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(troubles)
    assert all(any(re.search(TROUBLES[each], text) for text in told) for each in troubles), told


@pytest.mark.parametrize("name", ["Blocking", "Async"])
async def test_one_that_hangs_ends_at_its_deadline(name: str, tiny_model: Path) -> None:
    rollout = await act(tiny_model, "hang", n=1, failures=True, **where(name, deadline_s=0.5))
    assert rollout.failed == {"timeout": 1} and "0.5 s" in str(rollout.problem)


@pytest.mark.parametrize(("deaths", "rows"), [(2, 1), (3, 0)])
async def test_a_process_that_dies_is_replaced(deaths: int, rows: int, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "flag").write_text("x" * deaths)
    settings = where(options={"flag": str(tmp_path / "flag")}, reset_retries=2)
    rollout = await act(tiny_model, "go", n=1, failures=True, **settings)
    assert len(rollout.rows) == rows and rollout.failed == ({} if rows else {"environment_error": 1})


@pytest.mark.parametrize("same", [True, False])
async def test_attempts_of_a_group_face_the_same_episode_unless_told_otherwise(same: bool, tiny_model: Path) -> None:
    rollout = await act(tiny_model, "go", n=3, **where("Async", same_episode=same))
    assert len({row.turns[0]["content"] for row in rollout.rows}) == (1 if same else 3)
    again = await act(tiny_model, "go", n=3, **where("Async", same_episode=same))
    assert [row.turns[0] for row in again.rows] == [row.turns[0] for row in rollout.rows], "it follows from the seed"
    other = await act(tiny_model, "go", n=3, seed=1, **where("Async", same_episode=same))
    assert {row.turns[0]["content"] for row in other.rows}.isdisjoint(row.turns[0]["content"] for row in rollout.rows)


async def test_more_attempts_than_processes_all_act_and_waiting_costs_no_deadline(tiny_model: Path) -> None:
    rollout = await act(tiny_model, "go", n=12, **where(processes=2))
    assert len(rollout.rows) == 12


async def test_a_blocking_environment_does_not_stop_the_event_loop() -> None:
    environments = Environments(config(**where()).explorer.environment)  # type: ignore[arg-type]
    async with environments.attempt(0) as env:
        await env.reset(TASK)
        hanging = asyncio.ensure_future(env.step("hang"))
        async with environments.attempt(0) as other:
            await other.reset(TASK)
            assert (await other.step("go")).reward == 0.1 and not hanging.done()
        hanging.cancel()
    await environments.close()


def played(name: str, **options: Any) -> dict[str, Any]:
    return where() | {"explorer.environment": {"name": name, "options": options, "deadline_s": 100.0, "spares": 0}}


LAKE = Task.create("test", "lake", "", metadata={"environment": {"desc": ["SFF", "FHF", "FFG"]}})


def lake(slippery: bool = False, **options: Any) -> dict[str, Any]:
    return played("gymnasium", **{"id": "FrozenLake-v1", "options": {"is_slippery": slippery}, **options})


BY_STEP: list[dict[str, Any]] = [{"rows": "step"}, {"credit": "step"}, {"rows": "step", "credit": "step"}]


@pytest.mark.parametrize(
    ("place", "task", "options"),
    [(lake(slippery=True), LAKE, {}), *((where("Async"), TASK, options) for options in ({}, *BY_STEP))],
)
async def test_an_episode_is_played_again_from_its_row(
    place: dict[str, Any], task: Task, options: dict[str, Any], tiny_model: Path
) -> None:
    words = random.Random(0)
    says = lambda _: words.choice(["left", "down", "right", "up", "hm"])  # noqa: E731
    rollout, _ = await play(tiny_model, "episode", says, {"max_steps": 6, **options}, n=2, task=task, **place)
    rows = list({row.repeat: row for row in stored(rollout)}.values())  # the last one of each attempt
    assert len(rows) == 2
    for row in rows:
        played = await replay(row, task, config(**place))
        assert played.differences == () and len(played.steps) == sum(turn["role"] == "assistant" for turn in row.turns)


async def test_a_replay_finds_what_is_not_as_the_row_says(tiny_model: Path) -> None:
    place = where("Async")
    rollout, _ = await play(tiny_model, "episode", "down", task=TASK, **place)
    [row] = stored(rollout)
    wrong = {"role": "user", "content": "You are elsewhere."}, {"role": "assistant", "content": "right"}
    for changed, difference in [
        (row.with_fields(turns=(*row.turns[:2], wrong[0], *row.turns[3:])), "messages 2 to 2"),
        (row.with_fields(turns=(*row.turns[:1], wrong[1], *row.turns[2:])), "messages"),
        (row.with_fields(reward=1.0), "sum of rewards"),
    ]:
        found = (await replay(changed, TASK, config(**place))).differences
        assert len(found) >= 1 and difference in found[0]


async def test_a_lake_is_crossed_by_its_map(tiny_model: Path) -> None:
    path = ["I go right.", "right", "<answer>Down</answer> not left", "no idea", "down"]
    rollout = await act(tiny_model, path, n=1, task=LAKE, **lake(invalid_reward=-0.5))
    assert earned(rollout) == [0.5] and said(rollout) == [path]
    [row] = rollout.rows
    assert row.metrics == {"invalid_actions": 1.0}
    first, second, *_, after_nonsense = (turn["content"] for turn in row.turns if turn["role"] == "user")
    assert "PFF\nFHF\nFFG" in first and "left, down, right, up" in first and "row 1, column 1" in first
    assert second == "SPF\nFHF\nFFG\nYou are at row 1, column 2."
    assert after_nonsense.startswith("That is not an action") and "row 2, column 3" in after_nonsense


def test_an_environment_is_made_early_and_again_only_for_what_tasks_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], gymnasium.make

    def counted(id: str, **options: Any) -> Any:
        made.append(options.get("desc"))
        return make(id, **options)

    monkeypatch.setattr(gymnasium, "make", counted)
    environment = GymnasiumEnvironment("FrozenLake-v1")
    assert made == [None]
    seen = environment.reset(TASK, 0)
    environment.step("right")
    assert environment.reset(TASK, 0) == seen and made == [None]
    assert environment.reset(LAKE, 0) != seen and made == [None, ["SFF", "FHF", "FFG"]]
    assert environment.reset(TASK, 0) == seen and made[2:] == [None]
    car = Task.create("test", "car", "", metadata={"environment": {"id": "MountainCar-v0"}})
    assert "left, stay, right" in GymnasiumEnvironment(actions=["left", "stay", "right"]).reset(car, 0)


def walked(environment: GymnasiumEnvironment, task: Task, *actions: str) -> tuple[str, list[Step]]:
    """Return the first observation and the steps."""
    return environment.reset(task, 0), [environment.step(action) for action in actions]


def test_a_taxi_takes_its_passenger_home() -> None:
    task = Task.create("test", "taxi", "", metadata={"environment": {"seed": 3}})
    to_red, to_yellow = ["south"] * 2 + ["west"] * 2 + ["north"] * 2, ["south"] * 4
    taxi = GymnasiumEnvironment("Taxi-v4", show_map="first")
    first, steps = walked(taxi, task, *to_red, "pick-up", *to_yellow, "drop-off")
    assert sum(step.reward for step in steps) == 20.0 - 11 and [step.done for step in steps] == [False] * 11 + [True]
    assert not any(step.info for step in steps) and steps[0].observation.count("\n") == 0
    assert "+---------+" in first and "at Red (row 1, column 1) and wants to go to Yellow (row 5, column 1)" in first
    assert steps[-2].observation.startswith("The taxi is at row 5, column 1. The passenger is in the taxi")


def test_a_walk_along_the_cliff() -> None:
    _, steps = walked(GymnasiumEnvironment("CliffWalking-v1"), TASK, "right", "up", *["right"] * 11, "down")
    assert sum(step.reward for step in steps) == -100.0 - 13.0 and steps[-1].done
    assert "PCCCCCCCCCCG" in steps[0].observation


@pytest.mark.parametrize(
    ("id", "actions", "seen"),
    [
        ("CartPole-v1", ["left", "right"], "Observation: ["),
        ("Blackjack-v1", ["stick", "hit"], "Observation: ("),
        ("FrozenLake-v1", ["a", "b", "c", "d"], "Actions: a, b, c, d."),
    ],
)
def test_others_say_what_they_render_or_see(id: str, actions: list[str], seen: str) -> None:
    first, [step] = walked(GymnasiumEnvironment(id, actions=actions), TASK, actions[1])
    assert not step.info and seen in first


@pytest.mark.parametrize(
    ("place", "field"),
    [
        (lake(id="FrozenLak-v1"), "explorer.environment.options.id"),
        (lake(size=4), "explorer.environment.options"),
        (lake(options={"map_name": "9x9"}), "explorer.environment.options"),
    ],
)
def test_an_environment_that_its_library_does_not_know_is_refused(place: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, check=about(field)):
        check_workflows(config(**place).explorer, [])


@pytest.mark.parametrize(
    ("name", "problem", "why"),
    [
        ("Recorded", "", ""),
        ("Recorded", "raise", "Runt"),
        ("Recorded", "die", "exit code 3"),
        ("RecordedAsync", "", ""),
        ("RecordedAsync", "raise", "Runt"),
    ],
)
def test_one_is_created_before_the_run_as_attempts_create_it_and_closed(
    name: str, problem: str, why: str, tmp_path: Path
) -> None:
    options = {"to": str(tmp_path / "record"), "problem": problem}
    explorer = config(**where(name, options=options)).explorer
    if not problem:
        check_workflows(explorer, [])
    else:
        with pytest.raises(ConfigError, check=about("explorer.environment.options", options), match=why) as refused:
            check_workflows(explorer, [])
        assert f"{name}' cannot be created" in refused.value.problem and refused.value.__cause__ is None
    assert (tmp_path / "record").read_text().split() == ["created", *([] if problem else ["closed"])]


def test_an_environment_in_which_no_workflow_acts_is_refused() -> None:
    explorer = config(**where("Async")).explorer.model_copy(update={"workflow": "single_turn"})
    with pytest.raises(ConfigError, check=about("explorer.workflow", "single_turn")):
        check_workflows(explorer, [])
    explorer = explorer.model_copy(update={"workflow": f"{__name__}:InEnvironment"})
    assert check_workflows(explorer, [])


def test_an_environment_that_lacks_a_method_is_refused() -> None:
    name = f"{__name__}:WithoutStep"
    with pytest.raises(ConfigError, check=about("explorer.environment.name", name), match="lacks step"):
        check_workflows(config(**{**lake(), "explorer.environment": {"name": name}}).explorer, [])


class WithoutStep:
    def reset(self, task: Task, seed: int) -> str:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class InEnvironment:
    async def run(self, task: Task, model: Any, env: Any = None) -> None:
        raise NotImplementedError


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"install 'rayrft\[gymnasium\]'"):
        check_workflows(config(**lake()).explorer, [])


# Of other libraries, played for real by the runner


def right_at_second(observation: str, wrong: str, right: str) -> Callable[[str], str]:
    """Say what is wrong, but one of the attempts, after its first such observation, what is right."""
    second = iter([right])
    return lambda prompt: next(second, wrong) if prompt.count(observation) == 1 else wrong


async def test_a_task_of_reasoning_gym_is_tried_till_solved(tiny_model: Path) -> None:
    task = read_source(TaskSourceConfig(source="reasoning_gym", dataset="spell_backward", size=5), "tasks.sources.0")[0]
    word = re.findall(r": (\w+)", task.question)[-1]
    place = played("reasoning_gym", dataset="spell_backward", attempts=3)
    says = right_at_second("best answer", word, f"<answer>{word[::-1]}</answer>")
    rollout, _ = await play(tiny_model, "episode", says, n=2, task=task, **place)
    solved, other = sorted(stored(rollout), key=lambda row: len(row.turns))
    assert sorted(map(len, said(rollout))) == [2, 3]
    assert "solved" in solved.metrics and "solved" not in other.metrics
    assert solved.reward == pytest.approx(1.0) and other.reward is not None and other.reward < 0.9
    for row in (solved, other):
        assert "best answer" in row.turns[2]["content"]
    assert (await replay(solved, task, config(**place))).differences == ()


@pytest.fixture(scope="module")
def echo_server() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "tests.explorer.played.echo_server", str(port)]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None and any("running on" in line for line in server.stderr)
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


async def test_an_openenv_server_is_acted_in(echo_server: str, tiny_model: Path) -> None:
    task = Task.create("test", "echo", "", metadata={"environment": {"greeting": "good day"}})
    place = played("openenv", url=echo_server, action="text", observation="echo", fixed={"loud": True})
    rollout, _ = await play(tiny_model, "episode", "tac", n=2, task=task, **place)
    assert earned(rollout) == [6.0] * 2 and said(rollout) == [["tac", "tac"]] * 2
    assert all([turn["content"] for turn in row.turns[:3]] == ["good day True", "tac", "TAC"] for row in rollout.rows)
    row = stored(rollout)[0]
    assert (await replay(row, task, config(**place))).differences == ()
    whole = played("openenv", url=echo_server)
    says = ["what", '{"text": "tac"}', '{"text": "act"}']
    rollout, _ = await play(tiny_model, "episode", says, task=task, **whole)
    assert earned(rollout) == [6.0] and rollout.rows[0].metrics == {"invalid_actions": 1.0}


async def test_an_openenv_server_that_restarts_or_is_full_is_waited_for(tiny_model: Path) -> None:
    """Its first connection is closed, and its second one gets no session."""
    full = {"type": "error", "data": {"code": "CAPACITY_REACHED"}}
    begun = {"type": "observation", "data": {"observation": {"text": "go"}, "done": True}}
    connections = iter([[], [full], [begun, begun]])

    def serve(connection: ServerConnection) -> None:
        for answer in next(connections):
            connection.recv()
            connection.send(json.dumps(answer))

    with serve_websockets(serve, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = "http://127.0.0.1:{}".format(*server.socket.getsockname()[1:])
        rollout, _ = await play(tiny_model, "episode", "tac", **played("openenv", url=url, action="text"))
    assert len(rollout.rows) == 1 and list(connections) == []


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({}, None),
        ({"action": "text", "fixed": {"loud": True}}, None),
        ({"observation": "ecko"}, ("observation", "ecko")),
        ({"action": "txt"}, ("action", "txt")),
        ({"action": "text", "fixed": {"lout": True}}, ("fixed", "lout")),
        ({"action": "loud"}, ("fixed", {})),
    ],
)
def test_an_openenv_server_has_the_fields_that_the_config_names(
    options: dict[str, Any], wrong: tuple[str, Any] | None, echo_server: str
) -> None:
    explorer = config(**played("openenv", url=echo_server, **options)).explorer
    if wrong is None:
        check_workflows(explorer, [])
        return
    with pytest.raises(ConfigError, check=about(f"explorer.environment.options.{wrong[0]}", wrong[1])) as refused:
        check_workflows(explorer, [])
    assert wrong[0] != "observation" or "echo" in refused.value.remedy


@pytest.mark.parametrize("options", [{}, {"observation": "ecko"}])
def test_an_openenv_server_is_tried_before_the_run(options: dict[str, Any]) -> None:
    """One without sessions, as those of OpenEnv 0.1 are, and none at all."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for url in (f"http://127.0.0.1:{server.server_port}", "http://127.0.0.1:9"):
            explorer = config(**played("openenv", url=url, **options)).explorer
            with pytest.raises(ConfigError, check=about("explorer.environment.options.url", url)) as refused:
                check_workflows(explorer, [])
            assert "openenv 0.2" in refused.value.remedy
        server.shutdown()


async def test_an_openenv_server_that_is_gone_fails_the_attempt(tiny_model: Path) -> None:
    place = played("openenv", url="http://127.0.0.1:9", wait_s=0)
    rollout, _ = await play(tiny_model, "episode", "tac", failures=True, **place)
    assert rollout.failed == {"environment_error": 1} and "refused" in str(rollout.problem)
