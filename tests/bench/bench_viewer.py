"""How long the viewer takes over a run of many rows: to open the run and its rows, and to answer queries.

The log has ``--rows`` rows in groups of eight, written at once: segments of 32 MiB and a snapshot. `first` reads it for
the first time on this machine, after which its columns are kept; `opens` is another viewer later, to its curves and its
first page of rows, and `fresh` the same of the first viewer, which answers before it has read the log; `extended` is
the time until rows that were appended can be queried. Queries are requests to the application in this process, in an
order that rotates.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import zlib
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
from PIL import Image

from rayrft.buffer.events import Extent, GroupReport, StoredGroup, StoredRows
from rayrft.buffer.groups import GroupStatus, group_key
from rayrft.buffer.log.segments import segment_name, with_schema
from rayrft.buffer.state import State
from rayrft.buffer.transitions.contents import Began
from rayrft.config import dump_config, load_config
from rayrft.config.buffer import SamplerConfig
from rayrft.config.serve import ViewerConfig
from rayrft.data.images import keep_image
from rayrft.experience import SCHEMA_VERSION, Experience, VersionSpan, to_batch
from rayrft.monitor.records import RecordFile
from rayrft.viewer.app import Viewer
from tests.bench.helpers import parse, percentiles
from tests.e2e.conftest import small_config
from tests.monitor.made import step

GROUP, BATCH, SEGMENT = 8, 64, 32 << 20
QUERIES = {
    "newest": "rows",
    "filtered": "rows?min_reward=0.5&group_status=trained&sort=-tokens",
    "a step": "rows?min_step={step}&max_step={step}",
    "a task": "rows?task_id=task7&sort=reward",
    "text": "rows?text=answer 77",
    "SQL": "rows?where=tokens > 100 and reward < 0.5 and staleness >= 1",
    "a row": "row?id={row}",
    "tasks": "tasks",
    "unlearned": "tasks?which=unlearned&sort=change",
    "curves": "run",
    "timeline": "timeline",
    "advice": "advice",
    "compare": "/v1/compare?runs=big",
    "runs": "/v1/runs",
    "image": "image?id={row}&number=0",
    "feedback": "/feedback/big/v1/stats?person=Ann",
}
"""Paths, or views with parameters, of the run ``big``."""


def template(length: int, images: Path) -> pa.RecordBatch:
    """Rows of ``BATCH`` groups, to be written again under other names."""
    chance = np.random.default_rng(0)
    rows, image = [], keep_image(Image.new("RGB", (160, 90)), images)
    for number in range(BATCH * GROUP):
        mask = np.array([0] * 20 + [1] * length, np.uint8)
        turns = (
            {"role": "user", "content": f"Question {number // GROUP}?"},
            {"role": "assistant", "content": f"answer {number} " * 8},
        )
        logprobs = np.where(mask, -chance.exponential(0.4, len(mask)), 0).astype(np.float32)
        ids = chance.integers(0, 30_000, len(mask)).astype(np.int32)
        spans = (VersionSpan(20, len(mask), 0),)
        row = Experience(
            "", "", "", ids, 20, mask, logprobs, weight_versions=spans, turns=turns, reward=float(chance.random() < 0.4)
        )
        rows.append(replace(row, finished_at=1.0, stop_reason="stop", images=(image,)))
    return to_batch(rows)


class Log:
    """The log of a run, which grows by batches of ``BATCH`` groups."""

    def __init__(self, folder: Path, length: int) -> None:
        self.folder, self._template = folder, template(length, folder.parent / "images")
        folder.mkdir(parents=True)
        self.state = State(SamplerConfig(), 0, None)
        Began("run", SCHEMA_VERSION).apply(self.state)
        self.groups, self._segment = 0, 0

    def append(self) -> None:
        """Write a batch of groups, of which most are trained, at a step for every fourth batch."""
        first, self.groups = self.groups, self.groups + BATCH
        at = first // (4 * BATCH)
        tasks = [f"task{number % 5000}" for number in range(first, self.groups)]
        names = [f"run/mix/{number}/{task}" for number, task in zip(range(first, self.groups), tasks, strict=True)]
        ids = [f"{name}/{repeat}" for name in names for repeat in range(GROUP)]
        span = {"start": 20, "end": 20 + 1, "version": at - at % 2}
        changes = {
            "experience_id": pa.array(ids),
            "group_id": pa.array(np.repeat(names, GROUP).tolist()),
            "task_id": pa.array(np.repeat(tasks, GROUP).tolist()),
            "weight_versions": pa.array([[span]] * len(ids), self._template.schema.field("weight_versions").type),
            "finished_at": pa.array(np.full(len(ids), 1e9 + first)),
        }
        columns = [changes.get(name, self._template.column(name)) for name in self._template.schema.names]
        message = pa.RecordBatch.from_arrays(columns, schema=self._template.schema).serialize()
        contents = self.state.contents
        extent = contents.extents.get(self._segment, Extent(self._segment))
        if extent.nbytes > SEGMENT:
            self._segment, extent = self._segment + 1, Extent(self._segment + 1)
        data = message if extent.nbytes else with_schema(message)
        with (self.folder / segment_name(self._segment)).open("ab") as file:
            file.write(data)
        contents.extents[self._segment] = extent.grown(len(ids), data)
        groups, ledger = self.state.groups, contents.ledger
        ledger.sampled += len(ids)
        for place, name in enumerate(names):
            stored = StoredRows(extent.rows + place * GROUP, GROUP, 0, 800, 1000, at - at % 2, 1.0)
            slot = groups.add(
                StoredGroup(group_key(name), 0, stored, None, {}, GroupReport()), self._segment, first + place
            )
            if (first + place) % 10:
                groups.uses[slot], groups.last_step[slot] = 1, at
                groups.set_status(slot, GroupStatus.TRAINED)
                ledger.trained += GROUP
            else:
                self.state.retire("stale", slot)

    def commit(self) -> None:
        """Write a snapshot in place of the last one."""
        snapshot = self.state.to_snapshot()
        for old in self.folder.glob("snapshot-*"):
            old.unlink()
        (self.folder / f"snapshot-00000001-{zlib.crc32(snapshot):08x}.arrow").write_bytes(snapshot)


async def ask(http: httpx.AsyncClient, query: str, count: int) -> tuple[float, float]:
    """Return the seconds of a query of the run, by the clock and of the processor."""
    path, _, asked = query.format(
        step=count // (8 * BATCH * GROUP), row=f"run/mix/{count // 16}/task{count // 16 % 5000}/3"
    ).partition("?")
    began, processor = time.perf_counter(), time.process_time()
    response = await http.get(f"{path}?{asked}" if path.startswith("/") else f"/v1/{path}?run=big&{asked}")
    response.raise_for_status()
    return time.perf_counter() - began, time.process_time() - processor


async def until_read(http: httpx.AsyncClient, rows: int) -> str:
    """Return the seconds until the log is read, by the clock and of the processor."""
    began, processor = time.perf_counter(), time.process_time()
    while (log := (await http.get("/v1/rows?run=big&limit=1")).json()["log"])["lags"] or log["rows"] < rows:
        assert not log["problem"], log
        await asyncio.sleep(0.05)  # a page asks less often
    return f"{time.perf_counter() - began:.2f} s ({time.process_time() - processor:.2f} s of the processor)"


def viewer(storage: Path) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(Viewer(storage, ViewerConfig(), ()).app())
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=600)


async def measure(storage: Path, log: Log, count: int, rounds: int) -> None:
    async def open_run(http: httpx.AsyncClient, kind: str) -> None:
        for name in ("curves", "newest"):
            clock, processor = await ask(http, QUERIES[name], count)
            print(f"{kind:<9} {name} {clock:.2f} s ({processor:.2f} s of the processor)")

    async with viewer(storage) as http:
        await open_run(http, "fresh")
        print(f"first     {await until_read(http, count)}")
    async with viewer(storage) as http:  # as another process: nothing is in memory
        await open_run(http, "opens")
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in QUERIES}
        for number in range(rounds):
            order = list(QUERIES)
            for name in order[number % len(order) :] + order[: number % len(order)]:
                times[name].append(await ask(http, QUERIES[name], count))
        for name, seconds in times.items():
            clock, processor = np.array(seconds).T
            print(f"{name:<9} {percentiles(clock)}; of the processor {percentiles(processor)}")
        log.append()
        log.commit()
        print(f"extended  {await until_read(http, count + BATCH * GROUP)} by {BATCH * GROUP} rows")


def main() -> None:
    options = parse(__doc__, rows=1_000_000, tokens=100, steps=2000, rounds=20)
    with tempfile.TemporaryDirectory() as storage:
        os.environ["XDG_CACHE_HOME"] = f"{storage}/cache"
        config = load_config(small_config(Path(storage), "big"))
        log = Log(config.folder / "buffer", options.tokens)
        (config.folder / "config.yaml").write_text(dump_config(config))
        RecordFile(config.folder).append(
            *(step(step=number, time=float(number)) for number in range(1, options.steps + 1))
        )
        while log.groups * GROUP < options.rows:
            log.append()
        log.commit()
        count = log.groups * GROUP
        size = sum(file.stat().st_size for file in log.folder.iterdir()) / 1e9
        print(f"{count} rows, {size:.2f} GB, {options.steps} steps")
        asyncio.run(measure(Path(storage), log, count, options.rounds))
        [index] = Path(storage, "cache").rglob("*.duckdb")
        print(f"index     {index.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
