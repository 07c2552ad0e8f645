"""The Buffer is killed again and again, at any moment, while producers put and a trainer takes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray.exceptions import ObjectLostError

from rayrft.buffer.client import BufferWriter
from rayrft.buffer.events import GroupReport
from rayrft.buffer.schedule import Ticket
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.errors import LeaseEnded
from rayrft.experience import to_batch, unpack
from tests.buffer.in_process import small
from tests.buffer.rows import group, plan
from tests.chaos.mortal import MortalBuffer
from tests.scripted import handle

pytestmark = pytest.mark.usefixtures("ray_cluster")
TASKS = TaskSetSpec([str(number) for number in range(50)], [0] * 50, [1.0], sampler="failure", seed=0)
SIZES = {"segment_bytes": 50_000, "log_bytes": 500_000, "memory_bytes": 200_000, "max_bytes": 1 << 30}
CONFIG = small(**SIZES, max_rows=100, fsync="interval", fsync_s=0.05)
FOREVER = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}


class Reaper:
    """Kills processes that report at its door, a random while after they began or were ready, as often as it shall."""

    def __init__(self, chance: random.Random, kills: int) -> None:
        self._chance, self._left = chance, kills
        self._doomed: set[int] = set()
        self.door = f"{tempfile.mkdtemp()}/door"
        self.done = asyncio.Event()

    async def __aenter__(self) -> Reaper:
        self._server = await asyncio.start_unix_server(self._opened, self.door)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _opened(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        *what, number = (await reader.read()).decode().split()
        writer.close()
        pid, ready = int(number), what == ["is", "ready"]
        if pid in self._doomed or not self._left or (not ready and self._chance.random() < 0.8):
            return
        self._doomed.add(pid)
        await asyncio.sleep(self._chance.uniform(0, 0.4 if ready else 0.1))
        os.kill(pid, signal.SIGKILL)
        self._left -= 1
        if not self._left:
            self.done.set()


class Trainer:
    """Takes step after step, now and then one twice, and now and then gives a step's groups back before it trains."""

    def __init__(self, buffer: Any, chance: random.Random) -> None:
        self._buffer, self._chance = buffer, chance
        self.trained: list[list[str]] = []
        self.stale = 0
        self.enough = asyncio.Event()

    async def train(self) -> None:
        while True:
            step = len(self.trained)
            try:
                ids = await self._take(step)
                draw = self.draw
            except LeaseEnded as ended:
                assert ended.value == "stage_closed"
                return
            if self._chance.random() < 0.3:
                assert await self._take(step) == ids
            if self._chance.random() < 0.2:
                await self._buffer.requeue.remote(step, draw)
                continue
            await self._buffer.ack.remote(step)
            self.trained.append(ids)
            if step >= 30:
                self.enough.set()
            await self._buffer.advance.remote(step + 1)
            await self._buffer.cover.remote(step - 3)

    async def _take(self, step: int) -> list[str]:
        """The rows of the step's lease. Blocks may die with the process that made them: then it is asked for again."""
        while True:
            lease = await self._buffer.lease.remote(step, 2, 100)
            self.stale, self.draw = max(self.stale, *lease.staleness), lease.draw
            parts = [part for share in lease.shares for part in share.parts]
            try:
                messages = await asyncio.gather(*(part.ref for part in parts))
            except ObjectLostError:
                continue
            rows = [unpack(message).take(pa.array(part.rows)) for message, part in zip(messages, parts, strict=True)]
            return [name for batch in rows for name in batch.column("experience_id").to_pylist()]


class Producer:
    """Puts groups of two rows, small and large, and remembers which the Buffer has acknowledged."""

    def __init__(self, name: str, buffer: Any, chance: random.Random) -> None:
        self._name, self._buffer, self._chance = name, buffer, chance
        self._writer = BufferWriter(handle(buffer))
        self.put: list[str] = []
        self.dropped = self.failed = 0

    async def with_tickets(self) -> None:
        call = 0
        while tickets := await self._buffer.admit.remote(self._name, call := call + 1, 4):
            await asyncio.gather(*(self._use(ticket) for ticket in tickets))

    async def _use(self, ticket: Ticket) -> None:
        await asyncio.sleep(self._chance.uniform(0, 0.02))
        draw = self._chance.random()
        if draw < 0.1:
            await self._buffer.fail.remote(ticket, "workflow_error")
            self.failed += 1
        elif draw < 0.2:
            await self._buffer.drop.remote(ticket, {"zero_variance": 2}, GroupReport(rows=2))
            self.dropped += 1
        else:
            name = f"{self._name}-{ticket.sequence}"
            rows = group(
                ticket.sequence, length=self._chance.choice([4, 4, 4, 4, 5000]), version=ticket.version, name=name
            )
            await self._writer.put(to_batch(rows), GroupReport(rows=2, reward_sum=1.0, scored=2), ticket=ticket)
            self.put.append(name)


async def settle(buffer: Any, trainer: Trainer, producers: list[Producer]) -> None:
    """Every group that was acknowledged is trained once, or held, or counted."""
    stats = await buffer.stats.remote()
    held: list[str] = []
    for ref, rows in await buffer.partition.remote("usual"):
        held += unpack(await ref).take(pa.array(rows)).column("experience_id").to_pylist()
    trained = [row for step in trainer.trained for row in step]
    assert max(Counter(trained + held).values()) == 1, "a row was doubled"
    put = {f"{name}/{row}" for producer in producers for name in producer.put for row in range(2)}
    assert put >= {*trained, *held}
    filtered = 2 * sum(producer.dropped for producer in producers)
    dropped = stats.ledger.dropped
    assert dropped.pop("zero_variance", 0) == filtered
    assert sum(dropped.values()) == len(put) - len(trained) - len(held)
    assert dropped.keys() <= {"late", "stale"}
    assert stats.ledger.dropped_tasks.get("workflow_error", 0) == sum(producer.failed for producer in producers)
    ledger = stats.ledger
    assert (ledger.sampled, ledger.trained, ledger.held) == (len(put) + filtered, len(trained), len(held))


@pytest.fixture
def actors() -> Iterator[list[Any]]:
    made: list[Any] = []
    yield made
    for actor in made:
        ray.kill(actor)


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.slow)])
async def test_kills_of_the_buffer_lose_no_ticket_and_no_group(tmp_path: Path, actors: list[Any], kills: int) -> None:
    chance = random.Random(0)
    async with Reaper(chance, kills) as reaper:
        options = {**FOREVER, "max_concurrency": 1000, "name": f"mortal:{tmp_path.name}"}
        mortal = ray.remote(MortalBuffer).options(**options)
        actors.append(buffer := mortal.remote(reaper.door, "run", tmp_path, CONFIG, 0, TASKS))
        await buffer.open_stage.remote(plan(3, max_staleness=1))
        trainer = Trainer(buffer, chance)
        producers = [Producer(name, buffer, chance) for name in "ab"]
        working = [asyncio.create_task(each) for each in (trainer.train(), *(p.with_tickets() for p in producers))]
        for event in (reaper.done, trainer.enough):
            await asyncio.wait({*working, asyncio.create_task(event.wait())}, return_when=asyncio.FIRST_COMPLETED)
        await buffer.close_stage.remote()
        await asyncio.gather(*working)
        await settle(buffer, trainer, producers)
        assert trainer.stale <= 1
