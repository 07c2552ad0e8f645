"""How long a lease of 256 rows takes as the store grows, what a row costs in memory, and how fast a log opens again.

For each size a Buffer with the priority sampler is filled and leased from, as a trainer of two ranks does; a lease is
timed by its caller. Then the actor is killed with SIGKILL, and a new one on the same log is timed from its start to its
first answer; ``opening`` is the part that grows with the log.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from rayrft.buffer.buffer import Buffer
from rayrft.buffer.client import BufferWriter
from rayrft.buffer.schedule import StagePlan
from rayrft.config.buffer import BufferConfig
from tests.bench.bench_put import named, template
from tests.bench.helpers import parse, start_ray
from tests.scripted import handle

ROWS = 256


class MeasuredBuffer(Buffer):
    """A Buffer that tells how long it took to open, and its sizes."""

    def __init__(self, *args: Any) -> None:
        began = time.perf_counter()
        super().__init__(*args)
        self._opening = time.perf_counter() - began

    async def sizes(self) -> tuple[int, int, int, float]:
        """Groups, bytes of their columns and of their index by key, bytes of the log, and seconds of the opening."""
        groups, slots = self.state.groups, self.state.groups._slots
        memory = groups.to_table().nbytes + slots.__sizeof__() + 64 * len(slots)  # an entry's two integers
        return len(groups), memory, self.state.contents.log_bytes, self._opening


def start(folder: Path) -> Any:
    sampler = {"name": "priority", "tau": 50, "max_uses": 30000, "score": "reward_deviation"}
    config = BufferConfig.model_validate({"sampler": sampler, "max_rows": 10**8, "max_bytes": 1 << 40})
    return ray.remote(MeasuredBuffer).options(num_cpus=0, max_concurrency=1000).remote("bench", folder, config, 0)


async def fill(buffer: Any, rows: int, group: int, tokens: int) -> None:
    """Put groups, 64 at a time."""
    writer, batch, numbers = BufferWriter(handle(buffer)), template(group, tokens), iter(range(rows // group))

    async def loop() -> None:
        for number in numbers:
            await writer.put(named(batch, str(number)))

    await asyncio.gather(*(loop() for _ in range(64)))


def lease_times(buffer: Any, group: int, leases: int) -> np.ndarray:
    """Seconds of each lease; the first few, which wake the sampler and the object store, are left out."""
    ray.get(buffer.open_stage.remote(StagePlan(ROWS // group, scheduled=False)))
    seconds = []
    for step in range(leases + 10):
        began = time.perf_counter()
        lease = ray.get(buffer.lease.remote(step, 2, 60))
        seconds.append(time.perf_counter() - began)
        assert lease.usual_rows == ROWS
        ray.get([buffer.ack.remote(step), buffer.cover.remote(step + 1), buffer.advance.remote(step + 1)])
    return np.array(seconds[10:])


def main() -> None:
    options = parse(__doc__, group=8, leases=200, tokens=128, sizes=[10_000, 100_000, 1_000_000])
    start_ray()
    titles = ("p50 ms", "p99 ms", "B/row in memory", "log MB", "restart s", "opening s")
    table = [
        f"leases of {ROWS} rows in groups of {options.group}, rows of {options.tokens} tokens",
        "{:>9} {:>7} {:>7} {:>16} {:>8} {:>10} {:>10}".format("rows", *titles),
    ]
    for rows in options.sizes:
        folder = Path(tempfile.mkdtemp(prefix="bench-"))
        buffer = start(folder)
        asyncio.run(fill(buffer, rows, options.group, options.tokens))
        seconds = lease_times(buffer, options.group, options.leases) * 1e3
        before, (groups, memory, log, _) = ray.get([buffer.stats.remote(), buffer.sizes.remote()])
        os.kill(ray.get(buffer.pid.remote()), signal.SIGKILL)
        began = time.perf_counter()
        buffer = start(folder)
        after, (found, _, _, opening) = ray.get([buffer.stats.remote(), buffer.sizes.remote()])
        restart = time.perf_counter() - began
        assert (after.ledger, found) == (before.ledger, groups)
        table.append(
            f"{rows:>9} {np.median(seconds):>7.1f} {np.percentile(seconds, 99):>7.1f} "
            f"{memory / rows:>16.0f} {log / 1e6:>8.0f} {restart:>10.1f} {opening:>10.2f}"
        )
        ray.kill(buffer)
        shutil.rmtree(folder)
    # Ray says on this process's output, whatever it is told, that the killed actors died.
    ray.shutdown()
    print("\n".join(table))


if __name__ == "__main__":
    main()
