"""A whole run in simulated time whose actors are killed at random, and what came of it."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

from rayrft.buffer.leases import Lease
from rayrft.buffer.ledger import Ledger
from rayrft.config import RunConfig, dump_config, load_config
from rayrft.core import master as module
from rayrft.core.checkpoints import Checkpoints, Progress
from rayrft.core.master import Master
from rayrft.core.parts.endpoint import KeeperPart
from rayrft.core.preflight import PreparedRun, prepare
from rayrft.endpoint.keeper import RemoteSessions
from rayrft.experience import Task
from rayrft.explorer.engines import auxiliary
from rayrft.monitor.ray_metrics import RayMetrics
from rayrft.monitor.records import EvaluationRecord, StepRecord, read_records
from rayrft.monitor.summary import Summary
from rayrft.rewards import Reward, inline, register_reward
from rayrft.rewards.base import Transcript
from rayrft.rewards.judge import ChatModel
from rayrft.runtime.waits import cancel
from rayrft.trainer.api import RankSetup
from tests.chaos.scripted_run import Cluster, ScriptedPlacement
from tests.chaos.simulated import Actor, Life, Ref, VirtualLoop, World, describe_tasks
from tests.e2e.conftest import small_config

_SERVICES = ("auxiliary-judge", "reward", "operators", "keeper")
KINDS = (
    *("engine", "evaluation", "engine_pool", "evaluation_pool", "explorer", "trainer", "rank", "buffer", "master"),
    *_SERVICES,
)
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


@register_reward("judged parity")
class JudgedParity:
    """The same, once an auxiliary model has answered."""

    def use(self, models: Mapping[str, ChatModel]) -> None:
        self._judge = models["judge"]

    async def score(self, task: Task, transcript: Transcript) -> float:
        await self._judge.with_seed(0).chat([{"role": "user", "content": task.question}], max_tokens=4)
        return float(len(transcript.response) % 2)


def with_services(judge: str, endpoint: bool) -> dict[str, Any]:
    """Return the keys of a run with reward and operator actors, and an auxiliary model."""
    keys: dict[str, Any] = {
        "auxiliary": {"judge": {"model": judge, "max_length": 48}},
        "reward": {"name": "judged parity", "placement": "pool"},
        "pipelines": {"experiences": [{"name": "reward_deviation"}], "actors": {}},
    }
    return keys | ({"serve": {}} if endpoint else {})


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


def make_prepared(storage: Path) -> PreparedRun:
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
    services: bool = False
    """Whether the run has what `with_services` gives it."""
    opted_out: int = 0
    """Answers that the keeper of sessions was asked not to keep."""

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
        sampled = STEPS - self.cluster.max_staleness  # the groups of later steps may have been sampled before
        idle = [
            life.name
            for life, each in self.cluster.services.items()
            if min(each.until, sampled) > each.since + 2 and not each.answers
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
            f"{self.opted_out} answers were not to be kept, of {ledger}": self.opted_out
            <= ledger.dropped.get("opted_out", 0) + ledger.dropped.get("keeper_died", 0),
            f"tasks are left:\n{self.left}": not self.left,
            f"errors that nobody retrieved: {self.log}": not self.log,
            f"actors were restarted more often than killed: {self.report}": self.fails
            or not self.killed
            or all(restarts <= kills for kills, restarts in self.report.values()),
        }
        return problems + [problem for problem, holds in expected.items() if not holds]

    @property
    def report(self) -> dict[str, tuple[int, int]]:
        """Kills, with starts of engines that failed, and restarts by kind."""
        kills, restarts = Counter(map(kind_of, self.killed)), self.summary.restarts if self.summary else {}
        parts = {"engine": "engines", "evaluation_pool": "engine_pool", "rank": "trainer"}
        parts["auxiliary-judge"] = "auxiliary engines"
        counted = Counter[str]()
        for kind, count in kills.items():
            counted[parts.get(kind, kind)] += count
        counted["trainer"] += counted["master"]  # it may have taken steps of which there is no checkpoint
        counted["engines"] += self.cluster.failed_starts
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
        self._kinds = self._chance.sample(KINDS, len(KINDS)) if outcome.services else []
        """Those that are killed first."""

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
        first = next((kind for kind in self._kinds if kind in kinds), None)
        if first is not None:
            self._kinds.remove(first)
            actor = self._chance.choice(kinds[first])
        elif starting and self._chance.random() < 0.5:
            actor = self._chance.choice(starting)
        else:
            actor = self._chance.choice(kinds[self._chance.choice(list(kinds))])
        self._left -= 1
        self._outcome.killed.append(actor.name)
        self._say(f"{self._world.loop.time():.3f} step {self._cluster.steps} {moment}: {actor.name} is killed")
        actor.kill(restart=True)


async def opt_out(cluster: Cluster, outcome: Outcome) -> None:
    """Ask the keeper of sessions again and again not to keep an answer, as a replica of the endpoint does."""
    while (keeper := cluster.world.handle("keeper")) is None:  # noqa: ASYNC110 - in simulated time
        await asyncio.sleep(0.1)
    sessions = RemoteSessions(keeper, 60.0)
    while True:
        await sessions.opted_out(1)
        outcome.opted_out += 1
        await asyncio.sleep(0.05)


def is_up(master: Life | None) -> bool:
    """Whether the Master restarts actors that die."""
    return master is not None and hasattr(master.target, "_restarts") and master.target._restarts.running


def simulate(
    seed: int,
    kills: int,
    prepared: PreparedRun,
    folder: Path,
    say: Callable[[str], None] = lambda _: None,
    check: Check | None = None,
    user: Callable[[Master, Cluster], Coroutine[Any, Any, None]] | None = None,
    machines: Callable[[Cluster], None] = lambda _: None,
    **changes: Any,
) -> Outcome:
    """A run that is killed as the seed says, and whose ranks fail where ``check`` raises; ``user`` steers it.
    ``machines`` gives its cluster others."""
    max_staleness, services = (0, 2, 1)[seed % 3], bool(seed % 2)
    more = with_services(prepared.model, endpoint=max_staleness > 0) if services else {}
    config = make_config(folder, f"run-{seed}", max_staleness, seed // 3 % 2, **more, **changes)
    config.folder.mkdir(parents=True)
    (config.folder / "config.yaml").write_text(dump_config(config))
    loop = VirtualLoop()
    world = World(loop, seed)
    cluster = Cluster(world, max_staleness)
    outcome = Outcome(seed, cluster, config.folder, fails=check is not None, services=services)
    serve = mock.MagicMock(**{"replaced_replicas.return_value": {}})
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
        client = asyncio.ensure_future(opt_out(cluster, outcome) if config.records_sessions else asyncio.sleep(0))
        serve.delete_applications.side_effect = lambda _: client.cancel()
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
            await cancel(running, reaping, client)
            master.actor._actor.kill(restart=False)
        outcome.seconds = loop.time()
        await asyncio.sleep(1)
        [current] = [asyncio.current_task()]
        outcome.left = "" if asyncio.all_tasks() == {current} else describe_tasks(loop)

    random.seed(seed)
    with (
        mock.patch.object(time, "monotonic", loop.time),
        mock.patch.object(module, "Placement", lambda _, parts, detached: ScriptedPlacement(cluster, parts)),
        mock.patch.dict(sys.modules, {"rayrft.runtime.serving.applications": serve}),
        mock.patch.object(KeeperPart, "open", mock.AsyncMock(return_value=None)),
        mock.patch.object(auxiliary, "ChatTokenizer", lambda *_, **__: prepared.tokenizer()),
        mock.patch.object(module, "locate_files", lambda *_: "files: nowhere"),
        mock.patch.object(module, "look_at", mock.AsyncMock(return_value=None)),
        mock.patch.object(module, "is_restarted", lambda: world.begun["master"] > 1),
        mock.patch.object(RayMetrics, "write", lambda *_: None),
        mock.patch("rayrft.monitor.recorder.save_plot"),
        mock.patch("rayrft.explorer.explorer.gc"),
        mock.patch("ray.put", world.put),
        mock.patch("ray.get", lambda refs: [ref.get() for ref in refs]),
        mock.patch("ray.kill", world.kill),
        mock.patch("rayrft.runtime.handle.ended_at", lambda _: time.time()),
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        runner.run(main())
    return outcome
