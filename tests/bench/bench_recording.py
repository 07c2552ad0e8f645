"""What recording costs a run: processor time of traces, answers, records and Ray's metrics.

A round of traces is the groups of some steps: every group has an activity, and a request and a reward for each of its
answers. Ray's metrics cost their process something at each record, and in each second in which they are exported.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray

from rayrft.config import RunConfig
from rayrft.experience import Task
from rayrft.explorer.evaluation import Attempt
from rayrft.explorer.unstored import UnstoredAnswers
from rayrft.monitor.ray_metrics import RayMetrics
from rayrft.monitor.records import RecordFile
from rayrft.runtime.trace import WRITE_S, Trace
from tests.bench.helpers import parse, quickstart, race, spread, start_ray
from tests.buffer.rows import group
from tests.monitor.made import step

_PARTS = {"rollout": 1.0, "reward": 0.1, "operators": 0.0, "store": 0.01}


def record(trace: Trace, groups: int, answers: int) -> None:
    for number in range(groups):
        began = time.perf_counter()
        with trace.on("workflow 'single_turn'", "groups"), trace.on("engine-0", "generate", answers):
            for _ in range(answers):
                with trace.on("reward of domain 'math'", "score"):
                    pass
        with trace.on("buffer", "put"):
            pass
        trace.add("groups", f"run/stage/{number}/0123456789abcdef", began, _PARTS)


def traced(trace: Trace, groups: int, answers: int) -> None:
    record(trace, groups, answers)
    time.sleep(2 * WRITE_S)  # no processor time, in which the thread writes


async def measure_answers(folder: Path, groups: int, answers: int) -> tuple[float, float]:
    """Return the microseconds of a dropped group of so many ``answers``, and of an answer of an evaluation."""
    task, text = Task.create("bench", "What is two and two?", "4"), "It is four. " * 16
    rows = [replace(row, turns=({"role": "assistant", "content": text},)) for row in group(0, answers)]
    attempts = [Attempt(task.id, number, 1.0, response=text) for number in range(groups)]
    writer, began = UnstoredAnswers(folder, "explorer-0"), time.process_time()
    for _ in range(groups):
        await writer.add_dropped(task, rows, Counter(zero_variance=answers))
    dropped = time.process_time() - began
    await writer.add_evaluated([task], attempts, 0.0)
    return 1e6 * dropped / groups, 1e6 * (time.process_time() - began - dropped) / groups


def measure_steps(config: RunConfig, count: int, seconds: float) -> tuple[float, float, float]:
    """Return the milliseconds of a record in its file, and in Ray's metrics, and those of a second of their export."""
    metrics, file, made = RayMetrics(config), RecordFile(Path(tempfile.mkdtemp())), step(step=5)
    metrics.write(made)
    costs = []
    for write in (file.append, metrics.write):
        began = time.process_time()
        for _ in range(count):
            write(made)
        costs.append(1e3 * (time.process_time() - began) / count)
    began = time.process_time()
    time.sleep(seconds)
    return costs[0], costs[1], 1e3 * (time.process_time() - began) / seconds


def main() -> None:
    options = parse(__doc__, groups=2000, answers=8, rounds=7, records=500, seconds=15.0)
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    trace, calls = Trace(folder, "explorer-0"), (options.groups, options.answers)
    contenders = {"traced": partial(traced, trace, *calls), "not traced": partial(traced, Trace(), *calls)}
    times = race(contenders, options.rounds, warm_up=1)
    cost = (times["traced"][:, 1] - times["not traced"][:, 1]) / options.groups * 1e6
    size = sum(file.stat().st_size for file in (folder / "trace").iterdir()) / options.groups / (options.rounds + 1)
    print(f"a group of {options.answers} answers: {spread(cost, '.0f')} microseconds of a core, {size:.0f} bytes")
    dropped, evaluated = asyncio.run(measure_answers(folder, *calls))
    print(f"a dropped group: {dropped:.0f} microseconds, an answer of an evaluation: {evaluated:.0f}")
    start_ray()
    config, _ = quickstart({})
    measured = ray.remote(measure_steps).remote(config, options.records, options.seconds)
    written, measure, exported = ray.get(measured)
    print(
        f"a step: {written:.2f} ms for its record, {measure:.2f} ms for Ray's metrics, and {exported:.1f} ms a second"
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
