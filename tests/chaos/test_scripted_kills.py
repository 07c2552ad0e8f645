"""A whole run in one process, in simulated time, whose actors are killed at random moments, by a number as the seed."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ray.exceptions import ObjectStoreFullError, OutOfDiskError

from rayrft.buffer.leases import Lease
from rayrft.buffer.ledger import Ledger
from rayrft.config import RunConfig, StageConfig, dump_config, load_config
from rayrft.core import master as module
from rayrft.core.checkpoints import Checkpoints, Progress
from rayrft.core.master import Master
from rayrft.core.preflight import Prepared, prepare
from rayrft.core.train_loop import TrainLoop
from rayrft.errors import WeightSyncError
from rayrft.files import Room
from rayrft.monitor import sinks
from rayrft.monitor.records import EvaluationRecord, NoteRecord, RestartRecord, StepRecord, read_records
from rayrft.monitor.summary import Summary
from rayrft.rewards import Reward, inline, register_reward
from rayrft.trainer.api import RankSetup
from tests.chaos import simulated
from tests.chaos.scripted_run import Cluster, ScriptedPlacement
from tests.chaos.simulated import Actor, Life, Ref, VirtualLoop, World, describe_tasks
from tests.e2e.conftest import small_config
from tests.full_disk import FullDisk

KINDS = ("engine", "evaluation", "engine_pool", "evaluation_pool", "explorer", "trainer", "rank", "buffer", "master")
MOMENTS = ("send", "connect", "checkpoint", "train", "restore", "open_stage", "save")
"""Calls of the ranks during which actors are killed, among other times."""
STEPS = 12
Check = Callable[[RankSetup, Lease], None]
DEADLINE_S = 4000.0
"""Simulated seconds that a run may take."""


@register_reward("length parity")
@inline
def length_parity() -> Reward:
    """1 for answers of even length: some groups have no variance."""
    return lambda task, response: float(len(response) % 2)


def make_config(
    storage: Path, name: str, max_staleness: int = 0, evaluation_engines: int = 1, **changes: Any
) -> RunConfig:
    config = small_config(storage, name)
    config["tasks"] |= {"eval_size": 12}
    config["tasks"]["sources"][0] |= {"size": 400}
    config["reward"] = {"name": "length parity"}
    config["evaluation"] = {"engines": evaluation_engines, "samples": 1}
    config["explorer"] |= {"count": 2, "engine": {"count": 2}, "drop_zero_variance": True}
    config["trainer"] = {"ranks": 2}
    config["restarts"] = {"per_hour": 10_000, "backoff_s": 0}
    config["max_staleness"] = max_staleness
    config["checkpoint"] = {"every": 2}
    config["buffer"] = {"fsync": "never"}
    warmup, mix = config["stages"]
    warmup |= {"steps": 2}
    mix |= {"steps": STEPS - 2, "batch_size": 20, "evaluate_every": 3}
    return load_config(config, changes)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return make_prepared(tmp_path_factory.mktemp("prepared"))


def make_prepared(storage: Path) -> Prepared:
    """The inputs of all runs."""
    found = prepare(make_config(storage, "prepared"), "run")
    tokenizer = found.tokenizer()
    return replace(found, tokenizer=lambda: tokenizer)


@dataclass
class Outcome:
    seed: int
    cluster: Cluster
    folder: Path
    summary: Summary | None = None
    error: BaseException | None = None
    killed: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    left: str = ""
    seconds: float = 0.0
    fails: bool = False
    """Whether ranks fail, too."""

    @property
    def problems(self) -> list[str]:
        """Everything that is not as it must be."""
        problems = [*self.cluster.world.problems]
        if self.error is not None or self.summary is None or self.summary.status != "finished":
            return [*problems, f"the run ended by {self.error!r}"]
        records, ledger = read_records(self.folder), self.summary.ledger or Ledger()
        steps = [record for record in records if isinstance(record, StepRecord)]
        weights = [sorted(chain(*ranks)) for ranks in zip(*self.cluster.weights.values(), strict=True)]
        trained = Counter(row for step in weights for row in step)
        evaluated = Counter(
            (each.stage, each.step, each.temperature) for each in records if isinstance(each, EvaluationRecord)
        )
        idle = [
            life.name
            for life, each in self.cluster.services.items()
            if each.until > each.since + 2 and not each.answers
        ]
        accepted = ("late", "stale", "not_finite")
        filtered = sum(ledger.dropped[each] for each in ledger.dropped if each not in accepted)
        expected = {
            f"{sum(self.cluster.accepted.values())} rows were accepted, and {filtered} filtered of {ledger}": sum(
                self.cluster.accepted.values()
            )
            == ledger.sampled - filtered,
            "a row was trained twice": max(trained.values()) == 1,
            f"steps were recorded as {[step.step for step in steps]}": [each.step for each in steps]
            == list(range(1, STEPS + 1)),
            f"{len(weights)} steps were trained": len(weights) == STEPS,
            f"the ledger does not close: {ledger}": ledger.closes,
            f"{trained.total()} rows were trained of {ledger}": ledger.trained == trained.total(),
            "rows of steps": [len(step) for step in weights] == [step.usual_rows for step in steps],
            f"staleness was {[step.staleness_max for step in steps]}": max(step.staleness_max or 0 for step in steps)
            <= self.cluster.max_staleness,
            f"an evaluation was recorded twice: {evaluated}": not evaluated or max(evaluated.values()) == 1,
            f"engines had weights for three steps and answered nothing: {idle}": not idle,
            f"tasks are left:\n{self.left}": not self.left,
            f"errors that nobody retrieved: {self.log}": not self.log,
            f"actors were restarted more often than killed: {self.report}": self.fails
            or not self.killed
            or all(restarts <= kills for kills, restarts in self.report.values()),
        }
        return problems + [problem for problem, holds in expected.items() if not holds]

    @property
    def report(self) -> dict[str, tuple[int, int]]:
        """Kills and restarts by kind."""
        kills, restarts = Counter(map(kind_of, self.killed)), self.summary.restarts if self.summary else {}
        parts = {"engine": "engines", "evaluation_pool": "engine_pool", "rank": "trainer"}
        counted = Counter[str]()
        for kind, count in kills.items():
            counted[parts.get(kind, kind)] += count
        counted["trainer"] += counted["master"]  # it may have taken steps of which there is no checkpoint
        return {
            part: (counted[part], restarts[part].count if part in restarts else 0) for part in {*counted, *restarts}
        }


def kind_of(actor: str) -> str:
    return actor.rpartition("-")[0] or actor


def describe(outcome: Outcome) -> str:
    return f"seed {outcome.seed}, after kills of {outcome.killed}: " + "; ".join(outcome.problems)


class Reaper:
    """Kills actors of a run: after random steps, several at once, also those that are being restarted."""

    def __init__(self, cluster: Cluster, outcome: Outcome, kills: int, say: Callable[[str], None]) -> None:
        self._cluster, self._outcome, self._left, self._say = cluster, outcome, kills, say
        self._world, self._chance = cluster.world, random.Random(outcome.seed)

    async def reap(self) -> None:
        for step in sorted(self._chance.randrange(STEPS - 1) for _ in range(self._left)):
            while self._cluster.steps < step:  # noqa: ASYNC110 - in simulated time
                await asyncio.sleep(0.01)
            if self._cluster.steps >= STEPS - 1:
                break
            if self._chance.random() < 0.5:
                moment = self._chance.choice(MOMENTS)
                try:
                    await asyncio.wait_for(self._cluster.until(moment), 0.5)
                except TimeoutError:
                    moment = ""
                await asyncio.sleep(self._chance.uniform(0, 0.03))
            else:
                moment = ""
                await asyncio.sleep(self._chance.uniform(0, 0.3))
            for _ in range(self._chance.choice((1, 1, 2, 3))):
                self._kill(moment)
                await asyncio.sleep(self._chance.choice((0, 0, 0.01, 0.3)) * self._chance.random())
        while self._left > 0:  # the run is about to end
            self._kill("")
            await asyncio.sleep(0)

    def _kill(self, moment: str) -> None:
        kinds: dict[str, list[Actor]] = {}
        for actor in self._world.living:
            if (kind := kind_of(actor.name)) in KINDS:
                kinds.setdefault(kind, []).append(actor)
        if self._left <= 0 or not kinds:
            return
        starting = [actor for actor in self._world.living if actor.starting]
        if starting and self._chance.random() < 0.5:
            actor = self._chance.choice(starting)
        else:
            actor = self._chance.choice(kinds[self._chance.choice(list(kinds))])
        self._left -= 1
        self._outcome.killed.append(actor.name)
        self._say(f"{self._world.loop.time():.3f} step {self._cluster.steps} {moment}: {actor.name} is killed")
        actor.kill(restart=True)


def is_up(master: Life | None) -> bool:
    """Whether the Master restarts actors that die."""
    return master is not None and hasattr(master.target, "_restarts") and master.target._restarts.running


def simulate(
    seed: int,
    kills: int,
    prepared: Prepared,
    folder: Path,
    say: Callable[[str], None] = lambda _: None,
    check: Check | None = None,
    user: Callable[[Master, Cluster], Coroutine[Any, Any, None]] | None = None,
    machines: Callable[[Cluster], None] = lambda _: None,
    **changes: Any,
) -> Outcome:
    """A run that is killed as the seed says, and whose ranks fail where ``check`` raises; ``user`` steers it.
    ``machines`` gives its cluster others."""
    max_staleness = (0, 2, 1)[seed % 3]
    config = make_config(folder, f"run-{seed}", max_staleness, seed // 3 % 2, **changes)
    config.folder.mkdir(parents=True)
    (config.folder / "config.yaml").write_text(dump_config(config))
    loop = VirtualLoop()
    world = World(loop, seed)
    cluster = Cluster(world, max_staleness)
    outcome = Outcome(seed, cluster, config.folder, fails=check is not None)
    cluster.check = check or cluster.check
    machines(cluster)
    loop.set_exception_handler(
        lambda _, context: outcome.log.append(f"{context['message']}: {context.get('exception')!r}")
    )

    async def main() -> None:
        Checkpoints(config.folder, config.checkpoint).mark_beginning(Progress(prepared.run_id))
        master = world.create("master", lambda _: Master(config, Progress(prepared.run_id)), restarts=True)
        running = asyncio.ensure_future(master.call(Master.run, [Ref(prepared, None)]))
        while not running.done() and not is_up(master.actor._actor.life):  # noqa: ASYNC110 - in simulated time
            await asyncio.sleep(0.1)
        reaper = Reaper(cluster, outcome, kills, say)
        reaping = asyncio.ensure_future(user(master.actor._actor.life.target, cluster) if user else reaper.reap())
        try:
            done, _ = await asyncio.wait({running}, timeout=DEADLINE_S)
            if not done:
                status = await asyncio.wait_for(master.call(Master.status), 60)
                raise TimeoutError(f"the run waits:\n{chr(10).join(status.waiting)}\n{describe_tasks(loop)}")
            outcome.summary = running.result()
        except Exception as error:
            outcome.error = error
        finally:
            running.cancel()
            reaping.cancel()
            await asyncio.gather(running, reaping, return_exceptions=True)
            master.actor._actor.kill(restart=False)
        outcome.seconds = loop.time()
        await asyncio.sleep(1)
        [current] = [asyncio.current_task()]
        outcome.left = "" if asyncio.all_tasks() == {current} else describe_tasks(loop)

    random.seed(seed)
    with (
        mock.patch.object(time, "monotonic", loop.time),
        mock.patch.object(module, "Placement", lambda _, parts, detached: ScriptedPlacement(cluster, parts)),
        mock.patch.object(module, "look_at", mock.AsyncMock(return_value=None)),
        mock.patch.object(module, "is_restarted", lambda: world.begun["master"] > 1),
        mock.patch.object(sinks.RayMetrics, "write", lambda *_: None),
        mock.patch("rayrft.monitor.recorder.save_plot"),
        mock.patch("rayrft.explorer.explorer.gc"),
        mock.patch("ray.put", world.put),
        mock.patch("ray.get", lambda refs: [ref.get() for ref in refs]),
        mock.patch("ray.kill", world.kill),
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        runner.run(main())
    return outcome


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
"""Seeds of runs that failed, and why. Each fault that is mended changes what later runs draw."""


@pytest.mark.parametrize("seed", FOUND)
def test_kills_that_once_broke_a_run_are_survived(seed: int, prepared: Prepared, tmp_path: Path) -> None:
    outcome = simulate(seed, 20, prepared, tmp_path)
    assert not outcome.problems, describe(outcome)


MORE = [pytest.param(seed, 20, marks=pytest.mark.slow) for seed in range(100, 115)]


@pytest.mark.parametrize(("seed", "kills"), [(20, 10), (21, 10), (22, 10), *MORE])
def test_kills_are_survived(seed: int, kills: int, prepared: Prepared, tmp_path: Path) -> None:
    outcome = simulate(seed, kills, prepared, tmp_path)
    assert not outcome.problems, describe(outcome)
    assert len(outcome.killed) == kills
    print(outcome.report)


def test_a_run_whose_disk_is_full_now_and_then_takes_every_step_once(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(1)
    disk = FullDisk(monkeypatch, "segment", "journal", "metrics", full=lambda: chance.random() < 0.5)
    outcome = simulate(24, 3, prepared, tmp_path)
    assert not outcome.problems, describe(outcome)
    assert disk.refusals > 20 and len(outcome.killed) == 3


def test_a_run_whose_clock_jumps_a_day_back_and_forth_takes_every_step_once(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    full: type[Exception], prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, refusals, put = random.Random(1), Counter[str](), World.put

    def put_if_room(world: World, value: Any) -> Ref:
        life = simulated._life.get()
        if life is not None and life.name != "master" and chance.random() < 0.5:  # it only puts the run's inputs
            refusals[kind_of(life.name)] += 1
            raise full("Failed to put the object")
        return put(world, value)

    monkeypatch.setattr(World, "put", put_if_room)
    monkeypatch.setattr("rayrft.buffer.client._INLINE_BYTES", 0)
    monkeypatch.setattr(Room, "poll_s", 0.001)
    outcome = simulate(24, 3, prepared, tmp_path)
    assert not outcome.problems, describe(outcome)
    assert min(refusals["explorer"], refusals["buffer"]) > 5 and len(outcome.killed) == 3


def test_a_run_writes_a_checkpoint_once_before_a_node_of_it_is_drained_also_after_a_step_longer_than_a_stall(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, checkpoint, train, draining = list[int](), TrainLoop.checkpoint, TrainLoop._train, set[str]()

    async def train_long(loop: TrainLoop, step: int, *arguments: Any) -> Any:
        if step == 4 and not draining:
            draining.update({"node-1", "node of another run"})
            await asyncio.sleep(2 * (loop.config.monitor.stall_s + loop.config.monitor.patience_s))
        return await train(loop, step, *arguments)

    async def note(loop: TrainLoop) -> int:
        written.append(await checkpoint(loop))
        return written[-1]

    monkeypatch.setattr(TrainLoop, "checkpoint", note)
    monkeypatch.setattr(ScriptedPlacement, "nodes", {"node-1", "node-2"})
    monkeypatch.setattr(TrainLoop, "_train", train_long)
    monkeypatch.setattr(module, "draining_nodes", draining.copy)
    outcome = simulate(25, 0, prepared, tmp_path)
    assert not outcome.problems, describe(outcome)
    assert written == [5]
    notes = [each.text for each in read_records(outcome.folder) if isinstance(each, NoteRecord)]
    assert sum("drains a node" in text for text in notes) == 1


def test_a_seed_reproduces_a_run(prepared: Prepared, tmp_path: Path) -> None:
    first, second = (simulate(23, 5, prepared, tmp_path / name) for name in "ab")
    assert (first.killed, first.seconds) == (second.killed, second.seconds)
    assert len(first.killed) == 5


def test_steps_before_the_first_checkpoint_are_repeated_on_the_model_of_the_beginning(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    between, failures = TrainLoop._between_steps, [WeightSyncError("an engine died")]

    async def fail(loop: TrainLoop, stage: StageConfig) -> None:
        if failures:
            assert loop.progress.step == 1 and loop.evaluation is not None
            loop.evaluation.engines[0].kill()
            raise failures.pop()
        await between(loop, stage)

    monkeypatch.setattr(TrainLoop, "_between_steps", fail)
    outcome = simulate(3, 0, prepared, tmp_path)
    assert not outcome.problems, describe(outcome)
    assert not failures and outcome.report["trainer"][1] == 1, "no checkpoint has these weights: the ranks are new"


def test_a_run_is_scaled_up_and_down_while_its_actors_are_killed(prepared: Prepared, tmp_path: Path) -> None:
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
    prepared: Prepared, tmp_path: Path
) -> None:
    held, temperatures = list[int | str](), list[float]()

    def note(life: Life, method: str, arguments: Any, _: Any) -> None:
        if method == "adjust" and life.name == "explorer-0":
            temperatures.append(arguments[0].explorer.sampling.temperature)

    async def user(master: Master, cluster: Cluster) -> None:
        cluster.world.on_result.append(note)
        while (await master.status()).step < 5:  # noqa: ASYNC110 - in simulated time
            await asyncio.sleep(0.1)
        held.append(step := await master.steer("pause"))
        assert step % 2, "the latest checkpoint is older"
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
