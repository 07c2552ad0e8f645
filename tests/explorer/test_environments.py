"""Environments: where they live, how they fail, what seed they get, and whether their episodes can be played again."""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.explorer.environments import Environments
from rayrft.explorer.environments.gymnasium import GymnasiumEnvironment
from rayrft.explorer.replay import replay
from rayrft.explorer.rollout import Rollout
from tests.errors import about
from tests.explorer.attempts import earned, play, said, stored, where
from tests.explorer.scripted import config

TASK = Task.create("test", "go", "")


async def act(model: Path, says: Any, n: int = 2, **more: Any) -> Rollout:
    return (await play(model, "episode", says, n=n, task=more.pop("task", TASK), **more))[0]


@pytest.mark.parametrize("name", ["Blocking", "Async", "make_async"])
async def test_every_attempt_acts_in_an_environment_of_its_own(name: str, tiny_model: Path) -> None:
    rollout = await act(tiny_model, lambda _: "go", n=3, **where(name))
    assert earned(rollout) == [pytest.approx(0.3)] * 3 and said(rollout) == [["go"] * 3] * 3
    assert all(row.metrics == {"slips": 6.0} for row in rollout.rows)
    pids = {row.turns[2]["content"].split()[1] for row in rollout.rows}
    assert (pids == {str(os.getpid())}) == (name == "Async"), "what may block lives in other processes"


@pytest.mark.parametrize("name", ["Blocking", "Async"])
@pytest.mark.parametrize(
    ("trouble", "reason", "says"),
    [
        ("die", "environment_error", "exit code 1"),
        ("hang", "timeout", "0.5 s"),
        ("shout", "environment_error", "large|characters"),
        ("talk", "environment_error", "1000 characters"),
        ("raise", "environment_error", "no way"),
        ("nothing", "environment_error", "NoneType"),
        ("nan", "environment_error", "finite"),
    ],
)
async def test_an_environment_that_fails_costs_its_attempt_alone(
    name: str, trouble: str, reason: str, says: str, tiny_model: Path
) -> None:
    if name == "Async" and trouble == "die":
        pytest.skip("would be this process")
    answers = iter([trouble])  # of whichever attempt comes first
    settings = where(name, deadline_s=0.5 if trouble == "hang" else 100.0, observation_limit=1000, same_episode=False)
    n = 1 if trouble == "hang" else 3
    rollout = await act(tiny_model, lambda _: next(answers, "go"), n=n, failures=True, **settings)
    assert rollout.failed == {reason: 1} and len(rollout.rows) == n - 1
    assert rollout.problem is not None and re.search(says, rollout.problem)


@pytest.mark.parametrize(("deaths", "rows"), [(2, 1), (3, 0)])
async def test_a_process_that_dies_before_the_first_action_is_replaced_so_often(
    deaths: int, rows: int, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "flag").write_text("x" * deaths)
    settings = where(options={"flag": str(tmp_path / "flag")}, reset_retries=2)
    rollout = await act(tiny_model, lambda _: "go", n=1, failures=True, **settings)
    assert len(rollout.rows) == rows and rollout.failed == ({} if rows else {"environment_error": 1})


@pytest.mark.parametrize("same", [True, False])
async def test_attempts_of_a_group_face_the_same_episode_unless_told_otherwise(same: bool, tiny_model: Path) -> None:
    rollout = await act(tiny_model, lambda _: "go", n=3, **where(same_episode=same))
    assert len({row.turns[0]["content"] for row in rollout.rows}) == (1 if same else 3)
    again = await act(tiny_model, lambda _: "go", n=3, **where(same_episode=same))
    assert [row.turns[0] for row in again.rows] == [row.turns[0] for row in rollout.rows], "it follows from the seed"
    other = await act(tiny_model, lambda _: "go", n=3, seed=1, **where(same_episode=same))
    assert {row.turns[0]["content"] for row in other.rows}.isdisjoint(row.turns[0]["content"] for row in rollout.rows)


async def test_more_attempts_than_processes_all_act_and_waiting_costs_no_deadline(tiny_model: Path) -> None:
    rollout = await act(tiny_model, lambda _: "go", n=12, **where(processes=2))
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


LAKE = Task.create("test", "lake", "", metadata={"environment": {"desc": ["SFF", "FHF", "FFG"]}})
TAXI = Task.create("test", "taxi", "", metadata={"environment": {"seed": 3}})


def lake(slippery: bool = False, **options: Any) -> dict[str, Any]:
    more = {"id": "FrozenLake-v1", "options": {"is_slippery": slippery}, **options}
    return where() | {"explorer.environment": {"name": "gymnasium", "options": more, "spares": 0}}


def wanders() -> Any:
    words = random.Random(0)
    return lambda _: words.choice(["left", "down", "right", "up", "hm"])


@pytest.mark.parametrize("options", [{}, {"rows": "step"}, {"credit": "step"}, {"rows": "step", "credit": "step"}])
async def test_an_episode_is_played_again_from_its_row(options: dict[str, Any], tiny_model: Path) -> None:
    place = lake(slippery=True)
    rollout, _ = await play(tiny_model, "episode", wanders(), {"max_steps": 6, **options}, n=3, task=LAKE, **place)
    rows = list({row.repeat: row for row in stored(rollout)}.values())  # the last one of each attempt
    assert len(rows) == 3
    for row in rows:
        played = await replay(row, LAKE, config(**place))
        assert played.differences == () and len(played.steps) == sum(turn["role"] == "assistant" for turn in row.turns)


async def test_a_replay_finds_what_is_not_as_the_row_says(tiny_model: Path) -> None:
    place = lake()
    rollout, _ = await play(tiny_model, "episode", lambda _: "down", {"max_steps": 4}, task=LAKE, **place)
    [row] = stored(rollout)
    wrong = {"role": "user", "content": "You are at row 9, column 9."}
    for changed, where_ in [
        (row.with_fields(turns=(*row.turns[:2], wrong, *row.turns[3:])), "messages 2 to 2"),
        (
            row.with_fields(turns=(*row.turns[:1], {"role": "assistant", "content": "right"}, *row.turns[2:])),
            "messages",
        ),
        (row.with_fields(reward=1.0), "sum of rewards"),
    ]:
        found = (await replay(changed, LAKE, config(**place))).differences
        assert len(found) >= 1 and where_ in found[0]


async def test_a_lake_is_crossed_by_its_map(tiny_model: Path) -> None:
    path = ["I go right.", "right", "<answer>Down</answer> not left", "no idea", "down"]
    answers = iter(path)
    rollout = await act(tiny_model, lambda _: next(answers), n=1, task=LAKE, **lake(invalid_reward=-0.5))
    assert earned(rollout) == [0.5] and said(rollout) == [path]
    [row] = rollout.rows
    assert row.metrics == {"invalid_actions": 1.0}
    first, second, *_, after_nonsense = (turn["content"] for turn in row.turns if turn["role"] == "user")
    assert "PFF\nFHF\nFFG" in first and "left, down, right, up" in first and "row 1, column 1" in first
    assert second == "SPF\nFHF\nFFG\nYou are at row 1, column 2."
    assert after_nonsense.startswith("That is no action") and "row 2, column 3" in after_nonsense


def test_an_environment_is_made_before_it_is_asked_for_and_again_only_for_what_tasks_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


async def test_a_taxi_takes_its_passenger_home(tiny_model: Path) -> None:
    place = lake() | {"explorer.environment": {"name": "gymnasium", "options": {"id": "Taxi-v4", "show_map": "first"}}}

    def drives(prompt: str) -> str:
        state = prompt.split("The taxi is at ")[-1]
        (row, column), *rest = [(int(r), int(c)) for r, c in re.findall(r"row (\d), column (\d)", state)]
        aboard = "in the taxi" in state
        target = rest[-1] if aboard else rest[0]
        if (row, column) == target:
            return "drop off" if aboard else "pick up"
        if column != target[1] and row != 3:  # no wall stands in the third row
            return "south" if row < 3 else "north"
        if column != target[1]:
            return "east" if column < target[1] else "west"
        return "south" if row < target[0] else "north"

    rollout, _ = await play(tiny_model, "episode", drives, {"max_steps": 30}, task=TAXI, **place)
    assert earned(rollout)[0] > 0 and rollout.rows[0].turns[2]["content"].count("\n") == 0
    assert "+---------+" in rollout.rows[0].turns[0]["content"]


async def test_a_walk_along_the_cliff(tiny_model: Path) -> None:
    place = lake() | {"explorer.environment": {"name": "gymnasium", "options": {"id": "CliffWalking-v1"}}}
    answers = iter(["right", "up", *["right"] * 11, "down"])
    rollout, _ = await play(tiny_model, "episode", lambda _: next(answers), task=TASK, **place)
    assert earned(rollout) == [-100.0 - 13.0]
    assert "PCCCCCCCCCCG" in rollout.rows[0].turns[2]["content"]


async def test_other_environments_are_told_by_what_they_render_or_observe(tiny_model: Path) -> None:
    for id, actions, seen in [
        ("CartPole-v1", ["left", "right"], "Observation: ["),
        ("Blackjack-v1", ["stick", "hit"], "Observation: ("),
        ("FrozenLake-v1", ["a", "b", "c", "d"], "Actions: a, b, c, d."),
    ]:
        place = {"name": "gymnasium", "options": {"id": id, "actions": actions}}
        rollout, _ = await play(
            tiny_model,
            "episode",
            lambda _, says=actions[1]: says,
            {"max_steps": 2},
            task=TASK,
            **lake() | {"explorer.environment": place},
        )
        assert rollout.rows[0].metrics == {} and seen in rollout.rows[0].turns[0]["content"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"id": "FrozenLak-v1"}, "explorer.environment.options.id"),
        ({"size": 4}, "explorer.environment.options"),
    ],
)
def test_an_environment_that_gymnasium_does_not_know_is_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, check=about(field)):
        Environments(config(**lake(**options)).explorer.environment)  # type: ignore[arg-type]


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"install 'rayrft\[gymnasium\]'"):
        Environments(config(**lake()).explorer.environment)  # type: ignore[arg-type]
