"""Guards of a run's numbers: what they refuse, what they count, and what they do, in a whole run in simulated time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rayrft.config import load_config
from rayrft.config.guards import METRICS, GuardConfig
from rayrft.core.checkpoints import Checkpoints
from rayrft.core.master import Master
from rayrft.core.preflight import PreparedRun
from rayrft.core.steering import Steering
from rayrft.errors import ConfigError, GuardTripped
from rayrft.monitor.ray_metrics import RayMetrics
from rayrft.monitor.records import NoteRecord, StepRecord, flat, read_records
from tests.chaos.kills import Outcome, describe, simulate
from tests.chaos.scripted_run import Cluster
from tests.core.looping import Subject
from tests.e2e.conftest import small_config
from tests.errors import about
from tests.monitor import made


def test_guards_know_the_numbers_of_a_step() -> None:
    numbers = {name for name, value in flat(made.step()).items() if isinstance(value, int | float)}
    assert {*METRICS} == numbers - {"step", "version", "time"}


@pytest.mark.parametrize(
    ("guard", "field", "words"),
    [
        ({"field": "rewrd", "below": 0}, "guards.0.field", "did you mean 'reward'"),
        ({"field": "stage", "below": 0}, "guards.0.field", "not a number of"),
        ({"field": "kl"}, "guards.0.above", "give a bound"),
        ({"field": "kl", "above": 1, "action": "end"}, "guards.0.action", "'warn', 'hold' or 'stop'"),
    ],
)
def test_a_guard_that_cannot_act_is_refused(guard: dict[str, Any], field: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"(?i){words}") as refused:
        load_config(small_config(tmp_path, "guarded", guards=[guard]))
    assert refused.value.field == field


def test_a_job_without_steps_has_no_guards(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, check=about("guards")):
        load_config(
            small_config(
                tmp_path, "guarded", mode="explore", buffer={"name": "b"}, guards=[{"field": "kl", "above": 1}]
            )
        )


@pytest.mark.parametrize(
    ("value", "bound"), [(0.1, ""), (0.5, ""), (0.6, "above 0.5"), (0.0, "below 0.1"), (float("nan"), "above 0.5")]
)
def test_bounds_are_within_and_what_is_no_number_is_not(value: float, bound: str) -> None:
    assert GuardConfig(field="kl", above=0.5, below=0.1).crossed(value) == bound


async def test_a_guard_acts_once_until_a_step_is_within_bounds_and_passes_over_steps_without_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayMetrics, "write", lambda *_: None)
    loop = Subject(tmp_path).loop
    steering = Steering(load_config(loop.config, {"guards": COLLAPSE}), loop.progress, lambda _: None)
    for step, reward in enumerate([0.0, 0.0, 0.0, 0.0, 0.9, 0.0, None, 0.0, 0.0]):
        await steering.guard(loop, made.step(step=step, reward=reward))
        loop.progress.step += 1
    acted = [record.step for record in await loop.recorder.after(0) if isinstance(record, NoteRecord)]
    assert acted == [1, 7]


COLLAPSE = [{"field": "reward", "below": 0.05, "steps": 2}]


def notes(outcome: Outcome) -> list[tuple[int, str]]:
    records = read_records(outcome.folder)
    found = [(each.step, each.text) for each in records if isinstance(each, NoteRecord)]
    return [(step, text.partition(";")[0]) for step, text in found if "guards" in text or "unpaused" in text]


def guards(*given: dict[str, Any]) -> dict[str, Any]:
    return {"guards": [*given], "evaluation.enabled": False}


async def unpause(master: Master, cluster: Cluster) -> None:
    """Change the first guard and let the run continue, once it is paused."""
    while (await master.status()).status != "paused":  # noqa: ASYNC110 - in simulated time
        await asyncio.sleep(0.1)
    assert (await master.status()).step == 6, "the run is held before the next step"
    await master.steer("change", {"guards.0.steps": 2, "guards.0.action": "warn"})
    await master.steer("unpause")


def test_guards_warn_and_hold_after_steps_out_of_bounds_and_are_changed_while_the_run_is_paused(
    prepared: PreparedRun, tmp_path: Path
) -> None:
    held = {"field": "reward", "below": 2, "steps": 4, "action": "hold"}
    warns = {"field": "usual_rows", "above": 3, "below": -1, "steps": 3}
    absent = {"field": "probe_gap", "above": 1.0}
    outcome = simulate(30, 0, prepared, tmp_path, user=unpause, **guards(held, warns, absent))
    assert not outcome.problems, describe(outcome)
    said = notes(outcome)
    assert said[0] == (5, "guards.1: usual_rows is 16, above 3 (steps in a row: 3)"), "the first two steps have none"
    assert said[1][0] == 6 and said[1][1].startswith("paused by guards.0: reward is ")
    assert [text for _, text in said[2:4]] == ["guards.0.steps: 4 -> 2", "guards.0.action: hold -> warn"]
    assert said[4][1].startswith("unpaused after")
    assert said[5:] == [(12, "guards.2: probe_gap was 0 or missing at all steps: the run may not have it")]


def test_a_guard_stops_a_run_with_a_checkpoint_from_which_it_can_be_resumed(
    prepared: PreparedRun, tmp_path: Path
) -> None:
    stops = {"field": "expert_rows", "above": 3, "steps": 3, "action": "stop"}
    outcome = simulate(30, 0, prepared, tmp_path, **guards(stops))
    assert isinstance(outcome.error, GuardTripped) and about("guards.0")(outcome.error)
    assert "expert_rows is 4, above 3 (steps in a row: 3)" in outcome.error.problem and outcome.error.value == 4
    steps = [each.step for each in read_records(outcome.folder) if isinstance(each, StepRecord)]
    config = load_config(outcome.folder / "config.yaml")
    assert Checkpoints(config.folder, config.checkpoint).holds(3) and steps == [1, 2, 3]
    assert not (config.folder / "checkpoints" / "final").exists()


@pytest.mark.parametrize("saved", [True, False], ids=["at a checkpoint", "after a checkpoint"])
def test_a_paused_run_stays_paused_after_the_same_step_when_its_ranks_die(
    saved: bool, prepared: PreparedRun, tmp_path: Path
) -> None:
    held: list[Any] = []

    async def user(master: Master, cluster: Cluster) -> None:
        while (await master.status()).step < 5:  # noqa: ASYNC110 - in simulated time
            await asyncio.sleep(0.1)
        held.append(await master.steer("pause"))
        if saved:
            await master.steer("checkpoint")
        next(actor for actor in cluster.world.living if actor.name == "rank-0").kill(restart=True)
        while not any(record.kind == "restart" for record in await master.records(0)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        held.append(await master.steer("checkpoint"))
        held.append((await master.status()).status)
        await master.steer("unpause")

    outcome = simulate(30, 0, prepared, tmp_path, user=user, **guards())
    assert not outcome.problems, describe(outcome)
    assert held == [held[0], held[0], "paused"]
    assert [text.partition(" ")[0] for _, text in notes(outcome)] == ["unpaused"]
