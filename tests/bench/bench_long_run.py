"""What a step costs after 1,000, 10,000 and 100,000 steps, and a row of the Buffer after 10 million.

A run in one process, of which only the engine and the trainer are scripted. After each number of steps it takes turns
with a fresh one, 50 steps each: the ratio of their processor times shows growth, whatever else the machine does. The
second table is of the Buffer alone, without fsync. The log is bounded (``buffer.log_bytes``): until it is full, the
Buffer's index grows with it, by some 200 bytes a group.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import gc
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pyarrow as pa

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.client import BufferWriter
from rayrft.buffer.schedule import StagePlan
from rayrft.config import RunConfig, load_config
from rayrft.core.checkpoints import Checkpoints, Progress
from rayrft.core.train_loop import TrainLoop
from rayrft.data.task_sampler import TaskSetSpec
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import Task
from rayrft.explorer.engines.exchange import Answering, Completion, Request
from rayrft.explorer.engines.pool import EnginePool, Member, Membership
from rayrft.explorer.explorer import Explorer
from rayrft.monitor.ray_metrics import RayMetrics
from rayrft.monitor.recorder import Recorder
from rayrft.trainer.api import RankCall
from rayrft.trainer.tiny import make_tiny_model
from rayrft.weights.messages import SyncReport
from tests.bench.bench_put import named, template
from tests.bench.helpers import parse
from tests.buffer.in_process import small
from tests.core.given import restarts
from tests.e2e.conftest import small_config
from tests.monitor.made import result
from tests.scripted import remote

GROUPS, REPEATS, TASKS = 2, 2, 50
_WINDOWS = 20
LOG = {"log_bytes": 8 << 20, "segment_bytes": 1 << 20}


@dataclasses.dataclass
class Held:
    """Stands for an object reference: the object is freed with the last one."""

    message: Any

    def __await__(self) -> Any:
        yield from ()
        return self.message


class Engine(Answering):
    """Answers at once; the first answer of a prompt is right."""

    version = 0

    async def generate(self, request: Request) -> list[Completion]:
        spans = ((0, 2, self.version),)
        return [Completion((5 + number, 1), (-0.5, -0.5), spans, "stop") for number in range(request.n)]

    async def publish(self, version: int) -> SyncReport:
        """Stand for the weight sync."""
        self.version = version
        return SyncReport(version, 0.0, 0, None, None)


class Trainer:
    """Does not compute. Tells the bench after every step."""

    def __init__(self, stepped: Any) -> None:
        self._stepped, self._steps = stepped, 0

    async def call_ranks(self, call: RankCall) -> list[Any]:
        if call.method == "train":
            self._steps += 1
            await self._stepped(self._steps)
            return [result()]
        return [None]

    async def written(self, folder: Path) -> None: ...


def make_config(folder: Path, steps: int) -> RunConfig:
    stage = {"name": "long", "algorithm": {"name": "grpo"}, "steps": steps, "group_size": REPEATS}
    stage |= {"batch_size": GROUPS * REPEATS, "evaluate_every": None}
    settings = {"stages": [stage], "buffer": {"fsync": "never", **LOG}, "checkpoint": {"every": 50}, "max_staleness": 1}
    return load_config(small_config(folder, "long", **settings))


async def run(steps: int, stepped: Any) -> None:
    """Run so many steps; call ``stepped`` with the number of each."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    config = make_config(folder, steps)
    config.folder.mkdir()
    tasks = [Task.create("test", f"Spell this word backward: {number:03d}", "x") for number in range(TASKS)]
    prompts, model = [task.question for task in tasks], folder / "model"
    assert config.model.tiny is not None
    make_tiny_model(config.model.tiny, prompts, ["x"], model, max_length=48, seed=0)
    progress = Progress("run")
    Checkpoints(config.folder, config.checkpoint).mark_beginning(progress)
    sets = TaskSetSpec([task.id for task in tasks], [0] * TASKS, [1.0], sampler="shuffled", seed=0)
    buffer, trainer = Buffer("run", folder, config.buffer, 0, sets), Trainer(stepped)
    engine, pool = Engine(), EnginePool()
    pool.membership = Membership(1, (Member(remote(engine, "engine-0"), 0),))
    explorer = Explorer(
        config, partial(ChatTokenizer, model), remote(pool, "engine_pool"), remote(buffer), tasks, [], None
    )
    await explorer.start()
    sync: Any = engine
    recorder, stop = Recorder(config), asyncio.Event()
    actors = remote(buffer), remote(trainer), [remote(explorer)]
    await TrainLoop(config, *actors, recorder, progress, stop, restarts(), sync).run()


def resident_mib() -> float:
    """Resident memory of this process, once what is free is given back."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss / 2**20


class Turns:
    """Lets two runs of this process take turns: one at a time, for a window of steps each."""

    def __init__(self, window: int) -> None:
        self._window, self._runs = window, dict[str, asyncio.Event]()
        self.costs: dict[str, list[float]] = {}
        self._began = 0.0

    def open(self, name: str) -> None:
        """Let a run take part. Its first turn comes after the window of the other."""
        self._runs[name], self.costs[name] = asyncio.Event(), []
        if len(self._runs) == 1:
            self._runs[name].set()
        self._began = time.process_time()

    def close(self, name: str) -> None:
        """Let the other run go on alone."""
        self._runs.pop(name)
        for turn in self._runs.values():
            turn.set()

    async def step(self, name: str, step: int) -> None:
        """End a step. At the end of a window it is the other run's turn."""
        if name not in self._runs or step % self._window or len(self._runs) < 2:
            return
        self.costs[name].append((time.process_time() - self._began) / self._window * 1e3)
        for other, turn in self._runs.items():
            (turn.clear if other == name else turn.set)()
        await self._runs[name].wait()
        self._began = time.process_time()


async def measure_steps(at: list[int]) -> None:
    """Pair a long run with fresh ones: from each step of ``at`` on they take turns, for 20 windows each."""
    window, fresh_steps = 50, 50 * (_WINDOWS + 4)
    turns, first = Turns(window), 0.0
    turns.open("long")
    paired: asyncio.Task[None] | None = None

    async def fresh_step(step: int) -> None:
        await turns.step("fresh", step)
        if step == fresh_steps - window:
            turns.close("fresh")

    async def stepped(step: int) -> None:
        nonlocal paired, first
        if step in at:
            memory = resident_mib()
            first = first or memory
            turns.costs["long"].clear()
            turns.open("fresh")
            paired = asyncio.create_task(run(fresh_steps, fresh_step))
            print(f"{step:7} steps: {memory:.0f} MiB, {memory / first:.3f} of the first", flush=True)
        await turns.step("long", step)
        if paired is not None and paired.done():
            await paired
            paired = None
            long, fresh = (np.array(turns.costs[name][2:_WINDOWS]) for name in ("long", "fresh"))
            low, middle, high = np.quantile(long / fresh[: len(long)], [0.25, 0.5, 0.75])
            print(
                f"{step:7} steps: {np.median(long):.2f} ms of processor a step, {np.median(fresh):.2f} of a fresh run; "
                f"ratio of windows {middle:.3f} ({low:.3f}-{high:.3f})",
                flush=True,
            )

    await run(at[-1] + 2 * fresh_steps, stepped)


async def measure_rows(at: list[int]) -> None:
    group, groups, step = 8, 128, 0
    buffer = Buffer("rows", Path(tempfile.mkdtemp(prefix="bench-")), small(**LOG), 0)
    await buffer.open_stage(StagePlan(groups, group, scheduled=False))
    writer, batch, times, first = BufferWriter(remote(buffer)), template(group, 8), list[float](), (0.0, 0.0)
    for rows in at:
        while step * groups * group < rows:
            times.append(time.process_time())
            await asyncio.gather(*(writer.put(named(batch, f"{step}/{number}")) for number in range(groups)))
            await buffer.lease(step, 1, 60.0)
            await buffer.ack(step)
            await buffer.advance(step + 1)
            await buffer.cover(step)
            step += 1
        cost, memory = statistics.median(np.diff(times[-50:])) / groups / group * 1e6, resident_mib()
        first = first if first[0] else (cost, memory)
        print(
            f"{rows:9} rows: {cost:.1f} us of processor a row, {memory:.0f} MiB; to the first line "
            f"{cost / first[0]:.3f} and {memory / first[1]:.3f}",
            flush=True,
        )


def main() -> None:
    options = parse(__doc__, steps=[1_000, 10_000, 100_000], rows=[100_000, 1_000_000, 10_000_000])
    # In place of the object store, and of metrics that only a cluster collects.
    store = mock.patch.multiple("ray", put=Held, get=lambda refs: [ref.message for ref in refs])
    with store, mock.patch.object(RayMetrics, "write", lambda *_: None):
        asyncio.run(measure_steps(options.steps))
        asyncio.run(measure_rows(options.rows))


if __name__ == "__main__":
    main()
