"""Producers, a trainer and the Buffer in one process and in simulated time: every history follows from its seed.

The Buffer is the real one, over a real journal; only its rows lie in a table (`Rows`). It is an actor of a `World` that
is restarted when it dies: a call is repeated as long as its caller has no answer, and now and then it is executed once
more, late. The Buffer is killed at any time, which includes just before and just after each write.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rayrft.buffer import store
from rayrft.buffer.buffer import Buffer
from rayrft.buffer.events import Extent, GroupReport, StoredRows
from rayrft.buffer.ingest import GroupEntry
from rayrft.buffer.leases import Lease
from rayrft.buffer.log import journal
from rayrft.buffer.log.row_log import AppendResult, RowSpan
from rayrft.buffer.schedule import StagePlan, Ticket
from rayrft.buffer.validation import Limits
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.errors import LeaseEnded
from rayrft.experience import to_batch, unpack
from rayrft.runtime.handle import Handle
from rayrft.runtime.waits import cancel
from tests.buffer.in_process import small
from tests.buffer.rows import group
from tests.chaos.simulated import Life, VirtualLoop, World

_PATIENCE_S = 1000.0
"""Deadline of a lease, in simulated seconds; no delay in a history is near it."""


class ThreadedLoop(VirtualLoop):
    """A loop whose threads take a while before and after what they do. The thread of rows does one thing at a time."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance, self._threads = chance, dict[Executor, asyncio.Lock]()

    def run_in_executor(self, executor: Any, function: Any, *arguments: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        async def work() -> Any:
            alone = contextlib.nullcontext() if executor is None else self._threads.setdefault(executor, asyncio.Lock())
            async with alone:
                await asyncio.sleep(self._chance.uniform(0, 0.01))
                result = function(*arguments)
                await asyncio.sleep(self._chance.uniform(0, 0.01))
            return result

        return self.create_task(work())


class Rows:
    """Stands for the `RowLog`: groups in a list, of which a Buffer that opens keeps what its journal speaks of."""

    torn_bytes = 0

    def __init__(self, history: History, committed: list[Extent]) -> None:
        self._history = history
        del history.disk[max((extent.rows for extent in committed), default=0) :]

    def take(
        self, message: pa.Buffer, wanted: list[int], whole: list[int], announced: int, limits: Limits
    ) -> AppendResult:
        groups = [group for place, group in enumerate(json.loads(message.to_pybytes())) if place in wanted]
        row = len(self._history.disk)
        self._history.disk += [name for name, _ in groups]
        stored = [StoredRows(row + place, 1, 0, 1, 1, version, 1.0) for place, (_, version) in enumerate(groups)]
        extent = Extent(0, len(self._history.disk), len(self._history.disk))
        return AppendResult(extent, row, wanted, stored)

    def append(self, message: pa.Buffer) -> AppendResult:
        return self.take(message, [0], [], 1, Limits())

    def refs(self, spans: list[RowSpan]) -> list[tuple[Any, int, np.ndarray]]:
        return [("rows", span.row, np.ones(span.rows, dtype=np.int64)) for span in spans]

    def read_group(self, span: RowSpan) -> pa.RecordBatch:
        return to_batch(group(0, 1, name=self._history.disk[span.row]))

    def release(self, segments: list[int]) -> None: ...

    def memory(self) -> int:
        return 0

    def sync(self) -> None: ...


@dataclass(frozen=True)
class Setting:
    """What a history is about; `draw` makes one of a random number generator."""

    stages: tuple[StagePlan, ...]
    """With the first version still to be filled in. One of no groups stands for a stage of demonstrations alone."""
    steps: int
    """Of each stage."""
    sampler: dict[str, Any]
    producers: int
    tasks: int | None
    """Tasks that there are, or None where they never end."""
    kills: int
    """Of the Buffer's process."""
    crashes: int
    """Of everything else at once; the Buffer is killed with it, and the run resumed from its last checkpoint."""
    fails: float
    """How often a group fails, and how often it is filtered."""
    parks: float
    """How often a group is parked."""
    snapshot_bytes: int

    @classmethod
    def draw(cls, rng: random.Random) -> Setting:
        staleness, over = rng.randint(0, 2), rng.choice([1.0, 1.0, 1.5])
        parks = rng.choice([None, "mask", "train"] if staleness else [None, "mask"])
        groups = rng.choice([(2,), (3,), (1,), (2, 3), (2, 0, 2), (0, 1)])
        stages = [
            StagePlan(count, max_staleness=staleness, over_sampling=over, name=f"stage-{number}", parks=parks)
            for number, count in enumerate(groups)
        ]
        replayed = {"name": "uniform", "max_uses": 2, "replay_ratio": rng.choice([1, 2])}
        return cls(
            tuple(stages),
            rng.randint(3, 10),
            rng.choice([{"name": "fifo"}, {"name": "fifo"}, replayed]),
            rng.randint(1, 3),
            rng.choice([None, None, 12]),
            rng.randint(0, 6),
            rng.choice([0, 0, 1, 2, 3]),
            rng.choice([0.05, 0.2]),
            rng.choice([0.1, 0.5, 0.9]) if parks else 0.0,
            rng.choice([1500, 1 << 30]),
        )


class History:
    """The Buffer's disk, and what the others know. The Buffer's log lies in ``folder``."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.chance = random.Random(seed)
        self.setting = setting = Setting.draw(self.chance)
        self.world = World(ThreadedLoop(self.chance), seed)
        # The connection was lost for a moment: it is executed twice. What is called seldom is so as often as not.
        self.world.repeated = lambda method: 0.5 if method.endswith("_stage") else 0.1 * (method != "run")
        self.disk: list[str] = []
        """Ids of the groups in the file of rows."""
        self.trained: dict[int, list[str]] = {}
        """What each step was given to train on."""
        self.checkpoint = Checkpoint()
        self.known: dict[str, set[Any]] = {name: set() for name in ("sent", "put", "filtered", "failed")}
        """What producers know: groups that were sent, and everything that the Buffer acknowledged."""
        config, tasks = small(segment_bytes=1 << 30, sampler=setting.sampler), None
        if (count := setting.tasks) is not None:
            ids = [str(number) for number in range(count)]
            tasks = TaskSetSpec(ids, [0] * count, [1.0], sampler="shuffled", seed=0, epochs=1)
        self.world.on_end.append(self._ended)
        self._open = lambda _: Buffer("run", folder, config, 0, tasks)

    async def play(self) -> None:
        """Let the runs go through the stages while the Buffer is killed, and check what came of it."""
        reaping = asyncio.ensure_future(self._reap())
        for crash in range(self.setting.crashes + 1):
            self.buffer: Handle[Buffer] = self.world.create("buffer", self._open, restarts=True)
            run = self.world.create("run", lambda _, crash=crash: Run(self, f"life-{crash}"))
            running = asyncio.ensure_future(run.call(Run.run, replace(self.checkpoint)))
            if crash < self.setting.crashes:
                await asyncio.wait({running}, timeout=self.chance.uniform(0, 10))
            else:
                await running
            if running.done():
                running.result()
                break
            for actor in self.world.living:  # a run that is resumed has a Buffer of its own
                actor.kill(restart=False)
        await cancel(reaping)
        await self._check()
        self.buffer.actor._actor.kill(restart=False)

    async def _reap(self) -> None:
        for _ in range(self.setting.kills):
            await asyncio.sleep(self.chance.uniform(0, 1.5))
            self.buffer.actor._actor.kill(restart=True)

    def _ended(self, life: Life) -> None:
        if isinstance(life.target, Buffer):
            life.target.store.journal.close()
            life.target.store.storage.unlock()

    async def _check(self) -> None:
        """Every group that was acknowledged is trained, held or counted as dropped, and none is doubled."""
        stats = await self.buffer.call(Buffer.stats)
        held = [self.disk[row] for _, rows in await self.buffer.call(Buffer.partition, "usual") for row in rows]
        uses = Counter(name for batch in self.trained.values() for name in batch)
        sent, put = self.known["sent"], self.known["put"]
        assert {*uses, *held} <= sent and len(set(held)) == len(held)
        assert max(uses.values(), default=0) <= self.setting.sampler.get("max_uses", 1), "trained too often"
        dropped = dict(stats.ledger.dropped)
        parked = len(self.buffer.actor._actor.life.target.state.stage.begun)
        assert len(held) + parked == stats.ledger.held
        dropped.pop("unfinished", 0)
        filtered, failed = dropped.pop("zero_variance", 0), stats.ledger.dropped_tasks.get("workflow_error", 0)
        left = len({*uses, *held})
        assert stats.ledger.closes and not self.world.problems
        assert stats.ledger.trained + len(held) == left
        if self.setting.crashes:  # what had no answer when all died may have been executed, or not
            assert len(put) <= left + sum(dropped.values()) <= len(sent)
            assert filtered >= len(self.known["filtered"]) and failed >= len(self.known["failed"])
        else:
            assert len(put) == left + sum(dropped.values())
            assert filtered == len(self.known["filtered"]) and failed == len(self.known["failed"])


class Producer:
    """Uses tickets one way or the other, several at a time, and remembers what the Buffer acknowledged."""

    def __init__(self, history: History, buffer: Handle[Buffer], name: str) -> None:
        self._history, self._buffer, self._name = history, buffer, name
        self._calls = 0

    async def produce(self, stage: str) -> None:
        """Until no more tickets come."""
        history, buffer = self._history, self._buffer
        while True:
            self._calls += 1
            tickets = await buffer.call(Buffer.admit, self._name, self._calls, history.chance.randint(1, 4))
            if not tickets:
                return
            await asyncio.gather(*(self._use(stage, ticket) for ticket in tickets))

    async def _use(self, stage: str, ticket: Ticket) -> None:
        history, buffer, chance = self._history, self._buffer, self._history.chance
        await asyncio.sleep(chance.expovariate(1 / 0.2))
        draw = chance.random()
        name = f"{stage}/{ticket.sequence}"
        if draw < history.setting.fails:
            await buffer.call(Buffer.fail, ticket, "workflow_error")
            history.known["failed"].add((stage, ticket.sequence))
        elif draw < 2 * history.setting.fails:
            await buffer.call(Buffer.drop, ticket, {"zero_variance": 1}, GroupReport(rows=1))
            history.known["filtered"].add((stage, ticket.sequence))
        elif chance.random() < history.setting.parks:
            if ticket.resumes:
                message = await buffer.call(Buffer.parked, ticket)
                assert message is None or unpack(message)["group_id"][0].as_py() == f"{name} parked", "what was parked"
            payload = [pa.py_buffer(json.dumps([[f"{name} parked", ticket.version]]).encode())]
            await buffer.call(Buffer.park, GroupEntry(name, ticket, GroupReport(), {}, 1, 1), payload)
        else:
            entry = GroupEntry(name, ticket, GroupReport(rows=1, reward_sum=1.0, scored=1), {}, 1, 1)
            history.known["sent"].add(name)
            plan = history.setting.stages[0]
            kept = ticket.deadline - plan.max_staleness if plan.parks == "train" and ticket.resumes else ticket.version
            oldest = min(ticket.version, kept)
            await buffer.call(Buffer.put, [entry], [pa.py_buffer(json.dumps([[name, oldest]]).encode())])
            history.known["put"].add(name)


@dataclass
class Checkpoint:
    """From where a run is resumed; ``began`` is the step at which the stage began."""

    step: int = 0
    stage: int = 0
    began: int = 0


class Run:
    """One life of the run: it opens the stages and trains step after step, as the Master and the trainer do.

    Now and then the trainer gives a batch back.
    """

    def __init__(self, history: History, life: str) -> None:
        self._history, self._life = history, life
        found = history.world.handle("buffer")
        assert found is not None
        self._buffer: Handle[Buffer] = found
        names = [f"{life}.{number}" for number in range(history.setting.producers)]
        self._producers = [Producer(history, found, name) for name in names]
        self._published = 0
        self._draw = 0

    async def run(self, at: Checkpoint) -> None:
        buffer, setting = self._buffer, self._history.setting
        self._published = at.step
        await buffer.call(Buffer.resume, at.step, self._life)
        for number in range(at.stage, len(setting.stages)):
            if number > at.stage:
                at.stage, at.began = number, at.step
            plan = replace(setting.stages[number], version=at.began)
            await buffer.call(Buffer.open_stage, plan)
            producing = [asyncio.ensure_future(each.produce(plan.name)) for each in self._producers if plan.groups]
            try:
                while at.step < at.began + setting.steps:
                    await self._step(at, plan)
            except LeaseEnded as ended:
                if ended.value != "end_of_data":
                    raise
            await buffer.call(Buffer.close_stage, plan.name)
            await asyncio.gather(*producing)
            if not plan.groups:
                self._published = at.step
            await self._save(at)

    async def _step(self, at: Checkpoint, plan: StagePlan) -> None:
        history, buffer, chance, step = self._history, self._buffer, self._history.chance, at.step
        batch = await self._lease(step)
        if plan.groups and step not in history.trained and chance.random() < 0.1:
            await buffer.call(Buffer.requeue, step, self._draw)
            return
        assert history.trained.setdefault(step, batch) == batch, "the same batch as before"
        await asyncio.sleep(chance.expovariate(1 / 0.2))
        await buffer.call(Buffer.ack, step)
        at.step += 1
        if plan.groups or chance.random() < 0.3:  # an evaluation publishes weights, too
            self._published = at.step
        await buffer.call(Buffer.advance, self._published)
        if chance.random() < 0.3:
            await self._save(at)

    async def _save(self, at: Checkpoint) -> None:
        self._history.checkpoint = replace(at)
        await self._buffer.call(Buffer.cover, at.step)

    async def _lease(self, step: int) -> list[str]:
        lease: Lease = await self._buffer.call(Buffer.lease, step, 1, _PATIENCE_S)
        assert max(lease.staleness, default=0) <= self._history.setting.stages[0].max_staleness
        self._draw = lease.draw
        return [self._history.disk[row] for share in lease.shares for part in share.parts for row in part.rows]


def run_history(seed: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Run one history to its end, and check it.

    Raises AssertionError if nothing can wake a waiting caller, or rows were lost or doubled, and RayTaskError if a
    lease is not filled in time.
    """
    history = History(seed, folder)
    patch.setattr(journal, "SNAPSHOT_BYTES", history.setting.snapshot_bytes)
    patch.setattr(journal, "SNAPSHOT_RATIO", 0)
    patch.setattr(store, "RowLog", lambda storage, config, committed: Rows(history, committed))
    with asyncio.Runner(loop_factory=lambda: history.world.loop) as runner:
        runner.run(history.play())
