"""A whole run in one process, in simulated time, whose actors are killed at random moments, by a number as the seed."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from rayrft.config import StageConfig, load_config
from rayrft.core import master as module
from rayrft.core.master import Master
from rayrft.core.preflight import PreparedRun
from rayrft.core.train_loop import TrainLoop
from rayrft.errors import WeightSyncError
from rayrft.files import Room
from rayrft.monitor.records import NoteRecord, Record, RestartRecord, read_records
from rayrft.monitor.summary import read_summary
from rayrft.runtime.handle import root_cause
from tests.chaos import simulated
from tests.chaos.kills import KINDS, describe, is_up, kind_of, simulate
from tests.chaos.scripted_run import Cluster, ScriptedPlacement
from tests.chaos.simulated import Life, Ref, World
from tests.errors import about
from tests.full_disk import FullDisk

FOUND = {
    0: "a pool that was restarted let an engine join again that had joined already, which ended the run",
    1: "engines got older weights than they held when the run repeated steps",
    4: "a round waited for ranks that waited for a dead engine, which ended the run",
    9: "the lease of a step outlived the loop that asked for it",
    15: "a restarted Master and an engine that died with it waited for each other",
    21: "engines that a Master had paused before it died stayed paused",
    69: "an evaluation waited forever for the engines of a pool that was restarted",
    202: "an engine could not join while its dead predecessor was a member",
}
"""Seeds of runs that failed, and why. Each fault that is fixed changes what later runs draw."""


MORE = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 115)]


@pytest.mark.parametrize("seed", [*FOUND, *MORE])
def test_kills_are_survived(seed: int, prepared: PreparedRun, tmp_path: Path) -> None:
    outcome = simulate(seed, 20, prepared, tmp_path)
    assert not outcome.problems, describe(outcome)
    assert len(outcome.killed) == 20
    print(outcome.report)


def test_a_kill_of_each_kind_is_survived_and_the_seed_reproduces_the_run(prepared: PreparedRun, tmp_path: Path) -> None:
    outcome, again = (simulate(29, 20, prepared, tmp_path / name) for name in "ab")
    assert not outcome.problems, describe(outcome)
    assert (outcome.killed, outcome.seconds) == (again.killed, again.seconds)
    assert {*map(kind_of, outcome.killed)} == {*KINDS}
    restarts = [each for each in read_records(outcome.folder) if isinstance(each, RestartRecord)]
    assert {"reward", "operators", "keeper", "auxiliary engines"} <= {each.part for each in restarts}


def test_a_reward_actor_that_dies_again_and_again_ends_the_run_with_its_first_death(
    prepared: PreparedRun, tmp_path: Path
) -> None:
    async def user(master: Master, cluster: Cluster) -> None:
        actor = next(each for each in cluster.world.living if each.name == "reward-0")
        records = list[Record]()
        for deaths in range(4):
            while sum(isinstance(each, RestartRecord) for each in records) < deaths:
                records += await master.records(len(records))
            actor.kill(restart=True)

    outcome = simulate(29, 0, prepared, tmp_path, user=user, **{"restarts.per_hour": 3})
    assert outcome.error is not None
    cause = root_cause(outcome.error)
    assert about("reward-0")(cause) and "first of 4 deaths" in cause.problem
    summary = read_summary(outcome.folder)
    assert summary is not None and summary.restarts["reward"].count == 3


def test_a_run_whose_disk_is_full_now_and_then_takes_every_step_once(
    prepared: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(1)
    disk = FullDisk(monkeypatch, "segment", "journal", "metrics", full=lambda: chance.random() < 0.5)
    outcome = simulate(24, 3, prepared, tmp_path)
    assert not outcome.problems, describe(outcome)
    assert disk.refusals > 20 and len(outcome.killed) == 3


def test_a_run_whose_clock_jumps_a_day_back_and_forth_takes_every_step_once(
    prepared: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, now = random.Random(1), time.time
    monkeypatch.setattr(time, "time", lambda: now() + chance.choice((-86_400.0, 0.0, 86_400.0)))
    outcome = simulate(28, 10, prepared, tmp_path)
    assert not outcome.problems, describe(outcome)
    assert "master" in outcome.killed and len(outcome.killed) == 10
    seconds = [each.seconds for each in read_records(outcome.folder) if isinstance(each, RestartRecord)]
    assert len(seconds) > 1 and 0 < min(seconds) <= max(seconds) < 3600


@pytest.mark.parametrize("full", [ObjectStoreFullError, OutOfDiskError])
def test_a_run_whose_object_store_is_full_now_and_then_takes_every_step_once(
    full: type[Exception], prepared: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, refusals, put = random.Random(1), Counter[str](), World.put

    def put_if_room(world: World, value: Any) -> Ref:
        life = simulated._life.get()
        if life is not None and life.name != "master" and chance.random() < 0.5:  # it only puts the run's inputs
            refusals[kind_of(life.name)] += 1
            raise full("Failed to put the object")
        return put(world, value)

    monkeypatch.setattr(World, "put", put_if_room)
    monkeypatch.setattr("rayrft.buffer.client.INLINE_BYTES", 0)
    monkeypatch.setattr(Room, "poll_s", 0.001)
    outcome = simulate(24, 3, prepared, tmp_path)
    assert not outcome.problems, describe(outcome)
    assert min(refusals["explorer"], refusals["buffer"]) > 5 and len(outcome.killed) == 3


def test_before_a_node_is_drained_a_run_writes_a_checkpoint_once_and_its_engine_takes_no_more_requests(
    prepared: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, checkpoint, train, draining = list[int](), TrainLoop.checkpoint, TrainLoop.train, set[str]()
    clusters, answers = list[Cluster](), list[dict[str, int]]()

    async def train_long(loop: TrainLoop, step: int, *arguments: Any) -> Any:
        if step == 4 and not draining:
            draining.update({"node-1", "node of another run"})
            await asyncio.sleep(2 * (loop.config.monitor.stall_s + loop.config.monitor.patience_s))
        if step in (8, 11):
            answers.append({life.name: each.answers for life, each in clusters[0].services.items()})
        return await train(loop, step, *arguments)

    async def note(loop: TrainLoop) -> int:
        written.append(await checkpoint(loop))
        return written[-1]

    monkeypatch.setattr(TrainLoop, "checkpoint", note)
    monkeypatch.setattr(ScriptedPlacement, "nodes", {"node-1", "node-2"})
    monkeypatch.setattr(TrainLoop, "train", train_long)
    monkeypatch.setattr(module, "draining_nodes", draining.copy)
    outcome = simulate(25, 0, prepared, tmp_path, machines=clusters.append)
    assert not outcome.problems, describe(outcome)
    assert written == [2, 5, 12], "those at the ends of stages are others"
    before, after = answers
    assert before["engine-0"] == after["engine-0"] > 0 and before["engine-1"] < after["engine-1"]
    notes = [each.text for each in read_records(outcome.folder) if isinstance(each, NoteRecord)]
    assert sum("drains a node" in text for text in notes) == 1


def test_steps_before_the_first_checkpoint_are_repeated_on_the_model_of_the_beginning(
    prepared: PreparedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    between, failures = TrainLoop.between_steps, [WeightSyncError("an engine died")]

    async def fail(loop: TrainLoop, stage: StageConfig) -> None:
        if failures:
            assert loop.progress.step == 1 and loop.evaluation is not None
            loop.evaluation.engines[0].kill()
            raise failures.pop()
        await between(loop, stage)

    monkeypatch.setattr(TrainLoop, "between_steps", fail)
    outcome = simulate(3, 0, prepared, tmp_path)
    assert not outcome.problems, describe(outcome)
    assert not failures and outcome.report["trainer"][1] == 1, "no checkpoint has these weights: the ranks are new"


def test_a_run_is_scaled_up_and_down_while_its_actors_are_killed(prepared: PreparedRun, tmp_path: Path) -> None:
    engines = list[set[str]]()

    async def user(master: Master, cluster: Cluster) -> None:
        for count in (4, 1, 2):
            await master.steer("pause")
            scaling = asyncio.ensure_future(master.scale(count))
            next(actor for actor in cluster.world.living if actor.name == "engine-0").kill(restart=True)
            await asyncio.gather(scaling, return_exceptions=True)  # it may fail, and changes nothing then
            await master.scale(count)
            engines.append({actor.name for actor in cluster.world.living if actor.name.startswith("engine-")})
            await master.steer("unpause")
            step = (await master.status()).step
            while (await master.status()).step < step + 2:  # noqa: ASYNC110 - in simulated time
                await asyncio.sleep(0.01)

    outcome = simulate(26, 0, prepared, tmp_path, user=user)
    assert not outcome.problems, describe(outcome)
    assert [len(each) for each in engines] == [4, 1, 2] and engines[1] == {"engine-0"}
    assert load_config(outcome.folder / "config.yaml").explorer.engine.count == 2


def test_a_paused_run_whose_master_dies_stays_paused_after_the_same_step_with_the_config_of_each_step(
    prepared: PreparedRun, tmp_path: Path
) -> None:
    held, temperatures = list[int | str](), list[float]()

    def note(life: Life, method: str, arguments: Any, _: Any) -> None:
        if method == "adjust" and life.name == "explorer-0":
            temperatures.append(arguments[0].explorer.sampling.temperature)

    async def user(master: Master, cluster: Cluster) -> None:
        cluster.world.on_result.append(note)
        step = await master.steer("pause")
        while step < 5 or not step % 2:  # else the latest checkpoint is not older
            await master.steer("unpause")
            step = await master.steer("pause")
        held.append(step)
        await master.steer("change", {"explorer.sampling.temperature": 0.5})
        actor = next(each for each in cluster.world.living if each.name == "master")
        actor.kill(restart=True)
        while not is_up(actor.life):  # noqa: ASYNC110 - in simulated time
            await asyncio.sleep(0.1)
        assert actor.life is not None
        successor: Master = actor.life.target
        held.append(await successor.steer("checkpoint"))
        held.append((await successor.status()).status)
        await successor.steer("unpause")

    outcome = simulate(27, 0, prepared, tmp_path, user=user)
    assert not outcome.problems, describe(outcome)
    assert held == [held[0], held[0], "paused"]
    assert temperatures == [0.5, 1.0, 0.5], "the repeated step has the former temperature"
