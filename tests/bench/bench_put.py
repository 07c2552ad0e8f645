"""How fast producers put groups: the Buffer, Ray's own queue, and an SQLite table, on the same rows in one run.

Rows have 128 tokens. Producers are actors that put as fast as they are acknowledged, with at most 64 groups in flight
each. The Buffer writes its log (fsync: interval) and validates every row; the queue keeps rows in memory only; SQLite
is an actor with one table (write-ahead log, synchronous=NORMAL) that validates nothing.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.util.queue import Queue

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.client import BufferWriter
from rayrft.config.buffer import BufferConfig
from rayrft.experience import to_batch
from tests.bench.helpers import parse, spread, start_ray
from tests.buffer.rows import group
from tests.scripted import handle

IN_FLIGHT = 64


def template(rows: int, tokens: int = 128) -> pa.RecordBatch:
    """One group of usual rows."""
    return to_batch(group(0, rows=rows, length=tokens))


def named(batch: pa.RecordBatch, name: str) -> pa.RecordBatch:
    """The same rows under another group's name."""
    ids = pa.array([f"{name}/{row}" for row in range(batch.num_rows)])
    batch = batch.set_column(0, batch.schema.field(0), ids)
    return batch.set_column(1, batch.schema.field(1), pa.array([name] * batch.num_rows))


@ray.remote(num_cpus=0)
class Producer:
    """Puts groups for some seconds; gives how many rows were acknowledged."""

    def __init__(self, number: int, rows: int, store: Any) -> None:
        self._number, self._batch, self._store = number, template(rows), store
        self._count = 0

    async def produce(self, kind: str, seconds: float) -> int:
        store = self._store
        put: Any = store.put.remote if kind == "sqlite" else store.put_async if kind == "queue" else None
        put = put or BufferWriter(handle(store)).put
        end, done = time.monotonic() + seconds, 0

        async def loop() -> None:
            nonlocal done
            while time.monotonic() < end:
                self._count += 1
                await put(named(self._batch, f"{self._number}/{self._count}"))
                done += self._batch.num_rows

        await asyncio.gather(*(loop() for _ in range(IN_FLIGHT)))
        return done


@ray.remote(num_cpus=0)
class Table:
    """An SQLite table that actors share through one writer, a row for each group."""

    def __init__(self, path: str) -> None:
        self._db = sqlite3.connect(path, check_same_thread=False)
        self._db.executescript(
            "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;"
            "CREATE TABLE groups (id TEXT PRIMARY KEY, rows INTEGER, data BLOB)"
        )
        self._waiting: list[tuple[str, int, pa.Buffer]] = []
        self._writing, self._taken = asyncio.Lock(), 0

    async def put(self, batch: pa.RecordBatch) -> None:
        """Returns once the group is committed."""
        self._waiting.append((batch.column("group_id")[0].as_py(), batch.num_rows, batch.serialize()))
        count = self._taken + len(self._waiting)
        async with self._writing:
            if self._taken < count:  # else the one before took this group along
                groups, self._waiting = self._waiting, []
                self._taken += len(groups)
                await asyncio.to_thread(self._commit, groups)

    def _commit(self, groups: list[tuple[str, int, pa.Buffer]]) -> None:
        with self._db:
            self._db.executemany("INSERT INTO groups VALUES (?, ?, ?)", groups)


def measure(kind: str, rows: int, producers: int, seconds: float) -> float:
    """Rows a second that ``producers`` get acknowledged."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    if kind == "buffer":
        config = BufferConfig(max_rows=10**9, max_bytes=1 << 40, memory_bytes=2 << 30, log_bytes=1 << 40)
        store = ray.remote(Buffer).options(num_cpus=0, max_concurrency=1000).remote("b", folder, config, 0)
        ray.get(store.stats.remote())
    elif kind == "queue":
        store = Queue(actor_options={"num_cpus": 0})
    else:
        store = Table.options(max_concurrency=1000).remote(str(folder / "rows.db"))
    actors = [Producer.remote(number, rows, store) for number in range(producers)]
    ray.get([actor.produce.remote(kind, 1.0) for actor in actors])  # everything is imported and connected
    started = time.monotonic()
    done = sum(ray.get([actor.produce.remote(kind, seconds) for actor in actors]))
    rate = done / (time.monotonic() - started)
    for actor in [*actors, store.actor if kind == "queue" else store]:
        ray.kill(actor)
    shutil.rmtree(folder, ignore_errors=True)
    return rate


def main() -> None:
    options = parse(__doc__, seconds=4.0, rounds=3, producers=4)
    start_ray(8)
    for rows in (256, 8):
        rates: dict[str, list[float]] = {"buffer": [], "queue": [], "sqlite": []}
        for _ in range(options.rounds):
            for kind, measured in rates.items():
                measured.append(measure(kind, rows, options.producers, options.seconds))
        for kind, measured in rates.items():
            print(f"groups of {rows:>3} {kind:>8} {spread(measured, ',.0f')} rows/s", flush=True)


if __name__ == "__main__":
    main()
