"""Producers, a trainer and the Buffer in one process and in simulated time: every history follows from its seed.

The Buffer is the real one, over a real journal; only its rows lie in a table (`Rows`). Calls reach it as Ray's calls
reach an actor that is started again when it dies: a call is made again as long as its caller has no answer, so that it
may be executed twice, late, and in another order than it was made. The Buffer is killed between any two turns of its
event loop, which includes just before and just after each write to the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
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
from tests.buffer.in_process import small
from tests.buffer.rows import group

_LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)
_PATIENCE_S = 1000.0
"""Simulated seconds without progress after which somebody waits for ever; no delay in a history is near it."""


class Stuck(Exception):
    """Somebody waits, and nothing is left that could wake them."""


class Life:
    """One process of the Buffer, from its start to its death."""

    alive = True


class SimulatedLoop(asyncio.BaseEventLoop):
    """An event loop whose clock jumps to the next timer. What belongs to a dead process is not run any more."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self._threads: dict[Executor, asyncio.Lock] = {}
        self.now = 0.0
        self.turns = 0
        self.after_turn: Callable[[], None] = lambda: None
        self.tasks: list[asyncio.Task[Any]] = []
        self.set_task_factory(self._task)

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready:
            while self._scheduled and self._scheduled[0]._cancelled:
                heapq.heappop(self._scheduled)._scheduled = False
            if not self._scheduled:
                raise Stuck("nothing is left that could wake those who wait")
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False
            self.now = max(self.now, timer._when)
            self._ready.append(timer)
        handle = self._ready.popleft()
        life = handle._context.get(_LIFE) if not handle._cancelled else None
        if not handle._cancelled and (life is None or life.alive):
            handle._run()
            self.turns += 1
            self.after_turn()

    def run_in_executor(self, executor: Any, function: Any, *arguments: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        return self.create_task(self._in_thread(executor, function, arguments))

    async def _in_thread(self, executor: Executor | None, function: Callable[..., Any], arguments: Any) -> Any:
        """Stands for a thread: it takes a while before and after. The thread of rows does one thing at a time."""
        alone = contextlib.nullcontext() if executor is None else self._threads.setdefault(executor, asyncio.Lock())
        async with alone:
            await asyncio.sleep(self._rng.uniform(0, 0.01))
            result = function(*arguments)
            await asyncio.sleep(self._rng.uniform(0, 0.01))
        return result

    def throw_away(self) -> None:
        """End what still waits, much of it in processes that were killed, without running it any further."""
        for task in self.tasks:
            task.get_coro().close()
        self.close()

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **named: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **named)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        self.tasks.append(task)
        return task

    def _check_closed(self) -> None:
        """What is thrown away may ask for a turn that it never gets."""

    def _process_events(self, event_list: Any) -> None: ...

    def _write_to_self(self) -> None: ...


class Rows:
    """Stands for the `RowLog`: groups in a list, of which a Buffer that opens keeps what its journal speaks of."""

    torn_bytes = 0

    def __init__(self, world: World, committed: list[Extent]) -> None:
        self._world = world
        del world.disk[max((extent.rows for extent in committed), default=0) :]

    def take(
        self, message: pa.Buffer, wanted: list[int], whole: list[int], announced: int, limits: Limits
    ) -> AppendResult:
        groups = [group for place, group in enumerate(json.loads(message.to_pybytes())) if place in wanted]
        row = len(self._world.disk)
        self._world.disk += [name for name, _ in groups]
        stored = [StoredRows(row + place, 1, 0, 1, 1, version, 1.0) for place, (_, version) in enumerate(groups)]
        extent = Extent(0, len(self._world.disk), len(self._world.disk))
        return AppendResult(extent, row, wanted, stored)

    def append(self, message: pa.Buffer) -> AppendResult:
        return self.take(message, [0], [], 1, Limits())

    def refs(self, spans: list[RowSpan]) -> list[tuple[Any, int, np.ndarray]]:
        return [("rows", span.row, np.ones(span.rows, dtype=np.int64)) for span in spans]

    def read_group(self, span: RowSpan) -> pa.RecordBatch:
        return to_batch(group(0, 1, name=self._world.disk[span.row]))

    def release(self, segments: list[int]) -> None: ...

    def memory(self) -> int:
        return 0

    def sync(self) -> None: ...


@dataclass(eq=False)
class Call:
    """A call that has no answer yet."""

    method: str
    arguments: tuple[Any, ...]
    answer: asyncio.Future[Any]
    callers: Life


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


class World:
    """The Buffer's process, its disk, and the calls that are under way. The Buffer's log lies in ``folder``."""

    def __init__(self, rng: random.Random, folder: Path, setting: Setting) -> None:
        self.rng = rng
        self.setting = setting
        self.loop = SimulatedLoop(rng)
        self.disk: list[str] = []
        """Ids of the groups in the file of rows."""
        self.trained: dict[int, list[str]] = {}
        """What each step was given to train on."""
        self.checkpoint = Checkpoint()
        self.known: dict[str, set[Any]] = {name: set() for name in ("sent", "put", "filtered", "failed")}
        """What producers know: groups that were sent, and everything that the Buffer acknowledged."""
        self._pending: list[Call] = []
        self._life = self._callers = Life()
        self._kills = setting.kills
        self._clients = contextvars.copy_context()
        config, tasks = small(segment_bytes=1 << 30, sampler=setting.sampler), None
        if (count := setting.tasks) is not None:
            ids = [str(number) for number in range(count)]
            tasks = TaskSetSpec(ids, [0] * count, [1.0], sampler="shuffled", seed=0, epochs=1)
        self._open = lambda: Buffer("run", folder, config, 0, tasks)

    # The Buffer's process.

    def start(self) -> None:
        """Start the process, and send it the calls that have no answer yet."""
        self._life, context = Life(), self._clients.copy()
        context.run(_LIFE.set, self._life)
        self.buffer = context.run(self._open)
        # The turn of the loop after which this process is killed.
        end = self.loop.turns + self.rng.randint(1, 400) if self._kills else math.inf

        def after_turn() -> None:
            if self.loop.turns >= end:
                self.kill()

        self.loop.after_turn = after_turn
        for call in self.rng.sample(self._pending, len(self._pending)):
            self._send(call)

    def kill(self) -> None:
        """As SIGKILL does it: nothing of the process is run any more, and what it held is free."""
        self._kills -= 1
        self.end()
        self._clients.copy().run(self.loop.call_later, self.rng.uniform(0.1, 1), self.start)

    def crash(self) -> None:
        """Kill the Buffer and all who call it."""
        self._callers.alive = False
        self._pending = []
        if self._life.alive:
            self.end()
            self.start()

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start the processes of those who call the Buffer."""
        self._callers = Life()
        context = self._clients.copy()
        context.run(_LIFE.set, self._callers)
        return self.loop.create_task(work, context=context)

    def end(self) -> None:
        """Leave the disk as it is, without the process."""
        self._life.alive = False
        self.loop.after_turn = lambda: None
        self.buffer.store.journal.close()
        self.buffer.store.storage.unlock()

    # Calls.

    def __getattr__(self, name: str) -> Any:
        """A method of an actor's handle."""
        return SimpleNamespace(remote=lambda *arguments: self.call(name, arguments))

    def call(self, method: str, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Call the Buffer as an actor is called; the answer comes from whichever of its processes gives one."""
        call = Call(method, arguments, self.loop.create_future(), self._callers)
        self._pending.append(call)
        self._send(call)
        # The connection was lost for a moment: it is executed twice. What is called seldom is so as often as not.
        if self.rng.random() < (0.5 if method.endswith("_stage") else 0.1):
            self._send(call, late=self.rng.choice([0.02, 0.5, 3.0]))
        return call.answer

    def _send(self, call: Call, late: float = 0.02) -> None:
        self._clients.copy().run(self.loop.call_later, self.rng.expovariate(1 / late), self._deliver, call)

    def _deliver(self, call: Call) -> None:
        life = self._life
        if not life.alive or not call.callers.alive:
            return  # it is sent again once the next process is there; a run that is resumed has an actor of its own

        async def execute() -> None:
            try:
                result, error = await getattr(self.buffer, call.method)(*call.arguments), None
            except Exception as failure:  # whatever it is, it goes to the caller
                result, error = None, failure
            delay = self.rng.expovariate(1 / 0.02)
            self._clients.copy().run(self.loop.call_later, delay, self._reply, life, call, result, error)

        context = self._clients.copy()
        context.run(_LIFE.set, life)
        self.loop.create_task(execute(), context=context)

    def _reply(self, life: Life, call: Call, result: Any, error: Exception | None) -> None:
        if call not in self._pending or (not life.alive and self.rng.random() < 0.5):
            return
        self._pending.remove(call)
        if error is None:
            call.answer.set_result(result)
        else:
            call.answer.set_exception(error)


class Producer:
    """Uses tickets one way or the other, several at a time, and remembers what the Buffer acknowledged."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name
        self._calls = 0

    async def produce(self, stage: str) -> None:
        """Until no more tickets come."""
        world = self._world
        while True:
            self._calls += 1
            tickets = await world.admit.remote(self._name, self._calls, world.rng.randint(1, 4))
            if not tickets:
                return
            await asyncio.gather(*(self._use(stage, ticket) for ticket in tickets))

    async def _use(self, stage: str, ticket: Ticket) -> None:
        world, rng = self._world, self._world.rng
        await asyncio.sleep(rng.expovariate(1 / 0.2))
        draw = rng.random()
        name = f"{stage}/{ticket.sequence}"
        if draw < world.setting.fails:
            await world.fail.remote(ticket, "workflow_error")
            world.known["failed"].add((stage, ticket.sequence))
        elif draw < 2 * world.setting.fails:
            await world.drop.remote(ticket, {"zero_variance": 1}, GroupReport(rows=1))
            world.known["filtered"].add((stage, ticket.sequence))
        elif rng.random() < world.setting.parks:
            if ticket.resumes:
                message = await world.parked.remote(ticket)
                assert message is None or unpack(message)["group_id"][0].as_py() == f"{name} parked", "what was parked"
            payload = [pa.py_buffer(json.dumps([[f"{name} parked", ticket.version]]).encode())]
            await world.park.remote(GroupEntry(name, ticket, GroupReport(), {}, 1, 1), payload)
        else:
            entry = GroupEntry(name, ticket, GroupReport(rows=1, reward_sum=1.0, scored=1), {}, 1, 1)
            world.known["sent"].add(name)
            plan = world.setting.stages[0]
            kept = ticket.deadline - plan.max_staleness if plan.parks == "train" and ticket.resumes else ticket.version
            oldest = min(ticket.version, kept)
            await world.put.remote([entry], [pa.py_buffer(json.dumps([[name, oldest]]).encode())])
            world.known["put"].add(name)


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

    def __init__(self, world: World, life: str) -> None:
        self._world, self._life = world, life
        self._producers = [Producer(world, f"{life}.{number}") for number in range(world.setting.producers)]
        self._published = 0
        self._draw = 0

    async def run(self, at: Checkpoint) -> None:
        world, setting = self._world, self._world.setting
        self._published = at.step
        await world.resume.remote(at.step, self._life)
        for number in range(at.stage, len(setting.stages)):
            if number > at.stage:
                at.stage, at.began = number, at.step
            plan = replace(setting.stages[number], version=at.began)
            await world.open_stage.remote(plan)
            producing = [asyncio.ensure_future(each.produce(plan.name)) for each in self._producers if plan.groups]
            try:
                while at.step < at.began + setting.steps:
                    await self._step(at, plan)
            except LeaseEnded as ended:
                if ended.value != "end_of_data":
                    raise
            await world.close_stage.remote(plan.name)
            await asyncio.gather(*producing)
            if not plan.groups:
                self._published = at.step
            await self._save(at)

    async def _step(self, at: Checkpoint, plan: StagePlan) -> None:
        world, rng, step = self._world, self._world.rng, at.step
        batch = await self._lease(step)
        if plan.groups and step not in world.trained and rng.random() < 0.1:
            await world.requeue.remote(step, self._draw)
            return
        assert world.trained.setdefault(step, batch) == batch, "the same batch as before"
        await asyncio.sleep(rng.expovariate(1 / 0.2))
        await world.ack.remote(step)
        at.step += 1
        if plan.groups or rng.random() < 0.3:  # an evaluation publishes weights, too
            self._published = at.step
        await world.advance.remote(self._published)
        if rng.random() < 0.3:
            await self._save(at)

    async def _save(self, at: Checkpoint) -> None:
        self._world.checkpoint = replace(at)
        await self._world.cover.remote(at.step)

    async def _lease(self, step: int) -> list[str]:
        lease: Lease = await self._world.lease.remote(step, 1, _PATIENCE_S)
        assert max(lease.staleness, default=0) <= self._world.setting.stages[0].max_staleness
        self._draw = lease.draw
        return [self._world.disk[row] for share in lease.shares for part in share.parts for row in part.rows]


def run_history(seed: int, folder: Path, patch: pytest.MonkeyPatch) -> World:
    """Run one history to its end, and check it.

    Raises Stuck or LeaseEnded where somebody would wait for ever, and AssertionError where rows were lost or doubled.
    """
    rng = random.Random(seed)
    setting = Setting.draw(rng)
    patch.setattr(journal, "SNAPSHOT_BYTES", setting.snapshot_bytes)
    patch.setattr(journal, "SNAPSHOT_RATIO", 0)
    world = World(rng, folder, setting)
    patch.setattr(store, "RowLog", lambda storage, config, committed: Rows(world, committed))
    world.start()
    try:
        world.loop.run_until_complete(_history(world))
    finally:
        world.loop.throw_away()
        world.end()
    return world


async def _history(world: World) -> None:
    for crash in range(world.setting.crashes + 1):
        run = world.begin(Run(world, f"life-{crash}").run(replace(world.checkpoint)))
        if crash < world.setting.crashes:
            await asyncio.wait({run}, timeout=world.rng.uniform(0, 10))
        else:
            await run
        if run.done():
            run.result()
            break
        world.crash()
    await check(world)


async def check(world: World) -> None:
    """Every group that was acknowledged is trained, held or counted as dropped, and none is doubled."""
    stats = await world.stats.remote()
    held = [world.disk[row] for _, rows in await world.partition.remote("usual") for row in rows]
    uses = Counter(name for batch in world.trained.values() for name in batch)
    sent, put = world.known["sent"], world.known["put"]
    assert {*uses, *held} <= sent and len(set(held)) == len(held)
    assert max(uses.values(), default=0) <= world.setting.sampler.get("max_uses", 1), "trained too often"
    dropped = dict(stats.ledger.dropped)
    parked = len(world.buffer.state.stage.begun)
    assert len(held) + parked == stats.ledger.held
    dropped.pop("unfinished", 0)
    filtered, failed = dropped.pop("zero_variance", 0), stats.ledger.dropped_tasks.get("workflow_error", 0)
    left = len({*uses, *held})
    assert stats.ledger.closes
    assert stats.ledger.trained + len(held) == left
    if world.setting.crashes:  # what had no answer when all died may have been executed, or not
        assert len(put) <= left + sum(dropped.values()) <= len(sent)
        assert filtered >= len(world.known["filtered"]) and failed >= len(world.known["failed"])
    else:
        assert len(put) == left + sum(dropped.values())
        assert filtered == len(world.known["filtered"]) and failed == len(world.known["failed"])
